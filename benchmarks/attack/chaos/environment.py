"""The environment of the chaos run: two service processes with a model each, an archiver, and their store."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from shutil import copyfile, rmtree
from typing import Literal

from redis.crc import key_slot

from app.serving.served_generation import generation_of
from benchmarks.attack.chaos.servers import Node, Server
from benchmarks.harness.compose import RedisUsers, make_users, node_command, redis_command
from benchmarks.harness.faults.faulty_machine import FaultyMachine
from benchmarks.harness.faults.tcp_proxy import Address
from benchmarks.harness.fork_server import Weakness, fork_server
from benchmarks.harness.redis_cluster import HOST, ClusterAdmin, free_node_port, slots_of
from benchmarks.harness.service_process import free_port
from benchmarks.harness.supervised_process import SupervisedProcess, is_loaded, is_ready, spawn_program, start_all
from benchmarks.harness.topology import program
from model.artifact import model_directory
from storage.archive.manifest import MANIFEST, Manifest
from storage.protocol import UserStore
from storage.redis.layout.keys import Keyspace
from storage.redis.store import PARTITIONS, RedisStore
from storage.sqlite.database import FILE_NAME
from storage.sqlite.store import SQLiteStore
from storage.state.generation import Generation

ChaosStore = Literal["sqlite", "redis", "cluster"]

PRIMARIES = 3
NODE_TIMEOUT_MS = 2_000
KEYS = Keyspace("lisarec", PARTITIONS)
ARCHIVER = ("--every", "1", "--keep-tail", "5")  # seconds: most of what is sent is in the archive alone at the end
TRACEBACK = "Traceback (most recent call last)"
NOTICED = "(wrong_store)"  # in the log of a service that refuses a store, or a file, which is not what it was


@dataclass
class ChaosEnvironment:
    """The running processes.

    models    model directories of one folder, one for each app
    replicas  of every primary of a cluster that must have an event before it is acknowledged
    weakness  of the service, which the run has to notice
    apps      the processes of the service, each with a clock of its own
    servers   of Redis; none on SQLite
    """

    kind: ChaosStore
    models: Sequence[Path]
    directory: Path
    replicas: int = 1
    weakness: Weakness = "none"
    apps: list[SupervisedProcess] = field(default_factory=list)
    clocks: list[FaultyMachine] = field(default_factory=list)
    addresses: list[Address] = field(default_factory=list)
    servers: list[Server] = field(default_factory=list)
    redis_url: str = ""
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def data(self) -> Path:
        """Return the directory of SQLite's data."""
        return self.directory / "data"

    @property
    def archive(self) -> Path:
        """Return the directory of the archive."""
        return self.directory / "archive"

    @property
    def store_options(self) -> list[str]:
        """Return the options that name the store, for commands."""
        store = ["--redis-url", self.redis_url] if self.redis_url else ["--data-dir", str(self.data)]
        return [*store, "--archive-dir", str(self.archive)]

    @property
    def variables(self) -> Mapping[str, str]:
        """Return the environment of processes and commands."""
        return {"LISAREC_REDIS_REPLICAS": str(self.replicas)} if self.kind == "cluster" else {}

    def generations(self) -> list[Generation]:
        """Return the generations of the models."""
        return [generation_of(model_directory.load(model)) for model in self.models]

    async def open_store(self) -> UserStore:
        """Open the store beside the service."""
        if self.redis_url:
            return await RedisStore.open(self.redis_url, self.generations(), archive_dir=self.archive)
        return await SQLiteStore.open(self.data, self.generations())

    async def run_command(self, *arguments: str, killed_after_s: float) -> tuple[int | None, str]:
        """Run a `lisarec` command on the store; return its exit status (None if it was killed) and output."""
        number = next(self.numbers)
        log, status = (self.directory / f"command-{number}.{suffix}" for suffix in ("log", "status"))
        pid = fork_server().spawn([*arguments, *self.store_options], log, environment=self.variables, status=status)
        with suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                async with asyncio.timeout(killed_after_s):
                    while not select.select([pidfd], [], [], 0)[0]:
                        await asyncio.sleep(0.02)
            except TimeoutError:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)
        said = log.read_text(encoding="utf-8") if log.exists() else ""
        return int(status.read_text()) if status.exists() else None, said

    def archived_positions(self) -> Mapping[int, str]:
        """Return the newest archived entry of each partition."""
        try:
            return Manifest.from_json((self.archive / MANIFEST).read_text(encoding="utf-8")).positions
        except FileNotFoundError:
            return {}

    def is_archived_beyond(self, server: Server, before: Mapping[int, str]) -> bool:
        """Return whether the archive contains more of the server's log than at these positions."""
        return any(
            position != before.get(number)
            for number, position in self.archived_positions().items()
            if self.is_on(server, KEYS.log(number))
        )

    def is_on(self, server: Server, key: str) -> bool:
        """Return whether the server has the key."""
        return server.slots is None or key_slot(key.encode()) in server.slots

    def last_traceback(self, address: Address) -> str:
        """Return the latest traceback in the log of the app at this address and what follows it; "" if none."""
        log = self.directory / f"app-{self.addresses.index(address)}.log"
        said = log.read_text(encoding="utf-8") if log.exists() else ""
        return said[said.rindex(TRACEBACK) :] if TRACEBACK in said else ""

    def log_sizes(self) -> dict[Path, int]:
        """Return the sizes of the apps' logs."""
        logs = [self.directory / f"app-{number}.log" for number in range(len(self.models))]
        return {log: log.stat().st_size for log in logs if log.exists()}

    async def is_noticed(self, before: Mapping[Path, int], within_s: float) -> bool:
        """Return whether a service refuses the store within this time, by log lines after these sizes."""
        try:
            async with asyncio.timeout(within_s):
                while not any(NOTICED in log.read_bytes()[size:].decode() for log, size in before.items()):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            return False
        return True

    def create_data(self) -> None:
        """Create the directory of SQLite's data."""
        own = self.directory / "own-data"
        own.mkdir(parents=True)
        self._use_data(own)

    @contextmanager
    def replaced_file(self, snapshot: Path | None) -> Iterator[None]:
        """Within the block, replace SQLite's file by another one or by none; afterwards restore it.

        A link to the directory switches all files at once: a process that finds one without its log begins another.
        """
        own, other = self.data.resolve(), self.directory / f"other-data-{next(self.numbers)}"
        other.mkdir()
        if snapshot is not None:
            copyfile(snapshot, other / FILE_NAME)
        self._use_data(other)
        try:
            yield
        finally:
            self._use_data(own)
            rmtree(other, ignore_errors=True)  # a process that has just started may still write to it

    def _use_data(self, directory: Path) -> None:
        link = self.directory / "next-data"
        link.symlink_to(directory.absolute())
        link.replace(self.data)

    def copy_file(self) -> Path:
        """Copy the current SQLite data."""
        snapshot = self.directory / "snapshot.sqlite"
        snapshot.unlink(missing_ok=True)
        with closing(sqlite3.connect(self.data / FILE_NAME)) as data, closing(sqlite3.connect(snapshot)) as copied:
            data.backup(copied)
        return snapshot


@asynccontextmanager
async def running(environment: ChaosEnvironment) -> AsyncIterator[SupervisedProcess]:
    """Start everything in the directory and wait until it is ready; yields the archiver."""
    async with AsyncExitStack() as stack:
        if environment.kind == "sqlite":
            environment.create_data()
        else:
            await _start_servers(environment, stack)
        for number, model in enumerate(environment.models):
            _add_app(environment, number, model)
        await start_all(stack, environment.apps)
        archiver = _archiver(environment)
        await start_all(stack, [archiver])
        yield archiver


async def _start_servers(environment: ChaosEnvironment, stack: AsyncExitStack) -> None:
    users = make_users(environment.directory)
    admin = ClusterAdmin(users)
    is_cluster = environment.kind == "cluster"
    ports = [free_node_port() for _ in range(2 * PRIMARIES if is_cluster else 1)]
    nodes = [_node(environment, users, port) for port in ports]
    await start_all(stack, [node.process for node in nodes])
    if not is_cluster:
        environment.servers = [Server(nodes, environment.directory / "snapshot", admin)]
        environment.redis_url = users.url(ports[0])
        return
    await asyncio.to_thread(admin.form, ports[:PRIMARIES], ports[PRIMARIES:])
    environment.redis_url = users.cluster_url(ports)
    environment.servers = [
        Server(pair, environment.directory / f"snapshot-{number}", admin, slots_of(number, PRIMARIES))
        for number, pair in enumerate(map(list, zip(nodes[:PRIMARIES], nodes[PRIMARIES:], strict=True)))
    ]


def _node(environment: ChaosEnvironment, users: RedisUsers, port: int) -> Node:
    data = environment.directory / f"redis-{port}"
    data.mkdir(parents=True)
    binary = program("redis-server", "valkey-server")
    if environment.kind == "cluster":
        shell, *rest = node_command(binary, data, users, port, "--cluster-node-timeout", str(NODE_TIMEOUT_MS))
        command = [program(shell), *rest]
    else:
        command = redis_command(binary, data, users, port)
    log = environment.directory / f"redis-{port}.log"
    process = SupervisedProcess("redis", lambda: spawn_program(command, log), lambda: is_loaded(users, port))
    return Node(port, process, data)


def _add_app(environment: ChaosEnvironment, number: int, model: Path) -> None:
    address = (HOST, free_port())
    clock = FaultyMachine(environment.directory / f"clock-{number}")
    arguments = ["serve", "--model", str(model), "--host", HOST, "--port", str(address[1]), *environment.store_options]
    log = environment.directory / f"app-{number}.log"

    def spawn() -> int:
        return fork_server().spawn(
            arguments, log, weakness=environment.weakness, machine=clock, environment=environment.variables
        )

    environment.apps.append(SupervisedProcess("app", spawn, lambda: is_ready(address)))
    environment.clocks.append(clock)
    environment.addresses.append(address)


def _archiver(environment: ChaosEnvironment) -> SupervisedProcess:
    arguments = ["archive", *environment.store_options, *ARCHIVER]
    log = environment.directory / "archiver.log"

    async def is_at_work() -> bool:
        """Return whether the process runs; the success of its rounds depends on the store."""
        return True

    return SupervisedProcess(
        "archiver", lambda: fork_server().spawn(arguments, log, environment=environment.variables), is_at_work
    )

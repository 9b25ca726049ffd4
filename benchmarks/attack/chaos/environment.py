"""What the chaos run breaks: two processes of the service, with a model each, on SQLite, Redis or a Redis cluster."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from app.serving.served_generation import generation_of
from benchmarks.harness.compose import RedisUsers, make_users, node_command, redis_command
from benchmarks.harness.faulty_machine import FaultyMachine
from benchmarks.harness.fork_server import fork_server
from benchmarks.harness.redis_cluster import HOST, ClusterAdmin, free_node_port
from benchmarks.harness.service_process import free_port
from benchmarks.harness.supervised_process import SupervisedProcess, is_loaded, is_ready, spawn_program
from benchmarks.harness.tcp_proxy import Address
from benchmarks.harness.topology import program
from model.artifact import model_directory
from storage.protocol import UserStore
from storage.redis.store import RedisStore
from storage.sqlite.database import FILE_NAME
from storage.sqlite.store import SQLiteStore
from storage.state.generation import Generation

ChaosStore = Literal["sqlite", "redis", "cluster"]

NODES = 3
NODE_TIMEOUT_MS = 2_000
KEPT_OF_A_NODE = "nodes.conf"  # who a node is, and which slots it has


@dataclass
class Server:
    """A Redis server and its data directory."""

    process: SupervisedProcess
    data: Path
    snapshot: Path

    async def copy(self) -> None:
        """Keep a copy of the data as it is now."""
        await self.process.end(signal.SIGTERM)
        shutil.rmtree(self.snapshot, ignore_errors=True)
        shutil.copytree(self.data, self.snapshot)
        await self.process.start()

    @asynccontextmanager
    async def holding(self, snapshot: Path | None) -> AsyncIterator[None]:
        """Within the block the server has the data of the copy, or none; afterwards its own again."""
        await self.process.end(signal.SIGTERM)
        away = self.data.with_name(f"{self.data.name}-away")
        self.data.rename(away)
        if snapshot is None:
            self.data.mkdir()
        else:
            shutil.copytree(snapshot, self.data)
        if (away / KEPT_OF_A_NODE).exists():
            shutil.copyfile(away / KEPT_OF_A_NODE, self.data / KEPT_OF_A_NODE)
        try:
            await self.process.start()
            yield
        finally:
            await self.process.end(signal.SIGKILL)
            shutil.rmtree(self.data)
            away.rename(self.data)
            await self.process.start()


@dataclass
class ChaosEnvironment:
    """The running processes.

    models   model directories of one folder, one for each app
    apps     the processes of the service, each with a clock of its own
    servers  of Redis; none on SQLite
    """

    kind: ChaosStore
    models: Sequence[Path]
    directory: Path
    apps: list[SupervisedProcess] = field(default_factory=list)
    clocks: list[FaultyMachine] = field(default_factory=list)
    addresses: list[Address] = field(default_factory=list)
    servers: list[Server] = field(default_factory=list)
    redis_url: str = ""

    @property
    def data(self) -> Path:
        """Return the directory of SQLite's data."""
        return self.directory / "data"

    @property
    def store_options(self) -> list[str]:
        """Return the options that name the store, for commands."""
        return ["--redis-url", self.redis_url] if self.redis_url else ["--data-dir", str(self.data)]

    def generations(self) -> list[Generation]:
        """Return the generations of the models."""
        return [generation_of(model_directory.load(model)) for model in self.models]

    async def open_store(self) -> UserStore:
        """Open the store beside the service."""
        if self.redis_url:
            return await RedisStore.open(self.redis_url, self.generations())
        return await SQLiteStore.open(self.data, self.generations())

    async def run_command(self, *arguments: str, killed_after_s: float) -> None:
        """Run a command of `lisarec` on the store; kill it when it takes longer."""
        pid = fork_server().spawn([*arguments, *self.store_options], self.directory / "commands.log")
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

    @contextmanager
    def replaced_file(self, snapshot: Path | None) -> Iterator[None]:
        """Within the block another file, or none, is in the place of SQLite's; afterwards its own again."""
        away = self.directory / "away"
        away.mkdir()
        for file in self.data.glob(f"{FILE_NAME}*"):
            file.rename(away / file.name)
        if snapshot is not None:
            shutil.copyfile(snapshot, self.data / FILE_NAME)
        try:
            yield
        finally:
            for file in self.data.glob(f"{FILE_NAME}*"):
                file.unlink()
            for file in away.iterdir():
                file.rename(self.data / file.name)
            away.rmdir()

    def copy_file(self) -> Path:
        """Keep a copy of SQLite's data as it is now."""
        snapshot = self.directory / "snapshot.sqlite"
        snapshot.unlink(missing_ok=True)
        with closing(sqlite3.connect(self.data / FILE_NAME)) as data, closing(sqlite3.connect(snapshot)) as copied:
            data.backup(copied)
        return snapshot


@asynccontextmanager
async def chaos_environment(
    kind: ChaosStore, models: Sequence[Path], directory: Path
) -> AsyncIterator[ChaosEnvironment]:
    """Start everything below the directory; it is ready then, and ended afterwards."""
    environment = ChaosEnvironment(kind, models, directory)
    async with AsyncExitStack() as stack:
        if kind == "sqlite":
            environment.data.mkdir(parents=True)
        else:
            users = make_users(directory)
            ports = [free_node_port() for _ in range(NODES if kind == "cluster" else 1)]
            environment.servers = [_server(kind, users, directory, port) for port in ports]
            await _start(stack, [server.process for server in environment.servers])
            if kind == "cluster":
                await asyncio.to_thread(ClusterAdmin(users).form, ports)
            environment.redis_url = users.cluster_url(ports) if kind == "cluster" else users.url(ports[0])
        for number, model in enumerate(models):
            _add_app(environment, number, model)
        await _start(stack, environment.apps)
        yield environment


def _server(kind: ChaosStore, users: RedisUsers, directory: Path, port: int) -> Server:
    data = directory / f"redis-{port}"
    data.mkdir(parents=True)
    binary = program("redis-server", "valkey-server")
    if kind == "cluster":
        shell, *rest = node_command(binary, data, users, port, "--cluster-node-timeout", str(NODE_TIMEOUT_MS))
        command = [program(shell), *rest]
    else:
        command = redis_command(binary, data, users, port)
    process = SupervisedProcess(
        "redis", lambda: spawn_program(command, directory / f"redis-{port}.log"), lambda: is_loaded(users, port)
    )
    return Server(process, data, directory / f"snapshot-{port}")


def _add_app(environment: ChaosEnvironment, number: int, model: Path) -> None:
    address = (HOST, free_port())
    clock = FaultyMachine(environment.directory / f"clock-{number}")
    arguments = ["serve", "--model", str(model), "--host", HOST, "--port", str(address[1]), *environment.store_options]
    log = environment.directory / f"app-{number}.log"
    environment.apps.append(
        SupervisedProcess("app", lambda: fork_server().spawn(arguments, log, machine=clock), lambda: is_ready(address))
    )
    environment.clocks.append(clock)
    environment.addresses.append(address)


async def _start(stack: AsyncExitStack, processes: Sequence[SupervisedProcess]) -> None:
    for process in processes:
        stack.push_async_callback(process.close)
    await asyncio.gather(*(process.start() for process in processes))

"""The environment of the fault bench: SQLite, or replicas behind HAProxy on Redis, a proxy in every connection.

SQLite   clients - proxy - app - file
Redis    clients - proxy - HAProxy - proxy of each replica - app - proxy - Redis
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.serving.served_generation import generation_of
from benchmarks.harness.compose import RedisUsers, make_users, redis_command
from benchmarks.harness.faults.faulty_machine import FaultyMachine
from benchmarks.harness.faults.tcp_proxy import Address, TcpProxy
from benchmarks.harness.fork_server import Weakness, fork_server
from benchmarks.harness.ledger import Ledger, StoreVerdict, judge
from benchmarks.harness.service_process import free_port
from benchmarks.harness.supervised_process import SupervisedProcess, is_loaded, is_ready, spawn_program, start_all
from benchmarks.harness.topology import (
    FIRST_ADDRESS,
    NameServer,
    balancer_command,
    balancer_environment,
    program,
)
from model.artifact.model_directory import Artifact
from storage.errors import StorageUnavailable
from storage.protocol import UserStore
from storage.redis.store import RedisStore
from storage.sqlite.store import SQLiteStore

StoreKind = Literal["sqlite", "redis"]
HOST = "127.0.0.1"
ACCEPTED_WITHIN_S = 200.0
FAULTS_AHEAD = 1.05  # faults run a little ahead of the events, so that none is missing at the end


@dataclass(frozen=True)
class ScenarioSettings:
    """The settings that all scenarios have."""

    model: Path
    store: StoreKind
    replicas: int
    seed: int


@dataclass(frozen=True)
class EnvironmentOptions:
    """Options of the processes that run.

    weakness    of the service, which the bench has to notice
    on_machine  run the processes on machines that can fail; else nothing is between them and the real one
    """

    weakness: Weakness = "none"
    redis_options: Sequence[str] = ()
    on_machine: bool = False


class Faults:
    """Counts injected faults, and decides when the next one is due, in proportion to the acknowledged events.

    progress  share of the events that is acknowledged
    """

    def __init__(self, planned: int, progress: Callable[[], float]) -> None:
        self.planned = planned
        self.injected: Counter[str] = Counter()
        self._progress = progress

    @property
    def count(self) -> int:
        """Return how many faults were injected."""
        return self.injected.total()

    def note(self, kind: str) -> None:
        """Count a fault of this kind."""
        self.injected[kind] += 1

    def is_due(self) -> bool:
        """Return whether another fault is due."""
        return self.count < self.planned * min(1.0, FAULTS_AHEAD * self._progress())


class FaultEnvironment:
    """The running processes and machines; clients send their requests to `address`.

    apps     the replicas
    redis    the server, None on SQLite
    machine  under whoever keeps the data
    clocks   of all machines
    """

    def __init__(self, settings: ScenarioSettings, directory: Path, options: EnvironmentOptions) -> None:
        self.kind = settings.store
        self.model = settings.model
        self.directory = directory
        self.data = directory / "data"
        self.weakness = options.weakness
        self.address: Address = (HOST, 0)
        self.apps: list[SupervisedProcess] = []
        self.redis: SupervisedProcess | None = None
        self.app_machine = FaultyMachine(directory / "app-machine") if options.on_machine else None
        self.machine: FaultyMachine | None = None
        self.clocks = [self.app_machine] if self.app_machine else []
        self.store_address = ""  # a directory or a URL, without proxies

    @property
    def store_process(self) -> SupervisedProcess:
        """Return the process that keeps the data."""
        return self.redis or self.apps[0]

    async def open_store(self, artifact: Artifact) -> UserStore:
        """Open the store beside the service."""
        generations = [generation_of(artifact)]
        if self.kind == "sqlite":
            return await SQLiteStore.open(Path(self.store_address), generations)
        return await RedisStore.open(self.store_address, generations)

    async def judge(self, artifact: Artifact, ledger: Ledger) -> StoreVerdict:
        """End the replicas, and check the store against the ledger."""
        await asyncio.gather(*(app.close() for app in self.apps))
        store = await self.open_store(artifact)
        try:
            return await judge(store, generation_of(artifact), ledger)
        finally:
            await store.close()


@asynccontextmanager
async def fault_environment(
    settings: ScenarioSettings, directory: Path, options: EnvironmentOptions, faults: Faults
) -> AsyncIterator[FaultEnvironment]:
    """Start everything below the directory; it is ready then, and gone afterwards. The proxies inject faults."""
    directory.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        running = FaultEnvironment(settings, directory, options)

        async def proxied(name: str, target: Address, listen: Address = (HOST, 0)) -> Address:
            proxy = TcpProxy(name, target, faults.is_due, faults.note)
            stack.callback(proxy.close)
            return await proxy.listen(listen)

        if running.kind == "sqlite":
            running.machine = running.app_machine
            data = running.app_machine.live if running.app_machine else running.data
            running.store_address = str(data)
            port = free_port()
            running.apps = [_app(running, HOST, port, ["--data-dir", str(data)])]
            await start_all(stack, running.apps)
            running.address = await proxied("clients", (HOST, port))
        else:
            users = make_users(directory)
            redis_address = await _redis(running, stack, users, options)
            near_redis = await proxied("redis", redis_address)
            balancer = await _replicas(running, stack, settings.replicas, users.url(near_redis[1]), proxied)
            running.address = await proxied("clients", balancer)
        yield running


async def _redis(
    running: FaultEnvironment, stack: AsyncExitStack, users: RedisUsers, options: EnvironmentOptions
) -> Address:
    machine = FaultyMachine(running.directory / "redis-machine") if options.on_machine else None
    running.data.mkdir(parents=True, exist_ok=True)
    port = free_port()
    running.store_address = users.url(port)
    data = machine.live if machine else running.data
    command = redis_command(program("redis-server", "valkey-server"), data, users, port, *options.redis_options)
    log, environment = running.directory / "redis.log", machine.environment if machine else None
    running.machine = machine
    running.clocks += [machine] if machine else []
    running.redis = SupervisedProcess(
        "redis", lambda: spawn_program(command, log, environment), lambda: is_loaded(users, port)
    )
    await start_all(stack, [running.redis])
    return HOST, port


async def _replicas(
    running: FaultEnvironment,
    stack: AsyncExitStack,
    count: int,
    redis_url: str,
    proxied: Callable[..., Awaitable[Address]],
) -> Address:
    """Start replicas behind HAProxy as topology.py does, save that the balancer finds a proxy in the place of each."""
    names = NameServer()
    stack.callback(names.close)
    port, proxy_port, bind = free_port(), free_port(), free_port()
    hosts = [str(FIRST_ADDRESS + number) for number in range(count)]
    running.apps = [_app(running, host, port, ["--redis-url", redis_url]) for host in hosts]
    await start_all(stack, running.apps)
    for number, host in enumerate(hosts):
        await proxied("replicas", (host, port), (host, proxy_port))
        names.addresses.add(FIRST_ADDRESS + number)
    command, environment = balancer_command(), balancer_environment(f"{HOST}:{bind}", names, proxy_port)
    log = running.directory / "haproxy.log"
    balancer = SupervisedProcess(
        "haproxy", lambda: spawn_program(command, log, environment), lambda: is_ready((HOST, bind))
    )
    await start_all(stack, [balancer])
    return HOST, bind


def _app(running: FaultEnvironment, host: str, port: int, store: Sequence[str]) -> SupervisedProcess:
    command = ["serve", "--model", str(running.model), "--host", host, "--port", str(port), *store]
    log = running.directory / f"app-{host}.log"

    def spawn() -> int:
        return fork_server().spawn(command, log, weakness=running.weakness, machine=running.app_machine)

    return SupervisedProcess("app", spawn, lambda: is_ready((host, port)))


async def accept_loss(url: str) -> None:
    """Do as an operator would: accept what Redis has lost, so that services go on; again where it cannot be reached.

    Some nodes of a cluster name the old primary for a moment after a takeover.
    """
    async with asyncio.timeout(ACCEPTED_WITHIN_S):
        while not await _is_loss_accepted(url):
            await asyncio.sleep(0.1)


async def _is_loss_accepted(url: str) -> bool:
    try:
        store = await RedisStore.open(url, [])
    except StorageUnavailable:
        return False
    try:
        await store.repair(accept_loss=True)
    except StorageUnavailable:
        return False
    finally:
        await store.close()
    return True

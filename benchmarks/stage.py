"""What faults happen to: the service on SQLite, or replicas behind HAProxy on Redis, with a proxy in every connection.

SQLite   clients - proxy - app - file
Redis    clients - proxy - HAProxy - proxy of each replica - app - proxy - Redis
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal

from app.served_generation import generation_of
from benchmarks.compose import RedisUsers, make_users, redis_command
from benchmarks.ledger import Ledger, Verdict, judge
from benchmarks.load import TRANSPORT_ERRORS, Connection
from benchmarks.machine import Machine
from benchmarks.nursery import Weakness, nursery
from benchmarks.proxy import Address, Proxy
from benchmarks.running import free_port
from benchmarks.topology import (
    FIRST_ADDRESS,
    HAPROXY_CONFIG,
    NameServer,
    balancer_environment,
    program,
)
from benchmarks.topology import is_loaded as answers_ping
from benchmarks.victim import Victim, spawn_program
from model.artifact import Artifact
from storage.protocol import UserStore
from storage.redis import RedisStore
from storage.sqlite import SQLiteStore

StoreKind = Literal["sqlite", "redis"]
HOST = "127.0.0.1"


class Stage:
    """Everything that runs; `address` is where clients send their requests.

    apps     the replicas
    redis    the server, None on SQLite
    machine  under whoever keeps the data
    clocks   of all machines
    """

    def __init__(self, kind: StoreKind, directory: Path, model: Path, weakness: Weakness) -> None:
        self.kind = kind
        self.directory = directory
        self.data = directory / "data"
        self.address: Address = (HOST, 0)
        self.apps: list[Victim] = []
        self.redis: Victim | None = None
        self.machine: Machine | None = None
        self.clocks: list[Machine] = []
        self.weakness = weakness
        self.app_machine: Machine | None = None
        self.store_address = ""  # a directory or a URL, without proxies
        self.model = model

    @property
    def keeper(self) -> Victim:
        """The process that keeps the data."""
        return self.redis or self.apps[0]

    async def open_store(self, artifact: Artifact) -> UserStore:
        generations = [generation_of(artifact)]
        if self.kind == "sqlite":
            return await SQLiteStore.open(Path(self.store_address), generations)
        return await RedisStore.open(self.store_address, generations)

    async def judge(self, artifact: Artifact, ledger: Ledger) -> Verdict:
        """End the replicas and hold what they left behind against the law."""
        await asyncio.gather(*(app.close() for app in self.apps))
        store = await self.open_store(artifact)
        try:
            return await judge(store, generation_of(artifact), ledger)
        finally:
            await store.close()


@asynccontextmanager
async def stage(
    kind: StoreKind,
    model: Path,
    directory: Path,
    *,
    replicas: int = 4,
    weakness: Weakness = "none",
    redis_options: Sequence[str] = (),
    on_machine: bool = False,
    is_due: Callable[[], bool] = lambda: False,
    note: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[Stage]:
    """Start everything; it is ready then, and gone afterwards.

    on_machine   run the processes on machines that can fail; else nothing is between them and the real one
    is_due, note  as of Proxy
    """
    directory.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        made = Stage(kind, directory, model, weakness)
        app_machine = made.app_machine = Machine(directory / "app-machine") if on_machine else None
        made.clocks = [app_machine] if app_machine else []

        async def proxied(name: str, target: Address, listen: Address = (HOST, 0)) -> Address:
            proxy = Proxy(name, target, is_due, note)
            stack.callback(proxy.close)
            return await proxy.listen(listen)

        if kind == "sqlite":
            made.machine = app_machine
            data = app_machine.live if app_machine else made.data
            made.store_address = str(data)
            port = free_port()
            made.apps = [_app(made, HOST, port, ["--data-dir", str(data)])]
            await _started(stack, *made.apps)
            made.address = await proxied("clients", (HOST, port))
        else:
            users = make_users(directory)
            redis_address = await _redis(made, stack, users, redis_options, on_machine)
            near_redis = await proxied("redis", redis_address)
            balancer = await _replicas(made, stack, replicas, users.url(near_redis[1]), proxied)
            made.address = await proxied("clients", balancer)
        yield made


async def _redis(
    made: Stage, stack: AsyncExitStack, users: RedisUsers, options: Sequence[str], on_machine: bool
) -> Address:
    machine = Machine(made.directory / "redis-machine") if on_machine else None
    made.data.mkdir(parents=True, exist_ok=True)
    port = free_port()
    made.store_address = users.url(port)
    data = machine.live if machine else made.data
    command = redis_command(program("redis-server", "valkey-server"), data, users, port, *options)
    log, environment = made.directory / "redis.log", machine.environment if machine else None
    made.machine = machine
    made.clocks += [machine] if machine else []
    made.redis = Victim("redis", lambda: spawn_program(command, log, environment), lambda: is_loaded(users, port))
    await _started(stack, made.redis)
    return HOST, port


async def _replicas(made: Stage, stack: AsyncExitStack, count: int, redis_url: str, proxied: Callable) -> Address:  # type: ignore[type-arg]
    """Replicas behind HAProxy as in topology.py, save that the balancer finds a proxy in the place of each."""
    names = NameServer()
    stack.callback(names.close)
    port, proxy_port, bind = free_port(), free_port(), free_port()
    hosts = [str(FIRST_ADDRESS + number) for number in range(count)]
    made.apps = [_app(made, host, port, ["--redis-url", redis_url]) for host in hosts]
    await _started(stack, *made.apps)
    for number, host in enumerate(hosts):
        await proxied("replicas", (host, port), (host, proxy_port))
        names.addresses.add(FIRST_ADDRESS + number)
    command = [program("haproxy"), "-db", "-f", str(HAPROXY_CONFIG)]
    environment = balancer_environment(f"{HOST}:{bind}", names, proxy_port)
    log = made.directory / "haproxy.log"
    balancer = Victim("haproxy", lambda: spawn_program(command, log, environment), lambda: is_up((HOST, bind)))
    await _started(stack, balancer)
    return HOST, bind


def _app(made: Stage, host: str, port: int, store: Sequence[str]) -> Victim:
    command = ["serve", "--model", str(made.model), "--host", host, "--port", str(port), *store]
    log = made.directory / f"app-{host}.log"

    def spawn() -> int:
        return nursery().spawn(command, log, weakness=made.weakness, machine=made.app_machine)

    return Victim("app", spawn, lambda: is_up((host, port)))


async def _started(stack: AsyncExitStack, *victims: Victim) -> None:
    for victim in victims:
        stack.push_async_callback(victim.close)
    await asyncio.gather(*(victim.start() for victim in victims))


async def is_up(address: Address) -> bool:
    connection = Connection(address)
    try:
        return (await connection.request("GET", "/readyz"))[0] == 200
    except TRANSPORT_ERRORS:
        return False
    finally:
        connection.close()


async def is_loaded(users: RedisUsers, port: int) -> bool:
    """Say whether the server has read its log back and answers."""
    return await asyncio.to_thread(answers_ping, users, port)

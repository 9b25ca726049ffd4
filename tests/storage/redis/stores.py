"""Redis stores on servers of the tests, and helpers to inspect them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from storage.errors import StorageUnavailable
from storage.folders.folder import Folder
from storage.redis.layout.keys import Keyspace, User
from storage.redis.store import PARTITIONS, RedisOptions, RedisStore
from storage.state.event import Event
from storage.state.generation import Generation
from tests.storage.oracles.naive_fold import assert_state_is, fold
from tests.storage.oracles.random_events import click, fresh_user, make_generation
from tests.storage.redis.servers import RedisCluster, RedisServer
from tests.waiting import PATIENCE_S, until

GENERATION = make_generation()
PREFIX = "lisarec"
# Limits that a busy machine does not reach; a test of a server that hangs gives its own.
PATIENT: dict[str, Any] = {"connect_timeout_s": PATIENCE_S, "socket_timeout_s": PATIENCE_S}


@asynccontextmanager
async def opened(
    address: str,
    generations: Sequence[Generation] = (GENERATION,),
    *,
    partitions: int = PARTITIONS,
    archive_dir: Path | Folder | None = None,
    **options: Any,
) -> AsyncIterator[RedisStore]:
    """Open the store at the address (URL and optional prefix); it is closed afterwards."""
    url, _, prefix = address.partition(" ")
    store = await RedisStore.open(
        url,
        generations,
        prefix=prefix or PREFIX,
        partitions=partitions,
        archive_dir=archive_dir,
        options=RedisOptions(**PATIENT | options),
    )
    try:
        yield store
    finally:
        await store.close()


def user_of(address: str, user_id: str) -> User:
    return Keyspace(address.partition(" ")[2] or PREFIX, PARTITIONS).user("main", user_id)


def in_other_partitions(count: int) -> list[str]:
    """User ids in distinct partitions."""
    keys = Keyspace(PREFIX, PARTITIONS)
    apart: dict[str, str] = {}  # by the prefix of the partition
    while len(apart) < count:
        user_id = fresh_user()
        apart.setdefault(keys.user("main", user_id).partition, user_id)
    return list(apart.values())


def users_by_node(cluster: RedisCluster, address: str, each: int) -> dict[RedisServer, list[str]]:
    users: dict[RedisServer, list[str]] = {node: [] for node in cluster.primaries}
    while any(len(some) < each for some in users.values()):
        user_id = fresh_user()
        some = users[cluster.owner(user_of(address, user_id).head)]
        if len(some) < each:
            some.append(user_id)
    return users


async def ids(store: RedisStore, user_id: str = "u") -> list[str]:
    return [entry.record.entry_id for entry in await store.events("main", user_id, limit=10**6)]


async def assert_state_is_fold_of_log(store: RedisStore, user_id: str = "u") -> None:
    log = [entry.record for entry in await store.events("main", user_id, limit=10**6)]
    assert len({event.entry_id for event in log}) == len(log)
    assert_state_is((await store.states("main", [user_id], GENERATION))[0], fold(GENERATION, log))


async def until_applied(store: RedisStore, events: list[Event]) -> None:
    """Resend like a client until acknowledged."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await store.append("main", events)
            except StorageUnavailable:
                await asyncio.sleep(0.05)
            else:
                return


async def until_it_succeeds(call: Callable[[], Awaitable[object]]) -> None:
    """Retry until the store is available."""

    async def succeeds() -> bool:
        try:
            await call()
        except StorageUnavailable:
            return False
        return True

    await until(succeeds)


async def poll_until(store: RedisStore, condition: Callable[[], object]) -> None:
    """Poll like a service."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await store.pointers()
            await asyncio.sleep(0.05)


async def refusal(store: RedisStore, user_id: str) -> str:
    """Post an event until the store refuses it with a reason; it must never be accepted."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with pytest.raises(StorageUnavailable) as refused:
                await store.append("main", [click("never", user_id)])
            if not str(refused.value).startswith("Redis failed"):  # the connection that the restart broke
                return str(refused.value)

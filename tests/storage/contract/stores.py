"""The stores that fulfil the contract, opened by address; add further stores here."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from storage.archive.writer import ArchiveWriter
from storage.archiver.archiver import archive_log
from storage.archiver.redis_source import RedisSource
from storage.errors import StorageUnavailable
from storage.protocol import UserStore
from storage.records import MAIN_TENANT, AppendResult
from storage.redis.connections.client import RedisServers
from storage.redis.connections.nodes import ReplicaAcks
from storage.redis.store import RedisOptions, RedisStore
from storage.sqlite.database import FILE_NAME
from storage.sqlite.store import SQLiteStore
from storage.state.event import Event, Undo
from storage.state.generation import Generation
from tests.storage.redis.servers import expected_servers, running_cluster, running_server
from tests.storage.redis.stores import PATIENT
from tests.waiting import until

ARCHIVED = "archived"  # Redis with an archiver that moves away whatever it can, after every append
CLUSTER = "cluster"
STORES = ["sqlite", *expected_servers(), ARCHIVED, CLUSTER]
FEW_PARTITIONS = 4  # on all nodes of a cluster of three


def new_address(kind: str, directory: Path) -> str:
    """Address of a new, empty store of this kind, also for other processes."""
    if kind == "sqlite":
        return f"sqlite:{directory}"
    if kind == ARCHIVED:
        return f"{ARCHIVED}:{running_server('redis-server').new_address()} {directory}"
    return f"redis:{(running_cluster() if kind == CLUSTER else running_server(kind)).new_address()}"


async def open_store(address: str, generations: Sequence[Generation], tenant: str = MAIN_TENANT) -> UserStore:
    kind, _, place = address.partition(":")
    if kind == "sqlite":
        return await SQLiteStore.open(Path(place), generations, tenant=tenant)
    url, prefix, *archive_dir = place.split(" ")
    if kind == ARCHIVED:
        return await open_archived(url, prefix, Path(archive_dir[0]), generations, tenant)
    return await RedisStore.open(
        url,
        generations,
        tenant=tenant,
        prefix=prefix,
        partitions=FEW_PARTITIONS,
        options=RedisOptions(**PATIENT),
    )


@asynccontextmanager
async def opened(address: str, *generations: Generation, tenant: str = MAIN_TENANT) -> AsyncIterator[UserStore]:
    """Open the store at the address, and close it afterwards."""
    store = await open_store(address, generations, tenant)
    try:
        yield store
    finally:
        await store.close()


async def redis_keys(address: str, pattern: str) -> list[str]:
    """Names of matching keys of the store at the address; empty for stores without Redis."""
    if address.startswith("sqlite"):
        return []
    url, prefix, *_ = address.partition(":")[2].split(" ")
    servers = RedisServers(url, **PATIENT, acks=ReplicaAcks())
    try:
        await servers.connect()
        return [key async for keys in servers.scan(f"{prefix}:{pattern}") for key in keys]
    finally:
        await servers.close()


async def stored_properties(address: str) -> list[str]:
    """Raw properties of items and users in the store at the address."""
    if address.startswith("sqlite"):
        with closing(sqlite3.connect(Path(address.partition(":")[2]) / FILE_NAME)) as file:
            rows = file.execute("SELECT properties FROM items UNION ALL SELECT properties FROM user_properties")
            return [properties for (properties,) in rows if properties]
    url = address.partition(":")[2].split(" ")[0]
    servers = RedisServers(url, **PATIENT, acks=ReplicaAcks())
    try:
        await servers.connect()
        keys = await redis_keys(address, "*:properties")
        return [text.decode() for key in keys for text in await servers.call("HVALS", key)]
    finally:
        await servers.close()


async def append_all(store: UserStore, events: Sequence[Event], tenant: str = "main") -> None:
    """Append the events in calls of at most 100."""
    for start in range(0, len(events), 100):
        await store.append(tenant, events[start : start + 100])


async def open_archived(
    url: str, prefix: str, archive_dir: Path, generations: Sequence[Generation], tenant: str = MAIN_TENANT
) -> RedisStore:
    """Open a store with an archive of its acknowledged events, except each partition's newest."""
    store = await RedisStore.open(
        url,
        generations,
        tenant=tenant,
        prefix=prefix,
        partitions=FEW_PARTITIONS,
        archive_dir=archive_dir,
        options=RedisOptions(**PATIENT),
    )
    append = store.append

    async def append_and_archive(tenant: str, events: Sequence[Event | Undo]) -> list[AppendResult]:
        answers = await append(tenant, events)
        await asyncio.to_thread(archive_all, url, prefix, archive_dir)
        return answers

    store.append = append_and_archive  # type: ignore[method-assign]
    return store


def archive_all(url: str, prefix: str, archive_dir: Path) -> None:
    """Archive everything, unless another archiver runs."""
    with suppress(StorageUnavailable), RedisSource.open(url, prefix) as log, ArchiveWriter.open(archive_dir) as writer:
        archive_log(log, writer, datetime.now(UTC) + timedelta(seconds=1), keep_tail_s=0, keep_days=None)


async def begun(store: UserStore, event: Event) -> asyncio.Task[list[AppendResult]]:
    """Start an append that has left the queue, so that later ones wait in the queue."""
    append = asyncio.ensure_future(store.append(MAIN_TENANT, [event]))
    await asyncio.sleep(0)  # it is in the queue
    await until(lambda: store.waiting == 0)
    return append

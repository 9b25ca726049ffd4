"""Redis stores with an archive: numbered events of users, archiver rounds, and invariants afterwards."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl

from storage.archive.writer import ArchiveWriter
from storage.archiver.archiver import TurnCounts, archive_log
from storage.archiver.redis_source import RedisSource
from storage.folders.folder import Folder
from storage.folders.place import as_folder
from storage.redis.layout.keys import Keyspace
from storage.redis.store import RedisStore
from tests.storage.contract.stores import FEW_PARTITIONS
from tests.storage.oracles.random_events import click
from tests.storage.redis import stores
from tests.storage.redis.servers import RedisServer

NOW_MS = 1_700_000_000_000
USERS = [f"user-{number}" for number in range(24)]


def opened(
    server: RedisServer, archive_dir: Path | Folder | None, **options: Any
) -> AbstractAsyncContextManager[RedisStore]:
    return stores.opened(server.url, partitions=FEW_PARTITIONS, archive_dir=archive_dir, **options)


def ids_of(user_id: str, count: int) -> list[str]:
    return [f"{user_id}-{number}" for number in range(count)]


async def append_all(store: RedisStore, begin: int, end: int) -> int:
    """Append these numbers of events for every user; return how many were new."""
    events = [click(f"{user_id}-{number}", user_id) for user_id in USERS for number in range(begin, end)]
    return sum(not result.duplicate for result in await store.append("main", events))


async def seen_of(store: RedisStore) -> dict[str, Any]:
    """Everything that readers see of the users."""
    logs = {user_id: [entry.record for entry in await store.events("main", user_id, limit=1000)] for user_id in USERS}
    states = await store.states("main", USERS, stores.GENERATION)
    return {"logs": logs, "states": states}


def turn(server: RedisServer, directory: Path | Folder, *, keep_tail_s: float = 0, **options: Any) -> TurnCounts:
    now = options.pop("now", datetime.now(UTC) + timedelta(seconds=1))
    with RedisSource.open(server.url) as log, ArchiveWriter.open(directory) as writer:
        return archive_log(log, writer, now, keep_tail_s=keep_tail_s, **{"keep_days": None} | options)


def move_all(server: RedisServer, directory: Path | Folder, tail: str = "the last entry stays") -> None:
    """Archive and trim everything; events of other users are the entries that have to stay."""

    async def fill() -> None:
        async with opened(server, directory) as store:
            users = (f"filler{number}" for number in range(1000))
            apart = {Keyspace("lisarec", FEW_PARTITIONS).user("main", user_id).partition: user_id for user_id in users}
            await store.append("main", [click(f"{tail} {time.time_ns()}", user_id) for user_id in apart.values()])

    asyncio.run(fill())
    turn(server, directory)


def uuid7(ms: int, number: int = 0) -> str:
    digits = f"{ms:012x}"
    return f"{digits[:8]}-{digits[8:]}-7{number % 4096:03x}-8000-{number:012x}"


def in_stream(server: RedisServer, partition: int) -> tuple[list[int], int]:
    """Numbers of the entries in the stream, and the highest number ever used."""
    with server.client.pipeline(transaction=True) as pipe:
        pipe.xrange(Keyspace("lisarec", FEW_PARTITIONS).log(partition))
        pipe.get(f"lisarec:{{p{partition}}}:seq")
        entries, last = pipe.execute()
    return [int(entry_id.split(b"-")[0]) for entry_id, _ in entries], int(last or 0)


def assert_nothing_is_missing_or_twice(server: RedisServer, directory: Path | Folder) -> None:
    """Assert that each partition has every entry once, in the archive or in the stream."""
    with ArchiveWriter.open(directory) as writer:
        tables = [pl.read_parquet(file.local_path(as_folder(directory))) for file in writer.manifest.files]
        taken = pl.concat(tables) if tables else pl.DataFrame({"partition": [], "seq": []})
        for partition in range(FEW_PARTITIONS):
            archived = sorted(taken.filter(partition=partition)["seq"].to_list())
            position = writer.manifest.seq(partition)
            assert archived == list(range(1, position + 1))
            tail, last = in_stream(server, partition)
            assert tail == list(range(last - len(tail) + 1, last + 1))
            assert not tail or tail[0] <= max(position, 1)  # strictly: the newest archived entry is still there

"""Measure how fast a generation is rebuilt on one core: the fold alone, and the reads and writes around it.

Events of many users are appended to a store, and folded for another generation. Fold: from arrays of events to states.
Prepare: from logged events to those arrays. Read: the log from the store. Keep: states into the store, synced.

A second table shows rebuilds for a generation that extends the served one by new items, and the cost of folding users
one by one, in processor time of this process.

    python -m benchmarks.storage.rebuild                    # SQLite, Redis, and Redis with all events in the archive
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from uuid_utils import uuid7

from benchmarks.harness.topology import redis_server
from model.config import EVENT_WEIGHTS, ModelConfig
from storage.archive.writer import ArchiveWriter
from storage.archiver.archiver import archive_log
from storage.archiver.redis_source import RedisSource
from storage.errors import StorageUnavailable
from storage.maintenance.rebuild import rebuild
from storage.protocol import UserStore
from storage.records import FoldedState, LogPage
from storage.redis.store import RedisStore
from storage.sqlite.store import SQLiteStore
from storage.state.compiled_fold import EventColumns, fold_many
from storage.state.event import Event
from storage.state.fold import fold_event
from storage.state.generation import Generation

ITEMS = 3_500
NEW_ITEMS = 50
BATCH = 500
ROUNDS = 5
EXACT_USERS = 20
NOW_US = 1_750_000_000_000_000
PREFIX = "lisarec"

console = Console()


def random_generation(tag: bytes) -> Generation:
    """Return a generation with the shape of the default preset and random codes."""
    shape = ModelConfig()
    rng = np.random.default_rng(tag[0])
    codes = rng.integers(0, shape.history_codewords, (ITEMS, shape.history_codebooks), dtype=np.uint8)
    index = {f"item-{row}": row for row in range(ITEMS)}
    return Generation(tag, shape.decay_rates, shape.history_codewords, index, codes, EVENT_WEIGHTS)


def extended(before: Generation, tag: bytes) -> Generation:
    """Return a generation with the codes of another one, and codes of new items."""
    new = np.random.default_rng(0).integers(0, before.codewords, (NEW_ITEMS, before.codes.shape[1]), dtype=np.uint8)
    index = {f"item-{row}": row for row in range(ITEMS + NEW_ITEMS)}
    return replace(before, tag=tag, item_index=index, codes=np.concatenate([before.codes, new]))


def random_events(events: int, users: int, new_share: float) -> list[Event]:
    """Return events of users with unequal activity, as in practice; `new_share` of them are on new items."""
    rng = np.random.default_rng(0)
    of_users = (users * rng.random(events) ** 3).astype(int).tolist()
    items = rng.integers(0, ITEMS, events)
    items[rng.random(events) < new_share] = ITEMS
    items += (items == ITEMS) * rng.integers(0, NEW_ITEMS, events)
    return [
        Event(str(uuid7()), f"user-{user}", f"item-{item}", "click", NOW_US + number, NOW_US + number)
        for number, (user, item) in enumerate(zip(of_users, items.tolist(), strict=True))
    ]


def fold_alone(generation: Generation, events: list[Event]) -> tuple[float, float, bool]:
    """Return the seconds to prepare and to fold all events, each the best of several rounds, and whether the states of
    some users equal those that `fold_event` returns.
    """
    names = list(dict.fromkeys(event.user_id for event in events))
    row_of = {name: row for row, name in enumerate(names)}
    rows = np.array([row_of[event.user_id] for event in events])
    empty = np.repeat(np.array([generation.empty()]), len(names))
    first = EventColumns.from_events(generation, events[:1])
    fold_many(generation, empty.copy(), rows[:1], first)  # compiles the fold, or loads it from the cache
    prepare_s, fold_s = [], []
    for _ in range(ROUNDS):
        begin_s = time.process_time()
        columns = EventColumns.from_events(generation, events)
        prepare_s.append(time.process_time() - begin_s)
        states = empty.copy()
        begin_s = time.process_time()
        fold_many(generation, states, rows, columns)
        fold_s.append(time.process_time() - begin_s)
    equal = all(_is_stepped(generation, states[row], events, name) for row, name in enumerate(names[:EXACT_USERS]))
    return min(prepare_s), min(fold_s), equal


def _is_stepped(generation: Generation, state: np.void, events: list[Event], user_id: str) -> bool:
    expected = generation.empty()
    for event in events:
        if event.user_id == user_id:
            fold_event(generation, expected, event)
    return all(
        np.allclose(state[name], expected[name], rtol=1e-5)
        if name == "bins"
        else np.array_equal(state[name], expected[name])
        for name in generation.dtype.names or ()
    )


class TimedStore:
    """Times the reads and writes of a store."""

    def __init__(self, store: UserStore) -> None:
        self._store = store
        self.read_s = 0.0
        self.keep_s = 0.0
        self.kept = 0

    async def log(self) -> AsyncIterator[LogPage]:
        """Yield the pages of the store's log, and time the reads."""
        pages = aiter(self._store.log())
        while True:
            begin_s = time.perf_counter()
            try:
                page = await anext(pages)
            except StopAsyncIteration:
                return
            self.read_s += time.perf_counter() - begin_s
            yield page

    async def save_states(self, generation: Generation, states: list[FoldedState]) -> None:
        """Save the states in the store, and time it."""
        begin_s = time.perf_counter()
        await self._store.save_states(generation, states)
        self.keep_s += time.perf_counter() - begin_s
        self.kept += len(states)


async def append(store: UserStore, events: list[Event]) -> None:
    """Append the events in batches, four at a time, and retry if the store was unavailable."""
    for start in range(0, len(events), 4 * BATCH):
        lanes = (events[lane : lane + BATCH] for lane in range(start, min(start + 4 * BATCH, len(events)), BATCH))
        await asyncio.gather(*(_append_all(store, lane) for lane in lanes))


async def _append_all(store: UserStore, events: list[Event]) -> None:
    while True:
        with suppress(StorageUnavailable):
            await store.append("main", events)
            return


def archive_all(redis_url: str, archive_dir: Path, expected: int) -> float:
    """Move the whole log to the archive; return the seconds that it took."""
    begin_s = time.perf_counter()
    with RedisSource.open(redis_url, PREFIX) as log, ArchiveWriter.open(archive_dir) as writer:
        done = archive_log(log, writer, datetime.now(UTC) + timedelta(seconds=1), keep_tail_s=0, keep_days=None)
    assert done.archived == expected
    return time.perf_counter() - begin_s


async def rebuild_timed(store: UserStore, generation: Generation, events: list[Event]) -> tuple[float, TimedStore]:
    """Rebuild from the logged events; return the seconds that it took, and the timed store."""
    timed = TimedStore(store)
    begin_s = time.perf_counter()
    done = await rebuild(timed, generation)  # type: ignore[arg-type]  # the two methods that a rebuild uses
    elapsed_s = time.perf_counter() - begin_s
    assert (done.events, done.users) == (len(events), timed.kept)
    return elapsed_s, timed


async def filled_stores(
    directory: Path, served: Generation, logged: list[Event], redis: bool
) -> AsyncIterator[tuple[str, UserStore]]:
    """Yield one store after another, filled with all events; the last one's events are in the archive."""
    embedded = await SQLiteStore.open(directory, [served])
    await append(embedded, logged)
    yield "SQLite", embedded
    await embedded.close()
    if not redis:
        return
    with ExitStack() as stack:
        url = stack.enter_context(redis_server(directory))
        hot = await RedisStore.open(url, [served], prefix=PREFIX, archive_dir=directory / "archive")
        await append(hot, logged)
        yield "Redis", hot
        archived_s = await asyncio.to_thread(archive_all, url, directory / "archive", len(logged))
        console.print(f"archived:       {len(logged) / archived_s:>12,.0f} events/s")
        yield "archive", hot
        await hot.close()


async def rebuild_warm(store: UserStore, served: Generation, name: str, user_ids: list[str]) -> list[str]:
    """Rebuild for a generation that extends the served one; return a row of the table."""
    begin_s = time.process_time()
    done = await rebuild(store, extended(served, f"w{name:.<7}".encode()), before=served)
    warm_s = time.process_time() - begin_s
    alone = random_generation(f"1{name:.<7}".encode())
    begin_s = time.process_time()
    for user_id in user_ids:
        await store.states("main", [user_id], alone)
    each_ms = (time.process_time() - begin_s) / len(user_ids) * 1000
    return [name, f"{done.carried:,}", f"{done.users:,}", f"{warm_s:.2f}", f"{each_ms:.2f}"]


async def measure(events: int, users: int, new_share: float, redis: bool) -> bool:
    """Print the measurements; return whether the folds were correct."""
    served, built = random_generation(b"served.."), random_generation(b"built...")
    logged = random_events(events, users, new_share)
    prepare_s, fold_s, equal = await asyncio.to_thread(fold_alone, built, logged)
    console.print(f"{events:,} events of {len({event.user_id for event in logged}):,} users")
    console.print(f"fold alone:     {events / fold_s:>12,.0f} events/s on one core; equal to one by one: {equal}")
    console.print(f"prepare alone:  {events / prepare_s:>12,.0f} events/s on one core")
    one_by_one = list(dict.fromkeys(event.user_id for event in logged))[-EXACT_USERS:]
    table = Table("store", "read, events/s", "prepare and fold, events/s", "keep, states/s", "altogether, events/s")
    warm = Table("store", "taken over, users", "folded, users", "s", "one user alone, ms", "all folded, s")
    with TemporaryDirectory() as directory:
        async for name, store in filled_stores(Path(directory), served, logged, redis):
            begin_s = time.process_time()
            elapsed_s, timed = await rebuild_timed(store, random_generation(f"{name:.<8}".encode()), logged)
            full_s = time.process_time() - begin_s
            own_s = elapsed_s - timed.read_s - timed.keep_s
            cells = (events / timed.read_s, events / own_s, timed.kept / timed.keep_s, events / elapsed_s)
            table.add_row(name, *(f"{cell:,.0f}" for cell in cells))
            warm.add_row(*await rebuild_warm(store, served, name, one_by_one), f"{full_s:.2f}")
    console.print(table)
    console.print(warm)
    return equal


def main(
    events: Annotated[int, typer.Option(min=1)] = 1_000_000,
    users: Annotated[int, typer.Option(min=1)] = 20_000,
    new_share: Annotated[float, typer.Option(min=0, max=1, help="Share of the events on new items.")] = 0.014,
    redis: Annotated[bool, typer.Option(help="Also on Redis, which must be installed.")] = True,
) -> None:
    """Measure a rebuild from each store."""
    if not asyncio.run(measure(events, users, new_share, redis)):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

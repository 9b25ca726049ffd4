"""What writes files that must survive a power cut, and what must be there after a restart.

python -m benchmarks.resilience.crash_workloads NAME FOLDER    runs one, as `crash_states` does below strace
"""

from __future__ import annotations

import asyncio
import gzip
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import polars as pl

from app.http.auth import keys, seal_keys
from app.jobs.datasets.synthetic_shop import generate
from app.jobs.datasets.writer import new_directory
from app.jobs.lists import resumable_parquet
from app.jobs.lists.resumable_parquet import ListParts
from app.serving import empty_model
from app.serving.served_generation import generation_of
from benchmarks.harness.ledger import TENANT, is_fold
from model.artifact import model_directory
from model.artifact.model_directory import ArtifactError
from storage.archive.writer import ArchiveWriter
from storage.archiver.archiver import archive_log
from storage.archiver.sqlite_source import SQLiteSource
from storage.maintenance.backup import backup, restore
from storage.maintenance.backup_format import read_records
from storage.sqlite.store import SQLiteStore
from storage.state.event import Event

USERS = [f"user-{number}" for number in range(5)]
GENERATION = generation_of(empty_model.artifact())


class Workload(NamedTuple):
    """A run below a folder, and the laws of it.

    problems  yields what is wrong with a disk, given what the run had acknowledged
    """

    run: Callable[[Path], None]
    problems: Callable[[Path, Sequence[str]], Iterator[str]]


def acknowledge(text: str) -> None:
    """Say that something is durable; `crash_states` sees this call among the others."""
    os.write(2, f"acknowledged: {text}\n".encode())


def _clicks(first: int, count: int) -> list[Event]:
    return [
        Event(f"e{n}", USERS[n % len(USERS)], f"item-{n % 7}", "click", 1_700_000_000_000_000 + n, None)
        for n in range(first, first + count)
    ]


async def _append(store: SQLiteStore, first: int) -> None:
    events = _clicks(first, 4)
    await store.append(TENANT, events)
    acknowledge(" ".join(event.event_id for event in events))
    await store.append(TENANT, events)  # a resend


# ---- the event log


def _log_events(root: Path) -> None:
    async def log() -> None:
        for turn in range(2):
            store = await SQLiteStore.open(root / "new" / "state", [GENERATION])
            for first in (0, 4, 8):
                await _append(store, 20 * turn + first)
            await store.erase(TENANT, "nobody")  # empties the write-ahead log
            await _append(store, 20 * turn + 12)
            await store.close()

    asyncio.run(log())


def _log_problems(disk: Path, acknowledged: Sequence[str]) -> Iterator[str]:
    return iter(asyncio.run(_store_problems(disk / "new" / "state", " ".join(acknowledged).split())))


async def _store_problems(folder: Path, event_ids: Sequence[str]) -> list[str]:
    store, found, problems = await SQLiteStore.open(folder, [GENERATION]), list[str](), list[str]()
    for user_id in USERS:
        log = [entry.record for entry in await store.events(TENANT, user_id) if isinstance(entry.record, Event)]
        found += [event.event_id for event in log]
        (value,) = await store.states(TENANT, [user_id], GENERATION)
        if not is_fold(GENERATION, value, log):
            problems.append("a state is not the fold of its log")
    await store.close()
    if len(set(found)) < len(found):
        problems.append("an event counts twice")
    if not {*event_ids} <= {*found}:
        problems.append("an acknowledged event is lost")
    return problems


# ---- the archive


def _archive_events(root: Path) -> None:
    state = root.parent / "state"  # which does not lose power

    async def change(first: int, erased: str) -> None:
        store = await SQLiteStore.open(state, [GENERATION])
        await store.append(TENANT, _clicks(first, 10))
        if erased:
            await store.erase(TENANT, erased)
        await store.close()

    for turn, erased in enumerate(["", "", USERS[0]]):
        asyncio.run(change(10 * turn, erased))
        with SQLiteSource.open(state) as source, ArchiveWriter.open(root / "new" / "archive") as writer:
            archive_log(source, writer, datetime.now(UTC), keep_tail_s=0, keep_days=None)
        acknowledge("erased" if erased else str(10 * turn + 10))


def _archive_problems(disk: Path, acknowledged: Sequence[str]) -> Iterator[str]:
    folder = disk / "new" / "archive"
    with ArchiveWriter.open(folder):
        pass
    tables = [pl.read_parquet(file) for file in folder.rglob("*.parquet")]
    found = [event_id for table in tables for event_id in table["event_id"]]
    counts = [int(text) for text in acknowledged if text != "erased"]
    expected = {event.event_id for event in _clicks(0, max(counts, default=0)) if event.user_id != USERS[0]}
    if len(set(found)) < len(found):
        yield "an event is archived twice"
    if not expected <= {*found}:
        yield "an archived event is lost"
    if "erased" in acknowledged and any(USERS[0] in table["user_id"] for table in tables):
        yield "an erased user is in a file"


# ---- a backup, and the store that it is restored into


def _back_up(root: Path) -> None:
    async def back_up() -> None:
        store = await SQLiteStore.open(root.parent / "state", [GENERATION])
        await store.append(TENANT, _clicks(0, 12))
        await backup(store, root / "backup")
        await store.close()
        acknowledge("backup")
        restored = await SQLiteStore.open(root / "state", [GENERATION])
        await restore(restored, root / "backup", defaultdict(lambda: GENERATION))
        await restored.close()
        acknowledge("restore")

    asyncio.run(back_up())


def _backup_problems(disk: Path, acknowledged: Sequence[str]) -> Iterator[str]:
    file = disk / "backup"
    if file.exists():
        for _ in read_records(file):  # raises if it is not complete
            pass
    elif acknowledged:
        yield "a backup is lost"
    if "restore" in acknowledged:
        yield from asyncio.run(_store_problems(disk / "state", [event.event_id for event in _clicks(0, 12)]))


# ---- files of keys


def _make_keys(root: Path) -> None:
    for _ in range(3):
        _, key = keys.make(TENANT, ["recs:read"])
        keys.add(root / "new" / "keys", key)
        acknowledge(key.id)
    keys.remove(root / "new" / "keys", key.id)
    acknowledge("removed")
    for _ in range(2):
        acknowledge(f"seal {seal_keys.rotate(root / 'seals')[1].id.hex()}")


def _key_problems(disk: Path, acknowledged: Sequence[str]) -> Iterator[str]:
    file = disk / "new" / "keys"
    text = file.read_text() if acknowledged else ""  # the line of a key that is being added may be torn
    if not all(key_id in text for key_id in acknowledged[:2]):
        yield "an API key is lost"
    if "removed" in acknowledged and len(keys.read(file)) != 2:
        yield "a removed API key is back"
    sealing = acknowledged[-1].removeprefix("seal ") if len(acknowledged) > 4 else ""
    if sealing and sealing not in [key.id.hex() for key in seal_keys.read(disk / "seals")]:
        yield "a seal key is lost"


# ---- outputs of commands


def _save_model(root: Path) -> None:
    empty = empty_model.artifact()
    model_directory.save(root / "model", empty.model, empty.config, empty.items, {})
    acknowledge(model_directory.verified_tag(root / "model"))


def _model_problems(disk: Path, acknowledged: Sequence[str]) -> Iterator[str]:
    try:
        found = [model_directory.verified_tag(disk / "model")]
    except ArtifactError:  # it never loads with half a file
        found = []
    if found != [*acknowledged] and acknowledged:
        yield "a model is lost"


def _export_lists(root: Path) -> None:
    _finish_lists(root / "lists.parquet")
    acknowledge("lists")


def _finish_lists(out: Path) -> None:
    resumable_parquet.PART_USERS = 2
    parts = ListParts(out, "plan")
    for user_id in parts.lacks(USERS):
        parts.add(
            {
                user_id: {
                    "user_id": user_id,
                    "items": [],
                    "source": "popular",
                    "generation": "g",
                    "recommendation_id": "r",
                }
            }
        )
    parts.finish()


def _list_problems(disk: Path, acknowledged: Sequence[str]) -> Iterator[str]:
    if not (disk / "lists.parquet").exists():
        if acknowledged:
            yield "the file of lists is lost"
        _finish_lists(disk / "lists.parquet")
    if sorted(pl.read_parquet(disk / "lists.parquet")["user_id"]) != USERS:
        yield "a user has no list, or two"


def _write_data_set(root: Path) -> None:
    with new_directory(root / "new" / "shop") as directory:
        generate(directory, shoppers=20)
    acknowledge("data set")


def _data_problems(disk: Path, acknowledged: Sequence[str]) -> Iterator[str]:
    files = [disk / "new" / "shop" / name for name in ("items.tsv.gz", "interactions.tsv.gz")]
    must_be_whole = bool(acknowledged) or (disk / "new" / "shop").exists()
    if must_be_whole and not all(gzip.decompress(file.read_bytes()) for file in files):
        yield "a table is empty"


WORKLOADS = {
    "log": Workload(_log_events, _log_problems),
    "archive": Workload(_archive_events, _archive_problems),
    "backup": Workload(_back_up, _backup_problems),
    "keys": Workload(_make_keys, _key_problems),
    "model": Workload(_save_model, _model_problems),
    "lists": Workload(_export_lists, _list_problems),
    "data": Workload(_write_data_set, _data_problems),
}


if __name__ == "__main__":
    WORKLOADS[sys.argv[1]].run(Path(sys.argv[2]))

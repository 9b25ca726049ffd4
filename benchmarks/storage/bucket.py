"""Archive into a bucket while archivers are killed, use the archive, and measure the transfer rates.

Events are appended to Redis while archivers are killed at random moments after their start. Every tenth time, the S3
server also stops responding for a while. At the end the archive must contain each acknowledged event once, and a model
trained on it must give every user the same state in the served store and in one restored from a back-up.

    python -m benchmarks.storage.bucket --events 10000000 --kills 50
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import polars as pl
import typer
from rich.console import Console
from uuid_utils import uuid7

from benchmarks.harness.compose import ROOT
from benchmarks.harness.topology import redis_server
from benchmarks.machine import cpu
from benchmarks.storage.archive_use import use_archive
from benchmarks.storage.rebuild import ITEMS, NOW_US, random_generation
from benchmarks.storage.s3_server import S3Server
from storage.archive.manifest import MANIFEST, Manifest
from storage.archive.reader import ArchiveReader
from storage.errors import StorageUnavailable
from storage.folders.folder import Folder
from storage.folders.local_folder import LocalFolder
from storage.folders.object_folder import ObjectFolder
from storage.redis.store import RedisStore
from storage.state.event import Event

BATCH = 500
SESSION = 20
LANES = 4
FREEZE_EVERY = 10  # kills
FREEZE_S = 3.0
RETRY_AFTER_S = 0.05
PROGRESS_EVERY_S = 30.0
KILL_WITHIN_S = 8.0  # after an archiver has opened the archive
PART = 64 << 20
PARTS = 3

console = Console()


def batches(events: int, users: int) -> Iterator[list[Event]]:
    """Yield the events in batches, with SESSION of a user one after the other, as imports have them."""
    rng = random.Random(3)
    for begin in range(0, events, BATCH):
        sessions = [f"user-{rng.randrange(users)}" for _ in range(0, BATCH, SESSION)]
        yield [
            Event(str(uuid7()), sessions[number // SESSION], f"item-{rng.randrange(ITEMS)}", "click", at, at)
            for number, at in enumerate(range(NOW_US + begin, NOW_US + min(begin + BATCH, events)))
        ]


async def append(url: str, archive: Folder, events: int, users: int) -> None:
    """Append all events, a few batches concurrently."""
    store = await RedisStore.open(url, [random_generation(b"served..")], archive_dir=archive)
    left = batches(events, users)

    async def lane() -> None:
        for batch in left:
            while True:
                with suppress(StorageUnavailable):  # a retry counts once
                    await store.append("main", batch)
                    break
                await asyncio.sleep(RETRY_AFTER_S)

    await asyncio.gather(*(lane() for _ in range(LANES)))
    await store.close()


def manifest_of(archive: Folder) -> Manifest | None:
    """Return the archive's manifest; None if it does not exist or cannot be read."""
    try:
        found = archive.read(MANIFEST)
    except OSError:
        return None
    return None if found is None else Manifest.from_json(found.data.decode())


def kill_archivers(server: S3Server, archive: Folder, command: list[str], kills: int) -> int:
    """Start archivers and kill each at a random moment; return how many had committed something."""
    rng, committed = random.Random(4), 0
    for kill in range(1, kills + 1):
        before = opened = manifest_of(archive)
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        while (opened is None or (before is not None and opened.writer == before.writer)) and process.poll() is None:
            time.sleep(0.02)
            opened = manifest_of(archive)
        if kill % FREEZE_EVERY == 0:
            server.freeze()
            time.sleep(FREEZE_S)
            server.thaw()
        time.sleep(rng.uniform(0, KILL_WITHIN_S))
        process.kill()
        process.wait()
        found = manifest_of(archive)
        committed += opened is not None and found is not None and found.positions != opened.positions
        console.print(f"{kill} of {kills} archivers killed; {archived(found):,} events in the archive")
    return committed


def archived(manifest: Manifest | None) -> int:
    """Return the number of events in the archive."""
    return 0 if manifest is None else sum(file.rows for file in manifest.files)


def faults(archive: Folder, expected: int) -> list[str]:
    """Return the faults of the archive; none if it contains each event once."""
    manifest = manifest_of(archive)
    assert manifest is not None
    columns = ["partition", "seq", "event_id"]
    table = pl.concat([pl.read_parquet(f.local_path(archive), columns=columns) for f in manifest.files])
    wrong = []
    if len(table) != expected or table["event_id"].n_unique() != expected:
        wrong.append(f"{len(table):,} rows of {table['event_id'].n_unique():,} events, not {expected:,}")
    ends = table.group_by("partition").agg(pl.col("seq").max(), rows=pl.len(), different=pl.col("seq").n_unique())
    gaps = ends.filter((pl.col("seq") != pl.col("rows")) | (pl.col("rows") != pl.col("different")))
    return [*wrong, *(f"partition {row[0]} has gaps" for row in gaps.iter_rows())]


def print_rates(name: str, folder: Folder) -> None:
    """Print how fast large files are written to a folder, and read from it."""
    data = os.urandom(PART)
    begin_s = time.perf_counter()
    for number in range(PARTS):
        folder.add(f"part-{number}", data)
    there_s = time.perf_counter()
    for number in range(PARTS):
        folder.path(f"part-{number}").read_bytes()
    back_s = time.perf_counter()
    size_mb = PART * PARTS / 1e6
    console.print(
        f"{name}: {size_mb / (there_s - begin_s):,.0f} MB/s there, {size_mb / (back_s - there_s):,.0f} MB/s back"
    )


def archive_and_kill(server: S3Server, directory: Path, url: str, events: int, kills: int, users: int) -> ObjectFolder:
    """Append all events while archivers are killed, let a last one finish, and print the result."""
    archive = ObjectFolder(server.url("archive"), directory / "cache")
    command = [sys.executable, "-m", "app", "archive", "--redis-url", url, "--archive-dir", str(archive)]
    appending = threading.Thread(target=asyncio.run, args=(append(url, archive, events, users),))
    begin_s = time.perf_counter()
    appending.start()
    committed = kill_archivers(server, archive, [*command, "--every", "0", "--keep-tail", "0"], kills)
    with subprocess.Popen([*command, "--every", "1", "--keep-tail", "0"], cwd=ROOT, stdout=subprocess.DEVNULL) as last:
        while appending.is_alive():  # without an archiver, Redis would fill up
            appending.join(PROGRESS_EVERY_S)
            console.print(f"{archived(manifest_of(archive)):,} of {events:,} events in the archive")
        last.kill()
    subprocess.run([*command, "--once", "--keep-tail", "0"], cwd=ROOT, check=True)
    console.print(
        f"{events:,} events, {kills} kills, {committed} of them after a commit, {kills // FREEZE_EVERY} times "
        f"{FREEZE_S:g} s without answers: {time.perf_counter() - begin_s:,.0f} s"
    )
    return archive


def main(
    events: Annotated[int, typer.Option(min=1)] = 10_000_000,
    kills: Annotated[int, typer.Option(min=0)] = 50,
    users: Annotated[int, typer.Option(min=1)] = 20_000,
) -> None:
    """Archive, kill, compare, measure."""
    console.print(f"{cpu()}, {os.cpu_count()} cores; moto's server beside it")
    with TemporaryDirectory() as folder, closing(S3Server()) as server, redis_server(Path(folder)) as url:
        directory = Path(folder)
        os.environ.update({**server.environment, "LISAREC_CACHE_DIR": str(directory / "archiver")})
        archive = archive_and_kill(server, directory, url, events, kills, users)
        begin_s = time.perf_counter()
        wrong = faults(archive, events)
        size_mb = sum(path.stat().st_size for path in (directory / "cache").rglob("*.parquet")) / 1e6
        console.print(f"copied, verified and counted: {size_mb:,.0f} MB in {time.perf_counter() - begin_s:.1f} s")
        begin_s = time.perf_counter()
        reader = ArchiveReader(ObjectFolder(server.url("archive"), directory / "reader"))
        for what in ("first look-up, with an empty cache", "second look-up"):
            reader.read(lambda snapshot: snapshot.holds("main", [("user-1", "no such event")]))
            console.print(f"{what}: {time.perf_counter() - begin_s:.3f} s")
            begin_s = time.perf_counter()
        wrong += use_archive(server, archive, directory, url, events, users)
        local, bucket = LocalFolder(directory / "local"), ObjectFolder(server.url("rates"), directory / "rates")
        print_rates("directory", local)
        print_rates("bucket", bucket)
    for line in wrong[:20] or ["each event is in the archive once"]:
        console.print(line)
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

"""What a worker with a large catalogue takes: seconds until it is ready, and memory for each item.

Two workers serve the same model, one after the other. Resident is all that a process has in memory; its own is what it
shares with nobody (USS); its share counts what several have mapped once between them (PSS). Of each the same of a
worker with the small model is taken off, so that what is left grows with the items. Then users click on random items
and ask for recommendations, which brings in those pages of the mapped file that are needed.

    python -m benchmarks.worker --model models/ml-1m --items 10000000
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import httpx
import psutil
import typer
from rich.console import Console
from rich.table import Table

from app.uuid7 import uuid7
from benchmarks.catalogue import enlarge
from benchmarks.running import free_port, wait_until_ready
from model import artifact

CLICKS = 5  # of each user
BATCH = 500  # events
AT_ONCE = 50

console = Console()


class Memory(NamedTuple):
    """Of a process, in bytes."""

    resident: int
    own: int
    share: int

    @classmethod
    def of(cls, process: psutil.Process) -> Memory:
        found = process.memory_full_info()
        return cls(found.rss, found.uss, found.pss)


class Worker(NamedTuple):
    url: str
    process: psutil.Process
    ready_s: float


@contextmanager
def worker(model: Path) -> Iterator[Worker]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    with TemporaryDirectory() as store:
        command = [sys.executable, "-m", "app", "serve", "--model", str(model), "--port", str(port)]
        begin = time.perf_counter()
        service = subprocess.Popen(
            [*command, "--data-dir", store], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_until_ready(url, service)
            yield Worker(url, psutil.Process(service.pid), time.perf_counter() - begin)
        finally:
            service.terminate()
            service.wait(timeout=30)


def use(url: str, item_ids: list[str], users: int) -> None:
    """Five clicks of each user, and one question."""
    with httpx.Client(base_url=url, timeout=60) as client:
        for begin in range(0, users, BATCH // CLICKS):
            some = [str(user) for user in range(begin, min(begin + BATCH // CLICKS, users))]
            events = [
                {"event_id": uuid7(), "user_id": user, "item_id": random.choice(item_ids)}
                for user in some
                for _ in "12345"
            ]
            client.post("/v1/events", json=events).raise_for_status()
            for first in range(0, len(some), AT_ONCE):
                requests = [{"user_id": user} for user in some[first : first + AT_ONCE]]
                client.post("/v1/recommendations", json={"requests": requests}).raise_for_status()


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory.")],
    items: Annotated[int, typer.Option(help="Size of the catalogue.")] = 10_000_000,
    users: Annotated[int, typer.Option(help="Who click and ask.")] = 20_000,
    large: Annotated[Path | None, typer.Option(help="The large model, where it was made before.")] = None,
) -> None:
    with TemporaryDirectory() as temporary:
        if large is None:
            enlarge(model, items, large := Path(temporary) / "large")
        with worker(model) as one:
            small = Memory.of(one.process)
            small_ready_s = one.ready_s
        ids = artifact.load(large).items.ids
        table = Table("", "ready after", "resident", "its own", "its share", "bytes an item: resident", "own", "share")

        def row(name: str, ready_s: float | None, memory: Memory) -> None:
            sizes = [f"{size / 1e6:,.0f} MB" for size in memory]
            each = [f"{(size - less) / len(ids):.1f}" for size, less in zip(memory, small, strict=True)]
            table.add_row(name, "" if ready_s is None else f"{ready_s:.1f} s", *sizes, *each)

        row("the small model", small_ready_s, small)
        with worker(large) as first:
            row("a worker", first.ready_s, Memory.of(first.process))
            with worker(large) as second:
                row("beside another", second.ready_s, Memory.of(second.process))
            use(
                first.url,
                [ids[place] for place in random.sample(range(len(ids)), min(len(ids), CLICKS * users))],
                users,
            )
            row(f"after {CLICKS * users:,} clicks and {users:,} answers", None, Memory.of(first.process))
        ids_each = (ids.buffer.nbytes + large_titles(large)) / len(ids)
        table.title = f"{len(ids):,} items, whose ids and titles are {ids_each:.1f} B each"
    console.print(table)


def large_titles(large: Path) -> int:
    return artifact.load(large).items.titles.buffer.nbytes


if __name__ == "__main__":
    typer.run(main)

"""Measure the cost of a worker with a large catalogue: seconds until it is ready, and memory for each item.

Two workers serve the same model; the second starts while the first runs. Each needs its own memory (anonymous). They
share the mapped pages of the model's files, which the kernel reclaims when memory is short. The memory of a worker with
the small model is subtracted, so that the rest grows with the items. Users then click on random items, which is the
worst case, and request recommendations. This maps the required pages of the files, sixteen at a time.

    python -m benchmarks.inference.worker_memory --model models/ml-1m --items 10000000
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import httpx
import psutil
import typer
from rich.console import Console
from rich.table import Table
from uuid_utils import uuid7

from app.jobs.loadtest import synthetic_catalogue
from benchmarks.harness.service_process import free_port, running_process
from model.artifact import model_directory

CLICKS = 5  # of each user
BATCH = 500  # events
REQUESTS_PER_BATCH = 50

console = Console(width=140)


class Memory(NamedTuple):
    """Bytes of a process: resident, anonymous, and mapped from files."""

    resident: int
    own: int
    mapped: int

    @classmethod
    def of(cls, process: psutil.Process) -> Memory:
        """Read the memory of a process."""
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        sizes = dict(line.split(":") for line in lines if line.endswith("kB"))
        return cls(*(int(sizes[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon", "RssFile")))


class Worker(NamedTuple):
    """A process that serves a model, and the seconds until it was ready."""

    url: str
    process: psutil.Process
    ready_s: float


@contextmanager
def worker(model: Path) -> Iterator[Worker]:
    """Serve the model in a new process."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    with TemporaryDirectory() as store:
        command = [sys.executable, "-m", "app", "serve", "--model", str(model), "--port", str(port)]
        begin_s = time.perf_counter()
        with running_process([*command, "--data-dir", store], url, stderr=subprocess.DEVNULL) as service:
            yield Worker(url, psutil.Process(service.pid), time.perf_counter() - begin_s)


def send_clicks(url: str, item_ids: Sequence[str], users: int) -> None:
    """Send five clicks and one request for recommendations of each user."""
    with httpx.Client(base_url=url, timeout=60) as client:
        for begin in range(0, users, BATCH // CLICKS):
            some = [str(user) for user in range(begin, min(begin + BATCH // CLICKS, users))]
            events = [
                {"event_id": str(uuid7()), "user_id": user, "item_id": random.choice(item_ids)}
                for user in some
                for _ in "12345"
            ]
            client.post("/v1/events", json=events).raise_for_status()
            for first in range(0, len(some), REQUESTS_PER_BATCH):
                requests = [{"user_id": user} for user in some[first : first + REQUESTS_PER_BATCH]]
                client.post("/v1/recommendations", json={"requests": requests}).raise_for_status()


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory.")],
    items: Annotated[int, typer.Option(help="Size of the catalogue.")] = 10_000_000,
    users: Annotated[int, typer.Option(help="Who click and ask.")] = 5_000,
    large: Annotated[Path | None, typer.Option(help="The large model, where it was made before.")] = None,
) -> None:
    """Print the cost of workers with the small and with the large model."""
    with TemporaryDirectory() as temporary:
        if large is None:
            synthetic_catalogue.write_enlarged(large := Path(temporary) / "large", model, items, "trained")
        with worker(model) as one:
            small = Memory.of(one.process)
            small_ready_s = one.ready_s
        ids = model_directory.load(large).items.ids
        table = Table("", "ready after", "resident", "own", "mapped", "bytes an item: resident", "own", "mapped")

        def row(name: str, ready_s: float | None, memory: Memory) -> None:
            sizes = [f"{size / 1e6:,.0f} MB" for size in memory]
            each = [f"{(size - less) / len(ids):.1f}" for size, less in zip(memory, small, strict=True)]
            table.add_row(name, "" if ready_s is None else f"{ready_s:.1f} s", *sizes, *each)

        row("the small model", small_ready_s, small)
        with worker(large) as first:
            row("a worker", first.ready_s, Memory.of(first.process))
            with worker(large) as second:
                row("beside another", second.ready_s, Memory.of(second.process))
            send_clicks(
                first.url,
                [ids[place] for place in random.sample(range(len(ids)), min(len(ids), CLICKS * users))],
                users,
            )
            row(f"after {CLICKS * users:,} clicks and {users:,} answers", None, Memory.of(first.process))
        table.title = f"{len(ids):,} items, whose ids are {ids.buffer.nbytes / len(ids):.1f} B each"
    console.print(table)


if __name__ == "__main__":
    typer.run(main)

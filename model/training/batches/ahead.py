"""Making the next batches while a device computes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Batch = TypeVar("Batch")
AHEAD = 2  # batches


def made_ahead(batches: Iterator[Batch], prepared: Callable[[Batch], Batch]) -> Generator[Batch, None, None]:
    """Iterate over the same batches, prepared. Another thread makes and prepares the next ones meanwhile."""

    def following() -> Batch | None:
        batch = next(batches, None)
        return None if batch is None else prepared(batch)

    with ThreadPoolExecutor(1, "batches") as thread:
        waiting: list[Future[Batch | None]] = [thread.submit(following) for _ in range(AHEAD)]
        while (batch := waiting.pop(0).result()) is not None:
            waiting.append(thread.submit(following))
            yield batch

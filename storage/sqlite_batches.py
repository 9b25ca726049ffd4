"""Statements about many rows at once.

Each statement lets go of the interpreter's lock, and waits until whoever took it gives it back. So a hundred rows in a
few statements cost far less than in a hundred. Batches have a few sizes only, so that SQLite prepares few statements.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def in_batches(rows: Sequence[T], sizes: Sequence[int]) -> Iterator[Sequence[T]]:
    """All of the rows, in order, in batches of these sizes, the largest first and the last one 1."""
    start = 0
    for size in sizes:
        while start + size <= len(rows):
            yield rows[start : start + size]
            start += size


def rows_of(batch: Sequence[Sequence[Any]]) -> str:
    """VALUES with a place for each value of the batch."""
    row = f"({', '.join('?' * len(batch[0]))})"
    return f"VALUES {', '.join([row] * len(batch))}"

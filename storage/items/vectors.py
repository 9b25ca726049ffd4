"""Vectors that shops compute for their items, as stores keep them: of length 1, in numbers of two bytes.

How long a vector is tells nothing, where a model of texts or images has made it. A shop of a hundred thousand items
with 384 numbers each so needs 77 MB, of which no process keeps any.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MAX_NUMBERS = 1_024
NUMBER = np.dtype("<f2")
NO_VECTOR = b""  # takes one away
VECTORS_PAGE = 500  # items whose vectors a store reads at a time


class VectorStore(Protocol):
    """The vectors of tenants' items, which `ItemStore.put_items` sets. All of a tenant have as many numbers."""

    async def numbers(self, tenant: str) -> int:
        """Return how many numbers the tenant's vectors have; 0 while no item has one."""
        ...

    async def of_items(self, tenant: str, item_ids: Sequence[str]) -> dict[str, bytes]:
        """Return the vectors of those of these items that have one, by id."""
        ...


def encode(numbers: Sequence[float]) -> bytes:
    """Return a vector as stores keep it.

    raises  ValueError  when it has no number, too many, one that is not finite, or none but 0
    """
    vector = np.array(numbers, np.float64)
    if not 1 <= len(vector) <= MAX_NUMBERS:
        raise ValueError(f"a vector has 1 to {MAX_NUMBERS:,} numbers")
    largest = float(np.abs(vector).max())
    if not 0 < largest < np.inf:
        raise ValueError("a vector must have finite numbers, at least one of them not 0")
    vector /= largest  # squares of others could be too large, or too small
    return (vector / np.linalg.norm(vector)).astype(NUMBER).tobytes()


def decode(vectors: Sequence[bytes]) -> NDArray[np.float32]:
    """Return vectors of as many numbers each: (n, d)."""
    return np.frombuffer(b"".join(vectors), NUMBER).reshape(len(vectors), -1).astype(np.float32)


def numbers_in(vector: bytes) -> int:
    """Return how many numbers a vector has."""
    return len(vector) // NUMBER.itemsize

"""Vectors that shops compute for their items, as stores keep them: of length 1, in two-byte numbers.

The length of a vector from a text or image model carries no information. A shop of 100,000 items with 384 numbers each
needs 77 MB, none of which a process keeps in memory.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MAX_NUMBERS = 1_024
NUMBER = np.dtype("<f2")
NO_VECTOR = b""  # removes a vector
VECTORS_PAGE = 500  # number of items whose vectors a store reads at a time


class VectorStore(Protocol):
    """The vectors of tenants' items, which `ItemStore.put_items` sets. All vectors of a tenant have the same size."""

    async def numbers(self, tenant: str) -> int:
        """Return how many numbers the tenant's vectors have; 0 if no item has a vector."""

    async def of_items(self, tenant: str, item_ids: Sequence[str]) -> dict[str, bytes]:
        """Return the vectors of these items by id, without those that have none."""


def encode(numbers: Sequence[float]) -> bytes:
    """Return a vector in the form that stores keep.

    raises  ValueError  if it is empty or too long, contains a number that is not finite, or only zeros
    """
    vector = np.array(numbers, np.float64)
    if not 1 <= len(vector) <= MAX_NUMBERS:
        raise ValueError(f"a vector has 1 to {MAX_NUMBERS:,} numbers")
    largest = float(np.abs(vector).max())
    if not 0 < largest < np.inf:
        raise ValueError("a vector must have finite numbers, at least one of them not 0")
    vector /= largest  # squares could otherwise overflow or underflow
    return (vector / np.linalg.norm(vector)).astype(NUMBER).tobytes()


def decode(vectors: Sequence[bytes]) -> NDArray[np.float32]:
    """Return vectors of equal size: (n, d)."""
    return np.frombuffer(b"".join(vectors), NUMBER).reshape(len(vectors), -1).astype(np.float32)


def numbers_in(vector: bytes) -> int:
    """Return how many numbers a vector has."""
    return len(vector) // NUMBER.itemsize

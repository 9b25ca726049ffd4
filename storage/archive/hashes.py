"""Hashes of the users and events in an archived file, from which a reader knows what the file has.

A hash is 128 bits of BLAKE2b of a name, in two halves: (2, n) uint64 for n names. Collisions are negligible. An
event's name is that of its entry in the log, so undos and merges have one too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from storage.errors import StorageError
from storage.state.event import MERGE_ID, UNDO_ID, digest
from storage.state.record_encoding import MERGE, UNDO

Hashes: TypeAlias = NDArray[np.uint64]

ONE_READER = Lock()  # numpy parses headers by ``ast``, which fails in two threads before Python 3.11.8 (gh-106905)

ENTRY_ID = (
    pl.when(pl.col("kind") == UNDO)
    .then(pl.format(UNDO_ID, "event_id"))
    .when(pl.col("kind") == MERGE)
    .then(pl.format(MERGE_ID, "target"))
    .otherwise("event_id")
)


def hashes_of_users(user_ids: Sequence[str]) -> Hashes:
    """Return the hashes (2, n) of users."""
    return hashes_of_digests([digest(user_id) for user_id in user_ids])


def hashes_of_events(events: Sequence[tuple[str, str]]) -> Hashes:
    """Return the hashes (2, n) of (user id, entry id) pairs."""
    return hashes_of_digests([digest(f"{user_id}\0{entry_id}") for user_id, entry_id in events])


def hashes_of_digests(digests: Sequence[bytes]) -> Hashes:
    """Return digests of 128 bits as hashes (2, n)."""
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2).T


def hashes_of_table(table: pl.DataFrame) -> Hashes:
    """Return the merged hashes of the table's users and of its (user id, entry id) pairs."""
    events = hashes_of_events(list(table.select("user_id", entry_id=ENTRY_ID).iter_rows()))
    return merge_hashes([events, hashes_of_users(table["user_id"].unique().to_list())])


def merge_hashes(many: Sequence[Hashes]) -> Hashes:
    """Return the distinct hashes of several arrays, in order of the first half."""
    hashes = np.hstack(many)
    hashes = hashes[:, np.lexsort(hashes[::-1])]
    is_new = np.append(True, np.any(hashes[:, 1:] != hashes[:, :-1], axis=0))
    return np.ascontiguousarray(hashes[:, is_new])


def contains(hashes: Hashes, wanted: Hashes) -> NDArray[np.bool_]:
    """Return whether each of the wanted (n,) is among the merged hashes."""
    begin = np.searchsorted(hashes[0], wanted[0], "left")
    end = np.searchsorted(hashes[0], wanted[0], "right")
    held: NDArray[np.bool_] = np.zeros(len(begin), np.bool_)
    for place in np.flatnonzero(end > begin):
        held[place] = wanted[1, place] in hashes[1, begin[place] : end[place]]
    return held


def read_hashes(path: Path) -> Hashes:
    """Open a file of hashes as a memory map.

    raises  StorageError  when the file is damaged
    """
    try:
        with ONE_READER:
            hashes: Hashes = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as exc:
        raise StorageError(f"'{path}' is damaged: {exc}") from exc
    return hashes

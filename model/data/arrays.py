"""Arrays of events, in memory or in memory-mapped files, and the pieces in which passes go over them.

A pass over arrays in memory has a single piece. A pass over mapped arrays works on a limited number of events at a
time, and releases their pages after each piece: the file keeps them.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import DTypeLike, NDArray
from typing_extensions import override

Column = tuple[Callable[[slice], NDArray[Any]], DTypeLike]
"""A function that reads a part of a column, and the type of its entries."""

READING, SORTING = "reading data", "sorting events"  # stages of reading a data directory
OnStage = Callable[[str], None]
"""A function that is called with the stage of a long job: its name, the share that is done, and the time left."""

COUNTED_AT_ONCE = 1 << 22  # numpy converts each key that it counts to eight bytes


def ignored(_: str) -> None:
    """Do nothing."""


def shares_of(stage: str, on_stage: OnStage) -> Callable[[float], None]:
    """Return a function that takes the share of a stage that is done, and reports it with the time left."""
    begin_s = time.monotonic()

    def report(share: float) -> None:
        left_s = (time.monotonic() - begin_s) * (1 - share) / share if share else 0.0
        left = f", {timedelta(seconds=round(left_s))} to go" if 0 < share < 1 else ""
        on_stage(f"{stage}, {share:.0%}{left}")

    return report


class Arrays:
    """Creates arrays in memory. ``piece`` is the number of events that a pass works on at a time."""

    piece = 1 << 62

    def empty(self, length: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialised array of that length."""
        return np.empty(length, dtype)

    def saved(self, path: Path) -> NDArray[Any]:
        """Return the array of a .npy file, read-only. The events stay in the file."""
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        return array

    def save(self, path: Path, array: NDArray[Any]) -> None:
        """Write an array to a .npy file, piece by piece."""
        kind = np.lib.format.dtype_to_descr(array.dtype)
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": array.shape})
            for part in self.slices(len(array)):
                file.write(np.ascontiguousarray(array[part]).data)

    def release(self) -> None:
        """Release the pages of all mapped files. A later access reads them again."""

    def slices(self, length: int) -> Iterator[slice]:
        """Iterate over pieces of the events, and release each piece afterwards."""
        for begin in range(0, length, self.piece):
            yield slice(begin, min(begin + self.piece, length))
            self.release()

    def groups(self, starts: NDArray[np.int64], share: int = 1) -> Iterator[slice]:
        """Iterate over runs of groups that fit into one piece, and release each afterwards.

        starts  (groups + 1,)  where the events of each group begin, and the end
        share   the divisor of a piece for each run, such as 4 for a quarter

        A larger group is a run by itself.
        """
        first, groups, most = 0, len(starts) - 1, max(self.piece // share, 1)
        while first < groups:
            end = int(np.searchsorted(starts, starts[first] + most, side="right")) - 1
            end = min(max(end, first + 1), groups)
            yield slice(first, end)
            self.release()
            first = end

    def joined(self, parts: Iterable[NDArray[Any]], length: int, dtype: DTypeLike) -> NDArray[Any]:
        """Concatenate parts, which have at most ``length`` entries together."""
        found = [*parts]
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, dtype), *found])

    def stored(self, parts: Iterable[Sequence[NDArray[Any] | None]], most: int) -> list[Any]:
        """Concatenate parts of several columns, with at most ``most`` entries per column in all; empty without parts.

        Columns may differ in length. A column that is None in the first part stays None.
        """
        made: list[NDArray[Any] | None] = []
        ends: list[int] = []
        for part in parts:
            if not ends:
                made = [None if column is None else self.empty(most, column.dtype) for column in part]
                ends = [0] * len(made)
            for number, (column, into) in enumerate(zip(part, made, strict=True)):
                if column is not None and into is not None:
                    begin, ends[number] = ends[number], ends[number] + len(column)
                    into[begin : ends[number]] = column
            self.release()
        return [None if into is None else into[:end] for into, end in zip(made, ends, strict=True)]

    def bucketed(
        self, columns: Sequence[Column], keys: NDArray[np.integer], starts: NDArray[np.int64], buckets: Sequence[slice]
    ) -> list[NDArray[Any]]:
        """Return columns whose entries are grouped into consecutive buckets of keys, and keep their order within.

        Each piece appends its entries to their buckets, so that files are written and read in long runs.

        keys     (n,)         of the entries
        starts   (keys + 1,)  where the entries of each key begin when all are sorted, and the end
        buckets  ranges of keys, which together have all keys
        """
        sizes = [keys_of.stop - keys_of.start for keys_of in buckets]
        bucket_of = np.repeat(np.arange(len(buckets), dtype=np.min_scalar_type(len(buckets))), sizes)
        free = starts[[keys_of.start for keys_of in buckets]]
        made = [self.empty(len(keys), dtype) for _, dtype in columns]
        for part in self.slices(len(keys)):
            bucket = bucket_of[keys[part]]
            by_bucket = np.argsort(bucket, kind="stable")
            counts = np.bincount(bucket, minlength=len(buckets))
            ends = np.cumsum(counts)
            for (read, _), column in zip(columns, made, strict=True):
                moved = read(part)[by_bucket]
                for one in np.flatnonzero(counts).tolist():
                    begin, count = int(free[one]), int(counts[one])
                    column[begin : begin + count] = moved[ends[one] - count : ends[one]]
            free += counts
        return made

    def counted(self, keys: NDArray[np.integer], groups: int, chosen: NDArray[np.bool_] | None = None) -> NDArray[Any]:
        """Count the entries of each group, or only the chosen ones: (groups,) int64."""
        counts = np.zeros(groups, np.int64)
        step = min(self.piece, COUNTED_AT_ONCE)
        for begin in range(0, len(keys), step):
            part = slice(begin, begin + step)
            found = np.bincount(keys[part] if chosen is None else keys[part][chosen[part]])
            counts[: len(found)] += found
            self.release()
        return counts


class MappedArrays(Arrays):
    """Creates arrays in files of a folder. The system deletes the files once nothing uses them.

    An array has its space on the disk from the beginning: the system kills a process that finds none while it writes.
    """

    def __init__(self, folder: Path, piece: int) -> None:
        """Work on ``piece`` events at a time; raises OSError when the folder cannot be written."""
        folder.mkdir(parents=True, exist_ok=True)
        self.piece = max(piece, 1)
        self._folder = folder
        self._maps: WeakSet[mmap.mmap] = WeakSet()

    @override
    def empty(self, length: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return an array of zeros; raises OSError when the disk has no space for it."""
        size = length * np.dtype(dtype).itemsize
        if not size:
            return np.empty(length, dtype)
        with TemporaryFile(dir=self._folder) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as exc:
                raise OSError(exc.errno, exc.strerror, str(self._folder)) from exc
            mapped = mmap.mmap(file.fileno(), size)
        self._maps.add(mapped)
        return np.frombuffer(mapped, dtype)

    @override
    def saved(self, path: Path) -> NDArray[Any]:
        array = super().saved(path)
        if isinstance(array.base, mmap.mmap):
            self._maps.add(array.base)
        return array

    @override
    def release(self) -> None:
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    @override
    def joined(self, parts: Iterable[NDArray[Any]], length: int, dtype: DTypeLike) -> NDArray[Any]:
        made = self.empty(length, dtype)
        end = 0
        for part in parts:
            begin, end = end, end + len(part)
            made[begin:end] = part
        return made[:end]


IN_MEMORY = Arrays()

"""Codes assigned to items that a generation's model has not learned, as read by one process.

They are stored next to the shop's item changes, with versions in the same sequence. No state depends on an
assignment, because an event that steps with codes contains them (storage/state/cold_codes.py). Assignments determine
what is recommended, and which codes later events are logged with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from app.catalogue.expressions.texts import Texts
from model.artifact.growing_table import extended
from model.artifact.model_directory import Artifact
from model.artifact.string_table import ends_of
from model.cold_items import ColdCodes, ColdItems, codes_fit
from storage.records import ItemCodes


def item_codes(item_id: str, tag: bytes, evidence: int, codes: ColdCodes) -> ItemCodes:
    """Return the record in which stores keep the codes of an item. Codes made from more events are better."""
    return ItemCodes(item_id, tag, evidence, codes.bias, codes.history.tobytes(), codes.target.tobytes())


class Assignments(Mapping[str, ItemCodes]):
    """A snapshot of a generation's assignments by item id, oldest first, without an object for each.

    tag      the tag of the generation
    ids      ids of items; more may be appended later
    newest   the row of the newest assignment of each of the first items; -1 for items that are left out
    """

    def __init__(self, tag: bytes, ids: Texts, newest: NDArray[np.int32], rows: _Rows) -> None:
        self._tag, self._ids, self._newest, self._rows = tag, ids, newest, rows
        self._count = int((newest >= 0).sum())

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids.at(np.flatnonzero(self._newest >= 0)))

    def __getitem__(self, item_id: str) -> ItemCodes:
        number = self._ids.number(item_id)
        if number is None or number >= len(self._newest) or self._newest[number] < 0:
            raise KeyError(item_id)
        return self._rows.record(item_id, self._tag, int(self._newest[number]))

    def fitting(self, trained: Artifact) -> tuple[Assignments, ColdItems]:
        """Return the assignments that the model accepts, and their codes in the same order."""
        shape, newest = trained.config.model, np.full_like(self._newest, -1)
        books = shape.history_codebooks, shape.target_codebooks
        numbers = np.flatnonzero(self._newest >= 0)
        numbers = numbers[self._rows.have_lengths(self._newest[numbers], *books)]
        codes = self._rows.codes(self._newest[numbers], *books)
        fits = codes_fit(trained, self._ids.at(numbers), codes)
        newest[numbers[fits]] = self._newest[numbers[fits]]
        return Assignments(self._tag, self._ids, newest, self._rows), codes.at(fits)


class ColdItemCodes:
    """The newest assignments of one tenant's generations. The event loop changes them; threads may read them."""

    def __init__(self) -> None:
        self._by_tag: dict[bytes, _OfGeneration] = {}
        self._lock = Lock()  # held while changing this object, or copying from it

    def apply(self, records: Iterable[ItemCodes]) -> None:
        """Apply the records that were read from the store."""
        by_tag: dict[bytes, dict[str, ItemCodes]] = defaultdict(dict)
        for record in records:
            by_tag[record.tag][record.item_id] = record
        with self._lock:
            for tag, newest in by_tag.items():
                self._by_tag.setdefault(tag, _OfGeneration(tag)).apply([*newest.values()])

    def of(self, tag: bytes) -> Assignments:
        """Return a generation's assignments, as a new object after each change; thread-safe."""
        with self._lock:
            of_generation = self._by_tag.get(tag)
            return NO_ASSIGNMENTS if of_generation is None else of_generation.assignments


class _Rows:
    """Assignments by row, in columns, with codes stored back to back. Written rows never change."""

    def __init__(self) -> None:
        self.count = 0
        self._evidence, self._bias = np.zeros(0, np.int32), np.zeros(0, np.float64)
        self._codes, self._ends = np.zeros(0, np.uint8), np.zeros(1, np.int64)  # two ends per row: history and target

    def append(self, records: Sequence[ItemCodes]) -> None:
        begin, end = self.count, self.count + len(records)
        codes = [codes for record in records for codes in (record.history, record.target)]
        ends = self._ends[2 * begin] + ends_of(np.array([*map(len, codes)], np.int64)).astype(np.int64)
        self._evidence, self._bias = extended(self._evidence, end), extended(self._bias, end)
        self._codes, self._ends = extended(self._codes, int(ends[-1])), extended(self._ends, 2 * end + 1)
        self._evidence[begin:end] = [record.evidence for record in records]
        self._bias[begin:end] = [record.bias for record in records]
        self._codes[ends[0] : ends[-1]] = np.frombuffer(b"".join(codes), np.uint8)
        self._ends[2 * begin : 2 * end + 1] = ends
        self.count = end

    def record(self, item_id: str, tag: bytes, row: int) -> ItemCodes:
        begin, middle, end = self._ends[2 * row : 2 * row + 3].tolist()
        history, target = self._codes[begin:middle].tobytes(), self._codes[middle:end].tobytes()
        return ItemCodes(item_id, tag, int(self._evidence[row]), float(self._bias[row]), history, target)

    def have_lengths(self, rows: NDArray[np.int32], history: int, target: int) -> NDArray[np.bool_]:
        """Return which rows have as many codes."""
        begin, middle, end = (self._ends[2 * rows + place] for place in range(3))
        fits: NDArray[np.bool_] = (middle - begin == history) & (end - middle == target)
        return fits

    def codes(self, rows: NDArray[np.int32], history: int, target: int) -> ColdItems:
        """Return the codes of rows that have as many of them."""
        both = self._codes[self._ends[2 * rows][:, None] + np.arange(history + target)]
        return ColdItems(both[:, :history], both[:, history:], self._bias[rows])

    def at(self, rows: NDArray[np.int32]) -> _Rows:
        """Return a copy that contains only these rows."""
        kept = _Rows()
        kept.append([self.record("", b"", row) for row in rows.tolist()])
        return kept


NO_ASSIGNMENTS = Assignments(b"", Texts(), np.zeros(0, np.int32), _Rows())


class _OfGeneration:
    """The assignments of one generation."""

    def __init__(self, tag: bytes) -> None:
        self._tag = tag
        self._ids = Texts()
        self._rows = _Rows()
        self._newest = np.zeros(0, np.int32)
        self._assignments = Assignments(tag, self._ids, self._newest, self._rows)
        self._is_changed = False

    def apply(self, records: Sequence[ItemCodes]) -> None:
        """Apply records of distinct items."""
        known = len(self._ids)
        numbers = self._ids.add_all([record.item_id for record in records])
        changed = [
            place
            for place, (number, record) in enumerate(zip(numbers.tolist(), records, strict=True))
            if number >= known or self._rows.record(record.item_id, record.tag, int(self._newest[number])) != record
        ]
        if not changed:
            return
        self._is_changed = True
        self._newest = extended(self._newest, len(self._ids))
        self._newest[numbers[changed]] = self._rows.count + np.arange(len(changed))
        self._rows.append([records[place] for place in changed])
        if self._rows.count > 2 * len(self._ids):  # most rows are outdated
            self._rows = self._rows.at(self._newest[: len(self._ids)])
            self._newest = np.arange(len(self._ids), dtype=np.int32)

    @property
    def assignments(self) -> Assignments:
        """The current assignments; the same object until there is a change."""
        if self._is_changed:
            newest = self._newest[: len(self._ids)].copy()
            self._assignments, self._is_changed = Assignments(self._tag, self._ids, newest, self._rows), False
        return self._assignments

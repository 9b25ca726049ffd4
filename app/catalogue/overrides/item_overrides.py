"""Overrides of items: the values that a tenant has set through the API, as far as this process has read them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta

import numpy as np
from numpy.typing import NDArray

from app.catalogue.expressions.texts import Texts
from app.catalogue.item_properties import stored
from model.artifact.growing_table import extended
from storage.records import EPOCH, NO_PROPERTIES, HeldProperties, ItemChanges, ItemEntry, PropertyValue

ENTRIES_PER_PAGE = 1000
RECENT_PAGES = 16
SIZE_BYTES = 4  # that say how large a packed entry is


class ItemOverrides:
    """The newest entry of each item, packed without an object for any. Only the event loop changes them.

    version       the store's version up to which all changes were read
    change_count  the number of changes read, which `changed_since` takes
    held          the tenant's properties
    """

    def __init__(self) -> None:
        self.version = 0
        self.change_count = 0
        self.held = NO_PROPERTIES
        self._taken_back: dict[str, int] = {}  # by property: the count of changes up to which all values are dead
        self._ids = Texts()
        self._counts = np.zeros(0, np.int64)  # of changes, when each item changed last
        self._entries = PackedEntries()
        # the rows of the pages read last, each with the count of changes before it: a change costs no look at all rows
        self._recent: deque[tuple[int, NDArray[np.int64]]] = deque(maxlen=RECENT_PAGES)

    def __contains__(self, item_id: str) -> bool:
        """Return whether the tenant has ever set anything of the item."""
        return self._ids.number(item_id) is not None

    def entry(self, item_id: str) -> ItemEntry | None:
        """Return what the tenant has set of the item, None for nothing; thread-safe."""
        row = self._ids.number(item_id)
        return None if row is None else self._live(row)

    def hold(self, held: HeldProperties) -> bool:
        """Go by these properties, unless they came before the present ones; return whether anything changes."""
        if not self.held.is_before(held):
            return False
        self._taken_back |= dict.fromkeys(held.taken_back_since(self.held), self.change_count)
        self.held = held
        return True

    def start_over(self) -> None:
        """Read all changes again, and go by whatever properties there are."""
        self._taken_back |= dict.fromkeys(self.held.types["item"], self.change_count)
        self.version, self.held = 0, NO_PROPERTIES

    def apply(self, changes: ItemChanges) -> None:
        """Apply the changes of items, but for values of properties that were taken back since they were read."""
        self.hold(changes.held)
        is_current = changes.held.removals == self.held.removals
        entries = changes.entries if is_current else [self._without_dead(changes.held, one) for one in changes.entries]
        rows = self._ids.add_all([entry.item_id for entry in entries])
        self._counts = extended(self._counts, len(self._ids))
        self._entries.put(rows, entries)
        self._counts[rows] = self.change_count + 1 + np.arange(len(rows))  # of an item that comes twice, the last one
        self._recent.append((self.change_count, rows))
        self.change_count += len(rows)
        self.version = changes.version

    def changed_since(self, change_count: int) -> Iterator[tuple[HeldProperties, list[ItemEntry]]]:
        """Yield the newest entries of the items that changed since that count, in pages; thread-safe.

        Each page comes with the properties that its values are of.
        """
        recent, counts = tuple(self._recent), self._counts
        if recent and recent[0][0] <= change_count:  # no change since then came before these
            rows = np.unique(np.concatenate([of_page for _, of_page in recent]))
        else:
            rows = np.arange(min(len(self._ids), len(counts)))
        own = counts[rows]
        rows = rows[own > change_count]
        rows = rows[np.argsort(own[own > change_count])]  # the item changed last stands last
        for begin in range(0, len(rows), ENTRIES_PER_PAGE):
            held = None
            while held is not self.held:  # which the event loop may change meanwhile
                held, entries = self.held, [self._live(row) for row in rows[begin : begin + ENTRIES_PER_PAGE].tolist()]
            yield held, entries

    def _live(self, row: int) -> ItemEntry:
        number = int(self._counts[row])  # before the entry is read, which may be a newer one
        title, categories, available, properties = self._entries[row]
        if self._taken_back:
            properties = {name: one for name, one in properties.items() if self._taken_back.get(name, 0) < number}
        return ItemEntry(self._ids[row], title, categories, available, properties)

    def _without_dead(self, held: HeldProperties, entry: ItemEntry) -> ItemEntry:
        by_key = held.by_key("item", entry.properties)
        return ItemEntry(
            entry.item_id, entry.title, entry.categories, entry.available, self.held.by_name("item", by_key)
        )


Unpacked = tuple[str | None, tuple[str, ...] | None, bool | None, Mapping[str, PropertyValue | None]]


class PackedEntries:
    """Entries by row, without their items' ids, as bytes in one buffer. One thread puts, any may read."""

    def __init__(self) -> None:
        # replaced together, as a reader's places have to lie within what it reads
        self._parts: tuple[NDArray[np.uint8], NDArray[np.int64]] = np.zeros(0, np.uint8), np.zeros(0, np.int64)
        self._rows, self._used, self._dead = 0, 0, 0  # how many rows, bytes, and bytes of older entries

    def put(self, rows: NDArray[np.int64], entries: Sequence[ItemEntry]) -> None:
        """Set the entries of rows; new rows come behind the last one. Of a row that comes twice, the last counts."""
        contents = [_packed(entry) for entry in entries]
        sizes = np.fromiter(map(len, contents), np.int64, len(contents))
        end = self._used + int(sizes.sum())
        self._dead += int(self._sizes(np.unique(rows[rows < self._rows])).sum())
        self._rows = max(self._rows, int(rows.max(initial=-1)) + 1)
        buffer, begins = extended(self._parts[0], end), extended(self._parts[1], self._rows)
        buffer[self._used : end] = np.frombuffer(b"".join(contents), np.uint8)
        self._parts = buffer, begins
        begins[rows] = self._used + np.cumsum(sizes) - sizes  # last, for whoever reads meanwhile
        self._used = end
        if self._dead > self._used // 2:
            self._drop_dead()

    def __getitem__(self, row: int) -> Unpacked:
        buffer, begins = self._parts
        begin = int(begins[row]) + SIZE_BYTES
        end = begin + int.from_bytes(buffer[begin - SIZE_BYTES : begin].tobytes(), "little")
        title, categories, available, properties, *times = json.loads(buffer[begin:end].tobytes())
        properties = {name: tuple(one) if isinstance(one, list) else one for name, one in properties.items()}
        for name in times:
            properties[name] = EPOCH + timedelta(microseconds=properties[name])
        return title, None if categories is None else tuple(categories), available, properties

    def _sizes(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        buffer, begins = self._parts
        sizes = buffer[begins[rows][:, None] + np.arange(SIZE_BYTES)].astype(np.int64)
        own: NDArray[np.int64] = SIZE_BYTES + (sizes << np.arange(0, 8 * SIZE_BYTES, 8)).sum(axis=1)
        return own

    def _drop_dead(self) -> None:
        """Move the newest entries to the front of another buffer."""
        buffer, begins = self._parts
        sizes = self._sizes(np.arange(self._rows))
        moved = np.cumsum(sizes) - sizes
        self._used, self._dead = int(sizes.sum()), 0
        self._parts = buffer[np.repeat(begins[: self._rows] - moved, sizes) + np.arange(self._used)], moved


def _packed(entry: ItemEntry) -> bytes:
    """Return an entry as `PackedEntries` has it: its size, then its parts and the names of those that are times."""
    times = [name for name, value in entry.properties.items() if isinstance(value, datetime)]
    properties = {name: stored(value) for name, value in entry.properties.items()}
    parts = (entry.title, entry.categories, entry.available, properties, *times)
    content = json.dumps(parts, ensure_ascii=False, separators=(",", ":")).encode()
    return len(content).to_bytes(SIZE_BYTES, "little") + content

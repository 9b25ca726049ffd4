"""Item overrides: the values that a tenant has set through the API, as read by this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock
from typing import NamedTuple

from app.catalogue.overrides.availability import is_over
from app.catalogue.overrides.catalogue_values import CatalogueValues
from storage.records import NO_PROPERTIES, HeldProperties, ItemChanges, ItemEntry


class DescribedItem(NamedTuple):
    """The parts of an item's overrides that describe it in words; parts that are not set are empty."""

    item_id: str
    title: str
    categories: Sequence[str]


class ItemOverrides:
    """The newest override of each item, stored in the values of one catalogue, from which others are updated.

    version       the version of the store up to which all changes are read
    change_count  the number of changes read
    held          the tenant's declared properties
    is_complete   whether all changes were read; until then, items may lack values that the store has
    """

    def __init__(self) -> None:
        self.version = 0
        self.change_count = 0
        self.is_complete = False
        self.held = NO_PROPERTIES
        self._values = CatalogueValues.of_no_catalogue()
        self._lock = Lock()  # held while changing this object, or copying from it

    def __contains__(self, item_id: str) -> bool:
        """Return whether the tenant has ever set a value of the item."""
        return item_id in self._values

    def entry(self, item_id: str) -> ItemEntry | None:
        """Return the overrides of the item, None if there are none; thread-safe."""
        return self._values.entry(item_id)

    def hold(self, held: HeldProperties) -> bool:
        """Switch to these declared properties unless they are older; return whether anything changes."""
        if not self.held.is_before(held):
            return False
        with self._lock:
            return self._hold(held)

    def start_over(self) -> None:
        """Read all changes again, and accept any declared properties."""
        with self._lock:
            self.version = 0
            self.is_complete = False
            self._set_held(NO_PROPERTIES)

    def apply(self, changes: ItemChanges) -> None:
        """Apply changes to items, except values of properties that were removed since the changes were read."""
        with self._lock:
            self._hold(changes.held)
            newest = {entry.item_id: entry for entry in changes.entries}
            entries = [*newest.values()]
            if changes.held.removals != self.held.removals:
                entries = [self._without_dead(changes.held, entry) for entry in entries]
            change_count = self.change_count + len(changes.entries)
            with self._values.lock:
                self._values.put(entries, change_count)
            self.change_count = change_count
            self.version = changes.version

    def bring_up_to_date(self, values: CatalogueValues) -> None:
        """Copy all changes to the values of another catalogue; thread-safe, blocking others for one page at a time."""
        while not self._is_current(values):
            source, change_count = self._values, self.change_count
            for part, ids, rows in source.changed_since(values.change_count):
                with self._lock:
                    if source is not self._values:
                        break
                    with values.lock:
                        values.hold(self.held)
                        values.copy(part, ids, rows, change_count)
            else:
                with self._lock, values.lock:
                    values.hold(self.held)
                    values.change_count = change_count

    def keep_in(self, values: CatalogueValues) -> None:
        """Use these values as the storage from now on, so that nothing is stored twice."""
        while self._values is not values:
            self.bring_up_to_date(values)
            with self._lock:
                if self._is_current(values):
                    self._values = values

    def changed_since(self, change_count: int) -> Iterator[list[str]]:
        """Yield the ids of items that changed since that count, in pages, the newest changes first; thread-safe."""
        for _, item_ids, _ in self._values.changed_since(change_count, newest_first=True):
            yield item_ids

    def described(self, item_ids: Sequence[str]) -> list[DescribedItem]:
        """Return the descriptions of the items with overrides that may be recommended, now or later; thread-safe."""
        found = [entry for item_id in item_ids if (entry := self.entry(item_id)) is not None]
        entries = [entry for entry in found if not is_over(entry)]
        return [DescribedItem(one.item_id, one.title or "", one.categories or ()) for one in entries]

    def _is_current(self, values: CatalogueValues) -> bool:
        return values is self._values or (values.change_count == self.change_count and values.held is self.held)

    def _hold(self, held: HeldProperties) -> bool:
        if not self.held.is_before(held):
            return False
        self._set_held(held)
        return True

    def _set_held(self, held: HeldProperties) -> None:
        self.held = held
        with self._values.lock:
            self._values.hold(held)

    def _without_dead(self, held: HeldProperties, entry: ItemEntry) -> ItemEntry:
        by_key = held.by_key("item", entry.properties)
        return ItemEntry(
            entry.item_id, entry.title, entry.categories, entry.available, self.held.by_name("item", by_key)
        )

"""Overrides of items: the values that a tenant has set through the API, as far as this process has read them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from storage.records import ItemChanges, ItemEntry, PropertyTypes, PropertyValue


class ItemOverrides:
    """The newest entry of each item, in the order in which the entries were read. Only the event loop changes them.

    version       the store's version up to which all changes were read
    change_count  the number of changes read, which `changed_since` takes
    types         the types of the tenant's properties
    """

    def __init__(self) -> None:
        self.version = 0
        self.change_count = 0
        self.types: PropertyTypes = {"item": {}, "user": {}}
        self._newest: dict[str, tuple[int, ItemEntry]] = {}

    def __contains__(self, item_id: str) -> bool:
        """Return whether the tenant has ever set anything of the item."""
        return item_id in self._newest

    def properties(self, item_id: str) -> Mapping[str, PropertyValue | None]:
        """Return the properties of the item; thread-safe."""
        newest = self._newest.get(item_id)
        return {} if newest is None else newest[1].properties

    def apply(self, changes: ItemChanges) -> None:
        """Apply the changes of items."""
        for entry in changes.entries:
            self.change_count += 1
            self._newest.pop(entry.item_id, None)  # the item changed last stands last
            self._newest[entry.item_id] = self.change_count, entry
        self.version = changes.version

    def changed_since(self, change_count: int) -> list[ItemEntry]:
        """Return the newest entries of the items that changed since that count; thread-safe for count 0."""
        if not change_count:
            return [entry for _, entry in list(self._newest.values())]  # a copy in one step
        newest_first = reversed(self._newest.values())
        return [entry for _, entry in takewhile(lambda change: change[0] > change_count, newest_first)]

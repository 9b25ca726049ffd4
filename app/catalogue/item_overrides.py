"""Overrides of items: the values that a tenant has set through the API, as far as this process has read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import takewhile

from storage.records import NO_PROPERTIES, HeldProperties, ItemChanges, ItemEntry, PropertyValue


class ItemOverrides:
    """The newest entry of each item, in the order in which the entries were read. Only the event loop changes them.

    version       the store's version up to which all changes were read
    change_count  the number of changes read, which `changed_since` takes
    held          the tenant's properties
    """

    def __init__(self) -> None:
        self.version = 0
        self.change_count = 0
        self.held = NO_PROPERTIES
        self._taken_back: dict[str, int] = {}  # by property: the count of changes up to which all values are dead
        self._newest: dict[str, tuple[int, ItemEntry]] = {}

    def __contains__(self, item_id: str) -> bool:
        """Return whether the tenant has ever set anything of the item."""
        return item_id in self._newest

    def properties(self, item_id: str) -> Mapping[str, PropertyValue | None]:
        """Return the properties of the item; thread-safe."""
        newest = self._newest.get(item_id)
        return {} if newest is None else self._live(*newest).properties

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
        for entry in changes.entries if is_current else map(partial(self._without_dead, changes.held), changes.entries):
            self.change_count += 1
            self._newest.pop(entry.item_id, None)  # the item changed last stands last
            self._newest[entry.item_id] = self.change_count, entry
        self.version = changes.version

    def changed_since(self, change_count: int) -> list[ItemEntry]:
        """Return the newest entries of the items that changed since that count; thread-safe for count 0."""
        if not change_count:
            return [self._live(*change) for change in list(self._newest.values())]  # a copy in one step
        newest_first = reversed(self._newest.values())
        return [self._live(*change) for change in takewhile(lambda change: change[0] > change_count, newest_first)]

    def _live(self, number: int, entry: ItemEntry) -> ItemEntry:
        if not self._taken_back:
            return entry
        live = {name: value for name, value in entry.properties.items() if self._taken_back.get(name, 0) < number}
        return replace(entry, properties=live)

    def _without_dead(self, held: HeldProperties, entry: ItemEntry) -> ItemEntry:
        by_key = held.by_key("item", entry.properties)
        return replace(entry, properties=self.held.by_name("item", by_key))

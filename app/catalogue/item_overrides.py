"""What a shop has set for its items through the API, as far as one process has read it."""

from __future__ import annotations

from itertools import takewhile

from app.catalogue.cold_item_codes import is_assignment
from storage.records import ItemChanges, ItemEntry


class ItemOverrides:
    """The newest entry of each item, in the order in which the entries were read. Only the event loop changes them.

    version  the version of the store up to which everything was read
    mark     the number of changes read, from which `since` goes on
    """

    def __init__(self) -> None:
        self.version = 0
        self.mark = 0
        self._newest: dict[str, tuple[int, ItemEntry]] = {}

    def apply(self, changes: ItemChanges) -> None:
        """Apply the shop's changes; assignments of codes among them are skipped."""
        for entry in changes.entries:
            if is_assignment(entry):
                continue
            self.mark += 1
            self._newest.pop(entry.item_id, None)  # so that the item that was changed last stands last
            self._newest[entry.item_id] = self.mark, entry
        self.version = changes.version

    def since(self, mark: int) -> list[ItemEntry]:
        """Return the newest entries of the items that changed after that mark; thread-safe for mark 0."""
        if not mark:
            return [entry for _, entry in list(self._newest.values())]  # a copy in one step
        return [entry for _, entry in takewhile(lambda change: change[0] > mark, reversed(self._newest.values()))]

"""What a shop has said of its items, as far as one process has read it."""

from __future__ import annotations

from itertools import takewhile

from app.assigned import is_assignment
from storage.records import ItemChanges, ItemEntry


class ItemOverrides:
    """The newest word on each item, in the order in which it was read. Only the event loop changes it.

    version  of the store, up to which all was read
    mark     how many changes were read, from which `since` goes on
    """

    def __init__(self) -> None:
        self.version = 0
        self.mark = 0
        self._newest: dict[str, tuple[int, ItemEntry]] = {}

    def apply(self, changes: ItemChanges) -> None:
        for entry in changes.entries:
            if is_assignment(entry):
                continue
            self.mark += 1
            self._newest.pop(entry.item_id, None)  # so that what was changed last stands last
            self._newest[entry.item_id] = self.mark, entry
        self.version = changes.version

    def since(self, mark: int) -> list[ItemEntry]:
        """What was said last of the items that were changed after that mark; from any thread where that is 0."""
        if not mark:
            return [entry for _, entry in list(self._newest.values())]  # a copy in one step
        return [entry for _, entry in takewhile(lambda said: said[0] > mark, reversed(self._newest.values()))]

"""Codes that the service has assigned to items which a generation's model has not learned, as read by one process.

They are stored beside the shop's changes of items, and have versions in the same sequence. No state depends on an
assignment: an event that steps with codes carries them itself (storage/state/cold_codes.py). Assignments decide what is
recommended, and with which codes events are logged from now on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from model.cold_items import ColdCodes
from storage.records import ItemCodes

NO_ASSIGNMENTS: Mapping[str, CodeAssignment] = {}


@dataclass(frozen=True, slots=True)
class CodeAssignment:
    """The codes of one item in one generation. The more events they were made from, the better they are."""

    item_id: str
    tag: bytes
    codes: ColdCodes
    evidence: int

    @classmethod
    def of(cls, record: ItemCodes) -> CodeAssignment:
        """Return the assignment that a store keeps as this record."""
        history, target = (np.frombuffer(codes, np.uint8) for codes in (record.history, record.target))
        return cls(record.item_id, record.tag, ColdCodes(history, target, record.bias), record.evidence)

    def record(self) -> ItemCodes:
        """Return the assignment as stores keep it."""
        codes = self.codes
        return ItemCodes(
            self.item_id, self.tag, self.evidence, codes.bias, codes.history.tobytes(), codes.target.tobytes()
        )


class ColdItemCodes:
    """The newest assignments of one tenant's generations. Only the event loop changes them."""

    def __init__(self) -> None:
        self._by_tag: dict[bytes, Mapping[str, CodeAssignment]] = {}

    def apply(self, records: Iterable[ItemCodes]) -> None:
        """Apply the records that were read from the store."""
        changed: dict[bytes, dict[str, CodeAssignment]] = defaultdict(dict)
        for record in records:
            known = self.of(record.tag).get(record.item_id)
            if known is None or known.record() != record:
                changed[record.tag][record.item_id] = CodeAssignment.of(record)
        for tag, assignments in changed.items():
            # another mapping, by which holders of the old one see that there are new assignments
            self._by_tag[tag] = {**self.of(tag), **assignments}

    def of(self, tag: bytes) -> Mapping[str, CodeAssignment]:
        """Return a generation's assignments by item id, oldest first; a change makes another mapping."""
        return self._by_tag.get(tag, NO_ASSIGNMENTS)

"""Codes that the service has assigned to items which a generation's model has not learned, as read by one process.

They are stored among the shop's changes of items: an assignment is the entry "ITEM!TAG" of the catalogue. No client can
write it, as ids from outside have no "!". Its title is

  EVIDENCE BIAS HISTORY TARGET      how many events the codes were made from, and the codes, two digits each; 0 events
                                    where they are those of its categories

So versions, pages and backups are those of items. No state depends on an assignment: an event that steps with codes
carries them itself (storage/state/cold_codes.py). Assignments decide what is recommended, and with which codes events
are logged from now on.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from model.cold_items import ColdCodes
from storage.records import ItemEntry
from storage.state.cold_codes import MARK

logger = logging.getLogger(__name__)
NO_ASSIGNMENTS: Mapping[str, CodeAssignment] = {}


@dataclass(frozen=True, slots=True)
class CodeAssignment:
    """The codes of one item in one generation. The more events they were made from, the better they are."""

    item_id: str
    tag: bytes
    codes: ColdCodes
    evidence: int


def is_assignment(entry: ItemEntry) -> bool:
    """Return whether the entry assigns codes, and is none of the shop's."""
    return MARK in entry.item_id


def entry_of(assignment: CodeAssignment) -> ItemEntry:
    """Return the entry that stores the assignment."""
    codes = assignment.codes
    title = f"{assignment.evidence} {codes.bias!r} {codes.history.tobytes().hex()} {codes.target.tobytes().hex()}"
    return ItemEntry(f"{assignment.item_id}{MARK}{assignment.tag.hex()}", title)


def assignment_in(entry: ItemEntry) -> CodeAssignment:
    """Return the assignment that the entry stores; ValueError when `entry_of` has not made it."""
    item_id, _, tag = entry.item_id.partition(MARK)
    evidence, bias, *codes = (entry.title or "").split(" ")
    history, target = (np.frombuffer(bytes.fromhex(text), np.uint8) for text in codes)
    return CodeAssignment(item_id, bytes.fromhex(tag), ColdCodes(history, target, float(bias)), int(evidence))


class ColdItemCodes:
    """The newest assignments of one tenant's generations. Only the event loop changes them."""

    def __init__(self) -> None:
        self._by_tag: dict[bytes, Mapping[str, CodeAssignment]] = {}

    def apply(self, entries: Iterable[ItemEntry]) -> None:
        """Apply the assignments among the entries; entries of the shop are skipped."""
        changed: dict[bytes, dict[str, CodeAssignment]] = defaultdict(dict)
        for entry in filter(is_assignment, entries):
            try:
                assignment = assignment_in(entry)
            except ValueError as exc:
                logger.warning("codes of an item cannot be read: %s", exc)
                continue
            known = self.of(assignment.tag).get(assignment.item_id)
            if known is None or entry_of(known) != entry_of(assignment):
                changed[assignment.tag][assignment.item_id] = assignment
        for tag, assignments in changed.items():
            # another mapping, by which holders of the old one see that there are new assignments
            self._by_tag[tag] = {**self.of(tag), **assignments}

    def of(self, tag: bytes) -> Mapping[str, CodeAssignment]:
        """Return a generation's assignments by item id, oldest first; a change makes another mapping."""
        return self._by_tag.get(tag, NO_ASSIGNMENTS)

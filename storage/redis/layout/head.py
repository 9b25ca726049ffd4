"""The value of a user's head: the end of the user's log, its archived part, and its merge."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from storage.errors import StorageError
from storage.state.event import uuid7_time_us

SEQ_DIGITS = 16  # more than the 53 bits that a score represents exactly
TIME_DIGITS = 10
LAST_TIME_S = 9_999_999_999
MERGE_MARK = 2 * SEQ_DIGITS + TIME_DIGITS  # position of the merge mark in a head

HEAD = re.compile(rb"\d{16}(\d{16}\d{10}([?>=].*)?)?", re.DOTALL)


class MergeStage(Enum):
    """The merge mark in a head: the stage of a merge (storage/redis/corrections/undo_and_merge.py)."""

    PROPOSED = "?"
    DECIDED = ">"
    DONE = "="


@dataclass(frozen=True, slots=True)
class Head:
    """The end of a user's log, and the part of it that is in the archive.

    newest        SEQ of the newest entry, 0 without a log
    archived      SEQ; entries up to it are in the archive and no longer in Redis
    id_time_s     the newest time of a UUIDv7 among the ids up to there, rounded up
    merge         the stage of the user's merge into another user; usually None
    merge_target  the id of that user
    """

    newest: int = 0
    archived: int = 0
    id_time_s: int = 0
    merge: MergeStage | None = None
    merge_target: str = ""

    @classmethod
    def of(cls, value: bytes | None) -> Head:
        """Parse the value of a head's key; None is a user without a log. Raise StorageError for a damaged one."""
        if value is None:
            return cls()
        cls.check(value)
        archived, time_s = value[SEQ_DIGITS : 2 * SEQ_DIGITS], value[2 * SEQ_DIGITS : MERGE_MARK]
        merge = MergeStage(value[MERGE_MARK : MERGE_MARK + 1].decode()) if len(value) > MERGE_MARK else None
        target = value[MERGE_MARK + 1 :].decode()
        return cls(int(value[:SEQ_DIGITS]), int(archived or 0), int(time_s or 0), merge, target)

    @classmethod
    def check(cls, value: bytes | None, *states: bytes | None) -> None:
        """Raise StorageError if a head is not valid, by itself or in combination with the user's states."""
        if value is None and any(state is not None for state in states):
            raise StorageError(
                "a user has states but no head; rebuild it from the log with 'lisarec repair'", "damaged"
            )
        if value is not None and not _is_valid(value):
            raise StorageError("a user's head is damaged; rebuild it from the log with 'lisarec repair'", "damaged")

    def may_be_archived(self, event_id: str) -> bool:
        """Return whether only the archive can determine that the user's log does not contain this id.

        The time in a UUIDv7 shows that it is newer than all trimmed entries. All other ids must be looked up, because a
        resend of the event may have another time.
        """
        if not self.archived:
            return False
        time_us = uuid7_time_us(event_id)
        return time_us is None or rounded_up_s(time_us) <= self.id_time_s


def _is_valid(value: bytes) -> bool:
    if HEAD.fullmatch(value) is None:
        return False
    if len(value) > MERGE_MARK:
        try:
            value[MERGE_MARK:].decode()
        except UnicodeDecodeError:
            return False
    return True


def rounded_up_s(time_us: int) -> int:
    """Return the time in seconds, rounded up and clipped to ten digits.

    Both operations are monotone, so comparing such times can only err towards a look-up.
    """
    return min(-(-time_us // 1_000_000), LAST_TIME_S)

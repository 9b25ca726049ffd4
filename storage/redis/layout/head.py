"""The value of a user's head: how far their log goes, and what became of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from storage.errors import StorageError
from storage.state.event import uuid7_time_us

SEQ_DIGITS = 16  # more than the 53 bits that a score holds exactly
TIME_DIGITS = 10
LAST_TIME_S = 9_999_999_999
MERGE_MARK = 2 * SEQ_DIGITS + TIME_DIGITS  # position of the merge mark in a head

HEAD = re.compile(rb"\d{16}(\d{16}\d{10}([?>=].*)?)?", re.DOTALL)


class MergeStage(Enum):
    """The merge mark in a head: how far a merge into another user is (storage/redis/corrections/undo_and_merge.py)."""

    PROPOSED = "?"
    DECIDED = ">"
    DONE = "="


@dataclass(frozen=True, slots=True)
class Head:
    """The end of a user's log, and the part of it that is in the archive.

    newest        SEQ of the newest entry, 0 without a log
    archived      SEQ; entries up to it are in the archive and no longer in Redis
    id_time_s     the newest time of a UUIDv7 among the ids up to there, rounded up
    merge         the stage of the user's merge into another one; None for almost everybody
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
        """Raise StorageError when a head cannot be what it should be, by itself or beside the user's states."""
        if value is None and any(state is not None for state in states):
            raise StorageError(
                "a user has states but no head; rebuild it from the log with 'lisarec repair'", "damaged"
            )
        if value is not None and HEAD.fullmatch(value) is None:
            raise StorageError("a user's head is damaged; rebuild it from the log with 'lisarec repair'", "damaged")

    def may_be_archived(self, event_id: str) -> bool:
        """Return whether only the archive can tell that the user's log does not have this id.

        A UUIDv7 shows by itself that it is younger than all trimmed entries. Any other id has to be looked up: a resend
        of the event may come with another time.
        """
        if not self.archived:
            return False
        time_us = uuid7_time_us(event_id)
        return time_us is None or rounded_up_s(time_us) <= self.id_time_s


def rounded_up_s(time_us: int) -> int:
    """Return the time in seconds, rounded up and clipped to ten digits.

    Both are monotone, so a comparison of such times can only err towards looking up.
    """
    return min(-(-time_us // 1_000_000), LAST_TIME_S)

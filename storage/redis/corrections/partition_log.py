"""A partition's log as read by a repair: it determines the heads and indexes of the partition's users."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from storage.errors import StorageError
from storage.records import LogEntry
from storage.redis.layout.head import MERGE_MARK, SEQ_DIGITS, TIME_DIGITS, Head, MergeStage, rounded_up_s
from storage.redis.layout.keys import Keyspace, User
from storage.redis.layout.stream_entries import index_member
from storage.state.event import Merge, digest, uuid7_time_us


class FoundUser:
    """A user's entries in the log.

    newest       SEQ of the newest entry
    merged_into  id of the user that this one was merged into; empty if it was not merged
    """

    def __init__(self) -> None:
        self.newest = 0
        self.merged_into = ""
        self._entries: list[tuple[int, bytes, int]] = []  # SEQ, hash of the id, and the id's time if it is a UUIDv7
        self._is_archived = False

    def add(self, entry: LogEntry, *, is_archived: bool) -> None:
        """Add the user's next entry."""
        self.newest = entry.seq
        self.merged_into = entry.record.target if isinstance(entry.record, Merge) else ""
        self._is_archived = self._is_archived or is_archived
        entry_id = entry.record.entry_id
        self._entries.append((entry.seq, index_member(entry_id), rounded_up_s(uuid7_time_us(entry_id) or 0)))

    def index(self, archived: int) -> tuple[list[int], list[bytes]]:
        """Return the SEQs and id hashes of the entries after the archived ones."""
        entries = [(seq, member) for seq, member, _ in self._entries if seq > archived]
        return [seq for seq, _ in entries], [member for _, member in entries]

    def head(self, archived: int) -> str:
        """Return the value of the user's head. A completed merge returns to DECIDED, which changes nothing."""
        value = f"{self.newest:0{SEQ_DIGITS}}"
        if self._is_archived:
            value += f"{archived:0{SEQ_DIGITS}}{self._archived_time_s(archived):0{TIME_DIGITS}}"
        if self.merged_into:
            value = f"{value:0<{MERGE_MARK}}{MergeStage.DECIDED.value}{self.merged_into}"
        return value

    def fits(self, value: bytes | None, last: int) -> bool:
        """Return whether a head may be that of this user, or a later one; the log was read up to `last`."""
        try:
            head = Head.of(value)
        except StorageError:
            return False
        if head.newest != self.newest and head.newest <= last:
            return False
        if head.newest == self.newest and not self._is_merge_of(head):
            return False
        return head.id_time_s >= self._archived_time_s(head.archived)

    def _is_merge_of(self, head: Head) -> bool:
        if self.merged_into:
            return head.merge in (MergeStage.DECIDED, MergeStage.DONE) and head.merge_target == self.merged_into
        return head.merge in (None, MergeStage.PROPOSED)

    def _archived_time_s(self, archived: int) -> int:
        return max((time_s for seq, _, time_s in self._entries if seq <= archived), default=0)


class PartitionLog:
    """A partition's log as it was read.

    archived  SEQ of the newest archived entry
    seq       SEQ of its newest entry
    first_id  id of the first entry in the stream; empty if there is none
    lacks     description of missing entries; empty if none are missing
    """

    def __init__(self, keys: Keyspace, archived: int) -> None:
        self.archived = archived
        self.seq = 0
        self.first_id = b""
        self.lacks = ""
        self.users: defaultdict[User, FoundUser] = defaultdict(FoundUser)
        self._keys = keys

    def add(self, entries: Sequence[tuple[str, LogEntry]], *, is_archived: bool) -> None:
        """Add the log's next entries, with their tenants."""
        for tenant, entry in entries:
            self.users[self._keys.user(tenant, entry.record.user_id)].add(entry, is_archived=is_archived)

    def forget(self, erased: Sequence[tuple[str, bytes]]) -> None:
        """Forget erased users, given by tenant and digest of the id."""
        if erased:
            gone = set(erased)
            for user in [user for user in self.users if (user.tenant, digest(user.user_id)) in gone]:
                del self.users[user]

"""The newest entry that each partition's log must have, as recorded by a process and in PREFIX:meta."""

from collections.abc import Mapping

from storage.redis.layout.keys import NEWEST_FIELD
from storage.redis.layout.stream_entries import entry_seq


class NewestEntries:
    """The newest entries that this process knows, and those that processes have noted in PREFIX:meta.

    They are noted for processes that start later, with the time when a loss was last accepted. An acceptance
    invalidates earlier notes, including those written a moment later by a process that does not know of it yet.
    """

    def __init__(self) -> None:
        self._known: dict[int, str] = {}  # by partition
        self._noted: dict[int, str] = {}

    def remember(self, partition: int, entry_id: str) -> None:
        """Remember an entry, unless a newer one is known."""
        if not self.is_known(partition, entry_id):
            self._known[partition] = entry_id

    def is_known(self, partition: int, entry_id: str) -> bool:
        """Return whether this entry or a newer one is known."""
        return partition in self._known and _seq(entry_id) <= _seq(self._known[partition])

    def is_ahead_of(self, partition: int, entry_id: str) -> bool:
        """Return whether another entry with the same or a higher number is known.

        The entry itself may be known before the reply to its commit, because a check has found it in the log.
        """
        return self.is_known(partition, entry_id) and self._known[partition] != entry_id

    def forget(self) -> None:
        """Forget all entries, which are no longer required."""
        self._known.clear()

    def required(self, partition: int) -> set[str]:
        """Return the required entries. Two entries with the same number come from two processes that used it."""
        return {entries[partition] for entries in (self._known, self._noted) if partition in entries}

    def read(self, meta: Mapping[bytes, bytes], accepted_ms: int) -> None:
        """Replace the noted entries with those in the fields of PREFIX:meta."""
        self._noted = {}
        for field, value in meta.items():
            prefix, _, partition = field.decode().partition(":")
            noted_ms, _, entry_id = value.decode().partition(" ")
            if f"{prefix}:" == NEWEST_FIELD and int(noted_ms) == accepted_ms:
                self._noted[int(partition)] = entry_id

    def to_note(self, accepted_ms: int) -> dict[str, str]:
        """Return the fields of PREFIX:meta to set because they are older than the entries that this process knows."""
        return {
            f"{NEWEST_FIELD}{partition}": f"{accepted_ms} {entry_id}"
            for partition, entry_id in self._known.items()
            if partition not in self._noted or _seq(entry_id) > _seq(self._noted[partition])
        }


def _seq(entry_id: str) -> int:
    return entry_seq(entry_id.encode())

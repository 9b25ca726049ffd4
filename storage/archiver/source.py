"""The archiver's view of a log: its entries, and a way to trim archived ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from storage.archive.writer import ErasureEntry, EventEntry

PAGE = 1_000  # entries read or trimmed in one command, 2 to 5 ms in which Redis does nothing else


@dataclass(frozen=True, slots=True)
class EntryPage:
    """Consecutive entries of one partition, and the position of the last one."""

    partition: int
    entries: Sequence[EventEntry | ErasureEntry]
    position: str | None


class LogSource(Protocol):
    """A log that is archived.

    A position names an entry of a partition; None stands for the beginning.
    """

    def attach(self) -> None:
        """Read the layout of the log, before its first entry is read; StorageError when it cannot be read.

        `claim` does this, too.
        """

    def claim(self, archive_id: str, is_new: bool) -> None:
        """Bind this log to that archive; StorageError when it is bound to another one."""

    def entries(self, position_of: Callable[[int], str | None]) -> Iterator[EntryPage]:
        """Yield the entries of each partition after its position.

        raises  StorageError  when the entry at the position is not the one that was there
        """

    def require(self, positions: Mapping[int, str]) -> None:
        """Raise StorageError if an entry at one of these positions has gone since it was read."""

    def trim(self, position_of: Callable[[int], str | None], before_ms: int) -> int:
        """Remove the entries logged before that time and strictly before the position; return how many."""

    def scrub(self) -> None:
        """Remove the remaining data of erased users from the log, and what left the log from its files."""

    def memory_usage(self) -> Sequence[tuple[str, int, int]]:
        """Return the name, used bytes and maximum bytes (0: no limit) of each server with the log in memory."""

"""The stored data of the users for whom a batch is ranked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.catalogue.trained_catalogue import NO_ROWS, Rows
from model.lisa.item_intervals import Purchases
from storage.state.corrections import ReadState


class SeenRows(NamedTuple):
    """The data from a user's log that a request needs, in rows of the catalogue.

    seen      the items that the user has seen
    left_out  the items that the user's events exclude
    newest    the number of log entries read, if there are more
    bought    the user's purchases; None if they were not read
    state     the user's state, if it was read together with the log
    """

    seen: Rows
    left_out: Rows
    newest: int | None
    bought: Purchases | None = None
    state: ReadState | None = None

    @property
    def size(self) -> int:
        """The number of rows."""
        return len(self.seen) + len(self.left_out) + (0 if self.bought is None else len(self.bought.item))


NOTHING_SEEN = SeenRows(NO_ROWS, NO_ROWS, None)


@dataclass(frozen=True, slots=True)
class StoredUsers:
    """The stored data of some requests' users.

    states     encoded states by user; users without events, or whose state is still being folded, are missing
    seen       what was read from the log of each request's user, in order; None if it cannot be read now
    read_s     the duration of the read; 0 when there was no user to read
    is_failed  whether the store failed to read some of the states
    """

    states: Mapping[str, bytes]
    seen: Sequence[SeenRows | None]
    read_s: float = 0.0
    is_failed: bool = False

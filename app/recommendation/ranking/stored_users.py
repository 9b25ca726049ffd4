"""What the store has of the users for whom a batch is ranked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.catalogue.trained_catalogue import NO_ROWS, Rows
from model.lisa.item_intervals import Purchases
from storage.state.corrections import ReadState


class SeenRows(NamedTuple):
    """What a request goes by of its user's log, in rows of the catalogue.

    seen      the items that the user has seen
    left_out  those that the user's events leave out
    newest    how many log entries were read, where there are more
    bought    what the user has bought; None where that was not read
    state     the user's state, where it was read with the log; else None
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

    states     encoded states by user; a user without events, or whose state is still being folded, is missing
    seen       what was read of the log of each request's user, in order; None where it cannot be read now
    read_s     how long the store took; 0 when there was no user to read
    is_failed  whether the store could not read all of the states
    """

    states: Mapping[str, bytes]
    seen: Sequence[SeenRows | None]
    read_s: float = 0.0
    is_failed: bool = False

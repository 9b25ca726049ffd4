"""What the store has of the users for whom a batch is ranked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from app.catalogue.trained_catalogue import Rows


class SeenRows(NamedTuple):
    """The rows of the items that a user has seen; `newest` is how many log entries were read where there are more."""

    rows: Rows
    newest: int | None


@dataclass(frozen=True, slots=True)
class StoredUsers:
    """The stored data of some requests' users.

    states     encoded states by user; a user without events, or whose state is still being folded, is missing
    seen       the seen items of users whose requests exclude all of them
    read_s     how long the store took; 0 when there was no user to read
    is_failed  whether the store could not read all of the states
    """

    states: Mapping[str, bytes]
    seen: Mapping[str, SeenRows]
    read_s: float = 0.0
    is_failed: bool = False

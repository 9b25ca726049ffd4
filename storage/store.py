"""The promise every store makes, and the ways in which it can fail."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from storage.state import Event, Generation


class StorageError(Exception):
    """A request could not be applied. Nothing of it was."""


class StorageUnavailable(StorageError):
    """The store cannot be reached or written, or is closed. What was sent may be sent again: ids make that safe."""


class PartlyApplied(StorageUnavailable):
    """The events at the positions `applied` are durable; of the others it is not known. Send all of them again."""

    def __init__(self, message: str, applied: Sequence[int]) -> None:
        super().__init__(f"{message}; {len(applied)} events were applied")
        self.applied = tuple(applied)


class StorageBusy(StorageError):
    """Too much is waiting to be written. Nothing was accepted; come back later."""


@dataclass(frozen=True, slots=True)
class Appended:
    """What became of one event. A duplicate changed nothing and is neither late nor unknown."""

    duplicate: bool = False
    unknown_item: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An event and its place in the log; sequence numbers grow, and may have gaps."""

    seq: int
    event: Event


class UserStore(Protocol):
    """Logs of events and the states folded from them, by tenant and user.

    A store is made with the live generations, the serving one first; every event is folded into all of them.
    At any moment a user's state is the fold of the user's log. Any number of stores may work on the same data.

    Every method raises StorageUnavailable when the data cannot be reached or the store is closed.
    """

    async def append(self, tenant: str, events: Sequence[Event]) -> list[Appended]:
        """Log and fold the events in one atomic, durable step; one answer for each, in order.

        An event whose id the user's log (or an earlier event of the same call) has already is a duplicate. The
        serving generation says what is unknown or late. StorageBusy: too much waits. After a StorageUnavailable
        the events may or may not have been applied; append them again.
        """
        ...

    async def states(self, tenant: str, user_ids: Sequence[str], generation: Generation) -> list[bytes | None]:
        """The users' encoded states, in order; None for a user without events.

        A state that is missing, unreadable or behind the log is folded from the log and kept, which is a
        write: StorageBusy as for `append`.
        """
        ...

    async def seen_items(self, tenant: str, user_id: str) -> set[str]:
        """The items of all events in the user's log."""
        ...

    async def events(self, tenant: str, user_id: str, *, after: int = 0, limit: int = 100) -> list[LogEntry]:
        """The first `limit` entries of the user's log with sequence numbers above `after`, in log order."""
        ...

    async def erase(self, tenant: str, user_id: str) -> None:
        """Forget the user: when this returns there is no log and no state, and what comes later is a new user's.

        What an archive holds goes with the archiver's next turn. Erasing who is unknown changes nothing.
        """
        ...

    async def ping(self) -> None:
        """Return when the store can be read."""
        ...

    async def close(self) -> None:
        """Finish and answer what was accepted, then let go of everything. Closing twice is closing once."""
        ...

"""The promise every store makes, and the ways in which it can fail."""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from storage.state import Event, Generation
from storage.trends import Trends

MAIN_TENANT = "main"


class StorageError(Exception):
    """A request could not be applied. Nothing of it was."""


class StorageUnavailable(StorageError):
    """The store cannot be reached or written, or is closed. What was sent may be sent again: ids make that safe."""


class PartlyApplied(StorageUnavailable):
    """The events at the positions `applied` are durable; of the others it is not known. Send all of them again."""

    def __init__(self, message: str, applied: Sequence[int]) -> None:
        super().__init__(f"{message}; {len(applied)} events were applied")
        self.applied = tuple(applied)


class PartlyRead(StorageUnavailable):
    """Only the values of these users can be read now."""

    def __init__(self, message: str, values: Mapping[str, bytes | None]) -> None:
        super().__init__(message)
        self.values = values


class StorageBusy(StorageError):
    """Too much is waiting to be written. Nothing was accepted; come back later."""


class UnknownEvent(Exception):
    """There is nothing to undo: the user's log has no event of this id. Nothing changed."""


class MergeRefused(Exception):
    """The visitor cannot become the user; the message says why. Nothing changed."""


class MergeTooLarge(MergeRefused):
    """The visitor's log has more than MAX_MERGED entries."""


MAX_MERGED = 10_000
"""Entries of a visitor's log that are copied in one atomic step, in which the store does nothing else."""


@dataclass(frozen=True, slots=True)
class Appended:
    """What became of one event. A duplicate changed nothing and is neither late nor unknown."""

    duplicate: bool = False
    unknown_item: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An event, or what storage/corrections.py has instead, and its place in the log.

    Sequence numbers grow, and may have gaps.
    """

    seq: int
    event: Event


@dataclass(frozen=True, slots=True)
class LogPage:
    """Some entries, each with its tenant; those of one user in log order.

    is_complete  the users of this page and of those before it have no entries in the pages that follow
    erased       tenants, and digests of the ids, of users whose entries in the pages before do not count
    starts_over  nor do any since the last complete page, which come again
    """

    entries: list[tuple[str, LogEntry]]
    is_complete: bool
    erased: Sequence[tuple[str, bytes]] = ()
    starts_over: bool = False


@dataclass(frozen=True, slots=True)
class FoldedState:
    """A user's encoded state: the fold of the log through the entry with that sequence number."""

    tenant: str
    user_id: str
    through_seq: int
    value: bytes


@dataclass(frozen=True, slots=True)
class NamedGeneration:
    """A generation as the store knows it: the name of its model directory, and the tag in its states."""

    name: str
    tag: bytes


@dataclass(frozen=True, slots=True)
class ItemEntry:
    """What a tenant has said of one item. What was never said is None: there the model directory's word stands."""

    item_id: str
    title: str | None = None
    categories: tuple[str, ...] | None = None
    available: bool | None = None


@dataclass(frozen=True, slots=True)
class ItemChanges:
    """Items as they are now, in the order in which they were last changed; `version` is that of the last change."""

    entries: list[ItemEntry]
    version: int


@dataclass(frozen=True, slots=True)
class Watched:
    """What every process looks at again and again: where the pointer points, how often items were changed, and what
    was noted of an experiment.
    """

    active: NamedGeneration | None
    items_version: int
    experiment: str | None = None


@dataclass(frozen=True, slots=True)
class KnownGeneration:
    """What the store has noted of a generation; a live one is being served or built by some process."""

    named: NamedGeneration
    is_active: bool
    is_live: bool


class GenerationRegistry(Protocol):
    """Which of a tenant's generations have states in a store, and which one every process that serves it is to serve.

    No state depends on what stands here: each says itself whose it is and how far into the log it goes.
    """

    async def announce(self, generation: NamedGeneration, live_for_s: float) -> None:
        """Note the generation, and that it is served or built for so long from now on."""
        ...

    async def known(self) -> list[KnownGeneration]: ...

    async def active(self) -> NamedGeneration | None:
        """Where the pointer points; None where none was ever set."""
        ...

    async def activate(self, generation: NamedGeneration) -> None:
        """Let the pointer point there: one step, after which everybody sees it."""
        ...

    async def note_experiment(self, text: str | None) -> None:
        """Let everybody who watches see this from now on; None: nothing."""
        ...

    async def forget(self, tag: bytes) -> int:
        """Remove a generation's states of this tenant, and then its name; how many there were. It can be done again."""
        ...


class UserStore(Protocol):
    """Logs of events and the states folded from them, by tenant and user.

    A state says how far into the user's log it goes, and is the fold of the log that far, for every generation and at
    any moment: what it lacks is folded when somebody needs it. Any number of stores may work on the same data.

    A user may have become another one, by a merge. Then every method that is given the one means the other.

    A store is made with the generations that this process serves, and the tenant whose they are, the first one first;
    their states it keeps fresh with every event. Every method raises StorageUnavailable when the data cannot be reached
    or the store is closed.
    """

    @property
    def generations(self) -> GenerationRegistry: ...

    @property
    def waiting(self) -> int:
        """How many reads and writes wait just now, in events and users."""
        ...

    def fold_into(self, generations: Sequence[Generation]) -> None:
        """From now on, serve these generations instead."""
        ...

    async def append(self, tenant: str, events: Sequence[Event]) -> list[Appended]:
        """Log the events in one atomic, durable step with the states; one answer for each, in order.

        An event whose id the user's log (or an earlier event of the same call) has already is a duplicate. The
        first generation says what is unknown or late. A state that lacks too much of the log stays as it is, is
        caught up apart, and nothing is late meanwhile. StorageBusy: too much waits. After a StorageUnavailable the
        events may or may not have been applied; append them again.
        """
        ...

    async def states(
        self, tenant: str, user_ids: Sequence[str], generation: Generation, *, at_most: int | None = None
    ) -> list[bytes | None]:
        """The users' encoded states, in order; None for a user without events.

        A state that is missing, unreadable or behind the log is folded from the log, and kept if that can be written.
        StorageBusy: too many reads wait. One that lacks more than `at_most` entries is None for now, and folded
        meanwhile. PartlyRead: some can be read, others not.
        """
        ...

    def log(self) -> AsyncIterator[LogPage]:
        """The whole log of every user, as of some moment after the call."""
        ...

    async def keep(self, generation: Generation, states: Sequence[FoldedState]) -> None:
        """Keep these states, save those of users of whom a newer one is kept or whose log is gone."""
        ...

    async def forget_idle(self) -> int:
        """Remove states that no event has reached for as long as the store was told; how many. They can be refolded."""
        ...

    async def seen_items(self, tenant: str, user_id: str, unseen_types: Collection[str] = ()) -> set[str]:
        """The items of all events that count in the user's log, save those of these types."""
        ...

    async def events(self, tenant: str, user_id: str, *, after: int = 0, limit: int = 100) -> list[LogEntry]:
        """The first `limit` entries of the user's log with sequence numbers above `after`, in log order."""
        ...

    async def watched(self) -> Watched:
        """Of the tenant that the store was made for, in one round trip."""
        ...

    async def put_items(self, tenant: str, entries: Sequence[ItemEntry]) -> None:
        """Note what is said of these items, one after the other, in one atomic, durable step.

        What an entry does not say stays as it was. Each item that is named gets a version of its own, above all
        before. It can be done again.
        """
        ...

    async def item_changes(self, tenant: str, after: int, limit: int) -> ItemChanges:
        """The first `limit` items whose versions are above `after`; without any, no entries and `after`."""
        ...

    async def item_tenants(self) -> list[str]:
        """Who has said anything of items, in any order."""
        ...

    async def item_counts(self, tenant: str, types: Collection[str]) -> dict[str, int]:
        """How many logged events of these types each item has; of a long log, of its archive and its newest entries."""
        ...

    async def add_trends(self, tenant: str, trends: Trends) -> None:
        """Let these add to the items' trends, in one step or a few; what is done again counts again."""
        ...

    async def trends(self, tenant: str, limit: int) -> dict[str, float]:
        """The items with the highest trends, highest first."""
        ...

    async def add_tallies(self, tenant: str, counts: Mapping[str, int]) -> None:
        """Add to what is counted under these names; what is done again counts again."""
        ...

    async def tallies(self, tenant: str) -> dict[str, int]: ...

    async def secret(self) -> bytes:
        """32 random bytes, made once for the data: whoever asks gets the same."""
        ...

    async def undo(self, tenant: str, user_id: str, event_id: str) -> bool:
        """Let the event that was posted with this user and id no longer count; whether it did until now.

        It stays in the log, with the undo behind it, and its id stays known: sent again, it is a duplicate.

        raises  UnknownEvent  when no such event is logged
        """
        ...

    async def merge(self, tenant: str, user_id: str, visitor: str) -> bool:
        """Let the visitor become the user, whether they have events or not; False when that was so already.

        The visitor's log follows what the user's log has at that moment, in its own order. From then on the visitor's
        id is another name of the user. After a failure the merge is done, not done, or finished by whoever comes
        across the visitor next; nobody ever sees a part of it.

        raises  MergeRefused  when the visitor has become somebody else, or the user has become the visitor
                MergeTooLarge when the visitor has more than MAX_MERGED entries
        """
        ...

    async def erase(self, tenant: str, user_id: str) -> None:
        """Forget the user and everybody who has become them: when this returns there is no log and no state.

        What comes later is a new user's.
        What an archive holds goes with the archiver's next turn. Erasing who is unknown changes nothing.
        """
        ...

    async def ping(self) -> None:
        """Return when the store can be read."""
        ...

    async def close(self) -> None:
        """Finish and answer what was accepted, then let go of everything. Closing twice is closing once."""
        ...

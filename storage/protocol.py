"""The contract that every store keeps."""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Protocol

from storage.errors import StorageUnavailable
from storage.items.audit import AuditLog
from storage.items.trends import Visit
from storage.items.vectors import VectorStore
from storage.records import (
    MAX_SEEN_ENTRIES,
    AppendResult,
    FoldedState,
    HeldProperties,
    ItemChanges,
    ItemCodes,
    ItemEntry,
    KnownGeneration,
    LogEntry,
    LogPage,
    NamedGeneration,
    PropertyValue,
    Scenarios,
    Tally,
    TenantPointers,
    TypeChanges,
)
from storage.state.corrections import EVERY_EVENT, EventFilter, SeenItems
from storage.state.event import Event, LogRecord, Undo
from storage.state.generation import Generation


class GenerationRegistry(Protocol):
    """Which of a tenant's generations have states in a store, and which one every process of the tenant serves.

    No state depends on the registry: each state carries its generation's tag and its place in the log.
    """

    async def announce(self, generation: NamedGeneration, live_for_s: float) -> None:
        """Register the generation, and announce that a process uses it for a number of seconds, at most an hour."""
        ...

    async def known(self) -> list[KnownGeneration]:
        """Return every generation that was announced or activated and not dropped."""
        ...

    async def active(self) -> NamedGeneration | None:
        """Return the active generation; None before the first activation."""
        ...

    async def activate(self, generation: NamedGeneration) -> None:
        """Activate this generation atomically, for all processes."""
        ...

    async def set_experiment(self, text: str | None) -> None:
        """Set the experiment's text, which every process polls; None removes it."""
        ...

    async def drop(self, tag: bytes) -> int:
        """Remove a generation's states of this tenant, then its name; return how many states. It may be repeated."""
        ...

    def states(self, tag: bytes) -> AsyncIterator[list[FoldedState]]:
        """Iterate over a generation's saved states of this tenant; one that moves to another node may be missed."""
        ...


class EventStore(Protocol):
    """Logs of events, by tenant and user.

    A user may have become another one, by a merge. Then every method that is given the one means the other.
    """

    async def append(self, tenant: str, events: Sequence[Event | Undo]) -> list[AppendResult]:
        """Log the events in one atomic, durable step with the states; return one result for each, in order.

        Undos among them are those of a back-up; `undo` makes new ones.

        An event whose id the user's log (or an earlier event of the same call) has already is a duplicate. The
        first served generation decides what is unknown or late. A state that is far behind its log stays as it is
        and is caught up in the background; until then none of the user's events is late. After a StorageUnavailable
        the events may or may not have been applied; append them again.

        raises  StorageBusy  when too many events wait, or a long log of one of the users is just being erased
        """
        ...

    async def events(self, tenant: str, user_id: str, *, after: int = 0, limit: int = 100) -> list[LogEntry]:
        """Return the first `limit` entries of the user's log with sequence numbers above `after`, in log order."""
        ...

    async def users_without_log(self, tenant: str, user_ids: Collection[str]) -> set[str]:
        """Return those of the users whom no event was logged for, and who were not merged into another one.

        raises  StorageBusy  when too many reads wait
        """
        ...

    async def log_lengths(self, tenant: str, user_ids: Sequence[str], *, limit: int) -> list[int]:
        """Return how many entries each user's log has, in order, counted up to `limit` and not read.

        A log has `limit` if a part of it is in an archive, where nobody counts.
        """
        ...

    async def archived_files(self, tenant: str, user_id: str, *, after: int = 0) -> int:
        """Return how many files of an archive `events` goes through for the user's entries above `after`.

        A store that reads no archive needs no method of its own.

        raises  StorageUnavailable  when an archive is needed and cannot be read
        """
        return 0

    async def erasure_length(self, tenant: str, user_id: str, *, limit: int) -> int:
        """Return how many log entries, be they others', an erasure of the user goes through, counted up to `limit`."""
        ...

    async def seen_items(
        self, tenant: str, user_id: str, events: EventFilter = EVERY_EVENT, *, limit: int = MAX_SEEN_ENTRIES
    ) -> SeenItems:
        """Return the items of these events, of those that count among the newest `limit` log entries.

        The log is read in pages, newest first, and others' reads come between them. The state comes with it where
        that takes no other read; a store may leave it out.
        """
        ...

    def log(self) -> AsyncIterator[LogPage]:
        """Iterate over the whole log of every user, as of some moment after the call."""
        ...

    async def undo(self, tenant: str, user_id: str, event_id: str) -> bool:
        """Stop counting the event that was posted with this user and id; return whether it counted until now.

        It stays in the log, with the undo behind it, and its id stays known: sent again, it is a duplicate.

        raises  UnknownEvent  when no such event is logged
        """
        ...

    async def merge(self, tenant: str, user_id: str, visitor: str) -> bool:
        """Make the visitor become the user, whether they have events or not; return False when that was so already.

        The visitor's log is appended to the user's log, in its own order. From then on the visitor's id is another
        name of the user. After a failure the merge is done, not done, or finished by the next access to the visitor;
        nobody ever sees a part of it.

        raises  MergeRefused   when the visitor has become somebody else, or the user has become the visitor
                MergeTooLarge  when the visitor has more than MAX_MERGED entries
        """
        ...

    async def erase(self, tenant: str, user_id: str) -> None:
        """Remove the log and the states of the user and of everybody who has become the user.

        What is appended later belongs to a new user. The archiver's next run removes what an archive holds.
        Erasing an unknown user changes nothing.
        """
        ...


class StateStore(Protocol):
    """States folded from users' logs, by tenant, user and generation.

    A state says how far into the user's log it goes, and is the fold of the log that far, for every generation and at
    any moment. What it lacks is folded when it is read.
    """

    def node_of(self, tenant: str, user_id: str) -> str:
        """Return which node has the user's state, "" for the only one; calls for its users may wait for each other."""
        ...

    def serve_generations(self, generations: Sequence[Generation]) -> None:
        """Keep the states of these generations fresh from now on, instead of those before."""
        ...

    async def states(
        self, tenant: str, user_ids: Sequence[str], generation: Generation, *, max_missing: int | None = None
    ) -> list[bytes | None]:
        """Return the users' encoded states, in order; None for a user without events.

        A state that is missing, unreadable or behind the log is folded from the log, and saved if that can be written.
        One that lacks more than `max_missing` entries is None for now, and folded in the background.

        raises  StorageBusy  when too many reads wait
                PartlyRead   when only some states can be read
        """
        ...

    async def save_states(self, generation: Generation, states: Sequence[FoldedState]) -> None:
        """Save these states, except those of users who have a newer state or no log any more."""
        ...

    async def drop_idle_states(self) -> int:
        """Remove states without an event for the configured time; return how many. They can be folded again."""
        ...


class HistoryStore(EventStore, StateStore, Protocol):
    """The logs of users and the states folded from them."""


class ItemStore(Protocol):
    """Tenants' item values and item codes, with a version for each change."""

    async def put_items(self, tenant: str, entries: Sequence[ItemEntry]) -> None:
        """Set what these entries say of their items, one after the other, in one atomic, durable step.

        The parts that are None in an entry stay as they were, as do the properties that it does not name. Each named
        item gets a version of its own, above all earlier ones. It may be repeated.

        raises  PropertyRefused  when a value is of another type than its property, or properties would be too many
                VectorRefused    when a vector has another number of numbers than those of the tenant's other items
        """
        ...

    async def put_item_codes(self, tenant: str, codes: Sequence[ItemCodes]) -> None:
        """Set these codes, each for its item and generation, in one atomic, durable step. It may be repeated."""
        ...

    async def item_changes(self, tenant: str, after: int, limit: int) -> ItemChanges:
        """Return the first changes above the version `after`, at most `limit`; without any, the version is `after`."""
        ...

    async def item_tenants(self) -> list[str]:
        """Return the tenants with values or codes of items, types of properties, scenarios or an audit log."""
        ...


class PropertyStore(Protocol):
    """The types of tenants' properties, and the properties of their users.

    A type is held from the first value, or declaration, on, until it is taken back. A user who was merged into another
    one has that one's properties: in a merge the user's values stay, and the visitor's fill what is missing. Erasing
    takes all away.
    """

    async def held(self, tenant: str) -> HeldProperties:
        """Return the properties that the tenant holds."""
        ...

    async def declare(self, tenant: str, types: TypeChanges) -> None:
        """Hold these types, or let go of properties, all of that or none, durably. It may be repeated.

        A property that is taken back has no values any more: whatever is held under its name later has none of them.
        They leave the store with the next change of their item or user.

        raises  PropertyRefused  when one of them has another type, or there would be too many
        """
        ...

    async def put_of_user(self, tenant: str, user_id: str, properties: Mapping[str, PropertyValue | None]) -> None:
        """Set these properties of the user, in one atomic, durable step; None takes one away. It may be repeated.

        raises  PropertyRefused  as `ItemStore.put_items` does
                StorageBusy      when the user is just being erased
        """
        ...

    async def of_user(self, tenant: str, user_id: str) -> dict[str, PropertyValue]:
        """Return the user's properties."""
        ...

    def of_users(self) -> AsyncIterator[tuple[str, str, dict[str, PropertyValue]]]:
        """Iterate over the tenants, ids and properties of all users who have some."""
        ...


class ScenarioStore(Protocol):
    """Versions of tenants' scenarios, as texts: the newest MAX_SCENARIO_VERSIONS of each."""

    async def revision(self, tenant: str) -> str:
        """Return the revision of the tenant's scenarios, which every process polls."""
        ...

    async def scenarios(self, tenant: str) -> Scenarios:
        """Return the newest version of each scenario; where one changes meanwhile, at least those of the revision."""
        ...

    async def versions(self, tenant: str, name: str) -> list[str]:
        """Return the versions of the scenario that are kept, oldest first."""
        ...

    async def add(self, tenant: str, name: str, text: str, *, believed: str, dropped: str | None = None) -> bool:
        """Add a version of the scenario, durably, if the revision is still the believed one; return whether it was.

        dropped  the name of another scenario, all of whose versions are removed in the same step
        """
        ...


class StatisticsStore(Protocol):
    """Statistics of a tenant's events and items."""

    async def item_counts(self, tenant: str, types: Collection[str]) -> dict[str, int]:
        """Count the users of each item by their logged events of these types.

        Of a long log, those in its archive and among its newest entries.
        """
        ...

    async def add_visits(self, tenant: str, visits: Sequence[Visit]) -> None:
        """Add to the items' trends, in one step or a few; recent visitors of an item do not count again."""
        ...

    async def trends(self, tenant: str, limit: int) -> dict[str, float]:
        """Return the items with the most visitors, most first, and how many of now they are worth."""
        ...

    async def add_tallies(self, tenant: str, counts: Mapping[Tally, float]) -> None:
        """Add to the counters of these names; what is repeated counts again."""
        ...

    async def tallies(self, tenant: str) -> dict[Tally, float]:
        """Return every counter of the tenant by name."""
        ...


class OrderStore(Protocol):
    """What is bought together: orders with an item, with two (a line break between) and all (an empty name)."""

    async def newest(self, tenant: str, user_id: str, limit: int) -> list[LogRecord]:
        """Return the newest `limit` entries of the user's log, newest first, without what an archive alone has."""
        ...

    async def add(self, tenant: str, counts: Mapping[str, float]) -> None:
        """Add to the counts of these names. They halve with time; the largest MAX_ORDER_COUNTS are kept."""
        ...

    async def counts(self, tenant: str) -> dict[str, float]:
        """Return every count by name, as of when something was added last."""
        ...


class UserStore(HistoryStore, ItemStore, StatisticsStore, Protocol):
    """A store as a whole. Any number of stores, in any number of processes, may work on the same data.

    A store is opened with the generations that its process serves, and the tenant that they belong to; the first one
    leads. Every append keeps their states fresh. Every method raises StorageUnavailable when the data cannot be reached
    or the store is closed.

    properties  the types of tenants' properties, and users' properties
    scenarios   the versions of tenants' scenarios
    orders      what is bought together
    vectors     those that tenants' shops have computed for items
    audit       who has done what
    """

    properties: PropertyStore
    scenarios: ScenarioStore
    orders: OrderStore
    vectors: VectorStore
    audit: AuditLog

    @property
    def generations(self) -> GenerationRegistry:
        """The registry of the store's tenant."""
        ...

    @property
    def waiting(self) -> int:
        """The number of queued reads and writes, in events and users."""
        ...

    async def repair(self, *, accept_loss: bool = False) -> int:
        """Rebuild users' damaged data from the log and the archive. Return the number of repaired users.

        accept_loss  go on without acknowledged events that neither store nor archive have any more

        raises  StorageError  when such events are lost and that is not accepted; nothing changed then
        """
        return 0  # a store whose rows stand for themselves

    async def accept_loss(self) -> None:
        """Accept the loss: all processes treat the current data as everything that was ever acknowledged."""

    async def pointers(self) -> TenantPointers:
        """Return what processes poll of the store's tenant, in one round trip."""
        ...

    async def secret(self) -> bytes:
        """Return 32 random bytes, which are made once for the data and then stay the same for everybody."""
        ...

    @property
    def failure(self) -> StorageUnavailable | None:
        """Why the store rejects writes or reads until an operator fixes it, as of the last second; else None.

        The store has other data than those that it acknowledged, or none, or would lose what it takes.
        """
        ...

    async def ping(self) -> None:
        """Return when the store can be read."""
        ...

    async def close(self) -> None:
        """Finish and answer what was accepted, then release everything. Closing twice is closing once."""
        ...

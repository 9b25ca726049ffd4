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
    """The generations of a tenant that have states in a store, and the one that every process of the tenant serves.

    No state depends on the registry: each state has its generation's tag and its position in the log.
    """

    async def announce(self, generation: NamedGeneration, live_for_s: float) -> None:
        """Register the generation, and announce that a process uses it for a number of seconds, at most an hour."""

    async def known(self) -> list[KnownGeneration]:
        """Return every generation that was announced or activated and not dropped."""

    async def active(self) -> NamedGeneration | None:
        """Return the active generation; None before the first activation."""

    async def activate(self, generation: NamedGeneration) -> None:
        """Activate this generation atomically, for all processes."""

    async def set_experiment(self, text: str | None) -> None:
        """Set the experiment's text, which every process polls; None removes it."""

    async def drop(self, tag: bytes) -> int:
        """Remove this tenant's states of a generation, codes, name and tallies; return how many states. Repeatable."""

    def states(self, tag: bytes) -> AsyncIterator[list[FoldedState]]:
        """Iterate over this tenant's saved states of a generation; one that moves to another node may be missed."""


class EventStore(Protocol):
    """Logs of events, by tenant and user.

    After a merge of one user into another, every method treats the id of the first as a name of the second.
    """

    async def append(self, tenant: str, events: Sequence[Event | Undo]) -> list[AppendResult]:
        """Log the events in one atomic, durable step with the states; return one result for each, in order.

        Undos among the events come from a backup; `undo` makes new ones. An event is a duplicate if the user's log, or
        an earlier event of the call, already has its id. The first served generation decides which items are unknown
        and which events are late. A state that is far behind its log catches up in the background; until then none of
        the user's events is late. After a StorageUnavailable the events may or may not have been applied; call again.

        raises  StorageBusy  when too many events are queued, or a long log of one of the users is being erased
        """

    async def events(self, tenant: str, user_id: str, *, after: int = 0, limit: int = 100) -> list[LogEntry]:
        """Return the first `limit` entries of the user's log with sequence numbers above `after`, in log order."""

    async def users_without_log(self, tenant: str, user_ids: Collection[str]) -> set[str]:
        """Return the users who have no logged events and were not merged into another user.

        raises  StorageBusy  when too many reads are queued
        """

    async def log_lengths(self, tenant: str, user_ids: Sequence[str], *, limit: int) -> list[int]:
        """Return each log's number of entries, up to `limit`, as which a log that is partly in an archive counts."""

    async def archived_files(self, tenant: str, user_id: str, *, after: int = 0) -> int:
        """Return the number of archive files that `events` reads for the user's entries above `after`.

        A store without an archive keeps this default.

        raises  StorageUnavailable  when an archive is needed and cannot be read
        """
        return 0

    async def erasure_length(self, tenant: str, user_id: str, *, limit: int) -> int:
        """Return how many log entries, others' too, an erasure of the user goes through, counted up to `limit`."""

    async def seen_items(
        self, tenant: str, user_id: str, events: EventFilter = EVERY_EVENT, *, limit: int = MAX_SEEN_ENTRIES
    ) -> SeenItems:
        """Return the items of these events among the newest `limit` log entries, without undone events.

        The log is read in pages, newest first, with other reads in between. The state is included if that takes no
        further read; a store may omit it.
        """

    def log(self) -> AsyncIterator[LogPage]:
        """Iterate over the whole log of every user, as of some moment after the call."""

    async def undo(self, tenant: str, user_id: str, event_id: str) -> bool:
        """Stop counting the event that was posted with this user and id; return whether it counted until now.

        The event stays in the log, followed by the undo. Its id stays known: sent again, it is a duplicate.

        raises  UnknownEvent  when no such event is logged
        """

    async def merge(self, tenant: str, user_id: str, visitor: str) -> bool:
        """Merge the visitor into the user, with or without events; return False if that was done before.

        The visitor's log is appended to the user's log, in the same order. From then on the visitor's id is another
        name of the user. After a failure the merge is done, not done, or finished by the next access to the visitor.
        A partial merge is never visible.

        raises  MergeRefused   when the visitor was merged into somebody else, or the user into the visitor
                MergeTooLarge  when the visitor has more than MAX_MERGED entries
        """

    async def erase(self, tenant: str, user_id: str) -> None:
        """Remove the log and the states of the user and of everybody who was merged into the user.

        Later events belong to a new user. The archiver's next run removes archived ones. Unknown users are no error.
        """


class StateStore(Protocol):
    """States folded from users' logs, by tenant, user and generation.

    A state records its position in the user's log, and always equals the fold of the log up to there, whatever the
    generation. Later entries are folded when the state is read.
    """

    def node_of(self, tenant: str, user_id: str) -> str:
        """Return the node with the user's state, "" for the only one; calls for its users may wait for each other."""

    def serve_generations(self, generations: Sequence[Generation]) -> None:
        """Keep the states of these generations up to date from now on, instead of the previous ones."""

    async def states(
        self, tenant: str, user_ids: Sequence[str], generation: Generation, *, max_missing: int | None = None
    ) -> list[bytes | None]:
        """Return the users' encoded states, in order; None for a user without events.

        A state that is missing, unreadable or behind the log is folded from the log, and saved if possible.
        One that lacks more than `max_missing` entries is None for now, and folded in the background.

        raises  StorageBusy  when too many reads are queued
                PartlyRead   when only some states can be read
        """

    async def save_states(self, generation: Generation, states: Sequence[FoldedState]) -> None:
        """Save these states, dated by their last events, unless a user has a newer state or no log any more."""

    async def drop_idle_states(self) -> int:
        """Remove states that got no event for the configured time; return how many. They can be folded again."""


class HistoryStore(EventStore, StateStore, Protocol):
    """The logs of users and the states folded from them."""


class ItemStore(Protocol):
    """Tenants' item values and item codes, with a version for each change."""

    async def put_items(self, tenant: str, entries: Sequence[ItemEntry]) -> None:
        """Apply these entries to their items, in order, durably, in one atomic step or several short ones.

        Parts of an item that are None in its entry keep their values, as do properties that the entry does not name.
        Each item gets its own version, above all earlier ones. The call may be repeated.

        raises  PropertyRefused  when a value has another type than its property, or there would be too many properties
                VectorRefused    when a vector has another dimension than those of the tenant's other items
        """

    async def put_item_codes(self, tenant: str, codes: Sequence[ItemCodes]) -> None:
        """Set these codes, each for its item and generation, in one atomic, durable step. It may be repeated."""

    async def item_changes(self, tenant: str, after: int, limit: int) -> ItemChanges:
        """Return the first changes above the version `after`, at most `limit`; without any, the version is `after`."""

    async def tenants(self) -> list[str]:
        """Return the tenants with generations, items or their codes, types of properties, scenarios or an audit log."""


class PropertyStore(Protocol):
    """The types of tenants' properties, and the properties of their users.

    The first value, or a declaration, fixes a property's type until the property is removed. A merge keeps the user's
    values and adds those of the visitor that are missing; from then on both ids have the same properties. Erasing a
    user removes all of them.
    """

    async def held(self, tenant: str) -> HeldProperties:
        """Return the properties of the tenant."""

    async def declare(self, tenant: str, types: TypeChanges) -> None:
        """Declare these types, and remove the properties with None: all of them or none, durably. It may be repeated.

        A removed property loses its values, even if its name is declared again later. The values leave the store with
        the next change of their item or user.

        raises  PropertyRefused  when a property has another type, or there would be too many
        """

    async def put_of_user(self, tenant: str, user_id: str, properties: Mapping[str, PropertyValue | None]) -> None:
        """Set these properties of the user, in one atomic, durable step; None removes one. It may be repeated.

        raises  PropertyRefused  as `ItemStore.put_items` does
                StorageBusy      when the user is being erased
        """

    async def of_user(self, tenant: str, user_id: str) -> dict[str, PropertyValue]:
        """Return the user's properties."""

    def of_users(self) -> AsyncIterator[tuple[str, str, dict[str, PropertyValue]]]:
        """Iterate over the tenants, ids and properties of all users who have some."""


class ScenarioStore(Protocol):
    """Versions of tenants' scenarios, as texts: the newest MAX_SCENARIO_VERSIONS of each."""

    async def revision(self, tenant: str) -> str:
        """Return the revision of the tenant's scenarios, which every process polls."""

    async def scenarios(self, tenant: str) -> Scenarios:
        """Return the newest version of each scenario; if one changes meanwhile, it may be newer than the revision."""

    async def versions(self, tenant: str, name: str) -> list[str]:
        """Return the kept versions of the scenario, oldest first."""

    async def add(self, tenant: str, name: str, text: str, *, believed: str, dropped: str | None = None) -> bool:
        """Add a version of the scenario, durably, if the revision is still `believed`; return whether it was.

        dropped  the name of another scenario, all of whose versions are removed in the same step
        """


class StatisticsStore(Protocol):
    """Statistics of a tenant's events and items."""

    async def item_counts(self, tenant: str, types: Collection[str]) -> dict[str, int]:
        """Count each item's users by logged events of these types: of long logs, by the newest and archived ones."""

    async def add_visits(self, tenant: str, visits: Sequence[Visit]) -> None:
        """Add the visits to the items' trends, in one step or a few; recent visitors of an item do not count again."""

    async def trends(self, tenant: str, limit: int) -> dict[str, float]:
        """Return the items with the most visitors, in descending order, with their counts after decay."""

    async def add_tallies(self, tenant: str, counts: Mapping[Tally, float]) -> None:
        """Add to the counters of these names. A repeated call counts again."""

    async def tallies(self, tenant: str) -> dict[Tally, float]:
        """Return every counter of the tenant by name."""


class OrderStore(Protocol):
    """Counts of orders: those with an item, those with two (a line break between), and all (an empty name)."""

    async def newest(self, tenant: str, user_id: str, limit: int) -> list[LogRecord]:
        """Return the newest `limit` entries of the user's log, newest first, without those only in an archive."""

    async def add(self, tenant: str, counts: Mapping[str, float]) -> None:
        """Add to the counts of these names, which decay, in one step; the largest MAX_ORDER_COUNTS are kept."""

    async def counts(self, tenant: str) -> dict[str, float]:
        """Return every count by name, as of the last addition."""

    async def drop_counts(self, tenant: str, item_ids: Collection[str]) -> set[str]:
        """Delete the counts of orders with these items, and the items' trends; return the items that had any."""


class UserStore(HistoryStore, ItemStore, StatisticsStore, Protocol):
    """A store as a whole. Any number of stores, in any number of processes, may work on the same data.

    A store is opened with the generations that its process serves, and their tenant. The first decides the results of
    an append, which updates all states. Every method raises StorageUnavailable when the store is unreachable or closed.

    generations  the registry of the store's tenant
    properties   the types of tenants' properties, and users' properties
    scenarios    the versions of tenants' scenarios
    orders       counts of items bought together
    vectors      the vectors that tenants' shops have computed for items
    audit        the audit logs of tenants
    """

    generations: GenerationRegistry
    properties: PropertyStore
    scenarios: ScenarioStore
    orders: OrderStore
    vectors: VectorStore
    audit: AuditLog

    @property
    def waiting(self) -> int:
        """The number of queued reads and writes, in events and users."""

    async def repair(self, *, accept_loss: bool = False) -> int:
        """Rebuild users' damaged data from the log and the archive. Return the number of repaired users.

        accept_loss  continue without the acknowledged events that both store and archive have lost

        raises  StorageError  when such events are lost and the loss is not accepted; nothing changed
        """
        return 0  # for a store that has nothing to rebuild

    async def require_whole(self) -> None:
        """Raise StorageError if the store may have lost acknowledged events, unless the loss was accepted."""

    async def accept_loss(self) -> None:
        """Accept the loss: all processes treat the current data as everything that was ever acknowledged."""

    async def pointers(self) -> TenantPointers:
        """Return the values of the store's tenant that processes poll, in one round trip."""

    async def secret(self) -> bytes:
        """Return 32 random bytes, generated once for the data and the same for all processes."""

    @property
    def failure(self) -> StorageUnavailable | None:
        """The reason why the store rejects writes or reads until an operator acts, as of the last second; else None.

        The store has lost acknowledged data, has other data, or would lose new data.
        """

    async def erase_tenant(self, tenant: str) -> None:
        """Remove whatever the store has of a tenant without users, except its audit log. It may be repeated."""

    async def ping(self) -> None:
        """Return when the store can be read."""

    async def close(self) -> None:
        """Answer all accepted requests, then release all resources. Closing again changes nothing."""

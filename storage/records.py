"""The values that stores take and return."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Literal, Self, TypeAlias, TypeVar

from storage.errors import PropertyRefused
from storage.state.event import Event, LogRecord
from storage.state.generation import Generation

MAIN_TENANT = "main"

ValueT = TypeVar("ValueT")

Tally = tuple[str | int, ...]
"""The name of a counter, in parts. The first two of a list's counter are one of LIST_TALLIES, and its generation."""

LIST_TALLIES = frozenset({"shown", "chosen", "value"})
OTHER = "other"
"""The name that stands for unknown ones in tallies."""

MAX_LIVE_S = 3_600.0
"""The longest time for which a generation is announced. A later end comes from a clock that was ahead."""

MAX_MERGED = 10_000
"""The maximum number of entries of a visitor's log in a merge: one atomic step copies them, and blocks the store."""


MAX_SEEN_ENTRIES = 10_000
"""The number of newest log entries that are read for a user's seen items, by default."""


MAX_PROPERTIES = 64
"""The maximum number of properties of a tenant's items, and of its users."""

PropertyType = Literal["text", "number", "boolean", "time", "set"]
PropertyValue: TypeAlias = str | float | bool | datetime | tuple[str, ...]
"""The value of a property: a text, a number, a boolean, a time (in UTC, to the microsecond) or a set of texts."""

PropertyOwner = Literal["item", "user"]
PropertyTypes = Mapping[PropertyOwner, Mapping[str, PropertyType]]
"""The types of the properties of a tenant's items and users, by name."""
TypeChanges = Mapping[PropertyOwner, Mapping[str, PropertyType | None]]
"""Types to declare; None removes a property, with all its values."""

ITEM_TIMES = ("available_from", "available_until", "published_at")
"""Properties that the items of every tenant have without a declaration. Their type is time."""

MAX_PAGE_BYTES = 4 << 20
"""Bytes of properties after which a page of changes ends."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY_S = 86_400

USERS_PAGE = 500
"""Users whose properties a store reads at a time."""

MAX_ORDER_COUNTS = 8_192  # of a tenant, by estimate some 1.5 MB
MAX_SCENARIO_VERSIONS = 50
"""Newest versions of a scenario that a store keeps."""


def counts_with(names: Iterable[str], item_ids: Collection[str]) -> tuple[list[str], set[str]]:
    """Return the names of counts in an `OrderStore` that have one of these items, never that of all orders.

    Also return these of the items.
    """
    counted = {name: found for name in names if name and (found := {*name.split("\n")}.intersection(item_ids))}
    return [*counted], set[str]().union(*counted.values())


@dataclass(frozen=True, slots=True)
class AppendResult:
    """The outcome of appending one event. A duplicate changed nothing and is neither late nor unknown."""

    duplicate: bool = False
    unknown_item: bool = False
    late: bool = False

    @classmethod
    def unfolded(cls, generation: Generation, record: LogRecord) -> Self:
        """Return the outcome of a new record that the next reader folds."""
        return cls(unknown_item=isinstance(record, Event) and not generation.knows_item_of(record))


DUPLICATE = AppendResult(duplicate=True)
NEW = {
    (unknown, late): AppendResult(unknown_item=unknown, late=late)
    for unknown in (False, True)
    for late in (False, True)
}
"""The outcomes of new events: whether the item is unknown, whether the event is late."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An event, or a correction of the log, and its place in the log.

    Sequence numbers grow, and may have gaps.
    """

    seq: int
    record: LogRecord


@dataclass(frozen=True, slots=True)
class LogPage:
    """Some entries of the log, each with its tenant; those of one user in log order.

    is_complete  the users of this and earlier pages have no entries in later pages
    erased       tenants and digests of the ids of users whose entries in earlier pages no longer count
    starts_over  the entries since the last complete page no longer count either: they come again
    """

    entries: list[tuple[str, LogEntry]]
    is_complete: bool
    erased: Sequence[tuple[str, bytes]] = ()
    starts_over: bool = False


@dataclass(frozen=True, slots=True)
class FoldedState:
    """A user's encoded state: the fold of the log through the entry with sequence number `through_seq`."""

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
    """The values that a tenant has set for an item. If a part was never set, it is None: see the model directory.

    properties  values by name; None, only in arguments of `put_items`, removes a property
    vector      encoded as in storage/items/vectors.py, or NO_VECTOR; for `put_items` alone: `VectorStore` returns them
    """

    item_id: str
    title: str | None = None
    categories: tuple[str, ...] | None = None
    available: bool | None = None
    properties: Mapping[str, PropertyValue | None] = field(default_factory=dict)
    vector: bytes | None = None


@dataclass(frozen=True, slots=True)
class ItemCodes:
    """The codes of one item that a generation's model has not learned.

    tag       of the generation
    evidence  the number of events from which the codes were made; 0 for codes typical of similar items
    history   history codes (B,), one byte each
    target    target codes (B',), one byte each
    """

    item_id: str
    tag: bytes
    evidence: int
    bias: float
    history: bytes
    target: bytes


@dataclass(frozen=True)
class HeldProperties:
    """The declared properties of a tenant. Values stored under any other key are dead.

    types     of the properties, by owner and name
    keys      under which values are stored, of properties whose key is not the name: a property declared after the nth
              removal has ``NAME#n``, so values of an earlier property of that name are never taken for its values
    removals  the number of properties that were removed
    """

    types: PropertyTypes
    keys: Mapping[PropertyOwner, Mapping[str, str]] = field(default_factory=lambda: {"item": {}, "user": {}})
    removals: int = 0

    @classmethod
    def parse(cls, text: str | bytes | None) -> Self:
        """Parse the stored JSON; None, where nothing is stored, gives no properties."""
        stored = json.loads(text or "{}")
        types: PropertyTypes = {"item": stored.get("item", {}), "user": stored.get("user", {})}
        return cls(types, stored["keys"], stored["removals"]) if "removals" in stored else cls(types)

    def to_json(self) -> str:
        """Return the JSON that `parse` reads."""
        apart = {"keys": self.keys, "removals": self.removals} if self.removals else {}
        return json.dumps({**self.types, **apart})

    def holding(self, types: TypeChanges) -> "HeldProperties":
        """Return the properties after these changes; raise PropertyRefused."""
        held = {owner: dict(of_owner) for owner, of_owner in self.types.items()}
        keys = {owner: dict(of_owner) for owner, of_owner in self.keys.items()}
        removals = self.removals
        changes = [(owner, *one) for owner, of_owner in types.items() for one in of_owner.items()]
        for owner, name, given in sorted(changes, key=lambda change: change[2] is not None):  # removals make room
            known = held[owner].get(name)
            if given is None:
                held[owner].pop(name, None)
                keys[owner].pop(name, None)
                removals += known is not None
            elif known is None:
                held[owner][name] = given
                if removals:
                    keys[owner][name] = f"{name}#{removals}"
            elif known != given:
                raise PropertyRefused(name, given, known)
            if len(held[owner]) > MAX_PROPERTIES:
                raise PropertyRefused(name, given or "", None)
        return HeldProperties(held, keys, removals)

    def is_before(self, other: "HeldProperties") -> bool:
        """Return whether the other value is newer."""
        sizes = (sum(map(len, held.types.values())) for held in (self, other))
        return (self.removals, next(sizes)) < (other.removals, next(sizes))

    def properties_removed_since(self, before: "HeldProperties") -> list[str]:
        """Return the item properties of `before` that have lost their values since."""
        held = self.names["item"]
        return [name for key, name in before.names["item"].items() if key not in held]

    def key(self, owner: PropertyOwner, name: str) -> str:
        """Return the key under which values of a property are stored."""
        return self.keys[owner].get(name, name)

    def by_key(self, owner: PropertyOwner, properties: Mapping[str, ValueT]) -> Mapping[str, ValueT]:
        """Return the values with their storage keys instead of names."""
        return {self.key(owner, name): value for name, value in properties.items()} if self.removals else properties

    def by_name(self, owner: PropertyOwner, stored: Mapping[str, ValueT]) -> Mapping[str, ValueT]:
        """Return the values with their names instead of storage keys, without dead ones."""
        if not self.removals:
            return stored
        names = self.names[owner]
        return {names[key]: value for key, value in stored.items() if key in names}

    @cached_property
    def names(self) -> Mapping[PropertyOwner, Mapping[str, str]]:
        """The names of properties by their keys, including those that every tenant has."""
        every: Mapping[PropertyOwner, Sequence[str]] = {"item": ITEM_TIMES, "user": ()}
        return {
            owner: {self.key(owner, name): name for name in (*of_owner, *every[owner])}
            for owner, of_owner in self.types.items()
        }


NO_PROPERTIES = HeldProperties({"item": {}, "user": {}})


@dataclass(frozen=True, slots=True)
class ItemChanges:
    """The current values of changed items and codes, in the order of their last changes; `version` is the last one's.

    held  the tenant's properties at that moment
    """

    entries: Sequence[ItemEntry]
    version: int
    codes: Sequence[ItemCodes] = ()
    held: HeldProperties = NO_PROPERTIES

    @classmethod
    def of(
        cls, changes: Iterable[tuple[int, ItemEntry | ItemCodes]], after: int, held: HeldProperties
    ) -> "ItemChanges":
        """Return the changes, which come with ascending versions; without any, the version is `after`."""
        entries: list[ItemEntry] = []
        codes: list[ItemCodes] = []
        version = after
        for version, changed in changes:  # noqa: B007
            if isinstance(changed, ItemEntry):
                entries.append(changed)
            else:
                codes.append(changed)
        return cls(entries, version, codes, held)


@dataclass(frozen=True, slots=True)
class TenantPointers:
    """The values of its tenant that every process polls."""

    active: NamedGeneration | None
    items_version: int
    experiment: str | None = None
    held: HeldProperties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Scenarios:
    """The newest version of each of a tenant's scenarios, by name.

    revision  a text that differs after every change of a scenario; "" before the first
    """

    revision: str
    newest: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class KnownGeneration:
    """A generation in a store's registry; some process serves or builds a live one."""

    named: NamedGeneration
    is_active: bool
    is_live: bool


def tallies_of_dropped(tallies: Iterable[Tally], tag: bytes, named: Collection[NamedGeneration]) -> list[Tally]:
    """Return the tallies of lists of the generation with this tag, unless another one has its name, too."""
    names = {one.name for one in named if one.tag == tag} - {one.name for one in named if one.tag != tag} - {OTHER}
    return [tally for tally in tallies if tally[0] in LIST_TALLIES and tally[1] in names]


def property_type(value: PropertyValue) -> PropertyType:
    """Return the type of a value."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, datetime):
        return "time"
    return "set" if isinstance(value, tuple) else "number"


def types_to_hold(
    owner: PropertyOwner, values: Iterable[Mapping[str, PropertyValue | None]]
) -> dict[str, PropertyType]:
    """Return the types that these values require of their properties, except of those that every tenant has.

    raises  PropertyRefused  when a name has values of two types
    """
    found: dict[str, PropertyType] = {}
    for of_one in values:
        add_types_to_hold(found, owner, of_one)
    return found


def add_types_to_hold(
    types: dict[str, PropertyType], owner: PropertyOwner, values: Mapping[str, PropertyValue | None]
) -> None:
    """Add the types that these values require of their properties to `types`; raise PropertyRefused."""
    for name, value in values.items():
        if value is not None:
            given = property_type(value)
            is_of_every_tenant = owner == "item" and name in ITEM_TIMES
            held = "time" if is_of_every_tenant else types.setdefault(name, given)
            if held != given:
                raise PropertyRefused(name, given, held)


def properties_to_json(properties: Mapping[str, PropertyValue | None]) -> str:
    """Return the properties as a JSON object, which `properties_from_json` reads."""
    return json.dumps({name: property_to_json(value) for name, value in properties.items()}, ensure_ascii=False)


def properties_from_json(text: str | bytes) -> dict[str, PropertyValue]:
    """Return the properties in a JSON object."""
    return {name: property_from_json(value) for name, value in json.loads(text).items()}


def property_to_json(value: PropertyValue | None) -> Any:
    """Return the value as JSON has it, which `property_from_json` decodes."""
    if isinstance(value, datetime):
        return {"time": (value - EPOCH) // timedelta(microseconds=1)}
    return list(value) if isinstance(value, tuple) else value


def property_from_json(value: Any) -> PropertyValue:
    """Return the value that `property_to_json` has encoded."""
    if isinstance(value, dict):
        return EPOCH + timedelta(microseconds=value["time"])
    return tuple(value) if isinstance(value, list) else value

"""The values that stores take and return."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Self

from storage.state.event import Event, LogRecord
from storage.state.generation import Generation

MAIN_TENANT = "main"

Tally = tuple[str | int, ...]
"""The name of a counter, in parts."""

MAX_LIVE_S = 3_600.0
"""The longest time for which a generation is announced; a later end is one of a clock that was ahead."""

MAX_MERGED = 10_000
"""Entries of a visitor's log that are copied in one atomic step, in which the store does nothing else."""


MAX_SEEN_ENTRIES = 10_000
"""Newest entries of a user's log that are read for the items that the user has seen, unless the caller names others."""


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

    is_complete  the users of this page and of those before it have no entries in the pages that follow
    erased       tenants and digests of the ids of users whose entries in earlier pages no longer count
    starts_over  the entries since the last complete page do not count either: they come again
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
    """What a tenant has set for one item. A part that was never set is None: the model directory has its value.

    properties  values by name; None, which `put_items` takes and nothing returns, takes a property away
    """

    item_id: str
    title: str | None = None
    categories: tuple[str, ...] | None = None
    available: bool | None = None
    properties: Mapping[str, str | float | bool | datetime | tuple[str, ...] | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ItemCodes:
    """The codes of one item that a generation's model has not learned.

    tag       the generation's
    evidence  how many events the codes were made from; 0 when they are typical of the item's categories
    history   history codes (B,), one byte each
    target    target codes (B',), one byte each
    """

    item_id: str
    tag: bytes
    evidence: int
    bias: float
    history: bytes
    target: bytes


@dataclass(frozen=True, slots=True)
class ItemChanges:
    """Changed items and codes as they are now, each in the order of the last changes; `version` is the last one's."""

    entries: Sequence[ItemEntry]
    version: int
    codes: Sequence[ItemCodes] = ()

    @classmethod
    def of(cls, changes: Iterable[tuple[int, ItemEntry | ItemCodes]], after: int) -> "ItemChanges":
        """Return the changes, which come with ascending versions; without any, the version is `after`."""
        entries: list[ItemEntry] = []
        codes: list[ItemCodes] = []
        version = after
        for version, changed in changes:  # noqa: B007
            if isinstance(changed, ItemEntry):
                entries.append(changed)
            else:
                codes.append(changed)
        return cls(entries, version, codes)


@dataclass(frozen=True, slots=True)
class TenantPointers:
    """What every process polls of its tenant: the active generation, the items' version, and the experiment."""

    active: NamedGeneration | None
    items_version: int
    experiment: str | None = None


@dataclass(frozen=True, slots=True)
class KnownGeneration:
    """A generation in a store's registry; some process serves or builds a live one."""

    named: NamedGeneration
    is_active: bool
    is_live: bool

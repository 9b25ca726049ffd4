"""The entries of a partition's log, as written to Redis and as returned by it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import orjson

from storage.errors import StorageError
from storage.records import LogEntry, LogPage
from storage.state.corrections import SeenEntry
from storage.state.event import Event, LogRecord, digest, event_hash
from storage.state.record_encoding import from_json, seen_from_json, to_json

compact_json = json.JSONEncoder(separators=(",", ":")).encode


class Entry(NamedTuple):
    """An event or correction as it is logged, with the hash of its id as a number and as a member of the index."""

    event: LogRecord
    id_hash: int
    member: bytes
    encoded: bytes

    @classmethod
    def of(cls, tenant: str, event: LogRecord) -> Entry:
        """Encode an event; raise StorageError if it cannot be encoded or folded, before it fails a whole round."""
        try:
            event.timestamp_us.to_bytes(8, "little", signed=True)
            if isinstance(event, Event):
                (event.id_time_us or 0).to_bytes(8, "little", signed=True)
                if not isfinite(event.value or 0.0):
                    raise ValueError(f"its value is {event.value}")
            id_hash = event_hash(event.entry_id)
            encoded = orjson.dumps(to_json(tenant, event))
        except (ValueError, TypeError, OverflowError) as exc:
            raise StorageError(f"an event cannot be stored: {exc!r}") from exc
        return cls(event, id_hash, id_hash.to_bytes(8, "little"), encoded)


def index_member(entry_id: str) -> bytes:
    """Return the member of an index that represents the id of an entry."""
    return event_hash(entry_id).to_bytes(8, "little")


@dataclass(frozen=True, slots=True)
class Change:
    """The data committed for one user: new entries, and the states after folding them, by key."""

    head_key: str
    id_index: str
    head: bytes  # up to which the previous states held the log; empty without a log
    entries: Sequence[Entry]
    states: Mapping[str, bytes]


def parse_erasure(value: bytes) -> tuple[str, bytes] | None:
    """Return tenant and digest of the erased user in an "x" entry; None for an entry of such a user."""
    if not value:
        return None
    tenant, user = json.loads(value)
    return tenant, bytes.fromhex(user)


def parse_log_entries(reply: Sequence[bytes]) -> list[LogEntry]:
    """Return the entries in a reply of READ_LOG."""
    return [LogEntry(int(seq), from_json(value)[1]) for seq, value in zip(reply[::2], _values(reply), strict=True)]


def parse_seen_entries(reply: Sequence[bytes]) -> list[SeenEntry]:
    """Return what `SeenItems` reads of the entries in a reply of READ_LOG."""
    return [seen_from_json(value) for value in _values(reply)]


def _values(reply: Sequence[bytes]) -> list[Any]:
    """Return the JSON values of the entries in a reply of READ_LOG."""
    encoded = reply[1::2]
    for seq, one in zip(reply[::2], encoded, strict=True):
        if not one:
            raise StorageError(f"a user's log has lost its entry {int(seq)}")
    values: list[Any] = json.loads((b"[%s]" % b",".join(encoded)).decode())  # one by one would take five times as long
    return values


def parse_stream_page(reply: Sequence[tuple[bytes, Mapping[bytes, bytes]]], *, is_complete: bool) -> LogPage:
    """Return a page of a partition's log from a reply of XRANGE.

    Entries of an erased user before the erasure are left out, because their content may not be removed yet.
    """
    entries: list[tuple[str, LogEntry]] = []
    erased: list[tuple[str, bytes]] = []
    for entry_id, fields in reply:
        if b"e" in fields:
            tenant, record = from_json(json.loads(fields[b"e"]))
            entries.append((tenant, LogEntry(entry_seq(entry_id), record)))
        elif (user := parse_erasure(fields[b"x"])) is not None:
            erased.append(user)
            entries = [(owner, one) for owner, one in entries if (owner, digest(one.record.user_id)) != user]
    return LogPage(entries, is_complete, erased)


def entry_seq(entry_id: bytes) -> int:
    """Return the SEQ in the id of a stream entry."""
    return int(entry_id.partition(b"-")[0])

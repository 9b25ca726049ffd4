"""The entries of a partition's log, as Redis replies with them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from storage.errors import StorageError
from storage.records import LogEntry, LogPage
from storage.state.event import digest
from storage.state.record_encoding import from_json


def parse_erasure(value: bytes) -> tuple[str, bytes] | None:
    """Return tenant and digest of the erased user that an "x" of the log names; None for an entry of such a user."""
    if not value:
        return None
    tenant, user = json.loads(value)
    return tenant, bytes.fromhex(user)


def parse_log_entries(reply: Iterable[bytes]) -> Iterator[LogEntry]:
    """Yield the entries in a reply of READ_LOG."""
    fields = iter(reply)
    for seq, encoded in zip(fields, fields, strict=True):
        if not encoded:
            raise StorageError(f"a user's log has lost its entry {int(seq)}")
        _tenant, record = from_json(json.loads(encoded))
        yield LogEntry(int(seq), record)


def parse_stream_page(reply: Sequence[tuple[bytes, Mapping[bytes, bytes]]], *, is_complete: bool) -> LogPage:
    """Return a page of a partition's log from a reply of XRANGE.

    Entries of an erased user that stand before the erasure are left out: their content may not be removed yet.
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

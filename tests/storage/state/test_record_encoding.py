"""The two encodings of log records."""

from __future__ import annotations

import json

import pytest

from storage.state.corrections import seen_entry
from storage.state.event import Event, LogRecord, Merge, Undo
from storage.state.record_encoding import from_json, seen_from_json, to_json

PLAIN = "e-1", "ada", "tea", "click", 1_700_000_000_000_000, None


@pytest.mark.parametrize(
    "record",
    [
        Event(*PLAIN),
        Event(*PLAIN, codes=((b"12345678", b"\x00\x01"),)),
        Event("e-2", "ada", "", "impression", 5, 4, items=("tea", "cup")),
        Event("e-3", "ada", "tea", "purchase", -5, 4, 9.5, "r-1", order_id="o-1"),
        Undo("ada", "e-1", 7),
        Merge("ada", "bob", 8),
    ],
)
def test_seen_items_are_the_same_without_decoding_the_record(record: LogRecord) -> None:
    value = json.loads(json.dumps(to_json("main", record)))
    assert from_json(value) == ("main", record)
    *rest, items = seen_from_json(value)
    *expected, shown = seen_entry(record)
    assert rest == expected
    assert tuple(items or ()) == tuple(shown or ())

"""Request bodies that are invalid JSON, or not what a call accepts."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from tests.app.support import SECRET

JSON = {"content-type": "application/json"}
POSTS = ("/v1/events", "/v1/recommendations")

MALFORMED: dict[str, tuple[int, bytes]] = {
    "nothing": (400, b""),
    "blank": (400, b" \n"),
    "text": (400, b"hello"),
    "half an object": (400, b'{"user_id": "ada"'),
    "two objects": (400, b'{"user_id": "ada", "item_id": "i"}{}'),
    "trailing comma": (400, b'{"user_id": "ada",}'),
    "single quotes": (400, b"{'user_id': 'ada'}"),
    "invalid UTF-8": (400, b'{"user_id": "\xff\xfe"}'),
    "half a character": (400, b'{"user_id": "\xc3'),
    "UTF-16": (400, '{"user_id": "ada"}'.encode("utf-16")),
    "byte order mark": (400, b'\xef\xbb\xbf{"user_id": "ada"}'),
    "control character": (400, b'{"user_id": "a\x00"}'),
    "gzip": (400, b"\x1f\x8b\x08\x00\x00\x00\x00\x00"),
    "deep arrays": (400, b"[" * 500_000),
    "deep objects": (400, b'{"a":' * 150_000),
    "an integer of 5,000 digits": (400, b'{"value": ' + b"9" * 5_000 + b"}"),
    "a field twice": (400, b'{"user_id": "ada", "user_id": "ada", "item_id": "i"}'),
    "a field twice, further in": (400, b'[{"requests": {"k": 1, "k": 1}}]'),
    "deep, but closed": (422, b"[" * 100 + b"]" * 100),
    "many unknown fields": (422, json.dumps({f"{SECRET}{n}": 0 for n in range(30_000)}).encode()),
    "many bad ids": (422, json.dumps({"history": ["a\x85b"] * 10_000}).encode()),
    "many bad events": (422, json.dumps([{"user_id": SECRET + "\x00", "item_id": SECRET + "\x85"}] * 1_000).encode()),
}

# Values that are wrong nearly everywhere, mixed with those that are right somewhere.
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**30, 2**63, -(2**63) - 1, 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([SECRET + "\x85", "ada", "item-1", "..", "2024-01-01T00:00:00Z", "0000-00-00T00:00:00Z", "all"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    *("event_id", "user_id", "item_id", "type", "timestamp", "value", "recommendation_id", "order_id"),
    *("k", "history", "candidates", "exclude", "categories", "exclude_seen", "requests"),
]
objects = st.dictionaries(st.sampled_from(FIELDS), values, max_size=6)
bodies = st.one_of(
    objects, st.lists(objects, max_size=3), st.fixed_dictionaries({"requests": st.lists(objects)}), values
)

"""Fast-path validation of events accepts only what the schema accepts, with the same result."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.errors import InvalidEvents
from app.events.ingest import parse_plain_events, to_event, validate_events
from app.schemas.fields import MAX_AHEAD_US
from storage.state.event import Event
from tests.app.support import ODD_IDS

NOW_US = 1_800_000_000_000_000
MAX_US = NOW_US + MAX_AHEAD_US
UUID7 = "01932c07-5e00-7d4b-a1c3-2f8e6b9d0a11"
NOW_S = NOW_US // 1_000_000

ids = st.one_of(
    st.from_regex(r"[A-Za-z0-9_.:@-]{1,20}", fullmatch=True),
    st.sampled_from([UUID7, UUID7.upper(), ".", "..", "...", "", "a\n", "\ud800", "a" * 128, "a" * 129, *ODD_IDS]),
    st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=130),
    st.text(st.characters(), max_size=3),
)
numbers = st.one_of(
    st.integers(-(10**13), 10**13),
    st.integers(NOW_S + 298, NOW_S + 302),
    st.floats(),
    st.floats(-1e11, 1e11),
    st.sampled_from([0, -0.0, 1e999, -1e999, float("nan"), 10**400, 253402300799, 253402300800, -62135596800, 1 << 63]),
)
odd = st.one_of(st.none(), st.booleans(), numbers, ids, st.just([]), st.just({}), st.just([1]))
times = st.one_of(numbers, st.sampled_from(["2024-11-14T18:20:00Z", "2024-11-14", "1700000000"]), odd)
events = st.fixed_dictionaries(
    {"user_id": ids | odd, "item_id": ids | odd},
    optional={
        "event_id": ids | odd,
        "items": st.lists(ids | odd, max_size=3) | odd,
        "type": st.sampled_from(["click", "impression"]) | ids | odd,
        "timestamp": times,
        "value": numbers | odd,
        "recommendation_id": ids | odd,
        "order_id": ids | odd,
        "price": odd,
    },
)
good = st.fixed_dictionaries(
    {"user_id": st.just("ada"), "item_id": st.just("tea-2")},
    optional={
        "event_id": st.sampled_from([UUID7, "e-1", None]),
        "type": st.sampled_from(["click", "buy"]),
        "timestamp": st.integers(-62135596800, NOW_S + 301) | st.floats(-1e9, NOW_S + 301) | st.none(),
        "value": st.floats(-1, 2e9) | st.sampled_from([0.0, 1e9]) | st.none(),
        "recommendation_id": st.just(UUID7) | st.none(),
        "order_id": st.just("o-17") | st.none(),
    },
)


shown = st.fixed_dictionaries(
    {
        "user_id": st.just("ada"),
        "type": st.just("impression") | st.just("click"),
        "items": st.lists(st.sampled_from([f"tea-{n}" for n in range(60)]), max_size=51),
    },
    optional={"recommendation_id": st.just("r"), "order_id": st.just("o"), "item_id": st.sampled_from([None, "tea-2"])},
)


def by_schema(bodies: list[Any], needs_ids: bool) -> list[Event] | None:
    try:
        return [to_event(posted, NOW_US) for posted in validate_events(bodies, MAX_US, needs_ids=needs_ids)]
    except InvalidEvents:
        return None


def named(events: list[Event], bodies: list[Any]) -> list[Event]:
    """The same events with a fixed name for generated ids."""
    return [
        event if body.get("event_id") else replace(event, event_id="made here")
        for event, body in zip(events, bodies, strict=True)
    ]


@given(st.lists(events | good | shown | odd, max_size=3), st.booleans())
@example([{"user_id": "a\n", "item_id": "i"}], False)
@example([{"user_id": "a", "item_id": "i", "timestamp": True}], False)
@example([{"user_id": "a", "item_id": "i", "event_id": None}], True)
@example([{"user_id": "a", "item_id": "i"}] * 1001, False)
@example([{"user_id": "a", "items": ["i", "j"], "type": "impression"}], False)
@example([{"user_id": "a", "items": ["i", "i"], "type": "impression"}], False)
@example([{"user_id": "a", "item_id": "i", "type": "impression"}], False)
@example([{"user_id": "a", "item_id": "i", "items": None, "type": "impression"}], False)
@example([{"user_id": "a", "items": [f"i{n}" for n in range(51)], "type": "impression"}], False)
@settings(max_examples=200)
def test_the_fast_path_equals_the_schema(bodies: list[Any], needs_ids: bool) -> None:
    quick = parse_plain_events(bodies, NOW_US, MAX_US, needs_ids=needs_ids)
    if quick is not None:
        schema = by_schema(bodies, needs_ids)
        assert schema is not None
        assert named(quick, bodies) == named(schema, bodies)
        for event, body in zip(quick, bodies, strict=True):
            assert event.item_ids == tuple(body.get("items") or [body["item_id"]])
            assert bool(event.items) == (event.type == "impression") == (not event.item_id)


@given(st.lists(good | shown, min_size=1, max_size=3), st.booleans())
def test_a_usual_event_takes_the_fast_path(bodies: list[Any], needs_ids: bool) -> None:
    parsed = json.loads(json.dumps(bodies))
    assert (parse_plain_events(parsed, NOW_US, MAX_US, needs_ids=needs_ids) is None) == (
        by_schema(parsed, needs_ids) is None
    )

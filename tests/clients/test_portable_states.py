"""Sealed states through the Python client."""

from __future__ import annotations

import pytest

from clients.lisarec_client import LisarecError
from tests.clients.conftest import Connect

ITEMS = [f"item-{row}" for row in range(1, 6)]


def test_states_give_the_list_of_a_user_with_the_same_events(connect: Connect, ann: str) -> None:
    client = connect()
    events = [{"item_id": item_id, "type": "purchase", "value": 2.5, "event_id": item_id} for item_id in ITEMS]
    state = client.portable_events(client.portable_events(None, events[:3]), iter(events[2:]))
    for event in events:
        client.event(ann, **event)
    assert client.flush(60.0)
    of_user = client.recommendations(ann, k=7)
    assert client.recommendations(None, k=7, state=state).items == of_user.items
    assert of_user.source != "fallback"


def test_states_that_cannot_be_opened_start_anew(connect: Connect) -> None:
    client = connect()
    events = [{"item_id": ITEMS[0], "event_id": "one", "timestamp": 1.7e9}]
    anew = client.recommendations(None, state=client.portable_events("A" * 4_996, iter(events)))
    assert anew.items == client.recommendations(None, state=client.portable_events(None, events)).items
    assert anew.source != "fallback"


def test_errors_of_the_service_are_reported(connect: Connect) -> None:
    client = connect()
    for events, code in (([], "invalid_events"), ([{"item_id": "a\x85b"}], "invalid_events")):
        with pytest.raises(LisarecError) as refused:
            client.portable_events(None, events)
        assert refused.value.code == code

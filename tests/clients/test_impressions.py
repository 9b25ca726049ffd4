"""Impressions sent by the Python client."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import Connect, Service


def shown(service: Service, user_id: str) -> dict[str, int]:
    items = service.ask("GET", f"/v1/users/{user_id}").json()["shown_items"]
    return {item["item_id"]: item["count"] for item in items}


def test_impressions_of_a_response_or_of_items_are_logged(service: Service, connect: Connect, ann: str) -> None:
    client = connect()
    answer = client.recommendations(ann, k=12)
    assert client.impression(ann, answer, places=(1, 3, 12))
    assert client.impression(ann, answer)
    assert client.impression(ann, iter(["item-1"]), recommendation_id="r")
    assert client.flush(60.0)
    seen = [(event["items"], event.get("recommendation_id")) for event in service.log(ann)]
    first, third, last = (answer.item_ids[place] for place in (0, 2, 11))
    of = answer.recommendation_id
    assert seen == [([first, third, last], of), (answer.item_ids, of), (["item-1"], "r")]
    counts = dict.fromkeys(answer.item_ids, 1) | {first: 2, third: 2, last: 2}
    assert shown(service, ann) == counts | {"item-1": counts.get("item-1", 0) + 1}
    rotated = client.recommendations(ann, k=12, rotation=1.0, rotation_days=30)
    assert rotated.source != "fallback"
    assert rotated.item_ids != answer.item_ids


@pytest.mark.parametrize(
    ("items", "places"),
    [
        ([], None),
        ([f"i{n}" for n in range(51)], None),
        (["a", "a"], None),
        (["a\x85b"], None),
        (["a", "b"], [3]),
        (["a", "b"], [0]),
        (["a", "b"], []),
        (["a", "b"], [1, 1]),
    ],
)
def test_invalid_impressions_are_refused_by_the_client(connect: Connect, items: Any, places: Any) -> None:
    with pytest.raises(ValueError, match=r"impression|places|items"):
        connect().impression("ann", items, places)


def test_an_empty_response_has_no_impression(connect: Connect) -> None:
    client = connect("http://127.0.0.1:9")
    answer = client.recommendations("ann")
    assert answer.items == []
    assert client.impression("ann", answer) is None
    assert client.impression("ann", answer, places=[1]) is None
    assert client.flush(0)

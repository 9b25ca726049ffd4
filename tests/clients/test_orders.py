"""Orders sent by the Python client."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Connect, Service


def test_the_purchases_of_an_order_share_its_id(service: Service, connect: Connect, ann: str) -> None:
    client = connect()
    ids = client.order(ann, "o-17", {"item-2": 9.5, "item-3": 4}, recommendation_id="r-1")
    ids += client.order(ann, "o-18", ["item-4"])
    assert client.flush(60.0)
    log = service.log(ann)
    assert [event["event_id"] for event in log] == ids
    assert [(event["item_id"], event["type"], event["order_id"], event.get("value")) for event in log] == [
        ("item-2", "purchase", "o-17", 9.5),
        ("item-3", "purchase", "o-17", 4.0),
        ("item-4", "purchase", "o-18", None),
    ]
    assert [event.get("recommendation_id") for event in log] == ["r-1", "r-1", None]


@pytest.mark.parametrize(
    ("order_id", "items"),
    [
        ("o\n19", ["item-4"]),
        ("", ["item-4"]),
        ("o-19", ["item-5", "item\n6"]),
        ("o-19", {"item-5": 1.0, "item-6": -1.0}),
    ],
)
def test_an_invalid_order_is_not_sent(
    service: Service, connect: Connect, ann: str, order_id: str, items: list[str] | dict[str, float]
) -> None:
    client = connect()
    with pytest.raises(ValueError, match="must be"):
        client.order(ann, order_id, items)
    event_id = client.event(ann, "item-1")
    assert client.flush(60.0)
    assert [event["event_id"] for event in service.log(ann)] == [event_id]

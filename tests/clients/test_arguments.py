"""Arguments that can never work are refused when the client is created, not hidden by its fallback."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

import pytest

from clients.lisarec_client import AsyncClient, Client
from tests.app.support import ODD_IDS
from tests.clients.conftest import Connect, Service
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"url": "recs.shop.example"}, "include the scheme, as in https://"),
        ({"url": "recs.shop.example:8000"}, "include the scheme"),
        ({"url": "127.0.0.1:8000"}, "not a valid base URL"),
        ({"url": "//recs.shop.example"}, "include the scheme"),
        ({"url": "ftp://recs.shop.example"}, "include the scheme"),
        ({"url": "https://"}, "include the scheme"),
        ({"url": ""}, "include the scheme"),
        ({"url": None}, "not a valid URL"),
        ({"url": "https://recs.shop.example:port"}, "not a valid URL"),
        ({"url": "https://recs.shop.example/v1?a=1"}, "remove the query string"),
        ({"url": "https://recs.shop.example/v1"}, "remove /v1"),
        ({"url": "https://shop.example/recs/v1/"}, "remove /v1"),
        ({"url": "https://shop:secret@recs.shop.example/v1"}, "the URL is not a valid base URL; remove /v1"),
        ({"url": "https://shop:sec/cret@recs.shop.example"}, "encode special characters of its password"),
        ({"key": ""}, "the key is empty"),
        ({"key": "lisarec_secret\n"}, "the key is empty or contains an invalid character"),
        ({"key": "lisarec_sécret"}, "the key is empty or contains an invalid character"),
        ({"timeout_s": 0}, "timeout_s must be greater than 0"),
        ({"timeout_s": float("nan")}, "timeout_s must be a finite number"),
        ({"queue_size": 0}, "queue_size must be greater than 0"),
    ],
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_invalid_settings_are_refused_at_construction(
    kind: type[Client | AsyncClient], arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as refused:
        kind(**{"url": "https://recs.shop.example"} | arguments)
    assert "cret" not in str(refused.value)


def test_urls_with_a_path_or_a_port_are_accepted() -> None:
    for url in (
        "http://127.0.0.1:8000",
        "https://recs.shop.example/",
        "https://shop.example/recs",
        "http://[::1]:8000",
    ):
        Client(url, "lisarec_key").close()


def test_numeric_ids_are_refused() -> None:
    with Client("https://recs.shop.example") as client, pytest.raises(ValueError, match="item_id must be a text"):
        client.event("ann", 42)  # type: ignore[arg-type]


def test_recommended_items_instead_of_ids_are_refused_in_an_order() -> None:
    with Client("https://recs.shop.example") as client, pytest.raises(ValueError, match="item_id must be a text"):
        client.order("ann", "o-1", [{"item_id": "item-1", "score": 0.5}])  # type: ignore[list-item]


@pytest.mark.parametrize("odd", ODD_IDS)
def test_users_items_and_events_may_have_unusual_ids(service: Service, connect: Connect, odd: str) -> None:
    client, visitor = connect(), odd[::-1] + odd[:2]
    visitor = visitor[:128] if visitor[:128] != odd else "visitor"
    assert client.event(odd, odd, event_id=odd) == odd
    assert client.event(visitor, odd, event_id=odd) == odd
    assert client.flush(PATIENCE_S)
    known = client.user(odd)
    assert known is not None
    assert known["user_id"] == odd
    assert client.merge(odd, visitor)
    path = f"/v1/users/{quote(odd, safe='')}/events"
    found = service.ask("GET", path).json()["events"]
    assert [(one["user_id"], one["event_id"], one["item_id"]) for one in found] == [(odd,) * 3, (visitor, odd, odd)]
    assert client.undo(odd, odd)
    assert client.undo(visitor, odd)
    assert not client.undo(odd, odd)
    client.put_properties(odd, {"shoe": "x"})
    assert client.properties(odd) == {"shoe": "x"}
    client.erase(odd)
    assert client.user(odd) is None

"""Search through the Python client."""

from __future__ import annotations

import pytest

from clients.lisarec_client import LisarecError
from tests.clients.conftest import Connect, Service


def test_search_with_and_without_a_user(service: Service, connect: Connect, ann: str) -> None:
    client = connect()
    client.event(ann, "item-1")
    assert client.flush(60.0)
    for user_id in (None, ann):
        asked = {"query": "thign & green", "limit": 7} | ({} if user_id is None else {"user_id": user_id})
        found = client.search("thign & green", user_id, limit=7)
        assert found == service.ask("GET", "/v1/items", params=asked).json()["items"]
        assert len(found) == 7
        assert all(item["title"].startswith("Green thing") for item in found)
    assert len(client.search("")) == 20


def test_invalid_searches_are_refused(connect: Connect) -> None:
    client = connect()
    with pytest.raises(ValueError, match="user_id"):
        client.search("thing", "a\x85b")
    with pytest.raises(LisarecError) as refused:
        client.search("q" * 257)
    assert refused.value.status == 422

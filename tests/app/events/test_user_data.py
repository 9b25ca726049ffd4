"""GET /v1/users/{user_id} and /events: the state for people to read, and the exported log."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from app.schemas.events import PostedEvent
from model.artifact.model_directory import load
from model.lisa.histogram import history_histogram
from storage.state.layout import ITEM_RING
from tests.app.conftest import SHAPE, Client, item_id
from tests.storage.redis.servers import RedisServer


def test_the_histogram_covers_the_whole_history(client: Client, model_dir: Path) -> None:
    rows = [(7 * n) % 50 for n in range(300)]  # at the rate 0.8, decay has to be made up for several times
    client.click("ada", *map(item_id, rows))
    user = client.get("/v1/users/ada").json()
    codes = load(model_dir).history_codes[rows]
    expected = history_histogram(codes, SHAPE.decay_rates, SHAPE.history_codewords)
    np.testing.assert_allclose(user["histogram"], expected, rtol=1e-5, atol=1e-12)
    assert (user["user_id"], user["generation"], user["event_count"]) == ("ada", "tiny", 300)
    assert user["last_item_id"] == item_id(rows[-1])
    assert user["recent_items"] == [item_id(row) for row in [*dict.fromkeys(rows[::-1])][:ITEM_RING]]


def test_a_user_without_events_is_not_found(client: Client) -> None:
    response = client.get("/v1/users/nobody")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "user_not_found")
    client.recommend("nobody")
    assert client.get("/v1/users/nobody").status_code == 404  # asking for recommendations makes nobody known


def test_a_user_with_only_weightless_events_has_an_empty_state(client: Client) -> None:
    client.post("/v1/events", json={"user_id": "ada", "item_id": "not-in-the-catalogue"})
    user = client.get("/v1/users/ada").json()
    assert (user["event_count"], user["last_item_id"], user["recent_items"]) == (1, None, [])
    assert not np.any(user["histogram"])


def test_an_unavailable_store_returns_503(client: Client) -> None:
    client.close_store()
    response = client.get("/v1/users/ada")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "storage_unavailable")


def test_the_exported_log_can_be_posted_again(client: Client, start: Callable[..., Client], tmp_path: Path) -> None:
    events = [
        {
            "event_id": f"e{n}",
            "user_id": "ada",
            "item_id": item_id(n),
            "type": "click",
            "timestamp": 1_700_000_000.25 + n,
        }
        for n in range(7)
    ]
    events[3] |= {"value": 2.5, "recommendation_id": "r1", "order_id": "o1"}
    posted = {field.alias or name for name, field in PostedEvent.model_fields.items()}
    assert events[3].keys() == posted - {"items"}
    client.post("/v1/events", json=[*events, {"user_id": "bob", "item_id": item_id(1)}])
    pages, query = [], {"limit": 3}
    while True:
        page = client.get("/v1/users/ada/events", params=query).json()
        pages.append(page["events"])
        if page["next"] is None:
            break
        query["after"] = page["next"]
    assert pages == [events[:3], events[3:6], events[6:]]
    other = start(tmp_path / "other")
    other.post("/v1/events", json=[event for page in pages for event in page])
    assert other.get("/v1/users/ada").json() == client.get("/v1/users/ada").json()
    assert client.post("/v1/events", json=events).json()["duplicates"] == 7
    other.close()


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "after=-1", "after=x", "after=99999999999999999999", "k=1"])
def test_invalid_pages_are_refused(client: Client, query: str) -> None:
    response = client.get(f"/v1/users/ada/events?{query}")
    assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_request")


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_an_empty_log_is_not_found_and_a_page_past_the_end_is_empty(
    kind: str, start: Callable[..., Client], tmp_path: Path, redis_server: RedisServer
) -> None:
    client = start(tmp_path, redis_url=redis_server.url if kind == "redis" else None)
    try:
        client.click("visitor", item_id(1))
        client.post("/v1/users/ada/merge", json={"from": "visitor"})
        for after in (0, 5):
            assert client.get(f"/v1/users/nobody/events?after={after}").status_code == 404
        for user in ("ada", "visitor"):
            page = client.get(f"/v1/users/{user}/events?after=5")
            assert (page.status_code, page.json()["events"], page.json()["next"]) == (200, [], None)
    finally:
        client.close()


def test_an_erased_user_is_unknown_and_may_return(client: Client) -> None:
    client.click("ada", item_id(1), item_id(2))
    client.click("bob", item_id(3))
    for _ in range(2):
        response = client.request("DELETE", "/v1/users/ada")
        assert response.status_code == 202
        assert response.json()["user_id"] == "ada"
        left = datetime.fromisoformat(response.json()["files_by"]) - datetime.now(UTC)
        assert timedelta(hours=23) < left <= timedelta(hours=24)
        assert client.get("/v1/users/ada").status_code == 404
        assert client.get("/v1/users/ada/events").status_code == 404
        assert client.recommend("ada")["source"] == "popular"
        assert client.recommend("ada", exclude_seen="all")["source"] == "popular"
    assert client.get("/v1/users/bob").json()["event_count"] == 1
    client.click("ada", item_id(5))
    assert client.get("/v1/users/ada").json()["recent_items"] == [item_id(5)]
    client.close_store()
    assert client.request("DELETE", "/v1/users/ada").status_code == 503

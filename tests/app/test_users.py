"""GET /v1/users/{user_id}: the state, for people to read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from model.artifact import load
from model.histogram import history_histogram
from storage.state import ITEM_RING
from tests.app.conftest import SHAPE, Client, item_id


def test_the_histogram_is_that_of_the_whole_history(client: Client, model_dir: Path) -> None:
    rows = [(7 * n) % 50 for n in range(300)]  # at the rate 0.8, decay has to be made up for several times
    client.click("ada", *map(item_id, rows))
    user = client.get("/v1/users/ada").json()
    codes = load(model_dir).history_codes[rows]
    expected = history_histogram(codes, SHAPE.decay_rates, SHAPE.history_codewords)
    np.testing.assert_allclose(user["histogram"], expected, rtol=1e-5, atol=1e-12)
    assert (user["user_id"], user["generation"], user["event_count"]) == ("ada", "tiny", 300)
    assert user["last_item_id"] == item_id(rows[-1])
    assert user["recent_items"] == [item_id(row) for row in rows[: -ITEM_RING - 1 : -1]]


def test_a_user_without_events_is_not_found(client: Client) -> None:
    response = client.get("/v1/users/nobody")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "user_not_found")
    client.recommend("nobody")
    assert client.get("/v1/users/nobody").status_code == 404  # asking for recommendations makes nobody known


def test_a_user_who_never_stepped_has_an_empty_state(client: Client) -> None:
    client.post("/v1/events", json={"user_id": "ada", "item_id": "not-in-the-catalogue"})
    user = client.get("/v1/users/ada").json()
    assert (user["event_count"], user["last_item_id"], user["recent_items"]) == (1, None, [])
    assert not np.any(user["histogram"])


def test_a_lost_store_is_503(client: Client) -> None:
    client.close_store()
    response = client.get("/v1/users/ada")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "storage_unavailable")

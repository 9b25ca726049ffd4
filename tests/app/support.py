"""Helpers of the app's tests besides fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from app.cli.main import main
from tests.app.conftest import ITEMS, Client, item_id
from tests.storage.oracles.naive_users import NaiveUsers, Refused

SECRET = "Zaphod-Beeblebrox"  # an input that no answer may contain

# ids as shops may have them, with characters that mean something to a path, a query, a table, a page or a store
ODD_IDS = [
    "a/b",
    "../../v1/admin",
    "Größe 42",
    "x y",
    "trailing ",
    " ",
    "100%",
    "%2F",
    "a?b#c&d=e;f",
    "<img src=x onerror=alert(1)>",
    "\"quoted\", 'and' \\",
    "商品",
    "{p1}:head:*[?]",
    "'; DROP TABLE log; --",
    "=1+1",
    "undo e1",
    "merge ada",
    "|",
    "\u2028\u202eltr",
    "\ufffd",
    "\U0001f375" * 128,
]
ALL_ITEMS = [item_id(row) for row in range(ITEMS)]


def bearer(key: str) -> dict[str, str]:
    """The headers of a request with the key."""
    return {"authorization": f"Bearer {key}"}


def assert_refused(response: httpx.Response, *statuses: int) -> None:
    """Assert an error of the common shape, at most 4 kB, without content of the request."""
    assert response.status_code in (statuses or range(400, 500)), response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"code", "message", "details"}
    assert all(set(detail) == {"index", "field", "reason"} for detail in error["details"])
    assert len(error["details"]) <= 20
    assert len(response.content) <= 4_096
    assert SECRET.lower() not in response.text.lower()


def run_command(*arguments: object) -> int:
    """Run a command of `lisarec` in this process and return its exit status."""
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    return int(exit_.value.code or 0)


def item_ids(answer: Any) -> list[str]:
    return [item["item_id"] for item in answer["items"]]


def recommend(client: Client, **body: Any) -> Any:
    response = client.post("/v1/recommendations", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def same_items(one: Any, other: Any) -> bool:
    scores, other_scores = ([item["score"] for item in answer["items"]] for answer in (one, other))
    return item_ids(one) == item_ids(other) and np.allclose(scores, other_scores, rtol=1e-4, atol=1e-4)


def all_pages(client: Client, request: dict[str, Any]) -> Iterator[Any]:
    cursor: str | None = ""
    while cursor is not None:
        page = recommend(client, **request, cursor=cursor)
        yield page
        cursor = page["cursor"]


def finish_background_work(client: Client) -> None:
    """Wait for background tasks, and apply their results."""
    client.runner.run(client.service.switcher.current.context.tasks.join())
    client.service.switcher.rebuild_at_s = 0.0
    client.runner.run(client.service.switcher.poll())


CORRECTIONS = ("undo", "merge", "erase")


def correct(client: Client, users: NaiveUsers, what: str, user_id: str, other: str) -> None:
    """Correct a user's log, in the service and in the oracle.

    other  the id of the event to undo, or of the user who becomes this one
    """
    url = f"/v1/users/{user_id}"
    if what == "undo":
        known = users.undo(user_id, other) is not None
        assert client.request("DELETE", f"{url}/events/{other}").status_code == (200 if known else 404)
    elif what == "erase":
        users.erase(user_id)
        assert client.request("DELETE", url).status_code == 202
    else:
        try:
            users.merge(user_id, other)
        except Refused:
            assert_refused(client.post(f"{url}/merge", json={"from": other}), 409)
        else:
            assert client.post(f"{url}/merge", json={"from": other}).status_code == 200

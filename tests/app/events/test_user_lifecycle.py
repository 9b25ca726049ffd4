"""Undo, merge and erasure over HTTP on both stores: corrections leave no trace in state, log or recommendations.

Each law compares two users of one service, of whom one has lived what the law says and the other never needed to. Items
without a model's codes are among theirs, some events of them with codes and some before there were any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.catalogue.cold_item_codes import item_codes
from app.events import cold_item_learner
from model.cold_items import ColdCodes
from tests.app.conftest import SHAPE, Client, item_id

KINDS = ["click", "click", "purchase", "dislike", "glance"]
ITEM_IDS = [*map(item_id, range(9)), "new-1", "new-2"]
EVENTS = st.lists(st.tuples(st.sampled_from(ITEM_IDS), st.sampled_from(KINDS), st.integers(0, 9)), max_size=8)
START_S = 1_700_000_000

laws = settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
Life = list[tuple[str, str, int]]
_names = count()


@pytest.fixture(scope="module")
def service(
    store_url: str | None, start: Callable[..., Client], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A service on each store in which `new-1` has codes; no other item gets codes during the test."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(cold_item_learner, "EVENTS_PER_SAMPLE", 1 << 40)
    client = start(tmp_path_factory.mktemp("state"), redis_url=store_url)
    rng = np.random.default_rng(0)
    history, target = (
        rng.integers(0, words, books, dtype=np.uint8)
        for books, words in (
            (SHAPE.history_codebooks, SHAPE.history_codewords),
            (SHAPE.target_codebooks, SHAPE.target_codewords),
        )
    )
    assignment = item_codes("new-1", client.service.switcher.current.named.tag, 10, ColdCodes(history, target, 0.5))
    client.runner.run(client.service.store.put_item_codes("main", [assignment]))
    client.service.switcher.rebuild_at_s = 0.0
    client.runner.run(client.service.switcher.poll())
    yield client
    client.close()
    monkeypatch.undo()


def fresh() -> str:
    return f"user-{next(_names)}"


def live(client: Client, user_id: str, life: Life, prefix: str = "e") -> None:
    events = [
        {
            "event_id": f"{prefix}{n}",
            "user_id": user_id,
            "item_id": name,
            "type": kind,
            "timestamp": START_S + time_s,
        }
        for n, (name, kind, time_s) in enumerate(life)
    ]
    for begin in range(0, len(events), 3):
        assert client.post("/v1/events", json=events[begin : begin + 3]).status_code == 200


def seen(client: Client, user_id: str) -> list[Any]:
    """All that the service returns about the user, without the user's id and generated ids."""
    found: list[Any] = []
    state = client.get(f"/v1/users/{user_id}").json()
    found.append({**state, "user_id": ""} if "histogram" in state else "none")
    for params in ({"k": 99}, {"exclude_seen": "all"}, {"exclude_seen": "none", "categories": "tea", "k": 3}):
        answer = client.recommend(user_id, **params)
        found.append({**answer, "user_id": "", "recommendation_id": ""})
    return found


def log_of(client: Client, user_id: str) -> list[tuple[str, str, float]]:
    events = client.get(f"/v1/users/{user_id}/events").json().get("events", [])
    return [(event["item_id"], event["type"], event["timestamp"]) for event in events if "undo" not in event]


@given(EVENTS, st.data())
@laws
def test_an_undone_event_equals_one_never_sent(service: Client, life: Life, data: st.DataObject) -> None:
    one, other = fresh(), fresh()
    undone = data.draw(st.sets(st.sampled_from(range(len(life))))) if life else set()
    live(service, one, life)
    for n in undone:
        assert service.request("DELETE", f"/v1/users/{one}/events/e{n}").json()["changed"]
    live(service, other, [event for n, event in enumerate(life) if n not in undone])
    if len(undone) < len(life) or not life:
        assert seen(service, one) == seen(service, other)
    else:  # the log says that there was somebody
        assert seen(service, one)[1:] == seen(service, other)[1:]
    live(service, one, life)  # sent again, all of them are known
    assert len(log_of(service, one)) == len(life)


@given(EVENTS, EVENTS, EVENTS)
@laws
def test_a_merged_user_equals_the_user_whose_log_holds_both(
    service: Client, before: Life, visit: Life, after: Life
) -> None:
    """Events of the user, of the visitor, and later ones under both ids."""
    user, visitor, other = fresh(), fresh(), fresh()
    live(service, user, before)
    live(service, visitor, visit)  # with the same ids, which stay apart
    assert service.post(f"/v1/users/{user}/merge", json={"from": visitor}).json()["changed"]
    live(service, visitor, after, "after")
    for life, prefix in ((before, "before"), (visit, "visit"), (after, "after")):
        live(service, other, life, prefix)
    assert seen(service, user) == seen(service, visitor) == seen(service, other)
    assert log_of(service, user) == log_of(service, other)
    live(service, visitor, visit)  # sent again
    assert log_of(service, user) == log_of(service, other)


@given(EVENTS, EVENTS, EVENTS, st.booleans())
@laws
def test_an_erased_user_equals_one_who_never_came(
    service: Client, life: Life, visit: Life, again: Life, is_merged: bool
) -> None:
    """Merged visitors are erased too; returning users are new."""
    user, visitor, other = fresh(), fresh(), fresh()
    live(service, user, life)
    live(service, visitor, visit, "v")
    if is_merged:
        assert service.post(f"/v1/users/{user}/merge", json={"from": visitor}).status_code == 200
    assert service.request("DELETE", f"/v1/users/{user}").status_code == 202
    names = [user, visitor] if is_merged else [user]
    for name in names:
        assert seen(service, name) == seen(service, other)
        assert log_of(service, name) == []
        assert service.get(f"/v1/users/{name}").status_code == 404
    for name in (*names, other):
        live(service, name, again)
    for name in names:
        assert seen(service, name) == seen(service, other)
        assert log_of(service, name) == log_of(service, other)


def test_the_generated_users_have_events_on_cold_items(service: Client) -> None:
    """Otherwise the laws would not cover them."""
    user = fresh()
    live(service, user, [("new-1", "click", 0), ("new-2", "click", 1)])
    assert service.get(f"/v1/users/{user}").json()["last_item_id"] == "new-1"
    assert service.recommend(user)["source"] == "personalised"

"""Blended lists of users with few events: trending items beside those of the model, within all filters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.recommendation.ranking import trending
from app.recommendation.ranking.rankings import SMOOTHING, blend
from tests.app.conftest import ITEMS, Client, categories_of, item_id

RANKINGS = st.lists(st.integers(0, 12), unique=True, max_size=10)


@given(RANKINGS, RANKINGS, st.integers(1, 3), st.integers(1, 12))
def test_each_item_scores_by_its_places_in_both_rankings(own: list[int], now: list[int], events: int, k: int) -> None:
    rows, scores = blend(np.array(own, np.int64), np.array(now, np.int64), events, k)
    weight = events / (events + SMOOTHING)
    expected = {
        row: (weight / (2 + own.index(row)) if row in own else 0)
        + ((1 - weight) / (2 + now.index(row)) if row in now else 0)
        for row in {*own, *now}
    }
    assert len(rows) == len(set(rows.tolist())) == min(k, len(expected))
    assert scores.tolist() == pytest.approx([expected[row] for row in rows.tolist()])
    assert scores.tolist() == pytest.approx(sorted(expected.values(), reverse=True)[:k])


@pytest.fixture
def busy(client: Client, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A service with trends: item-7 most, then item-8."""
    monkeypatch.setattr(trending, "MIN_RECENT_EVENTS", 4.0)
    for user, items in enumerate([("item-7", "item-8"), ("item-7", "item-8"), ("item-7",)]):
        client.click(f"other-{user}", *items)
    client.runner.run(client.service.signals.sync())
    return client


def ids(answer: dict[str, Any]) -> list[str]:
    return [item["item_id"] for item in answer["items"]]


def test_short_histories_are_blended_and_longer_ones_are_not(busy: Client) -> None:
    busy.click("ada", "item-1")
    answer = busy.recommend("ada", k=ITEMS)
    assert answer["source"] == "blended"
    assert len(set(ids(answer))) == ITEMS - 1
    assert [item["score"] for item in answer["items"]] == sorted((i["score"] for i in answer["items"]), reverse=True)
    busy.click("ada", "item-2", "item-3")
    few = busy.recommend("ada")
    assert (few["source"], len(few["items"])) == ("blended", 10)
    busy.click("ada", "item-4")
    assert busy.recommend("ada")["source"] == "personalised"


def test_trending_items_rank_higher(busy: Client) -> None:
    """Compared with the same user without trends."""
    history = {"history": ["item-1"], "k": ITEMS, "exclude_seen": "none"}
    answer = busy.post("/v1/recommendations", json=history).json()
    own = ids(busy.post("/v1/recommendations", json={**history, "explain": True}).json())
    assert answer["source"] == "blended"
    popular = np.argsort(-busy.service.catalogue.counts, kind="stable").tolist()
    each = trending.PRIOR_EVENTS / busy.service.catalogue.counts.sum()
    live = {7: 3.0, 8: 2.0}
    now = sorted(popular, key=lambda row: -(live.get(row, 0.0) + each * busy.service.catalogue.counts[row]))
    weight = 1 / (1 + SMOOTHING)
    scores = {item_id(row): (1 - weight) / (2 + place) for place, row in enumerate(now)}
    scores = {name: score + weight / (2 + own.index(name)) for name, score in scores.items()}
    assert [item["score"] for item in answer["items"]] == pytest.approx(
        [scores[name] for name in ids(answer)], rel=1e-6
    )
    assert scores[ids(answer)[0]] == max(scores.values())
    assert busy.post("/v1/recommendations", json={**history, "candidates": own[:3]}).json()["source"] == "personalised"


@pytest.mark.parametrize("user", ["ada", "unknown"])
def test_no_filter_leaks(busy: Client, user: str) -> None:
    busy.click("ada", "item-1")
    busy.request("PUT", "/v1/items/item-8", json={"available": False})
    answer = busy.recommend(user, k=ITEMS, categories="tea", exclude=["item-4", "item-1"])
    teas = {item_id(row) for row in range(ITEMS) if "tea" in categories_of(row)}
    assert set(ids(answer)) == teas - {"item-1", "item-4", "item-8"}


def test_unknown_users_get_trending_and_popular_items(busy: Client) -> None:
    counts = busy.service.catalogue.counts
    each, live = trending.PRIOR_EVENTS / counts.sum(), {7: 3.0, 8: 2.0}
    expected = sorted(-(live.get(row, 0.0) + each * int(counts[row])) for row in range(ITEMS))
    answer = busy.recommend("unknown", k=ITEMS)
    assert answer["source"] == "popular"
    assert [-item["score"] for item in answer["items"]] == pytest.approx(expected, rel=1e-5)
    assert len(set(ids(answer))) == ITEMS


@pytest.mark.parametrize("boost", [{}, {"tea": 1.0}])
def test_pages_of_trending_items_continue_by_score_and_boosts_multiply(busy: Client, boost: dict[str, float]) -> None:
    counts = busy.service.catalogue.counts
    each, live = trending.PRIOR_EVENTS / counts.sum(), {7: 3.0, 8: 2.0}
    least = 0.5 if boost else 0.0
    expected = {
        item_id(row): (live.get(row, 0.0) + each * max(int(counts[row]), least))
        * math.exp(sum(boost.get(category, 0.0) for category in categories_of(row)))
        for row in range(ITEMS)
    }
    found, cursor = list[Any](), ""
    while cursor is not None:
        request = {"user_id": "unknown", "k": 7, "boost": boost, "cursor": cursor}
        answer = busy.post("/v1/recommendations", json=request).json()
        found, cursor = found + answer["items"], answer["cursor"]
    scores = [item["score"] for item in found]
    assert scores == sorted(scores, reverse=True)
    assert len(found) == ITEMS
    assert {item["item_id"]: item["score"] for item in found} == pytest.approx(expected, rel=1e-5)

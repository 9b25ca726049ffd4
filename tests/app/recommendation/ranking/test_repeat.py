"""Repeat purchases over HTTP: lists of the user's own items, against plain lists of the purchases that count."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.http.auth.seal_keys import rotate
from app.recommendation import state_reader
from app.settings import Settings
from model.artifact import model_directory
from model.artifact.item_statistics import ItemStatistics
from model.lisa.item_intervals import NO_INTERVALS, Intervals
from tests.app.conftest import CATEGORIES, ITEMS, WEIGHTS, Client, categories_of, item_id, write_model
from tests.app.recommendation.ranking.event_shop import NAMES, NOW_S, Shop, ids, names, others
from tests.app.support import all_pages, assert_refused, item_ids, recommend
from tests.model.lisa import naive_intervals
from tests.model.lisa.naive_intervals import NaiveDue
from tests.storage.oracles.naive_users import NaiveUsers
from tests.storage.redis.servers import RedisServer

DAY_S = 86_400
AGES_S = [0, 600, 7_200, DAY_S, 9 * DAY_S, 10 * DAY_S, 40 * DAY_S, 900 * DAY_S]
AGAIN = {"mode": "repeat", "k": ITEMS}
BOUGHT = [[30, 20, 10], [2], [40, 35], [400], [6, 4, 2], [1, 0], [15], [90, 60, 31]]  # days ago, of the first items
numbers = count()

posts = st.tuples(
    st.just("post"),
    names,
    ids,
    st.integers(0, 5),
    st.sampled_from(["purchase", "purchase", "click"]),
    st.sampled_from(AGES_S),
)
histories = st.lists(posts | posts | posts | others, min_size=1, max_size=14)


def table(seed: int = 5, *, of_purchases: bool = True) -> Intervals:
    """Random intervals."""
    draw = np.random.default_rng(seed)
    log_days, spread, share = (draw.uniform(low, high, ITEMS + 1) for low, high in ((0, 4), (0.4, 1.2), (0, 0.7)))
    parts = log_days.astype(np.float32), spread.astype(np.float32), share.astype(np.float32)
    return Intervals(*parts, of_purchases)


TABLE = table()


def write_shop(directory: Path, intervals: Intervals = TABLE, seed: int = 7) -> Path:
    plain = model_directory.load(write_model(directory, seed))
    statistics = ItemStatistics(intervals=intervals)
    model_directory.save(directory, plain.model, plain.config, plain.items, plain.metrics, statistics)
    return directory


@pytest.fixture(scope="module")
def shop(store_server: RedisServer | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A service with a fixed clock for reading logs, and the purchases of Ada."""
    directory = tmp_path_factory.mktemp("shop")
    model_dir = write_shop(directory / "tiny")
    rotate(directory / "seal")
    made = Settings(
        model_dir=model_dir, data_dir=directory / "state", seal_keys_file=directory / "seal", max_seen_events=1_000
    )
    if store_server is not None:
        made = made.model_copy(update={"redis_url": store_server.url, "archive_dir": directory / "archive"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_reader, "now_us", lambda: NOW_S * 1_000_000)
        client = Client(made)
        buy(client, "ada", BOUGHT)
        yield Shop(client, None if store_server is None else (store_server, directory / "archive"))
        client.close()


def buy(client: Client, user_id: str, bought: list[list[int]], kind: str = "purchase") -> None:
    """Post purchases of the first items, each this many days ago."""
    events = [
        {"user_id": user_id, "item_id": item_id(row), "type": kind, "timestamp": NOW_S - days * DAY_S}
        for row, ages_days in enumerate(bought)
        for days in ages_days
    ]
    assert client.post("/v1/events", json=events).json()["accepted"] == len(events)


def due_of(bought: list[list[int]], intervals: Intervals = TABLE, rows: int = ITEMS) -> dict[str, NaiveDue]:
    """The oracle, for a model with this many learned rows."""
    return {
        item_id(row): naive_intervals.due(ages, intervals, min(row, rows)) for row, ages in enumerate(bought) if ages
    }


ADAS = due_of(BOUGHT)


def scores_of(due: dict[str, NaiveDue]) -> dict[str, Any]:
    return {name: pytest.approx(one.score, rel=1e-5) for name, one in due.items()}


def listed(answer: Any) -> dict[str, float]:
    return {item["item_id"]: item["score"] for item in answer["items"]}


def best_first(due: dict[str, NaiveDue]) -> list[str]:
    return sorted(due, key=lambda name: -due[name].score)


@given(histories)
@settings(max_examples=15)
def test_bought_items_are_ranked_by_how_due_they_are(shop: Shop, history: list[Any]) -> None:
    users, prefix = NaiveUsers(), f"user-{next(numbers)}"
    for step in history:
        shop.apply(users, prefix, *step)
    for user_id in (f"{prefix}-{name}" for name in NAMES):
        ages: dict[str, list[float]] = defaultdict(list)
        for entry in users.log(user_id):
            if not entry.is_undone and entry.event.type == "purchase":
                ages[entry.event.item_id].append((NOW_S - entry.event.timestamp_us / 1e6) / DAY_S)
        due = {name: naive_intervals.due(days, TABLE, int(name.removeprefix("item-"))) for name, days in ages.items()}
        answer = recommend(shop.client, user_id=user_id, **AGAIN)
        assert answer["source"] == "repeat"
        assert listed(answer) == scores_of(due)
        scores = list(listed(answer).values())
        assert scores == sorted(scores, reverse=True)
        assert answer["short"] == {"reason": "mode", "left": len(due)}
        for item in answer["items"]:
            one = due[item["item_id"]]
            assert item["repeat"]["times"] == one.times
            assert item["repeat"]["last_days"] == pytest.approx(one.last_days, abs=0.01)
            assert item["repeat"]["interval_days"] == pytest.approx(one.interval_days, abs=0.01)
        assert listed(shop.client.recommend(user_id, **AGAIN)) == listed(answer)
        pages = list(all_pages(shop.client, {"user_id": user_id, "mode": "repeat", "k": 2}))
        assert [one for page in pages for one in item_ids(page)] == item_ids(answer)
        assert listed(recommend(shop.client, user_id=user_id, mode="repeat", k=2)) == dict(
            list(listed(answer).items())[:2]
        )


def test_repeat_lists_respect_filters_and_rules(shop: Shop) -> None:
    asked, category = {"user_id": "ada", **AGAIN}, CATEGORIES[0]
    of_category = {name: one for name, one in ADAS.items() if category in categories_of(int(name[5:]))}
    assert 0 < len(of_category) < len(ADAS)
    best = best_first(ADAS)
    wishes: list[tuple[dict[str, Any], list[str]]] = [
        ({}, best),
        ({"categories": [category]}, best_first(of_category)),
        ({"exclude": best[:2]}, best[2:]),
        ({"candidates": [item_id(50), best[3], best[1]]}, [best[1], best[3]]),
        ({"filter": f'"{category}" in item.categories'}, best_first(of_category)),
        ({"basket": [best[0], item_id(50)]}, best[1:]),
        ({"current_item": best[2]}, [one for one in best if one != best[2]]),
        ({"exclude_events": ["purchase"], "within": "5d"}, [one for one in best if ADAS[one].last_days > 5]),
    ]
    for wish, expected in wishes:
        assert item_ids(recommend(shop.client, **asked, **wish)) == expected
    capped = item_ids(recommend(shop.client, **asked, max_per_category=1))
    labels = [label for name in capped for label in categories_of(int(name[5:]))]
    assert len(labels) == len(set(labels)) > 0
    assert set(item_ids(recommend(shop.client, **asked, diversity=0.5))) == set(best)
    for is_available, expected in ((False, best[1:]), (True, best)):
        posted = {"item_id": best[0], "available": is_available}
        assert shop.client.post("/v1/items", json=posted).status_code == 200
        shop.client.runner.run(shop.client.service.switcher.poll())
        assert item_ids(recommend(shop.client, **asked)) == expected


def test_repeat_lists_contain_pins_and_boosts_multiply_scores(shop: Shop) -> None:
    asked, best = {"user_id": "ada", **AGAIN}, best_first(ADAS)
    pinned = recommend(shop.client, **asked, pin=[{"item_id": item_id(50), "place": 2}])
    assert item_ids(pinned) == [best[0], item_id(50), *best[1:]]
    assert ["repeat" in item for item in pinned["items"]] == [one in ADAS for one in item_ids(pinned)]
    boosted = listed(recommend(shop.client, **asked, boost={CATEGORIES[1]: 0.7}))
    for name, one in ADAS.items():
        factor = np.exp(0.7) if CATEGORIES[1] in categories_of(int(name[5:])) else 1.0
        assert boosted[name] == pytest.approx(one.score * factor, rel=1e-5)


def test_seen_items_stay_unless_excluded(shop: Shop) -> None:
    asked = {"user_id": "ada", **AGAIN}
    assert listed(recommend(shop.client, **asked, exclude_seen="none")) == scores_of(ADAS)
    answer = recommend(shop.client, **{**asked, "k": len(ADAS)}, exclude_seen="all")
    assert (answer["items"], answer["short"]) == ([], {"reason": "exclude_seen", "left": 0})
    assert shop.client.request("PUT", "/v1/admin/scenarios/unseen", json={**AGAIN, "exclude_seen": "all"}).is_success
    assert recommend(shop.client, user_id="ada", scenario="unseen")["items"] == []


def test_requests_of_a_batch_have_their_own_mode(shop: Shop) -> None:
    asked: list[dict[str, Any]] = [
        {"user_id": "ada", **AGAIN},
        {"user_id": "ada", "k": 7},
        {"history": [item_id(3)], "k": 7},
        {"user_id": "nobody", **AGAIN},
        {"user_id": "ada", "k": 7, "exclude_seen": "all"},
    ]
    together = recommend(shop.client, requests=asked)["results"]
    alone = [recommend(shop.client, **one) for one in asked]
    assert [item_ids(one) for one in together] == [item_ids(one) for one in alone]
    assert [one["source"] for one in together] == [one["source"] for one in alone]


def test_a_user_without_purchases_gets_an_empty_list_with_a_reason(shop: Shop) -> None:
    shop.client.click("looker", item_id(1), item_id(2))
    for user_id in ("nobody", "looker"):
        answer = recommend(shop.client, user_id=user_id, **AGAIN, debug=True)
        assert (answer["items"], answer["source"]) == ([], "repeat")
        assert answer["short"] == {"reason": "mode", "left": 0}
        assert {"part": "mode", "items": ITEMS} in answer["debug"]["removed"]


def test_an_unreadable_log_gives_an_empty_list_with_a_reason(client: Client) -> None:
    buy(client, "ada", BOUGHT)
    assert len(recommend(client, user_id="ada", **AGAIN)["items"]) == len(ADAS)
    client.close_store()
    answer = recommend(client, user_id="ada", **AGAIN)
    assert (answer["items"], answer["short"]) == ([], {"reason": "log", "left": 0})


def test_a_scenario_may_list_repeat_purchases(shop: Shop) -> None:
    settings_ = {"mode": "repeat", "k": 3}
    assert shop.client.request("PUT", "/v1/admin/scenarios/again", json=settings_).status_code == 200
    found = recommend(shop.client, user_id="ada", scenario="again")
    assert (found["source"], item_ids(found)) == ("repeat", best_first(ADAS)[:3])
    assert item_ids(recommend(shop.client, user_id="ada", scenario="again", mode="repeat")) == item_ids(found)
    refused: list[dict[str, Any]] = [
        {"user_id": "ada", "mode": "next"},
        {"history": [item_id(1)]},
        {"state": "AZ8"},
        {"user_id": "ada", "because": ""},
        {"user_id": "ada", "basket_only": True},
    ]
    for body in refused:
        response = shop.client.post("/v1/recommendations", json={**body, "scenario": "again"})
        assert_refused(response, 422)
        assert response.json()["error"]["details"][0]["field"] == "mode"
    assert_refused(shop.client.get(f"/v1/items/{item_id(1)}/similar", params={"scenario": "again"}), 422)
    wrong = {"mode": "repeat", "basket_only": True}
    assert_refused(shop.client.request("PUT", "/v1/admin/scenarios/wrong", json=wrong), 422)


def test_requests_without_a_log_are_refused(shop: Shop) -> None:
    events = [{"event_id": "e1", "item_id": item_id(1), "type": "purchase"}]
    state = shop.client.post("/v1/portable/events", json={"events": events}).json()["state"]
    refused = [
        shop.client.post("/v1/recommendations", json={"history": [item_id(1)], **AGAIN}),
        shop.client.post("/v1/recommendations", json={"state": state, **AGAIN}),
        shop.client.post("/v1/portable/recommendations", json={"state": state, **AGAIN}),
        shop.client.post("/v1/portable/recommendations", json=AGAIN),
    ]
    for response in refused:
        assert_refused(response, 422)
        assert "a sealed state have no event log" in response.json()["error"]["details"][0]["reason"]
    for wish in ({"because": item_id(1)}, {"because": ""}, {"basket_only": True}, {"mode": "again"}, {"mode": None}):
        body = {"user_id": "ada", **AGAIN, **wish}
        assert_refused(shop.client.post("/v1/recommendations", json=body), 422)
    assert_refused(shop.client.get("/v1/users/ada/recommendations", params={"mode": "repeat", "because": ""}), 422)


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the clock for reading logs."""
    monkeypatch.setattr(state_reader, "now_us", lambda: NOW_S * 1_000_000)


@pytest.mark.usefixtures("still")
def test_a_model_without_intervals_treats_all_items_alike(shared_client: Client) -> None:
    buy(shared_client, "again", BOUGHT)
    answer = recommend(shared_client, user_id="again", **AGAIN)
    assert listed(answer) == scores_of(due_of(BOUGHT, NO_INTERVALS, rows=0))


@pytest.mark.usefixtures("still")
def test_without_purchases_all_weighted_events_count(tmp_path: Path) -> None:
    intervals = table(of_purchases=False)
    client = Client(Settings(model_dir=write_shop(tmp_path / "tiny", intervals), data_dir=tmp_path / "state"))
    assert WEIGHTS["dislike"] == 0
    buy(client, "ada", BOUGHT[:5], "click")
    buy(client, "ada", [[], [8], [1, 3]])
    buy(client, "ada", [[5], [5], [5], [5], [5], [5]], "dislike")
    merged = [BOUGHT[0], [*BOUGHT[1], 8], [*BOUGHT[2], 1, 3], *BOUGHT[3:5]]
    assert listed(recommend(client, user_id="ada", **AGAIN)) == scores_of(due_of(merged, intervals))
    client.close()


@pytest.mark.usefixtures("still")
def test_a_switch_of_models_changes_the_list(tmp_path: Path) -> None:
    other = table(seed=9)
    for name, intervals, seed in (("one", TABLE, 7), ("two", other, 11)):
        write_shop(tmp_path / "models" / name, intervals, seed)
    client = Client(Settings(model_dir=tmp_path / "models" / "one", data_dir=tmp_path / "state"))
    buy(client, "ada", BOUGHT)
    assert listed(recommend(client, user_id="ada", **AGAIN)) == scores_of(ADAS)
    assert client.post("/v1/admin/generations/two/activate").status_code == 200
    answer = recommend(client, user_id="ada", **AGAIN)
    assert answer["generation"] == "two"
    assert listed(answer) == scores_of(due_of(BOUGHT, other))
    client.close()


@pytest.mark.usefixtures("still")
def test_only_the_newest_events_are_read_and_the_response_says_so(start: Callable[..., Client], tmp_path: Path) -> None:
    client = start(tmp_path, max_seen_events=3)
    buy(client, "long", [[5], [4], [3], [2], [1]])
    buy(client, "short", [[5], [4], [3]])
    for user_id, rows, limit in (("long", {2, 3, 4}, 3), ("short", {0, 1, 2}, None)):
        answer = recommend(client, user_id=user_id, **AGAIN)
        assert set(item_ids(answer)) == set(map(item_id, rows))
        assert answer.get("seen_events_limit") == limit
    client.close()


def test_items_missing_from_the_catalogue_are_not_listed(shop: Shop) -> None:
    body = {"user_id": "odd", "item_id": "unheard-of", "type": "purchase"}
    assert shop.client.post("/v1/events", json=body).status_code == 200
    buy(shop.client, "odd", [[3]])
    assert item_ids(recommend(shop.client, user_id="odd", **AGAIN)) == [item_id(0)]

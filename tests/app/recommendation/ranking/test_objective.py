"""Objectives: lists weighted by a numeric property, over HTTP on both stores, against logarithms in plain Python."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.settings import Settings
from tests.app.conftest import ITEMS, Client, item_id
from tests.app.support import ALL_ITEMS, all_pages, assert_refused, item_ids, recommend

MARGINS = [None, 0.01, 0.5, 1.0, 2.5, 300.0, 0.0, -4.0, 1e-300, 1e300]
EVERY: dict[str, Any] = {"k": ITEMS, "exclude_seen": "none"}
MOST = 20.0  # either way

strengths = st.sampled_from([0.25, 0.5, 1.0])
wishes = st.fixed_dictionaries(
    {},
    optional={
        "filter": st.sampled_from(["item.margin > 0.4", "item.number < 30.0", "!known(item.margin)"]),
        "exclude": st.lists(st.sampled_from(ALL_ITEMS), max_size=20, unique=True),
        "candidates": st.lists(st.sampled_from(ALL_ITEMS), min_size=1, max_size=30, unique=True),
        "boost": st.sampled_from([{"tea": 0.7, "cup": -1.5}, ["item.number / 30.0"]]),
        "explain": st.just(True),
    },
)
subjects = st.sampled_from([{"user_id": "ada"}, {"user_id": "nobody"}, {"history": ALL_ITEMS[2:9]}])


class Shop(NamedTuple):
    """Two services over one store."""

    first: Client
    other: Client

    def put(self, margins: list[float | None]) -> None:
        """Set margins of items, in cents for one property, through the first service; the other one reads them."""
        properties = [
            {"margin": one, "cents": None if one is None or one > 1e9 else one * 100, "number": row, "brand": "b"}
            for row, one in enumerate(margins)
        ]
        posted = [{"item_id": item_id(row), "properties": own} for row, own in enumerate(properties)]
        assert self.first.post("/v1/items", json=posted).status_code == 200
        self.other.runner.run(self.other.service.switcher.poll())


@pytest.fixture(scope="module")
def shop(store_url: str | None, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    data_dir = tmp_path_factory.mktemp("state")
    made = Settings(model_dir=model_dir, data_dir=data_dir, redis_url=store_url)
    shop = Shop(Client(made), Client(made))
    shop.first.click("ada", *ALL_ITEMS[:9])
    types = dict.fromkeys(["margin", "cents", "number"], "number") | {"brand": "text"}
    assert shop.first.request("PUT", "/v1/admin/properties", json={"items": types}).status_code == 200
    shop.put([MARGINS[row % len(MARGINS)] for row in range(ITEMS)])
    yield shop
    shop.first.close()
    shop.other.close()


def gains_by_definition(margins: list[float | None], strength: float) -> dict[str, float]:
    """Gain of each score: strength times the log of the value, where the median of positive values gains 0."""
    middle = median([math.log(one) for one in margins if one is not None and one > 0] or [0.0])

    def gain(one: float | None) -> float:
        if one is None:
            return 0.0
        return min(max(strength * (math.log(one) - middle), -MOST), MOST) if one > 0 else -MOST

    return {item_id(row): gain(one) for row, one in enumerate(margins)}


def scores_of(answer: Any) -> dict[str, float]:
    return {item["item_id"]: item["score"] for item in answer["items"]}


def without_id(answer: Any) -> Any:
    return {name: value for name, value in answer.items() if name != "recommendation_id"}


@given(subjects, wishes, strengths, st.lists(st.sampled_from(MARGINS), min_size=ITEMS, max_size=ITEMS))
@settings(max_examples=20)
def test_lists_are_ranked_by_score_and_log_value(
    shop: Shop, subject: dict[str, Any], wish: dict[str, Any], strength: float, margins: list[float | None]
) -> None:
    shop.put(margins)
    asked, gains = {**subject, **EVERY, **wish}, gains_by_definition(margins, strength)
    plain = recommend(shop.first, **asked)
    is_popular = plain["source"] == "popular"
    least = 0.5 if strength else 0.0  # instead of a count of 0, if anything is weighed
    expected = {
        item: (score or least) * math.exp(gains[item]) if is_popular else score + gains[item]
        for item, score in scores_of(plain).items()
    }
    weighed = {**asked, "objective": {"property": "margin", "strength": strength}}
    for client in (shop.first, shop.other):
        answer = recommend(client, **weighed)
        assert scores_of(answer) == pytest.approx(expected, rel=1e-5, abs=1e-4)
        shown = [item["score"] for item in answer["items"]]
        assert shown == sorted(shown, reverse=True)
    for k in (1, 7, 20):
        assert item_ids(recommend(shop.other, **{**weighed, "k": k})) == item_ids(answer)[:k]
    pages = [item for page in all_pages(shop.first, {**weighed, "k": 7}) for item in item_ids(page)]
    assert pages == item_ids(answer)
    if not wish.get("explain") or is_popular:
        return
    before_it = sorted(plain["items"], key=lambda one: pages.index(one["item_id"]))
    for item, before in zip(answer["items"], before_it, strict=True):
        made, own = item["explanation"], before["explanation"]
        assert made.pop("objective") == pytest.approx(gains[item["item_id"]], abs=1e-4)
        assert made == own, "nothing else changes"


@given(subjects, wishes)
@settings(max_examples=10)
def test_strength_0_is_the_plain_list(shop: Shop, subject: dict[str, Any], wish: dict[str, Any]) -> None:
    asked = {**subject, **wish, "objective": {"property": "margin", "strength": 0}}
    assert without_id(recommend(shop.first, **asked)) == without_id(recommend(shop.first, **subject, **wish))


def test_the_unit_does_not_matter_and_get_equals_post(shop: Shop) -> None:
    shop.put([one if one is None or one < 1e9 else 2.0 for one in (MARGINS[row % 9] for row in range(ITEMS))])
    asked = {"user_id": "ada", **EVERY}
    by_margin, by_cents, whole, default = (
        recommend(shop.first, **asked, objective=one)
        for one in (
            {"property": "margin", "strength": 0.5},
            {"property": "cents", "strength": 0.5},
            {"property": "margin", "strength": 1},
            {"property": "margin"},
        )
    )
    assert scores_of(by_margin) == pytest.approx(scores_of(by_cents), abs=1e-4)
    assert without_id(whole) == without_id(default)
    url = f"/v1/users/ada/recommendations?k={ITEMS}&exclude_seen=none&objective="
    for text, expected in (("margin:0.5", by_margin), ("margin", default), ("margin:1.0", default)):
        assert without_id(shop.other.get(url + text).json()) == without_id(expected)


def test_a_property_that_no_item_has_changes_no_order(shop: Shop) -> None:
    assert shop.first.request("PUT", "/v1/admin/properties", json={"items": {"nothing": "number"}}).status_code == 200
    plain = recommend(shop.first, user_id="ada", **EVERY)
    assert scores_of(recommend(shop.first, user_id="ada", **EVERY, objective={"property": "nothing"})) == scores_of(
        plain
    )


def test_a_scenario_fixes_its_objective(shop: Shop) -> None:
    objective = {"property": "margin", "strength": 0.5}
    scenario = "/v1/admin/scenarios/worth"
    made = shop.first.request("PUT", scenario, json={"objective": objective, "exclude_seen": "none", "k": 20})
    assert made.status_code == 200, made.text
    assert made.json()["settings"]["objective"] == objective
    shop.other.runner.run(shop.other.service.scenarios.follow())
    expected = recommend(shop.first, user_id="ada", k=20, exclude_seen="none", objective=objective)
    for extra in ({}, {"objective": objective}, {"objective": "margin:0.5"}):
        found = recommend(shop.other, user_id="ada", scenario="worth", k=20, **extra)
        assert found["items"] == expected["items"]
    for other in ({"property": "margin"}, {"property": "cents", "strength": 0.5}):
        wrong = {"user_id": "ada", "scenario": "worth", "objective": other}
        refused = shop.other.post("/v1/recommendations", json=wrong)
        assert_refused(refused, 422)
        assert refused.json()["error"]["details"][0]["field"] == "objective"
    taken_back = shop.first.request("PUT", "/v1/admin/properties", json={"items": {"margin": None}})
    assert_refused(taken_back, 409)
    assert "scenario worth uses margin" in taken_back.text
    assert shop.first.request("DELETE", scenario).status_code == 200


def test_an_invalid_request_of_a_batch_is_named(shop: Shop) -> None:
    body = {"requests": [{"user_id": "ada"}, {"user_id": "ada", "objective": {"property": "brand"}}]}
    refused = shop.first.post("/v1/recommendations", json=body)
    assert_refused(refused, 422)
    (detail,) = refused.json()["error"]["details"]
    assert (detail["field"], detail["reason"]) == ("requests.1.objective", "'brand' is a text; it takes a number")

"""Complements over HTTP: of an item and of a basket, against sums of the model's table."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.recommendation.ranking import rotation
from app.settings import Settings
from model.artifact import model_directory
from model.artifact.item_statistics import ItemStatistics
from model.lisa.item_complements import FAINT_SCORE, LIFT_STRENGTH, Complements
from tests.app.conftest import CATEGORIES, ITEMS, Client, categories_of, item_id, write_model
from tests.app.support import all_pages, item_ids, recommend

EACH = 5
MORE = 40  # than a basket has complements
EVERYTHING = {"k": ITEMS, "exclude_seen": "none"}
baskets = st.lists(st.integers(0, ITEMS - 1), min_size=1, max_size=6, unique=True)


def table(seed: int = 3) -> Complements:
    """Random complements; one item in ten has none."""
    draw = np.random.default_rng(seed)
    items = np.stack([draw.permutation(np.delete(np.arange(ITEMS), row))[:EACH] for row in range(ITEMS)])
    scores = np.sort(draw.uniform(0.01, 4, (ITEMS, EACH)))[:, ::-1].astype(np.float32)
    items[::10, :], scores[::10, :] = -1, 0
    items[1::10, 2:], scores[1::10, 2:] = -1, 0
    return Complements(items.astype(np.int32), scores)


TABLE = table()


def write_shop(directory: Path) -> Path:
    plain = model_directory.load(write_model(directory))
    model_directory.save(directory, plain.model, plain.config, plain.items, plain.metrics, ItemStatistics(TABLE))
    return directory


@pytest.fixture(scope="module")
def shop(store_url: str | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory = tmp_path_factory.mktemp("shop")
    client = Client(
        Settings(model_dir=write_shop(directory / "tiny"), data_dir=directory / "state", redis_url=store_url)
    )
    client.click("ada", *(item_id(row) for row in range(20, 30)))
    yield client
    client.close()


def scores_of(basket: list[int]) -> dict[str, float]:
    """The oracle: scores of the complements of the basket."""
    found: dict[str, float] = defaultdict(float)
    for row in basket:
        for other, score in zip(TABLE.items[row].tolist(), TABLE.scores[row].tolist(), strict=True):
            if other >= 0 and other not in basket:
                found[item_id(other)] += score
    return found


def listed(answer: Any) -> dict[str, float]:
    return {item["item_id"]: item["score"] for item in answer["items"]}


def names(basket: list[int]) -> list[str]:
    return [item_id(row) for row in basket]


@given(basket=baskets, user=st.sampled_from(["ada", "nobody"]))
@settings(max_examples=10)
def test_basket_only_lists_only_complements(shop: Client, user: str, basket: list[int]) -> None:
    asked = {"user_id": user, "k": MORE, "exclude_seen": "none", "basket": names(basket), "basket_only": True}
    answer, expected = recommend(shop, **asked), scores_of(basket)
    assert answer["source"] == "together"
    assert listed(answer) == pytest.approx(expected)
    assert list(listed(answer).values()) == sorted(expected.values(), reverse=True)
    assert answer["short"] == {"reason": "basket_only", "left": len(expected)}
    pages = list(all_pages(shop, asked | {"k": 3}))
    assert [one for page in pages for one in item_ids(page)] == item_ids(answer)
    by_query = shop.recommend(user, k=MORE, exclude_seen="none", basket=names(basket), basket_only="true")
    assert listed(by_query) == listed(answer)


def test_rotation_lowers_complements_of_a_basket(shop: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, basket = int(time.time()), [2, 5]
    monkeypatch.setattr(rotation, "now_s", lambda: float(now_s))
    together = scores_of(basket)
    shown = sorted(together, key=lambda name: -together[name])[:3]
    impression = {"user_id": "eve", "type": "impression", "items": shown, "timestamp": now_s}
    assert shop.post("/v1/events", json=[impression] * 2).json()["accepted"] == 2
    asked = {"user_id": "eve", "exclude_seen": "none", "basket": names(basket), "basket_only": True, "rotation": 0.5}
    answer = recommend(shop, **asked, k=MORE)
    expected = {name: score * (0.25 if name in shown else 1) for name, score in together.items()}
    assert listed(answer) == pytest.approx(expected)
    assert list(listed(answer).values()) == sorted(listed(answer).values(), reverse=True)
    assert [one for page in all_pages(shop, asked | {"k": 3}) for one in item_ids(page)] == item_ids(answer)


def test_complements_of_an_item_equal_those_of_a_basket_with_it(shop: Client) -> None:
    for row in range(ITEMS):
        answer = shop.get(f"/v1/items/{item_id(row)}/together", params={"k": EACH}).json()
        assert listed(answer) == pytest.approx(scores_of([row]))
        assert (answer["source"], "short" in answer) == ("together", len(answer["items"]) < EACH)
    unknown = shop.get("/v1/items/unheard-of/together")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "item_not_found")
    for query in ("k=0", "k=1&k=2", "user_id=ada", "basket=item-1"):
        assert shop.get(f"/v1/items/item-1/together?{query}").status_code == 422


@given(basket=baskets)
@settings(max_examples=10)
def test_a_basket_lifts_complements_in_a_user_s_list(shop: Client, basket: list[int]) -> None:
    plain = listed(recommend(shop, user_id="ada", **EVERYTHING))
    found = recommend(shop, user_id="ada", **EVERYTHING, basket=names(basket), explain=True)
    together, gains = scores_of(basket), dict[str, float]()
    for item in plain:
        gains[item] = LIFT_STRENGTH * np.log1p(together.get(item, 0.0) / FAINT_SCORE)
    assert found["source"] == "personalised"
    assert listed(found).keys() == plain.keys() - {*names(basket)}
    for item in found["items"]:
        assert item["score"] == pytest.approx(plain[item["item_id"]] + gains[item["item_id"]], abs=1e-3)
        assert item["explanation"]["basket"] == pytest.approx(gains[item["item_id"]], abs=1e-3)
    best = item_ids(recommend(shop, user_id="ada", k=5, exclude_seen="none", basket=names(basket)))
    assert best == item_ids(found)[:5]
    ranked = recommend(shop, user_id="ada", **EVERYTHING, basket=names(basket), candidates=[*plain][:20])
    assert item_ids(ranked) == [one for one in item_ids(found) if one in [*plain][:20]]


def test_requests_of_a_batch_have_their_own_basket(shop: Client) -> None:
    asked: list[dict[str, Any]] = [
        {"user_id": "ada", "k": 7, "basket": names([2, 3])},
        {"user_id": "ada", "k": 7},
        {"user_id": "ada", "k": 7, "basket": names([4]), "basket_only": True},
        {"history": names([5, 6]), "k": 7, "basket": names([10])},
        {"user_id": "nobody", "k": 7, "basket": names([8, 9])},
    ]
    together = shop.post("/v1/recommendations", json={"requests": asked}).json()["results"]
    alone = [recommend(shop, **one) for one in asked]
    assert [listed(one) for one in together] == [pytest.approx(listed(one)) for one in alone]


def test_unknown_users_are_ranked_by_their_basket(shop: Client) -> None:
    basket = names([8, 9])
    found = recommend(shop, user_id="nobody", **EVERYTHING, basket=basket)
    as_history = recommend(shop, history=basket, **EVERYTHING, basket=basket)
    assert found["source"] == "personalised"
    assert listed(found) == pytest.approx(listed(as_history))
    assert recommend(shop, user_id="nobody", basket=["unheard-of"])["source"] == "popular"


@given(basket=baskets, category=st.sampled_from(CATEGORIES), alone=st.booleans())
@settings(max_examples=10)
def test_basket_items_never_appear_and_filters_and_rules_apply(
    shop: Client, basket: list[int], category: str, alone: bool
) -> None:
    gone, pinned = item_id(40), item_id(41)
    asked = {"user_id": "ada", **EVERYTHING, "basket": names(basket), "basket_only": alone, "categories": [category]}
    pins = [
        {"item_id": one, "place": place} for place, one in enumerate(dict.fromkeys([*names(basket[:1]), pinned]), 1)
    ]
    answer = recommend(shop, **asked, exclude=[gone], pin=pins, max_per_category=4, debug=True)
    shown = item_ids(answer)
    assert not {*names(basket), gone} & {*shown}
    assert all(category in categories_of(int(one.removeprefix("item-"))) for one in shown)
    assert (pinned in shown) == (category in categories_of(41) and 41 not in basket)
    if alone:
        assert {*shown} <= scores_of(basket).keys() | {pinned}
    parts = {one["part"]: one["items"] for one in answer["debug"]["removed"]}
    assert parts["basket"] == len({*basket} - {40})


def test_a_boost_multiplies_the_score_of_a_complement(shop: Client) -> None:
    asked = {"user_id": "ada", **EVERYTHING, "basket": names([2, 3, 4]), "basket_only": True}
    plain, boosted = listed(recommend(shop, **asked)), listed(recommend(shop, **asked, boost={"tea": 0.7}))
    for item, score in plain.items():
        factor = np.exp(0.7) if "tea" in categories_of(int(item.removeprefix("item-"))) else 1.0
        assert boosted[item] == pytest.approx(score * factor, rel=1e-5)


def test_basket_only_with_an_empty_basket_is_a_plain_list(shop: Client) -> None:
    plain, empty = (recommend(shop, user_id="ada", **wish) for wish in ({}, {"basket": [], "basket_only": True}))
    assert listed(plain) == listed(empty)


def test_a_model_of_an_earlier_version_has_an_empty_list_with_a_reason(shared_client: Client) -> None:
    answer = shared_client.get(f"/v1/items/{item_id(3)}/together").json()
    assert (answer["items"], answer["short"]) == ([], {"reason": "basket_only", "left": 0})
    plain = recommend(shared_client, history=names([1, 2]), k=ITEMS)
    with_basket = recommend(shared_client, history=names([1, 2]), k=ITEMS, basket=names([3]))
    assert listed(with_basket) == {one: score for one, score in listed(plain).items() if one != item_id(3)}


def test_a_scenario_may_list_complements_alone(shop: Client) -> None:
    assert shop.request("PUT", "/v1/admin/scenarios/cart", json={"basket_only": True, "k": 4}).status_code == 200
    basket = names([2, 3])
    found = recommend(shop, user_id="ada", scenario="cart", basket=basket)
    assert found["source"] == "together"
    assert item_ids(found) == item_ids(recommend(shop, user_id="ada", basket=basket, basket_only=True, k=4))
    refused = shop.post("/v1/recommendations", json={"user_id": "ada", "scenario": "cart", "basket_only": False})
    assert refused.status_code == 422


def test_quantities_in_the_basket_do_not_matter(shop: Client) -> None:
    for user, alone in (("ada", True), ("ada", False), ("nobody", False)):
        asked = {"user_id": user, "basket_only": alone, **EVERYTHING}
        once, twice = (recommend(shop, **asked, basket=names(basket)) for basket in ([8, 9], [8, 9, 8]))
        assert listed(twice) == listed(once)


def test_the_size_of_a_basket_is_limited(shop: Client) -> None:
    assert shop.post("/v1/recommendations", json={"user_id": "ada", "basket": ["a"] * 51}).status_code == 422

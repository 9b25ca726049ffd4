"""Filters, boosts, pins, diversity and pages, against independent definitions, on both stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.recommendation.ranking import reranking
from app.schemas.fields import MAX_K
from model.artifact import model_directory
from model.inference.diversity import WINDOW
from storage.state.layout import ITEM_RING
from tests.app.conftest import (
    BRANDS,
    CATEGORIES,
    CLICKS,
    COLOURS,
    ITEMS,
    SEEN,
    SOLD_OUT,
    UPDATED_CATEGORIES,
    Client,
    categories_of,
    item_id,
)
from tests.app.support import ALL_ITEMS, all_pages, item_ids, recommend
from tests.waiting import wait_until

LABELS = [*CATEGORIES, "new", "unknown"]


@pytest.fixture(scope="module")
def codes(model_dir: Path) -> list[list[int]]:
    return model_directory.load(model_dir).target_codes.tolist()  # type: ignore[no-any-return]


HISTORIES = [[], ["unknown"], ["item-1"], ["item-4", "item-9", "item-4", "unknown", "item-30"], CLICKS]
some_items = st.lists(st.sampled_from([*ALL_ITEMS, "unknown"]), max_size=30)
some_labels = st.lists(st.sampled_from(LABELS), max_size=3)
places = st.one_of(st.integers(1, 9), st.integers(1, 70))
pins = st.lists(st.tuples(st.sampled_from([*ALL_ITEMS, "unknown"]), places), max_size=5).map(
    lambda pairs: [{"item_id": item, "place": place} for place, item in {p: i for i, p in dict(pairs).items()}.items()]
)
subjects = st.one_of(
    st.fixed_dictionaries({"user_id": st.sampled_from(["clicker", *sorted(SEEN)])}),
    st.fixed_dictionaries({"history": st.sampled_from(HISTORIES)}),
)


def some_of(wishes: dict[str, Any], most: int) -> Any:
    """Draw a few options: with all filters at once hardly any list would contain an item."""
    chosen = st.sets(st.sampled_from(sorted(wishes)), max_size=most)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: wishes[name] for name in sorted(names)}))


filters = st.tuples(
    st.fixed_dictionaries({"exclude_seen": st.sampled_from(["none", "recent", "all"])}),
    some_of(
        {
            "exclude": some_items,
            "candidates": some_items,
            "categories": some_labels,
            "categories_all": st.lists(st.sampled_from(LABELS), max_size=1),
            "categories_none": some_labels,
        },
        most=2,
    ),
).map(lambda parts: {**parts[0], **parts[1]})
boosts = st.dictionaries(st.sampled_from(LABELS), st.sampled_from([0.5, -0.5, 3, -20, 20, 0]), min_size=1, max_size=3)
wishes = some_of(
    {
        "boost": boosts,
        "pin": pins,
        "diversity": st.sampled_from([0, 0.2, 0.7, 1]),
        "max_per_category": st.integers(1, 4),
        "max_per": st.dictionaries(st.sampled_from(["brand", "colours", "categories"]), st.integers(1, 4)),
    },
    most=4,
)
BOOSTED = {"user_id": "clicker", "exclude_seen": "none", "boost": {"tea": 3, "cup": -0.5}}
requests = st.tuples(subjects, filters, wishes).map(lambda parts: {**parts[0], **parts[1], **parts[2]})
quick = settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])


def labels_of(item: str) -> list[str]:
    return UPDATED_CATEGORIES.get(item, list(categories_of(int(item.removeprefix("item-")))))


def texts_of(name: str, item: str) -> set[str]:
    """Values of the item in a property with a limit."""
    if name == "categories":
        return set(labels_of(item))
    if name == "colours":
        return set(COLOURS.get(item, []))
    return {BRANDS[item]} if item in BRANDS else set()


def is_filtered(request: dict[str, Any], item: str) -> bool:
    """Whether the filters of the request remove the item, pinned or not."""
    own, any_of = set(labels_of(item)), request.get("categories")
    return (
        item in SOLD_OUT
        or item in request.get("exclude", [])
        or ("candidates" in request and item not in request["candidates"])
        or bool(any_of and not own & set(any_of))
        or not own >= set(request.get("categories_all", []))
        or bool(own & set(request.get("categories_none", [])))
    )


def seen_by(request: dict[str, Any]) -> list[str]:
    history = request["history"] if "history" in request else SEEN[request["user_id"]]
    past = [item for item in history if item in ALL_ITEMS]
    return {"none": [], "recent": past[-ITEM_RING:], "all": past}[request["exclude_seen"]]


def by_definition(client: Client, codes: list[list[int]], request: dict[str, Any]) -> list[tuple[str, float, bool]]:
    """The whole list: items with scores and whether they are pinned."""
    subject = {name: request[name] for name in ("user_id", "history") if name in request}
    answer = recommend(client, **subject, exclude_seen="none", k=MAX_K)
    is_popular = answer["source"] == "popular"
    plain = {item["item_id"]: np.float32(item["score"]) for item in answer["items"]}
    assert len(plain) == ITEMS - len(SOLD_OUT)
    scores: dict[str, Any] = {}
    for item, score in plain.items():
        gains = [gain for label, gain in request.get("boost", {}).items() if gain and label in labels_of(item)]
        if is_popular:
            least = 0.5 if any(request.get("boost", {}).values()) else 0.0
            scores[item] = max(float(score), least) * float(np.exp(np.sum(gains)))
        else:
            for gain in gains:
                score += np.float32(gain)
            scores[item] = score
    relevance = {item: float(np.float32(np.log1p(s)) if is_popular else s) for item, s in scores.items()}
    asked_pins = sorted(request.get("pin", []), key=lambda pin: pin["place"])
    pinned = [
        (pin["place"], pin["item_id"])
        for pin in asked_pins
        if pin["item_id"] in plain and not is_filtered(request, pin["item_id"])
    ]
    fixed = [item for _, item in pinned]
    seen, row = seen_by(request), ALL_ITEMS.index
    left = [item for item in plain if item not in fixed and item not in seen and not is_filtered(request, item)]
    left.sort(key=lambda item: (-scores[item], row(item)))
    limits: list[tuple[str, int]] = list(request.get("max_per", {}).items())
    if "max_per_category" in request:
        limits.append(("categories", request["max_per_category"]))
    weight: float = request.get("diversity", 0)
    chosen: list[str] = []

    def is_full(item: str) -> bool:
        return any(
            sum(text in texts_of(name, other) for other in fixed + chosen) >= most
            for name, most in limits
            for text in texts_of(name, item)
        )

    def value(item: str) -> float:
        like = [sum(map(int.__eq__, codes[row(item)], codes[row(other)])) / 3 for other in fixed + chosen]
        return (1 - weight) * relevance[item] - weight * max(like, default=0.0)

    while left := [item for item in left if item not in chosen and not is_full(item)]:
        window = left[: WINDOW if weight else 1]
        chosen.append(max(window, key=lambda item: (value(item), -window.index(item))))
    whole: list[tuple[str, float, bool]] = []
    while chosen or pinned:
        if pinned and (not chosen or pinned[0][0] <= len(whole) + 1):
            item = pinned.pop(0)[1]
            whole.append((item, float(scores[item]), True))
        else:
            item = chosen.pop(0)
            whole.append((item, float(scores[item]), False))
    return whole


def listed(answer: Any) -> list[tuple[str, float, bool]]:
    return [(item["item_id"], item["score"], item.get("pinned", False)) for item in answer["items"]]


class TestLaws:
    @given(
        request=requests,
        k=st.sampled_from([1, 5, 12, MAX_K]),
        skipped=st.sampled_from([0, 1, reranking.SKIPPED_PER_ITEM]),
    )
    @example(
        request={**BOOSTED, "pin": [{"item_id": item_id(row), "place": 2 * row + 1} for row in range(6)]},
        k=12,
        skipped=reranking.SKIPPED_PER_ITEM,
    )
    @example(
        request={**BOOSTED, "candidates": ALL_ITEMS[:30], "max_per_category": 2, "diversity": 0.2}, k=60, skipped=0
    )
    @example(request={"user_id": "clicker", "exclude_seen": "none", "max_per_category": 2}, k=5, skipped=0)
    @settings(quick, max_examples=40)
    def test_lists_equal_their_definition(
        self, shop: Client, codes: list[list[int]], request: dict[str, Any], k: int, skipped: int
    ) -> None:
        # or the few items here are all looked at in the first place
        with patch.object(reranking, "SKIPPED_PER_ITEM", skipped):
            assert listed(recommend(shop, **request, k=k)) == by_definition(shop, codes, request)[:k]

    @given(request=requests)
    @quick
    def test_filters_never_leak(self, shop: Client, request: dict[str, Any]) -> None:
        for item in recommend(shop, **request, k=MAX_K)["items"]:
            assert not is_filtered(request, item["item_id"])
            assert item.get("pinned") or item["item_id"] not in seen_by(request)

    @given(request=requests, wanted=pins, k=st.integers(1, 70))
    @quick
    def test_pins_keep_their_places(
        self, shop: Client, request: dict[str, Any], wanted: list[dict[str, Any]], k: int
    ) -> None:
        shown = recommend(shop, **{**request, "pin": wanted, "k": k})["items"]
        for pin in wanted:
            if pin["place"] <= len(shown) and pin["item_id"] in ALL_ITEMS and not is_filtered(request, pin["item_id"]):
                place = [item["item_id"] for item in shown].index(pin["item_id"])
                assert shown[place]["pinned"]
                # only at the end of a list, where nothing but pins is left, is there too little for its place
                is_at_the_end = all(item.get("pinned") for item in shown[place:])
                assert place + 1 == pin["place"] or (place + 1 < pin["place"] and is_at_the_end)

    @given(request=requests, most=st.integers(1, 4))
    @quick
    def test_max_per_category_is_respected(self, shop: Client, request: dict[str, Any], most: int) -> None:
        shown = recommend(shop, **{**request, "pin": [], "max_per_category": most, "k": MAX_K})["items"]
        held = [label for item in shown for label in labels_of(item["item_id"])]
        assert all(held.count(label) <= most for label in held)

    @given(request=requests, most=st.integers(1, 4), name=st.sampled_from(["brand", "colours"]))
    @quick
    def test_max_per_property_is_respected(self, shop: Client, request: dict[str, Any], most: int, name: str) -> None:
        shown = recommend(shop, **{**request, "pin": [], "max_per": {name: most}, "k": MAX_K})["items"]
        held = [text for item in shown for text in texts_of(name, item["item_id"])]
        assert all(held.count(text) <= most for text in held)

    @given(subject=subjects, wish=filters, k=st.integers(1, 70))
    @quick
    def test_neutral_options_change_nothing(
        self, shop: Client, subject: dict[str, Any], wish: dict[str, Any], k: int
    ) -> None:
        plain = recommend(shop, **subject, **wish, k=k)
        neutral_rules: tuple[dict[str, Any], ...] = (
            {"diversity": 0},
            {"boost": {"tea": 0, "cup": 0.0}},
            {"pin": []},
            {"max_per_category": MAX_K},
            {"max_per": {"brand": MAX_K, "colours": MAX_K}},
            {"max_per": {}},
            {"categories_all": wish.get("categories_all", [])},
            {"cursor": ""},
        )
        for neutral in neutral_rules:
            assert recommend(shop, **{**subject, **wish, "k": k, **neutral})["items"] == plain["items"]
        is_popular = plain["source"] == "popular"
        if not (is_popular and wish.get("diversity")):
            boosted = recommend(shop, **{**subject, **wish, "k": k, "boost": {"unknown": 5}})["items"]
            least = 0.5 if is_popular else -np.inf  # of an item that nobody has chosen, under any boost
            assert boosted == [item | {"score": max(item["score"], least)} for item in plain["items"]]

    @given(request=requests, k=st.integers(3, 25))
    @quick
    def test_pages_concatenate_to_the_list(self, shop: Client, request: dict[str, Any], k: int) -> None:
        whole = listed(recommend(shop, **request, k=MAX_K))
        pages = list(all_pages(shop, {**request, "k": k}))
        assert [item for page in pages for item in listed(page)] == whole
        assert [len(page["items"]) for page in pages] == [k] * (len(whole) // k) + [len(whole) % k] * (
            len(whole) % k > 0 or not whole
        )

    @given(request=requests.filter(lambda request: "user_id" in request))
    @quick
    def test_get_equals_post(self, shop: Client, request: dict[str, Any]) -> None:
        wish = {name: wish for name, wish in request.items() if name not in ("candidates", "boost", "pin")}
        query = {name: value for name, value in wish.items() if name != "user_id"}
        if "max_per" in wish:
            query["max_per"] = [f"{name}:{most}" for name, most in wish["max_per"].items()]
        answer = shop.recommend(wish["user_id"], **query, cursor="")
        assert listed(answer) == listed(recommend(shop, **wish))
        assert answer["cursor"] == recommend(shop, **wish, cursor="")["cursor"]

    @given(batch=st.lists(requests, min_size=2, max_size=6), k=st.integers(1, 9))
    @settings(quick, max_examples=8)
    def test_a_batch_equals_single_requests(self, shop: Client, batch: list[dict[str, Any]], k: int) -> None:
        results = recommend(shop, requests=[{**request, "k": k} for request in batch])["results"]
        for request, result in zip(batch, results, strict=True):
            alone = recommend(shop, **request, k=k)
            assert item_ids(result) == item_ids(alone)


class TestDecisions:
    def test_pins_of_unavailable_items_are_skipped(self, shop: Client) -> None:
        plain = item_ids(recommend(shop, user_id="clicker", k=5))
        for wish in ({}, {"exclude": ["item-33"]}):
            dropped = [*SOLD_OUT, "unheard-of", *wish.get("exclude", [])]
            pin = [{"item_id": item, "place": place + 1} for place, item in enumerate(dropped)]
            assert item_ids(recommend(shop, user_id="clicker", k=5, pin=pin, **wish)) == plain

    def test_a_pin_overrides_seen_filters(self, shop: Client) -> None:
        seen = CLICKS[-1]
        answer = recommend(shop, user_id="clicker", k=5, exclude_seen="all", pin=[{"item_id": seen, "place": 3}])
        assert item_ids(answer)[2] == seen
        assert item_ids(answer).count(seen) == 1

    def test_pins_exceed_category_limits_and_count_towards_them(self, shop: Client) -> None:
        tea = [item for item in ALL_ITEMS if labels_of(item) == ["tea"]][:4]
        pin = [{"item_id": item, "place": place + 1} for place, item in enumerate(tea)]
        shown = item_ids(recommend(shop, user_id="clicker", k=MAX_K, pin=pin, max_per_category=2))
        assert shown[:4] == tea
        assert not any("tea" in labels_of(item) for item in shown[4:])

    def test_a_list_may_consist_of_a_thousand_pins(self, shop: Client) -> None:
        pin = [{"item_id": f"item-{n}", "place": MAX_K - n} for n in range(MAX_K)]
        shown = item_ids(recommend(shop, user_id="clicker", k=MAX_K, pin=pin))
        assert shown == [item for item in reversed(ALL_ITEMS) if item not in SOLD_OUT]

    def test_explanations_contain_boosts_and_pins(self, shop: Client) -> None:
        request = {"user_id": "clicker", "k": 20, "boost": {"tea": 1.5, "cup": -1}, "explain": True}
        for item in recommend(shop, **request, pin=[{"item_id": "item-22", "place": 2}])["items"]:
            parts = item["explanation"]
            gain = 1.5 * ("tea" in labels_of(item["item_id"])) - ("cup" in labels_of(item["item_id"]))
            assert parts["boost"] == pytest.approx(gain)
            adds = sum(word["adds"] for word in parts["codewords"]) + parts["other_codewords"]
            assert item["score"] == pytest.approx(adds + parts["bias"] + parts["follows"] + gain, abs=1e-4)


def test_limits_per_property_apply_to_values_just_put(client: Client) -> None:
    assert client.post("/v1/items", json=[{"item_id": "item-1", "properties": {"brand": "first"}}]).status_code == 200
    recommend(client, history=["item-2"], max_per={"brand": 1})
    said = [{"item_id": item, "properties": {"brand": f"b{place // 2}"}} for place, item in enumerate(ALL_ITEMS)]
    assert client.post("/v1/items", json=said).status_code == 200
    shown = item_ids(recommend(client, history=["item-2"], exclude_seen="none", k=MAX_K, max_per={"brand": 1}))
    assert sorted(ALL_ITEMS.index(item) // 2 for item in shown) == list(range(len(ALL_ITEMS) // 2))


def test_a_limit_on_an_unused_property_has_no_effect(client: Client) -> None:
    assert client.request("PUT", "/v1/admin/properties", json={"items": {"brand": "text"}}).status_code == 200
    limited = {"history": ["item-2"], "k": 20, "max_per": {"brand": 1}}

    def answers() -> bool:  # once the type has reached the process
        return client.post("/v1/recommendations", json=limited).status_code == 200

    wait_until(answers)
    assert item_ids(recommend(client, **limited)) == item_ids(recommend(client, history=["item-2"], k=20))


def test_limits_per_category_apply_to_categories_just_put(client: Client) -> None:
    """The first list already counts the new categories."""
    item_updates = [{"item_id": item, "categories": [f"shelf-{place // 2}"]} for place, item in enumerate(ALL_ITEMS)]
    assert client.post("/v1/items", json=item_updates).status_code == 200
    client.click("ada", *CLICKS)
    first, second = (
        item_ids(recommend(client, user_id="ada", k=MAX_K, exclude_seen="all", max_per_category=1)) for _ in range(2)
    )
    assert first == second
    places = [ALL_ITEMS.index(item) // 2 for item in first]
    assert sorted(places) == sorted(set(places))
    seen = {ALL_ITEMS.index(item) for item in CLICKS}
    assert set(places) == {place // 2 for place in range(len(ALL_ITEMS)) if place not in seen}

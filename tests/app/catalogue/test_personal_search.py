"""Search with and without a user, over HTTP on both stores, against a definition in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from model.artifact.string_table import NO_MATCH, TYPO
from tests.app.conftest import ITEMS, SEEN, SOLD_OUT, Client, item_id
from tests.app.support import ALL_ITEMS, assert_refused, item_ids
from tests.model.artifact.search_oracle import title_level, whole_level

RETITLED = {"item-5": "Thing, green", "item-10": "Greens and things", "item-15": "Gren", "item-20": "Blackest nothing"}
OF_MODEL = {
    item_id(row): "" if row % 5 == 0 else f"{'Green' if row % 2 else 'Black'} thing number {row}"
    for row in range(ITEMS)
}
TITLES = OF_MODEL | RETITLED
UNLEARNED = {
    "new-1": "Green thing",
    "new-2": "A green thing",
    "new-3": "things, grene",
    "new-4": "A black box",
    "new-5": "Green thing of the next century",
    "new-6": "Black thing of the last century",
}
DATES = {"new-5": {"available_from": "2100-01-01T00:00:00Z"}, "new-6": {"available_until": "2000-01-01T00:00:00Z"}}
NOT_AVAILABLE = {*SOLD_OUT, "new-2", *DATES}
QUERIES = [
    "green thing",
    "thing green",
    "grene",
    "thign",
    "item-1",
    "black",
    "numbr blcak",
    "number 17",
    "e",
    "zzzz",
    "",
]
MOST = 100


@pytest.fixture(scope="module")
def titled(shop: Client) -> Client:
    posted: list[dict[str, Any]] = [{"item_id": name, "title": title} for name, title in RETITLED.items()]
    posted += [
        {"item_id": name, "title": title, "available": name != "new-2", **DATES.get(name, {})}
        for name, title in UNLEARNED.items()
    ]
    assert shop.post("/v1/items", json=posted).status_code == 200
    return shop


def search(client: Client, query: str, **params: Any) -> list[str]:
    response = client.get("/v1/items", params={"query": query, **params})
    assert response.status_code == 200, response.text
    return item_ids(response.json())


def level(query: str, name: str, *, with_typos: bool) -> int:
    of_title = title_level(query, (TITLES | UNLEARNED)[name], with_typos=with_typos)
    return min(of_title, whole_level(query, name))


def levels_of_learned(query: str, enough: int) -> dict[str, int]:
    """Match levels of learned items; includes typos if too few items match without."""
    for with_typos in (False, True):
        levels = {name: level(query, name, with_typos=with_typos) if query else 0 for name in ALL_ITEMS}
        found = {name: one for name, one in levels.items() if one < NO_MATCH}
        if len(found) >= enough:
            break
    return found


def unlearned(query: str) -> list[tuple[int, str]]:
    """Levels and ids of matching cold items, closest first."""
    return sorted((one, name) for name in UNLEARNED if (one := level(query, name, with_typos=True)) < NO_MATCH)


@pytest.mark.parametrize("limit", [3, 20, MOST])
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("user_id", ["clicker", "nobody"])
def test_results_for_a_user_are_ranked_by_score_and_match_level(
    titled: Client, user_id: str, query: str, limit: int
) -> None:
    plain = titled.recommend(user_id, k=ITEMS, exclude_seen="none")
    is_popular = plain["source"] == "popular"
    assert is_popular == (user_id == "nobody")
    scores = {item["item_id"]: item["score"] for item in plain["items"]}
    gained = {
        name: max(scores[name], 0.5) * float(np.exp(-one)) if is_popular else scores[name] - one
        for name, one in levels_of_learned(query, limit).items()
        if name in scores
    }
    found = search(titled, query, user_id=user_id, limit=limit)
    learned = [name for name in found if name in TITLES]
    best = sorted(gained.values(), reverse=True)[:limit]
    assert [gained[name] for name in learned] == pytest.approx(best, abs=1e-4)
    assert len({*found}) == len(found)
    others = [name for _, name in unlearned(query) if name not in NOT_AVAILABLE]
    assert found == learned + others[: limit - len(learned)]
    if is_popular:
        assert learned == sorted(gained, key=lambda name: (-gained[name], ALL_ITEMS.index(name)))[:limit]


@pytest.mark.parametrize("limit", [3, MOST])
@pytest.mark.parametrize("query", QUERIES)
def test_results_without_a_user_are_ranked_by_match_level(titled: Client, query: str, limit: int) -> None:
    popular = search(titled, "", limit=MOST)[:ITEMS]
    levels = {name: level(query, name, with_typos=True) if query else 0 for name in popular}
    learned = sorted((name for name in popular if levels[name] < NO_MATCH), key=lambda name: levels[name])
    expected = [name for name in learned if levels[name] < TYPO]
    expected += [name for one, name in unlearned(query) if one < TYPO]
    expected += [name for name in learned if levels[name] == TYPO]
    expected += [name for one, name in unlearned(query) if one == TYPO]
    assert search(titled, query, limit=limit) == expected[:limit]


def test_results_include_bought_items_but_not_sold_out_ones(titled: Client) -> None:
    found = search(titled, "", user_id="clicker", limit=MOST)
    assert {*SEEN["clicker"]} - {*SOLD_OUT} <= {*found}
    assert not {*found} & NOT_AVAILABLE
    assert {*SOLD_OUT} <= {*search(titled, "", limit=MOST)}


def test_items_outside_their_dates_are_unavailable(titled: Client) -> None:
    assert titled.request("PUT", f"/v1/items/{item_id(7)}", json=DATES["new-5"]).status_code == 200
    try:
        found = titled.get("/v1/items", params={"query": "thing", "limit": MOST}).json()["items"]
        hidden = {item["item_id"] for item in found if not item["available"]}
        assert {item_id(7), *DATES} <= hidden <= {item_id(7), *NOT_AVAILABLE}
        assert not {item_id(7), *DATES} & {*search(titled, "thing", user_id="clicker", limit=MOST)}
        for name in (item_id(7), *DATES):
            assert titled.get(f"/v1/items/{name}").json()["available"] is False
    finally:
        titled.request("PUT", f"/v1/items/{item_id(7)}", json={"available_from": None})


def test_searches_are_not_counted_as_lists(titled: Client) -> None:
    def lists() -> list[str]:
        lines = titled.get("/metrics").text.splitlines()
        return [line for line in lines if line.startswith("lisarec_recommendations")]

    assert titled.recommend("clicker")["items"]
    before = lists()
    assert before
    search(titled, "green", user_id="clicker")
    assert lists() == before


@pytest.mark.parametrize(
    "query", ["user_id=a%C2%85b", "user_id=", "user_id=ada&user_id=bea", "user_id=ada&limit=0", "user=ada"]
)
def test_the_user_must_be_one_valid_id(titled: Client, query: str) -> None:
    assert_refused(titled.get(f"/v1/items?query=tea&{query}"), 422)

"""Impressions and rotation over HTTP: impressions that count lower items, and only in rotated lists."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from app.http.auth.seal_keys import rotate
from app.recommendation.ranking import reranking, rotation
from app.settings import Settings
from storage.state.event import Event
from tests.app.conftest import ITEMS, WEIGHTS, Client, categories_of, item_id, write_model
from tests.app.recommendation.ranking import event_shop
from tests.app.recommendation.ranking.event_shop import NAMES, NOW_S, ids, names, others
from tests.app.support import ALL_ITEMS, SECRET, assert_refused, item_ids, recommend
from tests.storage.oracles.naive_users import NaiveUsers
from tests.storage.oracles.random_events import as_impression
from tests.storage.redis.servers import RedisServer

DAY_S = 86_400
ROOM = 56  # items that a state has of those that were shown
AGES_S = [0, 59, DAY_S, 6 * DAY_S, 7 * DAY_S, 8 * DAY_S, 900 * DAY_S]
EVERYTHING = {"k": ITEMS, "exclude_seen": "none"}
numbers = count()

ages = st.sampled_from(AGES_S)
some_items = st.lists(st.sampled_from([*ALL_ITEMS[:8], "unheard-of"]), min_size=1, max_size=8, unique=True)
most_items = st.permutations(ALL_ITEMS).map(lambda names: names[:50])
shows = st.tuples(st.just("show"), names, ids, some_items | some_items | most_items, ages)
posts = st.tuples(st.just("post"), names, ids, st.integers(0, 7), st.sampled_from(sorted(WEIGHTS)), ages)
histories = st.lists(shows | shows | posts | others, min_size=1, max_size=12)
wishes = st.fixed_dictionaries(
    {"rotation": st.sampled_from([0.1, 0.5, 1.0]), "rotation_days": st.sampled_from([0.5, 7, 365])}
)


class Shop(event_shop.Shop):
    """A service with a fixed clock for the age of impressions."""

    @override
    def apply(self, users: NaiveUsers, prefix: str, what: str, name: str, *rest: Any) -> None:
        if what not in ("post", "show"):
            super().apply(users, prefix, what, name, *rest)
            return
        user_id = f"{prefix}-{name}"
        event_id, about, *kind, age_s = rest
        items = about if what == "show" else [item_id(about)]
        own_kind = kind[0] if kind else "impression"
        event = Event(event_id, user_id, items[0], own_kind, (NOW_S - age_s) * 1_000_000, None)
        event = as_impression(event, items) if what == "show" else event
        posted = {"items": items} if what == "show" else {"item_id": items[0]}
        posted |= {"event_id": event_id, "user_id": user_id, "type": own_kind, "timestamp": NOW_S - age_s}
        answer = self.client.post("/v1/events", json=posted)
        assert answer.status_code == 200, answer.text
        counts = answer.json()
        assert (counts["accepted"], counts["unknown_items"], counts["unknown_types"]) == (users.post(event), 0, 0)

    def shown(self, user_id: str) -> dict[str, tuple[int, int]]:
        """Impressions of the user, as the service returns them."""
        answer = self.client.get(f"/v1/users/{user_id}")
        if answer.status_code == 404:
            return {}
        items = answer.json()["shown_items"]
        last = [datetime.fromisoformat(item["last"]).timestamp() for item in items]
        assert last == sorted(last, reverse=True)
        return {item["item_id"]: (item["count"], int(at)) for item, at in zip(items, last, strict=True)}


@pytest.fixture(scope="module")
def shop(store_server: RedisServer | None, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    directory = tmp_path_factory.mktemp("shop")
    rotate(directory / "seal")
    made = Settings(model_dir=model_dir, data_dir=directory / "state", seal_keys_file=directory / "seal")
    if store_server is not None:
        made = made.model_copy(update={"redis_url": store_server.url, "archive_dir": directory / "archive"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotation, "now_s", lambda: float(NOW_S))
        client = Client(made)
        client.click("rob", *ALL_ITEMS[:9])
        shown = {"type": "impression", "items": ALL_ITEMS[:50], "timestamp": NOW_S}
        for user_id in ("rob", "new"):
            assert client.post("/v1/events", json=[{"user_id": user_id, **shown}] * 3).json()["accepted"] == 3
        yield Shop(client, None if store_server is None else (store_server, directory / "archive"))
        client.close()


def naive_shown(events: list[Event]) -> dict[str, tuple[int, int]]:
    """The oracle: by item how many impressions have it since it was chosen, and the newest time, in the log's order.

    Where 56 others are known, the one that was shown longest ago is forgotten. Which one that is of several is left to
    the oracle of states; the examples here know of no such.
    """
    shown: dict[str, tuple[int, int]] = {}
    for event in events:
        time_s = event.timestamp_us // 1_000_000
        if event.type == "impression":
            for name in event.items:
                if name not in shown and len(shown) == ROOM:
                    del shown[min(shown, key=lambda one: shown[one][1])]
                times, newest = shown.get(name, (0, 0))
                shown[name] = times + 1, max(newest, time_s)
        elif WEIGHTS[event.type] > 0:
            shown.pop(event.item_id, None)
    return shown


def is_told_by_the_oracle(events: list[Event]) -> bool:
    return len({name for event in events for name in event.items}) <= ROOM


def gain(shown: dict[str, tuple[int, int]], name: str, wish: dict[str, float]) -> float:
    """Gain of the item's score by the documented formula."""
    times, newest = shown.get(name, (0, 0))
    tired = min(max(1 - (NOW_S - newest) / (wish["rotation_days"] * DAY_S), 0), 1) if times else 0
    return times * math.log(max(1 - wish["rotation"] * tired, 1e-6))


@given(histories, wishes)
@settings(max_examples=15)
def test_rotation_lowers_items_by_the_impressions_that_count(
    shop: Shop, history: list[Any], wish: dict[str, float]
) -> None:
    users, prefix = NaiveUsers(), f"user-{next(numbers)}"
    for step in history:
        shop.apply(users, prefix, *step)
    client = shop.client
    assert client.request("PUT", "/v1/admin/scenarios/fresh", json={**wish, **EVERYTHING}).status_code == 200
    for user_id in (f"{prefix}-{name}" for name in NAMES):
        shown = shop.shown(user_id)
        events = users.counted(user_id)
        if is_told_by_the_oracle(events):
            assert shown == {name: of for name, of in naive_shown(events).items() if name in ALL_ITEMS}
        plain = client.recommend(user_id, **EVERYTHING)
        is_popular = plain["source"] == "popular"
        scores = {item["item_id"]: item["score"] for item in plain["items"]}
        for name in scores.keys() & shown.keys():
            lost = gain(shown, name, wish)
            scores[name] = scores[name] * math.exp(lost) if is_popular else scores[name] + lost
        expected = sorted(scores.values(), reverse=True)
        for found in (
            client.recommend(user_id, **EVERYTHING, **wish),
            recommend(client, user_id=user_id, scenario="fresh"),
        ):
            assert found["source"] == plain["source"]
            assert sorted(item_ids(found)) == sorted(ALL_ITEMS)
            assert [item["score"] for item in found["items"]] == pytest.approx(expected, rel=1e-4, abs=1e-4)
            assert {item["item_id"]: item["score"] for item in found["items"]} == pytest.approx(
                scores, rel=1e-4, abs=1e-4
            )
        few = client.recommend(user_id, **EVERYTHING | {"k": 7}, **wish)
        assert [item["score"] for item in few["items"]] == pytest.approx(expected[:7], rel=1e-4, abs=1e-4)


def seen_by(client: Client, user_id: str) -> Any:
    """The state of the user without impressions and the number of events."""
    state = client.get(f"/v1/users/{user_id}").json()
    return {name: value for name, value in state.items() if name not in ("user_id", "shown_items", "event_count")}


class TestImpressions:
    def shown(self, user_id: str, answer: Any, items: list[str]) -> dict[str, Any]:
        of = {"recommendation_id": answer["recommendation_id"]}
        return {"user_id": user_id, "type": "impression", "items": items, **of}

    def test_change_no_state_list_trend_or_tally(self, shop: Shop) -> None:
        client = shop.client
        for user_id in ("plain", "shown"):
            client.click(user_id, *ALL_ITEMS[:9])
        answer = client.recommend("shown", k=20)

        def known() -> Any:
            client.runner.run(client.service.signals.sync())
            stats = client.get("/v1/stats").json()
            chosen = [(one["events"], one["value"]) for one in (*stats["places"], *stats["scenarios"])]
            return item_ids(client.get("/v1/items/trending").json()), [one for one in chosen if any(one)]

        before = known()
        for number in range(5):
            posted = client.post("/v1/events", json=self.shown("shown", answer, ALL_ITEMS[number : number + 50]))
            assert posted.json()["accepted"] == 1
        assert known() == before
        assert seen_by(client, "shown") == seen_by(client, "plain")
        for wish in ({}, {"exclude_seen": "all"}, {"explain": True}, {"cursor": ""}):
            lists = [recommend(client, user_id=user_id, k=30, **wish)["items"] for user_id in ("plain", "shown")]
            assert lists[0] == lists[1]

    def test_are_logged_once_and_round_trip(self, shop: Shop) -> None:
        posted: dict[str, Any] = {"event_id": "shown-1", "user_id": "logged", "items": ["item-3", "item-1"]}
        posted |= {"type": "impression", "timestamp": 1.7e9, "recommendation_id": "r"}
        one = {
            "event_id": "shown-2",
            "user_id": "logged",
            "type": "impression",
            "item_id": "item-5",
            "timestamp": 1.7e9,
        }
        for expected in ((2, 0), (0, 2)):
            counts = shop.client.post("/v1/events", json=[posted, one]).json()
            assert (counts["accepted"], counts["duplicates"]) == expected
        logged = shop.client.get("/v1/users/logged/events").json()["events"]
        assert logged[0] == posted
        assert logged[1]["items"] == ["item-5"]
        assert set(shop.shown("logged")) == {"item-1", "item-3", "item-5"}
        (entry, _) = shop.client.log("logged")
        assert (entry.items, entry.item_id) == (("item-3", "item-1"), "")

    def test_exclude_recently_shown_items_if_requested(self, shop: Shop) -> None:
        times = {"item-1": 30, "item-2": 3_000, "item-3": 30}
        for name, age_s in times.items():
            posted = {"user_id": "again", "type": "impression", "items": [name], "timestamp": time.time() - age_s}
            assert shop.client.post("/v1/events", json=posted).status_code == 200
        found = shop.client.recommend("again", k=ITEMS, exclude_events="impression", within="30m")
        assert {*ALL_ITEMS} - {*item_ids(found)} == {"item-1", "item-3"}

    @pytest.mark.parametrize(
        "wrong",
        [
            {"items": []},
            {"items": [f"i{n}" for n in range(51)]},
            {"items": ["item-1", "item-1"]},
            {"items": ["a\x85b"]},
            {"items": ["a", 7]},
            {"items": "item-1"},
            {"items": [SECRET, "."]},
            {"items": ["item-1"], "item_id": "item-1"},
            {"items": ["item-1"], "type": "click"},
            {"item_id": "item-1\nitem-2"},
            {},
        ],
    )
    def test_that_are_invalid_are_refused(self, shop: Shop, wrong: dict[str, Any]) -> None:
        assert_refused(shop.client.post("/v1/events", json={"user_id": "ada", "type": "impression"} | wrong), 422)

    def test_are_refused_in_sealed_states(self, shop: Shop) -> None:
        for about in ({"items": ["item-1"]}, {"item_id": "item-1"}):
            body = {"events": [{"type": "impression", **about}]}
            assert_refused(shop.client.post("/v1/portable/events", json=body), 422)

    def test_are_folded_by_the_next_model(self, tmp_path: Path) -> None:
        for name, seed in (("one", 7), ("two", 11)):
            write_model(tmp_path / "models" / name, seed)
        client = Client(Settings(model_dir=tmp_path / "models" / "one", data_dir=tmp_path / "state"))
        posted = {"user_id": "stays", "type": "impression", "items": ALL_ITEMS[:30], "timestamp": 1.7e9}
        client.post("/v1/events", json=posted)
        client.click("stays", "item-4")
        before = client.get("/v1/users/stays").json()["shown_items"]
        assert {one["item_id"] for one in before} == {*ALL_ITEMS[:30]} - {"item-4"}
        assert client.post("/v1/admin/generations/two/activate").status_code == 200
        after = client.get("/v1/users/stays").json()
        assert (after["generation"], after["shown_items"]) == ("two", before)
        client.close()


class TestRotatedLists:
    @pytest.mark.parametrize("user_id", ["rob", "new"])
    @pytest.mark.parametrize(
        "wish",
        [
            {"categories": ["tea"]},
            {"candidates": ALL_ITEMS[3:9]},
            {"filter": "item.title.size() > 5"},
            {"exclude": ALL_ITEMS[2:], "diversity": 0.5},
            {"max_per_category": 3},
            {"categories": ["cup"], "boost": {"cup": 0.7, "tea": -1.0}, "cursor": ""},
            {"pin": [{"item_id": "item-3", "place": 2}]},
        ],
    )
    def test_hide_no_allowed_item(self, shop: Shop, user_id: str, wish: dict[str, Any]) -> None:
        for k in (5, ITEMS):
            asked = {"user_id": user_id, "exclude_seen": "none", "k": k} | wish
            plain, rotated = recommend(shop.client, **asked), recommend(shop.client, **asked, rotation=1)
            if k == 5 or "max_per_category" not in wish:  # which items fill a cap first makes a difference
                assert len(rotated["items"]) == len(plain["items"])
            if k == ITEMS and "max_per_category" not in wish:
                assert sorted(item_ids(rotated)) == sorted(item_ids(plain))
        if "pin" in wish:
            assert item_ids(rotated)[1] == "item-3"

    @pytest.mark.parametrize("user_id", ["rob", "new"])
    def test_of_strength_1_begin_with_unshown_items_and_page_consistently(self, shop: Shop, user_id: str) -> None:
        asked = {"user_id": user_id, "exclude_seen": "none", "rotation": 1.0, "rotation_days": 30}
        whole = item_ids(recommend(shop.client, **asked, k=ITEMS))
        if user_id == "rob":  # for others a popular item that was shown is still ahead of one that nobody has used
            assert {*whole[:10]} == {*ALL_ITEMS[50:]}
        pages, cursor = [], ""
        for _ in range(6):
            page = recommend(shop.client, **asked, k=11, cursor=cursor)
            pages += item_ids(page)
            cursor = page["cursor"]
        assert pages == whole
        assert cursor is None

    @pytest.mark.parametrize("user_id", ["rob", "new"])
    def test_continue_below_items_removed_by_limits(
        self, shop: Shop, user_id: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reranking, "SKIPPED_PER_ITEM", 0)  # so the first scan finds too few items
        asked = {"user_id": user_id, "exclude_seen": "none", "rotation": 1.0, "rotation_days": 30}
        whole = item_ids(recommend(shop.client, **asked, k=ITEMS))
        for most in range(1, 9):
            expected, listed = list[str](), Counter[str]()
            for name in whole:
                categories = categories_of(ALL_ITEMS.index(name))
                if all(listed[category] < most for category in categories):
                    expected.append(name)
                    listed.update(categories)
            for k in range(1, 25):
                assert item_ids(recommend(shop.client, **asked, k=k, max_per_category=most)) == expected[:k]

    def test_explain_the_loss_of_each_item(self, shop: Shop) -> None:
        found = recommend(shop.client, user_id="rob", rotation=0.5, explain=True, k=ITEMS, exclude_seen="none")
        for item in found["items"]:
            made = item["explanation"]
            parts = [codeword["adds"] for codeword in made["codewords"]]
            total = sum(parts) + made["other_codewords"] + made["bias"] + made["follows"] + made["rotation"]
            assert item["score"] == pytest.approx(total, rel=1e-3, abs=1e-3)
            lost = 3 * math.log(0.5) if item["item_id"] in ALL_ITEMS[9:50] else 0.0
            if item["item_id"] not in ALL_ITEMS[:9]:
                assert made["rotation"] == pytest.approx(lost)

    def test_are_filled_by_the_fallback(self, shop: Shop) -> None:
        made = {"filter": "'tea' in item.categories", "fallback": "true", "rotation": 1.0, "k": ITEMS}
        assert shop.client.request("PUT", "/v1/admin/scenarios/filled", json=made).status_code == 200
        found = recommend(shop.client, user_id="rob", scenario="filled", exclude_seen="none")
        assert sorted(item_ids(found)) == sorted(ALL_ITEMS)
        filled = [item["item_id"] for item in found["items"] if item.get("fallback")]
        assert filled == item_ids(found)[-len(filled) :]
        unshown = [name for name in filled if name in ALL_ITEMS[50:]]
        assert filled[: len(unshown)] == unshown

    def test_follow_the_scenario(self, shop: Shop) -> None:
        put = shop.client.request("PUT", "/v1/admin/scenarios/turned", json={"rotation": 0.5, "rotation_days": 3})
        assert put.status_code == 200
        assert_refused(shop.client.get("/v1/users/rob/recommendations?scenario=turned&rotation=0"), 422)
        for wrong in ({"rotation": 1.1}, {"rotation": -0.1}, {"rotation_days": 0}, {"rotation_days": 366}):
            assert_refused(shop.client.post("/v1/recommendations", json={"user_id": "rob", **wrong}), 422)
            assert_refused(shop.client.request("PUT", "/v1/admin/scenarios/wrong", json=wrong), 422)

"""Both recommendation calls: they learn from events, respect filters, and batches equal single requests."""

from __future__ import annotations

import json
import random
import re
import threading
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.recommendation import executor
from app.recommendation.cost import FEW_CATEGORIES, SHORT_LOG
from app.recommendation.ranking import plain_ranking, query_builder, trending
from app.recommendation.ranking.plain_ranking import PlainRanker
from app.schemas.fields import MAX_ITEM_IDS, MAX_K
from app.schemas.recommendations import MAX_REQUESTS
from model.artifact.model_directory import load
from model.inference.engine import Engine
from model.inference.pipeline import StageSeconds
from storage.state.layout import ITEM_RING
from tests.app.conftest import CATEGORIES, ITEMS, Client, categories_of, item_id
from tests.app.support import ALL_ITEMS, item_ids, recommend, same_items

OF_ONE_ANSWER = re.compile(rb'"recommendation_id":"[^"]+"')


def bodies(client: Client, users: list[str]) -> list[bytes]:
    """Responses to each user's requests, alone and in parallel, without generated ids."""
    requests = [{"user_id": user} | ({} if k is None else {"k": k}) for user in users for k in (None, 1, 7, 2 * ITEMS)]
    answers = [client.post("/v1/recommendations", json=request) for request in requests]
    answers += [client.get(f"/v1/users/{user}/recommendations") for user in users]
    answers.append(client.post("/v1/recommendations", json={"requests": requests}))
    assert {answer.status_code for answer in answers} == {200}
    return [OF_ONE_ANSWER.sub(b"", answer.content) for answer in answers]


class TestLearning:
    def test_every_click_changes_the_recommendations(self, client: Client) -> None:
        rankings = [item_ids(client.recommend("ada", exclude_seen="none"))]
        for item in ("item-1", "item-2", "item-3"):
            client.click("ada", item)
            rankings.append(item_ids(client.recommend("ada", exclude_seen="none")))
        assert len({tuple(ranking) for ranking in rankings}) == len(rankings)

    def test_a_response_has_ids_of_its_items_and_its_own(self, client: Client) -> None:
        client.click("ada", "item-1")
        answer = client.recommend("ada", k=ITEMS, exclude_seen="none")
        assert (answer["user_id"], answer["generation"], answer["source"]) == ("ada", "tiny", "personalised")
        assert answer["recommendation_id"] != client.recommend("ada")["recommendation_id"]
        assert sorted(item_ids(answer)) == sorted(ALL_ITEMS)
        scores = [item["score"] for item in answer["items"]]
        assert scores == sorted(scores, reverse=True)
        titles = {item["item_id"]: item.get("title") for item in answer["items"]}
        assert titles["item-7"] == "Green thing number 7"
        assert titles["item-5"] is None  # it has none

    def test_scores_equal_the_engine_on_the_state(self, client: Client, model_dir: Any) -> None:
        client.click("ada", "item-9", "item-4", "item-9")
        user = client.get("/v1/users/ada").json()
        model = load(model_dir)
        queries = Engine(model).step(
            np.array([user["histogram"]], np.float32), np.array([9]), np.array([[9, 4, 9, -1, -1]])
        )
        (rows,), (scores,) = Engine(model).top_k(queries, 5)
        answer = client.recommend("ada", k=5, exclude_seen="none")
        assert item_ids(answer) == [item_id(row) for row in rows]
        np.testing.assert_allclose([item["score"] for item in answer["items"]], scores, rtol=1e-5)

    def test_captured_batches_give_the_same_lists(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        client.click("ada", "item-9", "item-4")
        client.click("bob", "item-9", "item-5")
        wishes: list[dict[str, Any]] = [
            {"user_id": name, "k": 5, "exclude": [item_id(row) for row in range(first, ITEMS, 2)]}
            for first, name in enumerate(("ada", "bob"))
        ]
        boosted = [wish | {"boost": {"tea": 2.0}} for wish in wishes]
        longer, limited = wishes[1] | {"k": 7}, wishes[1] | {"candidates": ["item-3", "item-4"]}
        batches = [wishes[:1], boosted[:1], wishes, boosted, [wishes[0], longer], [wishes[0], limited]]
        expected = [[recommend(client, **wish) for wish in batch] for batch in batches]
        asked: list[tuple[int, int]] = []
        rank_states = Engine.rank_states

        def counted(engine: Engine, states: Any, k: int, *options: Any, **named: Any) -> Any:
            asked.append((len(states.last_items), k))
            return rank_states(engine, states, k, *options, **named)._replace(device_s=StageSeconds(0.25, 0.5, 0.25))

        monkeypatch.setattr(Engine, "rank_states", counted)
        for captured, calls in ((False, [(1, 5), (1, 5)]), (True, [(1, 5), (1, 5), (2, 5)])):
            monkeypatch.setattr(Engine, "captures", lambda *_, is_captured=captured: is_captured)
            for batch, answers in zip(batches, expected, strict=True):
                found = recommend(client, requests=batch)["results"]
                assert all(map(same_items, found, answers))
            assert asked == calls
            asked.clear()
        assert 'lisarec_engine_seconds_sum{stage="device"} 5.0' in client.get("/metrics").text

    def test_a_history_equals_a_user_with_these_clicks(self, client: Client) -> None:
        history = ["item-1", "item-2", "item-1", "item-30"]
        client.click("ada", *history)
        for rule in ("none", "recent", "all"):
            as_history = recommend(client, history=history, exclude_seen=rule)
            assert as_history["user_id"] is None
            assert same_items(as_history, client.recommend("ada", exclude_seen=rule))
        assert client.get("/v1/users/None").status_code == 404  # nothing was stored

    def test_a_late_event_changes_the_state_but_not_the_last_item(self, client: Client) -> None:
        for item, timestamp in (("item-1", 2_000), ("item-2", 1_000)):
            client.post("/v1/events", json={"user_id": "ada", "item_id": item, "timestamp": timestamp})
        assert client.get("/v1/users/ada").json()["last_item_id"] == "item-1"


class TestPopular:
    def test_unknown_users_get_popular_items(self, shared_client: Client) -> None:
        popular = shared_client.get("/v1/items/popular").json()["items"]
        for answer in (shared_client.recommend("nobody"), recommend(shared_client, user_id="nobody")):
            assert (answer["source"], answer["items"]) == ("popular", popular)

    def test_a_history_of_unknown_items_gets_popular_items(self, shared_client: Client) -> None:
        for history in ([], ["nothing", "known"]):
            assert recommend(shared_client, history=history)["source"] == "popular"

    def test_a_user_without_weighted_events_gets_unseen_popular_items(self, client: Client) -> None:
        favourite = client.get("/v1/items/popular").json()["items"][0]["item_id"]
        client.post("/v1/events", json={"user_id": "ada", "item_id": favourite, "type": "dislike"})
        client.post("/v1/events", json={"user_id": "ada", "item_id": "not-in-the-catalogue"})
        answer = client.recommend("ada")
        assert answer["source"] == "popular"
        assert favourite not in item_ids(answer)
        assert favourite in item_ids(client.recommend("ada", exclude_seen="none"))

    def test_all_users_get_popular_items_if_the_store_fails(self, client: Client) -> None:
        client.click("ada", "item-1")
        client.close_store()
        for rule in ("none", "recent", "all"):
            assert client.recommend("ada", exclude_seen=rule)["source"] == "popular"
        assert recommend(client, history=["item-1"])["source"] == "personalised"
        assert "lisarec_failed_state_reads_total 3.0" in client.get("/metrics").text
        assert client.get("/readyz").status_code == 200


class TestSeen:
    def test_exclude_seen_recent_uses_the_ring_and_all_the_log(self, client: Client) -> None:
        clicked = [item_id(row) for row in range(ITEM_RING + 6)]
        client.click("ada", *clicked)
        shown = {rule: set(item_ids(client.recommend("ada", k=ITEMS, exclude_seen=rule))) for rule in ("recent", "all")}
        assert set(ALL_ITEMS) - shown["recent"] == set(clicked[-ITEM_RING:])
        assert set(ALL_ITEMS) - shown["all"] == set(clicked)
        assert set(item_ids(client.recommend("ada", k=ITEMS, exclude_seen="none"))) == set(ALL_ITEMS)
        assert set(item_ids(client.recommend("ada", k=ITEMS))) == shown["recent"]  # the default

    def test_exclude_seen_applies_to_a_history(self, shared_client: Client) -> None:
        history = [item_id(row) for row in range(ITEM_RING + 6)]
        left_out = {"none": [], "recent": history[-ITEM_RING:], "all": history}
        for rule, seen in left_out.items():
            answer = recommend(shared_client, history=history, k=ITEMS, exclude_seen=rule)
            assert set(item_ids(answer)) == set(ALL_ITEMS) - set(seen)


CLICKS = [item_id(row % 37) for row in range(0, 200, 3)]  # many more than the ring holds
SEEN = {"clicker": CLICKS, "disliker": ["item-3", "item-4"], "nobody": []}

some_items = st.lists(st.sampled_from([*ALL_ITEMS, "unknown"]), max_size=30)
subjects = st.one_of(
    st.fixed_dictionaries({"user_id": st.sampled_from(sorted(SEEN))}), st.fixed_dictionaries({"history": some_items})
)
wishes = st.fixed_dictionaries(
    {"k": st.integers(1, ITEMS + 5), "exclude_seen": st.sampled_from(["none", "recent", "all"])},
    optional={
        "exclude": some_items,
        "candidates": some_items,
        "categories": st.lists(st.sampled_from([*CATEGORIES, "unknown"]), max_size=2),
    },
)
requests = st.tuples(subjects, wishes).map(lambda parts: {**parts[0], **parts[1]})


@pytest.fixture(scope="module")
def filled(shared_client: Client) -> Client:
    """A service that knows the users of SEEN."""
    shared_client.click("clicker", *SEEN["clicker"])
    dislikes = [{"user_id": "disliker", "item_id": item, "type": "dislike"} for item in SEEN["disliker"]]
    assert shared_client.post("/v1/events", json=dislikes).json()["accepted"] == len(dislikes)
    return shared_client


def allowed_items(request: dict[str, Any]) -> set[str]:
    """Items that the filters of a request allow, by definition."""
    history = request["history"] if "history" in request else SEEN[request["user_id"]]
    past = [item for item in history if item in ALL_ITEMS]
    seen = {"none": [], "recent": [*dict.fromkeys(past[::-1])][:ITEM_RING], "all": past}[request["exclude_seen"]]
    wanted = request.get("categories")
    return {
        item
        for row, item in enumerate(ALL_ITEMS)
        if item not in seen
        and item not in request.get("exclude", [])
        and ("candidates" not in request or item in request["candidates"])
        and (not wanted or set(wanted) & set(categories_of(row)))
    }


class TestLaws:
    @given(request=requests)
    @settings(max_examples=150)
    def test_filters_remove_exactly_the_excluded_items(self, filled: Client, request: dict[str, Any]) -> None:
        answer = recommend(filled, **request)
        shown, allowed = item_ids(answer), allowed_items(request)
        assert set(shown) <= allowed
        assert len(set(shown)) == len(shown) == min(request["k"], len(allowed))
        scores = [item["score"] for item in answer["items"]]
        assert scores == sorted(scores, reverse=True)
        has_steps = request.get("user_id") == "clicker" or set(request.get("history", [])) & set(ALL_ITEMS)
        assert answer["source"] == ("personalised" if has_steps else "popular")

    @given(batch=st.lists(requests, min_size=1, max_size=6))
    @settings(max_examples=40)
    def test_a_batch_equals_single_requests(self, filled: Client, batch: list[dict[str, Any]]) -> None:
        results = recommend(filled, requests=batch)["results"]
        for request, result in zip(batch, results, strict=True):
            alone = recommend(filled, **request)
            assert same_items(result, alone)
            assert (result["source"], result["user_id"]) == (alone["source"], alone["user_id"])

    @given(wish=wishes, user_id=st.sampled_from(sorted(SEEN)))
    @settings(max_examples=40)
    def test_get_equals_post(self, filled: Client, wish: dict[str, Any], user_id: str) -> None:
        wish.pop("candidates", None)
        assert same_items(filled.recommend(user_id, **wish), recommend(filled, user_id=user_id, **wish))


REFUSED: dict[str, tuple[Any, str | None]] = {
    "nobody asks": ({}, None),
    "both ask": ({"user_id": "ada", "history": []}, None),
    "not an object": ([], None),
    "null": (None, None),
    "bad user": ({"user_id": "a\x85b"}, "user_id"),
    "dots": ({"user_id": ".."}, "user_id"),
    "history of no ids": ({"history": [1]}, "history.0"),
    "bad id in the history": ({"history": ["item-1", "a\nb"]}, "history.1"),
    "history as text": ({"history": "item-1"}, "history"),
    "long history": ({"history": ["i"] * (MAX_ITEM_IDS + 1)}, "history"),
    "many candidates": ({"user_id": "ada", "candidates": ["i"] * (MAX_ITEM_IDS + 1)}, "candidates"),
    "many exclusions": ({"user_id": "ada", "exclude": ["i"] * (MAX_ITEM_IDS + 1)}, "exclude"),
    "many categories": ({"user_id": "ada", "categories": ["c"] * (MAX_K + 1)}, "categories"),
    "a long category": ({"user_id": "ada", "categories": ["c" * 257]}, "categories.0"),
    "a category without a name": ({"user_id": "ada", "categories": [""]}, "categories.0"),
    "bad candidate": ({"user_id": "ada", "candidates": [None]}, "candidates.0"),
    "bad exclusion": ({"user_id": "ada", "exclude": [""]}, "exclude.0"),
    "category of no text": ({"user_id": "ada", "categories": [1]}, "categories.0"),
    "lone surrogate": ({"user_id": "ada", "categories": ["\ud800"]}, "categories.0"),
    "unknown rule": ({"user_id": "ada", "exclude_seen": "some"}, "exclude_seen"),
    "k of 0": ({"user_id": "ada", "k": 0}, "k"),
    "k of 1,001": ({"user_id": "ada", "k": 1_001}, "k"),
    "k as text": ({"user_id": "ada", "k": "5"}, "k"),
    "k as a boolean": ({"user_id": "ada", "k": True}, "k"),
    "k as a fraction": ({"user_id": "ada", "k": 5.5}, "k"),
    "NaN": ({"user_id": "ada", "k": float("nan")}, "k"),
    "explain as text": ({"user_id": "ada", "explain": "true"}, "explain"),
    "explain as a number": ({"user_id": "ada", "explain": 1}, "explain"),
    "a bad item to be like": ({"user_id": "ada", "because": "a\x85b"}, "because"),
    "huge k": ({"user_id": "ada", "k": 10**300}, "k"),
    "unknown field": ({"user_id": "ada", "limit": 5}, None),
    "no requests": ({"requests": []}, "requests"),
    "too many requests": ({"requests": [{"user_id": "ada"}] * (MAX_REQUESTS + 1)}, "requests"),
    "requests as an object": ({"requests": {"user_id": "ada"}}, "requests"),
    "a field beside requests": ({"requests": [{"user_id": "ada"}], "k": 5}, None),
    "one bad request": ({"requests": [{"user_id": "ada"}, {"user_id": "ada", "k": 0}]}, "requests.1.k"),
    "requests within requests": ({"requests": [{"requests": []}]}, "requests.0"),
}


@pytest.mark.parametrize(("body", "field"), REFUSED.values(), ids=REFUSED)
def test_an_invalid_request_is_refused(shared_client: Client, body: Any, field: str | None) -> None:
    response = shared_client.post("/v1/recommendations", content=json.dumps(body))
    assert response.status_code == 422
    error = response.json()["error"]
    assert error["code"] == "invalid_request"
    assert [detail["field"] for detail in error["details"]] == [field]


@pytest.mark.parametrize(
    "query",
    [
        "k=0",
        "k=1001",
        "k=five",
        "k=",
        "k=true",
        "k=NaN",
        "k=5&k=6",
        "k=1_0",
        "k=5.0",
        "k=%205",
        "k=%2B5",
        "exclude_seen=some",
        "exclude=a%C2%85b",
        "limit=5",
    ],
)
def test_an_invalid_query_is_refused(shared_client: Client, query: str) -> None:
    response = shared_client.get(f"/v1/users/ada/recommendations?{query}")
    assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_request")


def test_a_batch_of_the_maximum_size_is_answered(shared_client: Client) -> None:
    results = recommend(shared_client, requests=[{"user_id": f"u{n}", "k": 1} for n in range(MAX_REQUESTS)])["results"]
    assert [result["user_id"] for result in results] == [f"u{n}" for n in range(MAX_REQUESTS)]


class TestWhereAnswersAreComputed:
    """Short batches run on the event loop and long ones in a thread, with the same results."""

    @pytest.fixture
    def turns(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Ids of the threads that computed."""
        found: list[str] = []
        rank = PlainRanker.rank  # the first part of every batch

        def noting(self: PlainRanker, *arguments: Any) -> Any:
            found.append(threading.current_thread().name)
            return rank(self, *arguments)

        monkeypatch.setattr(PlainRanker, "rank", noting)
        return found

    def recommended(self, client: Client, monkeypatch: pytest.MonkeyPatch, at_once_s: float) -> Any:
        monkeypatch.setattr(executor, "MAX_ON_LOOP_S", at_once_s)
        return client.recommend("ada")["items"]

    def test_a_short_batch_runs_on_the_event_loop_and_a_long_one_in_a_thread(
        self, client: Client, turns: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client.click("ada", "item-1", "item-2")
        assert self.recommended(client, monkeypatch, 1e9) == self.recommended(client, monkeypatch, -1.0)
        assert not turns[0].startswith("engine")
        assert turns[1].startswith("engine")

    @pytest.mark.parametrize(("fits", "on_loop"), [(2.0, 0), (6.0, 3)])
    def test_a_costly_batch_runs_on_the_event_loop_only_with_margin(
        self, client: Client, turns: list[str], monkeypatch: pytest.MonkeyPatch, fits: float, on_loop: int
    ) -> None:
        monkeypatch.setattr(executor, "MAX_ON_LOOP_S", executor.MAX_ON_LOOP_S * executor.COSTLY_MARGIN * fits)
        learning_nothing = lambda self, _, *work: self._compute(*work)  # noqa: E731
        monkeypatch.setattr(executor.AdaptiveExecutor, "_compute_costly", learning_nothing)
        bought = [{"user_id": "bea", "item_id": f"item-{n % 9}", "type": "purchase"} for n in range(SHORT_LOG + 500)]
        client.post("/v1/events", json=bought).raise_for_status()
        for body in (
            {"history": ["item-1"] * 1_000},
            {"user_id": "ada", "candidates": ["item-1", "item-2"] * 500},
            {"user_id": "ada", "k": 1000},
            {"user_id": "bea", "mode": "repeat"},  # the length of its log counts
            {"user_id": "ada", "categories": [f"tea {n}" for n in range(FEW_CATEGORIES + 1)]},
        ):
            recommend(client, **body)
        assert [turn.startswith("costly") for turn in turns] == [False] * on_loop + [True] * (5 - on_loop)

    def test_requests_with_a_short_log_run_with_plain_ones(
        self, client: Client, turns: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(executor, "MAX_ON_LOOP_S", 1e9)
        client.click("ada", "item-1", "item-2")
        for wish in ({}, {"exclude_seen": "all"}, {"mode": "repeat"}):
            recommend(client, user_id="ada", **wish)
        assert turns == ["MainThread"] * 3


class TestPlainRequests:
    """Requests for a user with at most a length use a shorter code path with the same results."""

    @pytest.mark.parametrize("needed_events", [1e9, 1.0], ids=["without-trends", "with-trends"])
    def test_plain_requests_return_the_same_bytes(
        self, client: Client, monkeypatch: pytest.MonkeyPatch, needed_events: float
    ) -> None:
        monkeypatch.setattr(trending, "MIN_RECENT_EVENTS", needed_events)
        read_trends = client.service.signals.trend_counter.sync
        monkeypatch.setattr(client.service.signals.trend_counter, "sync", AsyncMock())  # trends fade from read to read
        chance = random.Random(0)
        users = [f"user-{number}" for number in range(8)]
        for number, user in enumerate(users):
            events = number if number < 6 else 30
            if events:
                client.click(user, *(item_id(chance.randrange(ITEMS)) for _ in range(events)))
        client.click("cold", "item-that-nobody-knows")
        assert client.post("/v1/items", json={"item_id": item_id(2), "available": False}).is_success
        client.runner.run(read_trends())
        users += ["cold", "nobody"]
        found = bodies(client, users)
        for module in (plain_ranking, query_builder):
            monkeypatch.setattr(module, "is_plain", lambda _: False)
            assert bodies(client, users) == found
        sources = set(re.findall(rb'"source":"(\w+)"', b"".join(found)))
        assert sources == {b"popular", b"personalised"} | ({b"blended"} if needed_events == 1 else set())

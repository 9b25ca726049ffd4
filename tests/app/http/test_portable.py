"""Portable states: lists equal those of a user with the same events, and the service stores nothing."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from app.http.auth import watched_file
from app.http.auth.keys import add, make
from app.http.auth.seal_keys import rotate
from app.http.auth.sealed_states import CHARACTERS
from app.settings import Settings
from storage.sqlite.database import FILE_NAME
from tests.app.conftest import Client, item_id, write_model
from tests.app.support import all_pages, assert_refused, bearer, item_ids, recommend
from tests.storage.redis.servers import new_server

SHOP = "https://shop.example"
COUNTED = re.compile(r'"(tallies|generations)"|:tallies|:live:|:meta')  # in a store, beside what is kept of users
EVENTS, LISTS = "/v1/portable/events", "/v1/portable/recommendations"


@pytest.fixture(scope="module", params=["sqlite", "redis"])
def client(
    request: pytest.FixtureRequest, start: Callable[..., Client], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    directory = tmp_path_factory.mktemp("portable")
    rotate(directory / "seal")
    server = new_server("redis-server") if request.param == "redis" else None
    client = start(
        directory / "state",
        seal_keys_file=directory / "seal",
        models_dir=directory,
        redis_url=server.url if server else None,
    )
    yield client
    client.close()
    if server:
        server.stop()


def events_of(*numbers: int, kind: str = "click") -> list[dict[str, Any]]:
    return [
        {"event_id": f"e{number}", "item_id": item_id(number * 7 % 61), "type": kind, "timestamp": 1.7e9 + number}
        for number in numbers
    ]


def post(client: Client, events: list[dict[str, Any]], state: str | None = None) -> Any:
    answer = client.post(EVENTS, json={"state": state, "events": events})
    assert answer.status_code == 200, answer.text
    return answer.json()


def visit(client: Client, events: list[dict[str, Any]], per_request: int = 4) -> str:
    """The state of the visitor after some requests."""
    state = None
    for first in range(0, len(events), per_request):
        state = post(client, events[first : first + per_request], state)["state"]
    assert isinstance(state, str)
    assert len(state) == CHARACTERS < 5_000
    return state


def as_user(client: Client, user_id: str, events: list[dict[str, Any]]) -> None:
    posted = [{**event, "event_id": f"{user_id}-{event['event_id']}", "user_id": user_id} for event in events]
    assert client.post("/v1/events", json=posted).status_code == 200


def listed(answer: Any) -> Any:
    """The response without the user and the list id."""
    return {name: value for name, value in answer.items() if name not in ("user_id", "recommendation_id")}


WISHES: list[dict[str, Any]] = [
    {},
    {"k": 30, "exclude_seen": "none"},
    {"exclude_seen": "all"},
    {"categories": ["tea"], "diversity": 0.5, "pin": [{"item_id": "item-3", "place": 2}]},
    {"because": ""},
    {"explain": True, "k": 3},
    {"exclude_events": ["purchase"], "within": "9999w"},
    {"exclude_events": ["purchase"], "within": "1m"},
    {"candidates": [item_id(row) for row in range(20)]},
    {"filter": "item.title.size() > 2"},
]


class TestList:
    @pytest.mark.parametrize("visits", [1, 15, 400])
    def test_equals_that_of_a_user_with_the_same_events(self, client: Client, visits: int) -> None:
        events = [*events_of(*range(visits)), *events_of(900, kind="dislike"), *events_of(901, 902, kind="purchase")]
        user = f"same-{visits}"
        as_user(client, user, events)
        state = visit(client, events, 4 if visits < 20 else 100)
        for wish in WISHES:
            by_log = "exclude_events" in wish or wish.get("exclude_seen") == "all"
            of_user = recommend(client, user_id=user, **wish)
            for path in ("/v1/recommendations", LISTS):
                answer = client.post(path, json={"state": state, **wish})
                assert answer.status_code == 200, answer.text
                of_visitor = answer.json()
                assert of_visitor["user_id"] is None
                if visits < 20 or not by_log:
                    assert listed(of_visitor) == listed(of_user)
                else:
                    assert 10 < of_visitor["seen_events_limit"] < visits

    def test_pages_like_that_of_a_user(self, client: Client) -> None:
        events = events_of(*range(12))
        as_user(client, "pages", events)
        state = visit(client, events)
        own, of_user = (
            [listed(page) for page in all_pages(client, {name: value, "k": 20})]
            for name, value in (("state", state), ("user_id", "pages"))
        )
        assert own == of_user
        assert len(own) > 1

    def test_mixes_with_users_and_histories_in_a_batch(self, client: Client) -> None:
        events = events_of(*range(40, 46))
        as_user(client, "batch", events)
        asked: list[dict[str, Any]] = [
            {"state": visit(client, events)},
            {"user_id": "batch"},
            {"history": []},
            {"state": visit(client, events[:1])},
        ]
        batch = recommend(client, requests=asked)["results"]
        assert [listed(one) for one in batch] == [listed(recommend(client, **one)) for one in asked]
        assert listed(batch[0]) == listed(batch[1])

    def test_is_popular_for_a_new_visitor(self, client: Client) -> None:
        for body in ({}, {"state": None}, {"exclude_events": ["purchase"]}):
            answer = client.post(LISTS, json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["source"] == "popular"

    def test_is_rebuilt_after_a_switch_from_the_events_in_the_state(self, tmp_path: Path) -> None:
        for name, seed in (("one", 7), ("two", 11)):
            write_model(tmp_path / "models" / name, seed)
        rotate(tmp_path / "seal")
        model = tmp_path / "models" / "one"
        client = Client(Settings(model_dir=model, data_dir=tmp_path / "state", seal_keys_file=tmp_path / "seal"))
        events = events_of(*range(9))
        as_user(client, "stays", events)
        state = visit(client, events)
        assert client.post("/v1/admin/generations/two/activate").status_code == 200
        of_user = recommend(client, user_id="stays")
        assert of_user["generation"] == "two"
        assert listed(recommend(client, state=state)) == listed(of_user)
        as_user(client, "stays", events_of(20))
        state = post(client, events_of(20, 8), state)["state"]
        assert listed(recommend(client, state=state)) == listed(recommend(client, user_id="stays"))
        client.close()


class TestEvents:
    def test_are_deduplicated_within_the_state(self, client: Client) -> None:
        first = post(client, [*events_of(1, 2), *events_of(2)])
        assert (first["accepted"], first["duplicates"], first["refused"]) == (2, 1, 0)
        again = post(client, events_of(2, 3), first["state"])
        assert (again["accepted"], again["duplicates"]) == (1, 1)
        both = visit(client, events_of(1, 2, 3))
        assert listed(recommend(client, state=again["state"])) == listed(recommend(client, state=both))

    def test_are_validated_like_those_of_users(self, client: Client) -> None:
        state = post(client, events_of(1))["state"]
        wrong: list[Any] = [
            {"events": []},
            {"events": events_of(*range(1_001))},
            {"events": [{"item_id": "a\x85b"}]},
            {"events": [{"item_id": "a", "more": 1}]},
            {"events": [{"item_id": "a", "user_id": "ada"}]},
            {"events": [7]},
            {"events": {}},
            {"state": 7, "events": events_of(2)},
            {"state": state},
            {"state": state, "events": events_of(2), "user_id": "ada"},
            [],
            7,
        ]
        for body in wrong:
            assert_refused(client.post(EVENTS, json=body), 422)
        assert_refused(client.post(EVENTS, content=b"{"), 400)
        too_many = client.post(EVENTS, json={"events": [{"user_id": "ada"}] * 1_001})
        assert "1 to 1,000 events" in too_many.json()["error"]["message"]
        for body in ({"user_id": "ada"}, {"history": []}, {"requests": []}, {"state": state, "user_id": "ada"}, [], 7):
            assert_refused(client.post(LISTS, json=body), 422)
        for body in ({"state": state, "user_id": "ada"}, {"state": state, "history": []}):
            assert_refused(client.post("/v1/recommendations", json=body), 422)

    def test_report_unknown_items_and_types(self, client: Client) -> None:
        answer = post(client, [{"item_id": "new"}, {"item_id": "item-1", "type": "stare"}])
        assert (answer["accepted"], answer["unknown_items"], answer["unknown_types"]) == (2, 1, 1)

    def test_are_not_stored(self, client: Client) -> None:
        def stored() -> list[Any]:
            client.runner.run(client.service.signals.flush())
            if client.settings.redis_url is not None:
                with closing(redis.Redis.from_url(client.settings.redis_url)) as store:
                    meta = store.hgetall(f"{client.settings.redis_prefix}:meta")
                    assert b"secret" in meta
                    return [
                        sorted((key, store.dump(key)) for key in store.scan_iter() if not COUNTED.search(str(key))),
                        # a second after an event, its process notes that it is there
                        {name: value for name, value in meta.items() if "newest:" not in str(name)},
                    ]
            with closing(sqlite3.connect(client.settings.data_dir / FILE_NAME)) as database:
                return [line for line in database.iterdump() if not COUNTED.search(line)]

        client.runner.run(client.service.store.secret())  # which a store makes once, when it is first asked for it
        before = stored()
        first = post(client, events_of(*range(30)))["state"]
        answer = recommend(client, state=first, exclude_seen="all")
        chosen = {"item_id": item_ids(answer)[0], "recommendation_id": answer["recommendation_id"]}
        post(client, [chosen], first)
        assert stored() == before


class TestInvalidStates:
    @pytest.mark.parametrize("path", [EVENTS, LISTS, "/v1/recommendations"])
    def test_are_refused_with_the_same_message(self, client: Client, path: str, tmp_path: Path) -> None:
        state = post(client, events_of(1))["state"]
        rotate(tmp_path / "other")
        altered = state[:3000] + ("A" if state[3000] != "A" else "B") + state[3001:]
        wrong = ["", "A", altered, state[:-4], state + "AAAA", "A" * CHARACTERS, "é" * CHARACTERS, "\0", "A" * 100_000]
        more = {"events": events_of(2)} if path == EVENTS else {}
        answers = [client.post(path, json={"state": text, **more}) for text in wrong]
        assert {answer.status_code for answer in answers} == {422}
        assert len({answer.content for answer in answers}) == 1
        assert answers[0].json()["error"]["code"] == "invalid_sealed_state"

    def test_are_named_in_a_batch(self, client: Client) -> None:
        requests = [{"history": []}, {"state": post(client, events_of(1))["state"]}, {"state": "A"}]
        answer = client.post("/v1/recommendations", json={"requests": requests})
        assert_refused(answer, 422)
        assert answer.json()["error"]["details"] == [
            {"index": None, "field": "requests.2.state", "reason": "cannot be opened"}
        ]

    def test_are_reported_as_expired(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        state = post(client, events_of(1))["state"]
        monkeypatch.setattr("app.http.auth.sealed_states.StateSealer._now_s", lambda _: 9_000_000_000)
        answer = client.post(LISTS, json={"state": state})
        assert_refused(answer, 422)
        assert answer.json()["error"]["code"] == "sealed_state_expired"
        answer = client.post("/v1/recommendations", json={"requests": [{"state": state}, {"history": []}]})
        assert answer.json()["error"]["code"] == "sealed_state_expired"
        assert answer.json()["error"]["details"][0]["field"] == "requests.0.state"

    def test_differ_from_a_service_without_seal_keys(self, shared_client: Client) -> None:
        for path, body in (
            (EVENTS, {"events": events_of(1)}),
            (LISTS, {}),
            ("/v1/recommendations", {"state": "A"}),
        ):
            answer = shared_client.post(path, json=body)
            assert_refused(answer, 409)
            assert "LISAREC_SEAL_KEYS_FILE" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def keyed(start: Callable[..., Client], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory = tmp_path_factory.mktemp("shop")
    rotate(directory / "seal")
    (directory / "keys").touch()
    client = start(directory / "state", keys_file=directory / "keys", seal_keys_file=directory / "seal")
    yield client
    client.close()


class TestPages:
    """Calls with keys, in particular browser keys, which everybody can read."""

    @pytest.fixture(autouse=True)
    def _keys_are_looked_at_each_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(watched_file, "POLL_EVERY_S", 0)

    @pytest.fixture
    def page(self, keyed: Client) -> Callable[..., httpx.Response]:
        return self.caller(keyed, "portable", origins=[SHOP])

    def caller(self, keyed: Client, *scopes: Any, **rest: Any) -> Callable[..., httpx.Response]:
        text, key = make("main", scopes, **rest)
        assert keyed.settings.keys_file is not None
        add(keyed.settings.keys_file, key)
        headers = bearer(text) | ({"origin": SHOP} if key.origins else {})

        def call(path: str, body: Any, **more: str) -> httpx.Response:
            return keyed.post(path, json=body, headers=headers | more)

        return call

    def test_may_only_fold_and_recommend(self, page: Callable[..., httpx.Response]) -> None:
        answer = page(EVENTS, {"events": events_of(1, 2)})
        assert answer.status_code == 200, answer.text
        assert answer.headers["access-control-allow-origin"] == SHOP
        state = answer.json()["state"]
        answer = page(LISTS, {"state": state, "boost": {"tea": 0.5}})
        assert answer.status_code == 200, answer.text
        assert answer.headers["access-control-allow-origin"] == SHOP
        assert_refused(page(LISTS, {"state": state}, origin="https://other.example"), 403)
        assert_refused(page("/v1/recommendations", {"state": state}), 403)
        assert_refused(page("/v1/events", [{**events_of(1)[0], "user_id": "ada"}]), 403)

    @pytest.mark.parametrize(
        "wish",
        [
            {"filter": "item.margin > 0.3"},
            {"boost": ["item.margin"]},
            {"max_per": {"supplier": 1}},
            {"objective": {"property": "margin"}},
            {"debug": True},
            {"scenario": "home", "explain": True},
        ],
    )
    def test_cannot_probe_properties(self, page: Callable[..., httpx.Response], wish: dict[str, Any]) -> None:
        assert_refused(page(LISTS, wish), 403)

    @pytest.mark.parametrize("settings", [{"objective": {"property": "margin"}}, {"boost": ["item.margin"]}])
    def test_cannot_infer_properties_from_scenario_scores(self, keyed: Client, settings: dict[str, Any]) -> None:
        text, key = make("main", ["catalogue:write", "scenarios:write"])
        assert keyed.settings.keys_file is not None
        add(keyed.settings.keys_file, key)
        for row in range(3):
            values = {"title": 'a "score":1', "properties": {"margin": 1.0 + row}}
            assert (
                keyed.request("PUT", f"/v1/items/{item_id(row)}", json=values, headers=bearer(text)).status_code == 200
            )
        assert (
            keyed.request("PUT", "/v1/admin/scenarios/weighed", json=settings, headers=bearer(text)).status_code == 200
        )
        page, backend = (
            self.caller(keyed, "portable", origins=[SHOP]),
            self.caller(keyed, "portable"),
        )
        state = page(EVENTS, {"events": events_of(*range(12))}).json()["state"]
        for known in ({}, {"state": state}):
            of_page, of_backend = (
                call(LISTS, {**known, "scenario": "weighed"}).json()["items"] for call in (page, backend)
            )
            assert [{**item, "score": None} for item in of_page] == [{**item, "score": None} for item in of_backend]
            assert [item["score"] for item in of_page] == [*range(len(of_page), 0, -1)]
        assert_refused(
            page(LISTS, {"scenario": "weighed", "boost": {"red": 0.5}}), 403 if "objective" in settings else 422
        )

    def test_may_post_at_most_100_events_on_known_items(self, page: Callable[..., httpx.Response]) -> None:
        assert_refused(page(EVENTS, {"events": events_of(*range(101))}), 413)
        answer = page(EVENTS, {"events": [{"event_id": "x", "item_id": "nobody-has-it"}]}).json()
        assert (answer["accepted"], answer["refused"]) == (0, 1)
        assert_refused(page(EVENTS, {"events": [{"item_id": "item-1"}]}), 422)  # without an id

    def test_have_a_rate_limit(self, keyed: Client) -> None:
        page = self.caller(keyed, "portable", origins=[SHOP], requests_per_minute=10)
        assert page(EVENTS, {"events": events_of(*range(8))}).status_code == 200
        assert_refused(page(EVENTS, {"events": events_of(*range(8))}), 429)

    def test_may_open_states_of_their_audience(self, keyed: Client) -> None:
        page = self.caller(keyed, "portable", origins=[SHOP], audience="web")
        server, app = self.caller(keyed, "recs:read", audience="web"), self.caller(keyed, "portable", audience="app")
        state = page(EVENTS, {"events": events_of(1)}).json()["state"]
        assert server("/v1/recommendations", {"state": state}).status_code == 200
        refused = [
            app(LISTS, {"state": state}),
            app(LISTS, {"state": "A"}),
            app(EVENTS, {"state": state, "events": events_of(2)}),
        ]
        assert {answer.status_code for answer in refused} == {422}
        assert len({answer.content for answer in refused}) == 1

    def test_get_their_permissions_from_a_preflight(self, keyed: Client) -> None:
        self.caller(keyed, "portable", origins=[SHOP])
        asked = {
            "origin": SHOP,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        for path in (EVENTS, LISTS):
            assert keyed.request("OPTIONS", path, headers=asked).status_code == 204
        assert keyed.request("OPTIONS", "/v1/recommendations", headers=asked).status_code != 204

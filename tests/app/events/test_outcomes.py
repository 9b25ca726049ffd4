"""Outcomes of events, each counted once: responses, metrics, trends and click-through."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.http.auth.keys import Scope, add, make
from app.serving import switcher
from app.settings import Settings
from storage.redis.layout.keys import Keyspace
from tests.app.conftest import Client, item_id
from tests.app.support import bearer, finish_background_work
from tests.storage.redis.servers import RedisServer

SHOP = "https://shop.example"
NOTHING = {"accepted": 0, "duplicates": 0, "unknown_items": 0, "unknown_types": 0, "refused": 0}


def outcomes(client: Client) -> dict[str, int]:
    """Counters of events by outcome, from the metrics."""
    found = re.findall(r'lisarec_events_total\{outcome="(\w+)"\} ([0-9.]+)', client.get("/metrics").text)
    return {outcome: int(float(count)) for outcome, count in found if float(count)}


class TestPartlyApplied:
    """Redis refuses the events of one partition."""

    def test_retried_events_are_counted_once(
        self, start: Callable[..., Client], tmp_path: Path, redis_server: RedisServer
    ) -> None:
        """Also if the retry goes to another process."""
        one, other = (start(tmp_path, redis_url=redis_server.url) for _ in range(2))
        users = [f"u{n}" for n in range(300)]
        try:
            for client in (one, other):
                client.runner.run(client.service.signals.sync())
            shown = one.recommend("nobody", k=10)
            items = [item["item_id"] for item in shown["items"]]
            events = [
                {
                    "event_id": f"e-{user}",
                    "user_id": user,
                    "item_id": items[n % 10],
                    "recommendation_id": shown["recommendation_id"],
                }
                for n, user in enumerate(users)
            ]
            broken = Keyspace("lisarec", 256).user("main", users[7])
            without = [
                n for n, user in enumerate(users) if Keyspace("lisarec", 256).user("main", user).log == broken.log
            ]
            redis_server.client.set(broken.log, "not a stream")
            refused = one.post("/v1/events", json=events)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "partly_applied")
            applied = len(users) - len(without)
            details = {detail["field"]: detail["reason"] for detail in refused.json()["error"]["details"]}
            assert details.pop(None).startswith("applied: 0-")
            assert details == {name: str(applied if name == "accepted" else 0) for name in NOTHING}
            redis_server.client.delete(broken.log)

            again = other.post("/v1/events", json=events).json()
            assert again == NOTHING | {"accepted": len(without), "duplicates": applied}
            assert outcomes(one) == {"accepted": applied}
            assert outcomes(other) == {"accepted": len(without), "duplicate": applied}
            for client in (other, one):
                client.runner.run(client.service.signals.sync())
            trends = {item["item_id"]: item["score"] for item in one.get("/v1/items/trending").json()["items"]}
            assert trends == pytest.approx(dict.fromkeys(items, 30), rel=1e-3)
            places = {place["place"]: place["events"] for place in one.get("/v1/stats").json()["places"]}
            assert places == {place: {"click": 30} for place in range(1, 11)}
        finally:
            one.close()
            other.close()


def test_unknown_types_are_counted_and_logged(client: Client) -> None:
    """Types without a weight in any served model; weight 0 is known."""
    kinds = ["click", "dislike", "glance", "glance", "never-heard-of"]
    events = [
        {"event_id": f"e{n}", "user_id": "ada", "item_id": item_id(n), "type": kind} for n, kind in enumerate(kinds)
    ]
    assert client.post("/v1/events", json=events).json() == NOTHING | {"accepted": 5, "unknown_types": 3}
    assert client.post("/v1/events", json=events).json() == NOTHING | {"duplicates": 5}
    assert outcomes(client) == {"accepted": 5, "duplicate": 5, "unknown_type": 3}
    assert [event.type for event in client.log("ada")] == kinds


class Pages:
    """Processes of a shop with a browser key and a server key."""

    def __init__(self, directory: Path, redis_url: str, model_dir: Path | None, processes: int = 1) -> None:
        keys = directory / "keys"
        self.texts: dict[str, dict[str, str]] = {}
        scopes: tuple[Scope, ...] = ("events:write", "recs:read", "catalogue:write", "metrics:read")
        for name, own, origins in (("page", scopes[:1], [SHOP]), ("backend", scopes, [])):
            text, key = make("main", own, origins)
            add(keys, key)
            self.texts[name] = bearer(text) | ({"origin": SHOP} if origins else {})
        settings = Settings(keys_file=keys, redis_url=redis_url, model_dir=model_dir, models_dir=directory / "models")
        self.clients = [Client(settings) for _ in range(processes)]
        self._sent = 0

    def events(self, users: list[str], items: list[str]) -> list[dict[str, str]]:
        self._sent += 1
        return [
            {"event_id": f"e{self._sent}-{n}", "user_id": user, "item_id": item}
            for n, (user, item) in enumerate((user, item) for user in users for item in items)
        ]

    def post(self, key: str, events: Any, process: int = 0) -> dict[str, int]:
        answer = self.call("POST", "/v1/events", key, process, json=events)
        counts: dict[str, int] = answer.json()
        return counts

    def call(self, method: str, path: str, key: str = "backend", process: int = 0, **options: Any) -> httpx.Response:
        answer = self.clients[process].request(method, path, headers=self.texts[key], **options)
        assert answer.status_code == 200, answer.text
        return answer

    def shown(self, process: int = 0) -> set[str]:
        """Items recommended to an unknown visitor."""
        client = self.clients[process]
        client.runner.run(client.service.signals.sync())
        for _ in range(3):
            finish_background_work(client)
            client.runner.run(client.service.switcher.poll())
        answer = self.call("GET", "/v1/users/nobody/recommendations?k=5", process=process)
        return {item["item_id"] for item in answer.json()["items"]}


@pytest.fixture
def open_pages(
    tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Pages]]:
    monkeypatch.setattr(switcher, "REBUILD_EVERY_S", 0.0)
    opened: list[Pages] = []

    def opening(model_dir: Path | None, processes: int = 1) -> Pages:
        opened.append(Pages(tmp_path, redis_server.url, model_dir, processes))
        return opened[-1]

    yield opening
    for pages in opened:
        for client in pages.clients:
            client.close()


class TestBrowserKeysPostOnlyKnownItems:
    @pytest.mark.parametrize("has_model", [True, False])
    def test_events_on_unknown_items_affect_no_other_user(
        self, open_pages: Callable[..., Pages], model_dir: Path, *, has_model: bool
    ) -> None:
        """Two requests of users who have used items of the shop and then five unknown ones."""
        pages = open_pages(model_dir if has_model else None)
        users, invented = [f"eve{n}" for n in range(15)], [f"fake-{n}" for n in range(5)]
        pages.post("page", pages.events(users, ["item-1", "item-2"]))
        answer = pages.post("page", pages.events(users, invented))
        assert answer == NOTHING | {"refused": 75}
        assert not pages.shown() & set(invented)
        logged = pages.clients[0].runner.run(pages.clients[0].service.store.events("main", "eve0"))
        assert len(logged) == (2 if has_model else 0)
        text = pages.call("GET", "/metrics").text
        assert f'outcome="refused"}} {75 if has_model else 105}.0' in text

    def test_items_of_the_shop_are_accepted_by_every_process(
        self, open_pages: Callable[..., Pages], model_dir: Path
    ) -> None:
        pages = open_pages(model_dir, processes=2)
        events = pages.events(["ada"], ["item-1", "new-1", "item-2", "new-2"])
        assert pages.post("page", events, process=1) == NOTHING | {"accepted": 2, "refused": 2}
        pages.call("PUT", "/v1/items/new-1", json={"title": "New kettle"})
        expected = NOTHING | {"accepted": 1, "duplicates": 2, "unknown_items": 1, "refused": 1}
        assert pages.post("page", events, process=1) == expected
        assert pages.post("page", events, process=0) == NOTHING | {"duplicates": 3, "refused": 1}
        assert [event.item_id for event in pages.clients[0].log("ada")] == ["item-1", "item-2", "new-1"]

    def test_a_server_key_may_post_any_item_and_browsers_follow_once_it_is_shown(
        self, open_pages: Callable[..., Pages]
    ) -> None:
        pages = open_pages(None, processes=2)
        assert pages.post("backend", pages.events(["ada"], ["tea"])) == NOTHING | {"accepted": 1, "unknown_items": 1}
        assert pages.shown(process=1) == {"tea"}
        answer = pages.post("page", pages.events(["bob"], ["tea", "fake"]), process=1)
        assert answer == NOTHING | {"accepted": 1, "unknown_items": 1, "refused": 1}

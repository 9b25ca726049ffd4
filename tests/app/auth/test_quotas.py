"""Quotas of keys: events a minute, limits of browser keys, and new users a minute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.http.auth import quota_counters
from app.http.auth.keys import Key, add, make
from app.schemas.events import MAX_EVENTS, MAX_PUBLIC_EVENTS, MAX_PUBLIC_NEW_USERS
from storage.errors import StorageUnavailable
from tests.app.conftest import Client
from tests.app.support import assert_refused, bearer
from tests.storage.redis.servers import RedisServer
from tests.waiting import PATIENCE_S

SHOP = "https://shop.example"
QUOTA = 60  # new users of a tenant


class Shop:
    """Processes over one store, and the keys that they know."""

    def __init__(self, start: Callable[..., Client], directory: Path, redis_url: str | None, processes: int) -> None:
        self.file = directory / "keys"
        self.texts = {
            "backend": self.add(new_users_per_hour=None),
            "small": self.add(new_users_per_hour=5),
            "rated": self.add(requests_per_minute=30),
            "page": self.add(origins=[SHOP]),
            "page of a second shop": self.add(origins=[SHOP]),
            "generous page": self.add(origins=[SHOP], new_users_per_hour=QUOTA),
            "rated page": self.add(origins=[SHOP], requests_per_minute=60),
            "page of views": self.add(origins=[SHOP], event_types=["view", "impression"]),
        }
        self.clients = [
            start(directory, keys_file=self.file, redis_url=redis_url, new_users_per_hour=QUOTA)
            for _ in range(processes)
        ]
        self._events = 0

    def add(self, **limits: Any) -> str:
        text, key = make("main", ["events:write"], **limits)
        add(self.file, key)
        return text

    def events(self, users: list[str]) -> list[dict[str, str]]:
        self._events += len(users)
        return [
            {"event_id": f"e{self._events - n}", "user_id": user, "item_id": "item-1"} for n, user in enumerate(users)
        ]

    def post(self, key: str, users: list[str], process: int = 0) -> httpx.Response:
        headers = bearer(self.texts[key]) | ({"origin": SHOP} if "page" in key else {})
        return self.clients[process].post("/v1/events", json=self.events(users), headers=headers)

    def logged(self, user: str) -> int:
        return len(self.clients[0].log(user))


@pytest.fixture
def open_shop(
    start: Callable[..., Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Shop]]:
    monkeypatch.setattr(quota_counters, "REDIS_TIMEOUT_S", PATIENCE_S)  # on a machine with other things to do
    shops: list[Shop] = []

    def open_one(redis_url: str | None = None, processes: int = 1) -> Shop:
        shops.append(Shop(start, tmp_path, redis_url, processes))
        return shops[0]

    yield open_one
    for client in shops[0].clients:
        client.close()


def new(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


def assert_nothing_applied(shop: Shop, answer: httpx.Response, status: int, code: str, user: str) -> None:
    assert_refused(answer, status)
    assert answer.json()["error"]["code"] == code
    assert "nothing was applied" in answer.json()["error"]["message"]
    assert shop.logged(user) == 0


class TestRates:
    def test_count_events_and_not_requests(self, open_shop: Callable[..., Shop]) -> None:
        shop = open_shop()
        too_many = shop.post("rated", ["ada"] * 31)  # as much as in a minute: it would never be let through
        assert_nothing_applied(shop, too_many, 413, "too_many_events", "ada")
        assert shop.post("rated", ["ada"] * 20).json()["accepted"] == 20
        refused = shop.post("rated", ["bob"] * 20)
        assert_refused(refused, 429)
        assert refused.json()["error"]["code"] == "too_many_requests"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert shop.logged("bob") == 0
        assert shop.post("backend", ["bob"] * MAX_EVENTS).json()["accepted"] == MAX_EVENTS  # it has no rate

    def test_limit_the_new_users_of_a_browser_key(self, open_shop: Callable[..., Shop]) -> None:
        """Otherwise a browser key could fill a store with new users, since keys are rated by requests."""
        shop = open_shop()
        sizes = [1, 1, 1, MAX_PUBLIC_NEW_USERS, MAX_PUBLIC_NEW_USERS + 1, MAX_PUBLIC_EVENTS, MAX_EVENTS]
        answers = [shop.post("rated page", new(f"made-up-{turn}", size)) for turn, size in enumerate(sizes)]
        assert [answer.status_code for answer in answers] == [200] * 4 + [422, 413, 413]
        assert shop.post("rated page", new("more", 10)).status_code == 429


class TestBrowserKeys:
    def test_have_a_smaller_limit_of_events_per_request(self, open_shop: Callable[..., Shop]) -> None:
        shop = open_shop()
        too_many = shop.post("page", ["ada"] * (MAX_PUBLIC_EVENTS + 1))
        assert_nothing_applied(shop, too_many, 413, "too_many_events", "ada")
        assert shop.post("page", ["ada"] * MAX_PUBLIC_EVENTS).json()["accepted"] == MAX_PUBLIC_EVENTS

    def test_have_a_limit_of_new_users_per_request(self, open_shop: Callable[..., Shop]) -> None:
        shop = open_shop()
        too_many = shop.post("page", new("u", MAX_PUBLIC_NEW_USERS + 1))
        assert_nothing_applied(shop, too_many, 422, "too_many_new_users_at_once", "u-0")
        assert shop.post("page", new("u", MAX_PUBLIC_NEW_USERS)).status_code == 200
        known = new("known", QUOTA // 2)
        assert shop.post("backend", known).status_code == 200
        assert shop.post("page", known).status_code == 200  # they are not new

    def test_post_only_their_event_types(self, open_shop: Callable[..., Shop]) -> None:
        shop = open_shop()
        headers = bearer(shop.texts["page of views"]) | {"origin": SHOP}
        viewed, clicked, bought, shown = shop.events(["ada"] * 4)
        viewed["type"], bought["type"], shown["type"] = "view", "purchase", "impression"
        refused = shop.clients[0].post("/v1/events", json=[viewed, clicked, bought], headers=headers)
        assert_nothing_applied(shop, refused, 422, "invalid_events", "ada")
        reason = "this key may post only events of the types view, impression"
        details = refused.json()["error"]["details"]
        assert details == [{"index": index, "field": "type", "reason": reason} for index in (1, 2)]
        taken = shop.clients[0].post("/v1/events", json=[viewed, shown], headers=headers)
        assert taken.json()["accepted"] == 2
        one = shop.clients[0].post("/v1/events", json=bought, headers=headers)
        assert one.status_code == 422
        assert shop.post("page", ["bob"]).json()["accepted"] == 1  # a key without types posts all

    def test_leave_half_of_the_new_user_quota_to_server_keys(self, open_shop: Callable[..., Shop]) -> None:
        shop = open_shop()
        pages = ["page", "page of a second shop", "generous page"]
        for page in pages:
            assert shop.post(page, new(page, QUOTA // 2 // len(pages))).status_code == 200
        for page in pages:
            refused = shop.post(page, ["one-more"])
            assert_nothing_applied(shop, refused, 429, "too_many_new_users", "one-more")
            assert "all page keys of this tenant" in refused.json()["error"]["message"]
        assert shop.post("backend", new("b", QUOTA // 2)).status_code == 200


class TestNewUserQuota:
    def test_counts_each_new_user_once(self, open_shop: Callable[..., Shop]) -> None:
        shop = open_shop()
        users = new("u", QUOTA)
        for _ in range(3):
            assert shop.post("backend", [*users, *users]).json()["accepted"] == 2 * QUOTA
        refused = shop.post("backend", [*users, "one-more"])
        assert_nothing_applied(shop, refused, 429, "too_many_new_users", "one-more")
        assert 1 <= int(refused.headers["retry-after"]) <= 3_600

    def test_is_lower_for_a_key_with_a_lower_limit(self, open_shop: Callable[..., Shop]) -> None:
        shop = open_shop()
        too_many = shop.post("small", new("u", 6))
        assert_nothing_applied(shop, too_many, 422, "too_many_new_users_at_once", "u-0")
        assert shop.post("small", new("u", 5)).status_code == 200
        assert_nothing_applied(shop, shop.post("small", ["u-5"]), 429, "too_many_new_users", "u-5")
        assert shop.post("backend", ["u-5"]).status_code == 200

    @pytest.mark.parametrize("has_redis", [False, True], ids=["alone", "redis"])
    def test_is_not_spent_by_requests_that_another_quota_refuses(
        self, open_shop: Callable[..., Shop], request: pytest.FixtureRequest, *, has_redis: bool
    ) -> None:
        shop = open_shop(request.getfixturevalue("redis_server").url if has_redis else None)
        assert shop.post("backend", new("b", QUOTA - 3)).status_code == 200
        for _ in range(3):
            assert_nothing_applied(shop, shop.post("small", new("s", 4)), 429, "too_many_new_users", "s-0")
        assert shop.post("small", new("s", 3)).status_code == 200  # neither its own quota nor the tenant's was spent

    def test_is_spent_once_by_retries_after_a_store_failure(
        self, open_shop: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def refuse(*_: object) -> None:
            raise StorageUnavailable("the disk is full", "disk_full")

        shop = open_shop()
        with monkeypatch.context() as failing:
            failing.setattr(shop.clients[0].service.store, "append", refuse)
            for _ in range(QUOTA + 1):
                assert_refused(shop.post("backend", ["ada"]), 503)
        assert shop.post("backend", ["ada", *new("b", QUOTA - 1)]).status_code == 200
        assert shop.post("backend", ["one-more"]).status_code == 429

    def test_is_shared_by_all_processes(self, open_shop: Callable[..., Shop], redis_server: RedisServer) -> None:
        shop = open_shop(redis_server.url, processes=2)
        assert shop.post("backend", new("a", QUOTA // 2), process=0).status_code == 200
        assert shop.post("backend", new("b", QUOTA // 2), process=1).status_code == 200
        for process in range(2):
            refused = shop.post("backend", ["one-more"], process)
            assert_nothing_applied(shop, refused, 429, "too_many_new_users", "one-more")


def test_a_key_line_contains_the_quota() -> None:
    _, key = make("main", ["events:write"], new_users_per_hour=0)
    assert Key.model_validate_json(key.line()).new_users_per_hour == 0
    assert "new_users_per_hour" not in make("main", ["events:write"])[1].line()

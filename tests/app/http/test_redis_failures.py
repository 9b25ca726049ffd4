"""Redis that is away, slow, full or read-only: what the service does, and that it recovers by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from app.http.error_responses import STORAGE_REASONS
from app.serving import switcher
from app.serving.served_generation import generation_of
from app.serving.store_factory import opened_store
from app.settings import Settings, with_password
from model.artifact.model_directory import load
from storage.errors import FailureCause, StorageUnavailable
from storage.records import ItemChanges
from storage.redis.store import RedisOptions
from tests.app.conftest import CATEGORIES, Client
from tests.storage.redis.servers import RedisServer
from tests.waiting import wait_until

AS_SHIPPED_S = RedisOptions().socket_timeout_s
GIVEN_UP_WITHIN_S = 60.0  # three calls; each gives up within seconds, on a machine with nothing else to do


class Failure(NamedTuple):
    """How a failure begins and ends, whether Redis stays readable, and what operators are told."""

    begin: Callable[[RedisServer], Any]
    heal: Callable[[RedisServer], Any]
    readable: bool
    cause: FailureCause
    logged: str


FAILURES = {
    "killed": Failure(RedisServer.kill, RedisServer.start, readable=False, cause="unreachable", logged="127.0.0.1"),
    "frozen": Failure(RedisServer.freeze, RedisServer.thaw, readable=False, cause="timeout", logged="Timeout"),
    "full": Failure(
        lambda redis: redis.client.config_set("maxmemory", 1),
        lambda redis: redis.client.config_set("maxmemory", 0),
        readable=True,
        cause="memory_full",
        logged="'maxmemory'",
    ),
    "read-only": Failure(
        lambda redis: redis.client.replicaof("127.0.0.1", 1),
        lambda redis: redis.client.replicaof("NO", "ONE"),
        readable=True,
        cause="read_only",
        logged="read only replica",
    ),
    "without its replica": Failure(
        lambda redis: redis.client.config_set("min-replicas-to-write", 1),
        lambda redis: redis.client.config_set("min-replicas-to-write", 0),
        readable=True,
        cause="too_few_replicas",
        logged="NOREPLICAS",
    ),
}


@pytest.fixture
def client(start: Callable[..., Client], redis_server: RedisServer, tmp_path: Path) -> Iterator[Client]:
    client = start(tmp_path, AS_SHIPPED_S, redis_url=redis_server.url)
    yield client
    client.close()


def click(user_id: str, event_id: str) -> dict[str, object]:
    return {"user_id": user_id, "item_id": "item-1", "event_id": event_id}


def wait_until_taken(client: Client, event: dict[str, object]) -> None:
    wait_until(lambda: client.post("/v1/events", json=event).status_code == 200)


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
def test_events_fail_and_popular_items_are_returned_until_redis_recovers(
    client: Client, redis_server: RedisServer, failure: Failure, caplog: pytest.LogCaptureFixture
) -> None:
    client.click("ada", "item-1", "item-2")
    failure.begin(redis_server)
    for event_id in ("a", "b"):
        begin_s = time.monotonic()
        answer = client.post("/v1/events", json=click("ada", event_id))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_unavailable")
        assert answer.json()["error"]["message"] == f"{STORAGE_REASONS[failure.cause]}; retry the same request later"
        assert int(answer.headers["retry-after"]) >= 1
        assert client.recommend("ada")["source"] == ("personalised" if failure.readable else "popular")
        assert client.get("/v1/users/ada").status_code == (200 if failure.readable else 503)
        assert time.monotonic() - begin_s < GIVEN_UP_WITHIN_S
    assert client.get("/readyz").status_code == 200
    assert f'lisarec_store_errors_total{{cause="{failure.cause}"}} 0.0' not in client.get("/metrics").text
    lines = [record.getMessage() for record in caplog.records if f"({failure.cause})" in record.getMessage()]
    assert lines
    assert all(failure.logged in line for line in lines)

    failure.heal(redis_server)
    wait_until_taken(client, click("ada", "a"))
    assert client.recommend("ada")["source"] == "personalised"
    logged = [event.event_id for event in client.log("ada")]
    assert len(logged) == len(set(logged))
    assert set(logged[2:]) - {"b"} == {"a"}  # an unanswered event may have been taken, then it counts once
    assert client.get("/v1/users/ada").json()["event_count"] == len(logged)


class TestLostData:
    """A Redis that lost acknowledged events, or whose settings would lose new ones."""

    def assert_refused(self, client: Client, cause: FailureCause) -> None:
        wait_until(lambda: client.get("/readyz").status_code == 503)
        for event_id in ("a", "b"):
            answer = client.post("/v1/events", json=click("bob", event_id))
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == f"{STORAGE_REASONS[cause]}; retry the same request later"
        assert client.request("PUT", "/v1/items/item-1", json={"title": "Tea"}).status_code == 503
        assert client.request("DELETE", "/v1/users/ada").status_code == 503
        assert client.recommend("ada")["source"] in ("personalised", "popular")
        numbers = client.get("/metrics").text
        assert "lisarec_store_distrusted 1.0" in numbers
        assert f'lisarec_store_errors_total{{cause="{cause}"}} 0.0' not in numbers

    def test_a_redis_that_lost_its_data_is_refused_until_they_return(
        self, client: Client, redis_server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        client.click("ada", "item-1", "item-2")
        copy = redis_server.copy_data(tmp_path / "copy")
        redis_server.restart_with(None)
        self.assert_refused(client, "wrong_store")
        (line,) = [one.getMessage() for one in caplog.records if one.name.endswith("data_loss_check")]
        assert "lisarec repair --accept-loss" in line
        redis_server.restart_with(copy)
        wait_until_taken(client, click("ada", "a"))
        assert client.get("/readyz").status_code == 200
        assert len(client.log("ada")) == 3

    @pytest.mark.parametrize(
        ("setting", "unsafe", "safe"),
        [("appendonly", "no", "yes"), ("maxmemory-policy", "allkeys-lru", "noeviction")],
    )
    def test_a_redis_without_persistence_gets_no_events(
        self, client: Client, redis_server: RedisServer, setting: str, unsafe: str, safe: str
    ) -> None:
        client.click("ada", "item-1", "item-2")
        redis_server.client.config_set(setting, unsafe)
        self.assert_refused(client, "unsafe")
        redis_server.client.config_set(setting, safe)
        wait_until_taken(client, click("ada", "a"))
        assert client.get("/readyz").status_code == 200


def test_the_service_starts_without_redis_and_connects_later(
    start: Callable[..., Client], redis_server: RedisServer, tmp_path: Path
) -> None:
    redis_server.kill()
    with closing(start(tmp_path, redis_url=redis_server.url)) as client:
        assert client.get("/readyz").status_code == 200
        assert client.recommend("ada")["source"] == "popular"
        assert client.post("/v1/events", json=click("ada", "a")).status_code == 503
        redis_server.start()
        wait_until_taken(client, click("ada", "a"))
        assert client.recommend("ada")["source"] == "personalised"


NOT_YET_READ = "this process has not read the {} from the store yet; retry the same request later"
RULED: dict[str, dict[str, object]] = {
    "filter": {"filter": "!known(item.age_limit) || item.age_limit <= 6.0"},
    "boost": {"boost": ["item.age_limit"], "exclude": ["item-0", "item-1", "item-2"]},
    "objective": {"objective": "age_limit", "exclude": ["item-0", "item-1", "item-2"]},
    "scenario": {"scenario": "kids"},
    "categories": {"categories": [*CATEGORIES]},
    "categories_all": {"categories_all": [CATEGORIES[1]]},
    "categories_none": {"categories_none": ["adult"]},
}


def test_filters_pass_no_items_before_their_values_are_read(
    start: Callable[..., Client], redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a start without Redis, items are read in pages while requests are served."""
    adult = [f"item-{row}" for row in range(3)]
    with closing(start(tmp_path, redis_url=redis_server.url)) as before:
        for item_id in adult:
            said = {"properties": {"age_limit": 18}, "categories": ["adult"]}
            assert before.request("PUT", f"/v1/items/{item_id}", json=said).status_code == 200
        assert before.request("PUT", "/v1/admin/scenarios/kids", json=RULED["filter"]).status_code == 200
    redis_server.kill()
    monkeypatch.setattr(switcher, "ITEM_CHANGES_PER_READ", 1)
    with closing(start(tmp_path, redis_url=redis_server.url)) as client:
        seen: list[tuple[str, int]] = []

        async def ask() -> None:
            for name, rule in RULED.items():
                answer = await client.http.post("/v1/recommendations", json={"user_id": "ada", "k": 60, **rule})
                seen.append((name, answer.status_code))
                if answer.status_code == 200:
                    assert not {item["item_id"] for item in answer.json()["items"]} & set(adult)
                else:
                    error = answer.json()["error"]
                    assert error["code"] == "storage_unavailable"
                    what = ["items", "scenarios"] if name == "scenario" else ["items"]  # scenarios are read first
                    assert error["message"] in [NOT_YET_READ.format(one) for one in what]

        store = client.service.store
        read_page = store.item_changes

        async def ask_and_read(tenant: str, after: int, limit: int) -> ItemChanges:
            await ask()
            page: ItemChanges = await read_page(tenant, after, limit)
            return page

        monkeypatch.setattr(store, "item_changes", ask_and_read)
        client.runner.run(ask())
        redis_server.start()
        wait_until(lambda: client.get("/v1/items/item-2").json()["properties"] == {"age_limit": 18.0})
        client.runner.run(client.service.switcher.poll())
        assert len(seen) > 2 * len(RULED)
        assert {status for _, status in seen} == {503}
        wait_until(lambda: client.post("/v1/recommendations", json={"user_id": "ada", **RULED["scenario"]}).is_success)
        client.runner.run(ask())
        assert [status for _, status in seen[-len(RULED) :]] == [200] * len(RULED)


@pytest.mark.parametrize("name", [name for name, failure in FAILURES.items() if failure.readable])
def test_items_are_read_at_startup_while_redis_refuses_writes(
    start: Callable[..., Client], redis_server: RedisServer, tmp_path: Path, name: str
) -> None:
    failure, adult = FAILURES[name], {"item-0", "item-1", "item-2"}
    with closing(start(tmp_path, redis_url=redis_server.url)) as before:
        for item_id in adult:
            said = {"available": item_id != "item-0", "properties": {"age_limit": 18}, "categories": ["adult"]}
            assert before.request("PUT", f"/v1/items/{item_id}", json=said).status_code == 200
        assert before.request("PUT", "/v1/admin/scenarios/kids", json=RULED["filter"]).status_code == 200
    redis_server.client.delete(*redis_server.client.keys("*:live:*"))
    failure.begin(redis_server)
    with closing(start(tmp_path, redis_url=redis_server.url)) as client:
        assert "item-0" not in {item["item_id"] for item in client.recommend("ada", k=60)["items"]}
        for rule in RULED.values():
            answer = client.post("/v1/recommendations", json={"user_id": "ada", "k": 60, **rule})
            assert answer.status_code == 200, answer.text
            assert not {item["item_id"] for item in answer.json()["items"]} & adult
        failure.heal(redis_server)
        wait_until(lambda: client.get("/healthz").is_success and bool(redis_server.client.keys("*:live:*")))


def test_states_and_log_survive_a_kill_of_redis(client: Client, redis_server: RedisServer) -> None:
    client.click("ada", "item-1", "item-2", "item-3")
    before = client.get("/v1/users/ada").json()
    redis_server.kill()
    redis_server.start()
    wait_until_taken(client, click("bob", "b"))
    assert client.get("/v1/users/ada").json() == before
    assert [event.item_id for event in client.log("ada")] == ["item-1", "item-2", "item-3"]


def test_services_share_users_and_prefixes_separate_them(
    client: Client, start: Callable[..., Client], redis_server: RedisServer, tmp_path: Path
) -> None:
    with closing(start(tmp_path, redis_url=redis_server.url)) as twin:
        for n in range(1, 6):
            client.click("ada", f"item-{2 * n}")
            twin.click("ada", f"item-{2 * n + 1}")
            states = [one.get("/v1/users/ada").json() for one in (client, twin)]
            assert states[0] == states[1]
            assert (states[0]["event_count"], states[0]["last_item_id"]) == (2 * n, f"item-{2 * n + 1}")
    with closing(start(tmp_path, redis_url=redis_server.url, redis_prefix="other")) as stranger:
        assert stranger.get("/v1/users/ada").status_code == 404


def test_a_wrong_password_prevents_the_start(
    start: Callable[..., Client], redis_server: RedisServer, model_dir: Path, tmp_path: Path
) -> None:
    password = "p@ss/w:rd#é"
    redis_server.client.acl_setuser("shop", enabled=True, passwords=[f"+{password}"], keys="*", commands=["+@all"])
    url = f"redis://shop@127.0.0.1:{redis_server.port}"
    with closing(start(tmp_path, redis_url=url, redis_password=password)) as client:
        client.click("ada", "item-1")
    wrong = Settings(model_dir=model_dir, redis_url=url, redis_password="wrong")

    async def use() -> None:
        async with opened_store(wrong, generation_of(load(model_dir))) as store:
            await store.ping()  # where it took too long to be asked while the store opened

    with pytest.raises(StorageUnavailable, match=r"(?i)password"):
        asyncio.run(use())


@pytest.mark.parametrize(
    ("url", "with_it"),
    [
        ("redis://db:6379/0", "redis://:p%40@db:6379/0"),
        ("redis://shop:old@db", "redis://shop:p%40@db"),
        ("rediss://shop@db:1/2?timeout=3", "rediss://shop:p%40@db:1/2?timeout=3"),
        ("unix:///run/redis.sock?db=1", "unix://:p%40@/run/redis.sock?db=1"),
    ],
)
def test_the_password_setting_is_inserted_into_the_url(url: str, with_it: str) -> None:
    assert with_password(url, "p@") == with_it

"""Requests that read a long log: bounded, reported in the response, and without delay for others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from app.catalogue.trained_catalogue import NO_ROWS
from app.events import user_data
from app.recommendation import state_reader
from app.recommendation.cost import SHORT_LOG
from app.recommendation.filters import EVERYTHING
from app.recommendation.ranking.stored_users import SeenRows
from app.recommendation.recommender import BatchEntry
from app.schemas.recommendations import RecommendationRequest
from tests.app.conftest import ITEMS, Client, item_id
from tests.app.support import assert_refused, item_ids, recommend
from tests.waiting import PATIENCE_S

NEWEST = 6


@pytest.fixture(scope="module")
def bounded(
    store_url: str | None, start: Callable[..., Client], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A service that reads few events per user; one user has more events, and one exactly as many."""
    client = start(tmp_path_factory.mktemp("state"), redis_url=store_url, max_seen_events=NEWEST)
    client.click("long", *(item_id(row) for row in range(20)))
    client.click("short", *(item_id(row) for row in range(NEWEST)))
    yield client
    client.close()


class TestBound:
    def test_only_the_newest_events_count_and_the_response_says_so(self, bounded: Client) -> None:
        answer = bounded.recommend("long", k=ITEMS, exclude_seen="all")
        newest = {item_id(row) for row in range(20 - NEWEST, 20)}
        assert newest.isdisjoint(item_ids(answer))
        assert len(item_ids(answer)) == ITEMS - NEWEST
        assert answer["seen_events_limit"] == NEWEST

    def test_a_short_log_is_not_reported(self, bounded: Client) -> None:
        answer = bounded.recommend("short", k=ITEMS, exclude_seen="all")
        assert len(item_ids(answer)) == ITEMS - NEWEST
        assert "seen_events_limit" not in answer
        for rule in ("none", "recent"):
            assert "seen_events_limit" not in bounded.recommend("long", exclude_seen=rule)

    def test_a_batch_equals_single_requests(self, bounded: Client) -> None:
        asked = [
            {"user_id": user_id, "exclude_seen": rule, "k": ITEMS}
            for user_id in ("long", "short", "nobody")
            for rule in ("all", "none", "recent")
        ]
        answers = recommend(bounded, requests=asked)["results"]
        for request, answer in zip(asked, answers, strict=True):
            alone = recommend(bounded, **request)
            assert item_ids(answer) == item_ids(alone)
            assert answer.get("seen_events_limit") == alone.get("seen_events_limit")

    def test_the_field_is_documented(self, bounded: Client) -> None:
        schemas = bounded.get("/openapi.json").json()["components"]["schemas"]
        assert "newest" in schemas["Recommendations"]["properties"]["seen_events_limit"]["description"]


@pytest.mark.parametrize(("size", "is_costly"), [(0, False), (SHORT_LOG, False), (SHORT_LOG + 1, True)])
@pytest.mark.parametrize("wish", [{"mode": "repeat"}, {"exclude_seen": "all"}, {"exclude_events": ["click"]}])
def test_requests_with_a_short_log_are_batched_with_plain_ones(
    wish: dict[str, Any], size: int, is_costly: bool
) -> None:
    request, states = RecommendationRequest.model_validate({"user_id": "ada", **wish}), SimpleNamespace(node_of=str)
    seen = SeenRows(np.arange(size), NO_ROWS, None)
    assert BatchEntry.of(request, EVERYTHING, seen, cast(Any, states)).lane.is_costly == is_costly
    assert BatchEntry.of(request, EVERYTHING, None, cast(Any, states)).lane.is_costly  # it could not be read


def test_a_short_log_is_read_together_with_the_state(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.click("ada", "item-1", "item-2")
    plain = client.recommend("ada", exclude_seen="recent", k=10)
    read, states = list[str](), client.service.store.states

    async def noted(tenant: str, user_ids: Sequence[str], *args: Any, **options: Any) -> Any:
        read.extend(user_ids)
        return await states(tenant, user_ids, *args, **options)

    monkeypatch.setattr(client.service.store, "states", noted)
    assert item_ids(client.recommend("ada", exclude_seen="all", k=10)) == item_ids(plain)
    assert client.recommend("nobody", exclude_seen="all")["source"] == "popular"
    assert read == []
    asked = [{"user_id": "ada", "exclude_seen": "all", "k": 10}, {"user_id": "ada", "k": 10}]
    assert [item_ids(one) for one in recommend(client, requests=asked)["results"]] == [item_ids(plain)] * 2
    assert read == ["ada"]  # the second request has read no log, and may need a newer state


class TestOthers:
    def test_other_requests_do_not_wait_for_a_long_log(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        client.click("ada", "item-1", "item-2")
        seen_items, may_read = client.service.store.seen_items, asyncio.Event()

        async def slow_seen_items(*args: Any, **options: Any) -> Any:
            await may_read.wait()
            return await seen_items(*args, **options)

        monkeypatch.setattr(client.service.store, "seen_items", slow_seen_items)

        async def law() -> None:
            get = client.http.get
            params = {"exclude_seen": "all", "k": "60"}
            slow = [asyncio.ensure_future(get("/v1/users/ada/recommendations", params=params)) for _ in range(5)]
            await asyncio.sleep(0)
            async with asyncio.timeout(PATIENCE_S):
                assert (await get("/v1/users/ada/recommendations")).json()["source"] != "popular"
            assert not any(task.done() for task in slow)
            may_read.set()
            for answer in await asyncio.gather(*slow):
                assert {"item-1", "item-2"}.isdisjoint(item_ids(answer.json()))

        client.runner.run(law())

    def test_reads_of_long_logs_beyond_the_limit_are_refused(
        self, start: Callable[..., Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(state_reader, "MAX_WAITING", 3)
        client = start(tmp_path)
        client.click("ada", "item-1")
        may_read, reading, most = asyncio.Event(), 0, 0
        seen_items = client.service.store.seen_items

        async def slow_seen_items(*args: Any, **options: Any) -> Any:
            nonlocal reading, most
            reading += 1
            most = max(most, reading)
            await may_read.wait()
            await asyncio.sleep(0)  # let the other reads of the batch begin
            seen = await seen_items(*args, **options)
            reading -= 1
            return seen

        monkeypatch.setattr(client.service.store, "seen_items", slow_seen_items)

        async def law() -> None:
            get, params = client.http.get, {"exclude_seen": "all"}
            asked = [asyncio.ensure_future(get("/v1/users/ada/recommendations", params=params)) for _ in range(9)]
            while not any(task.done() for task in asked):
                await asyncio.sleep(0.01)
            may_read.set()
            answers = await asyncio.gather(*asked)
            taken = [answer.status_code for answer in answers].count(200)
            assert 3 <= taken <= 3 + state_reader.READ_AT_ONCE  # those that wait, and those that are read
            for answer in answers:
                if answer.status_code != 200:
                    assert_refused(answer, 503)
                    assert answer.json()["error"]["code"] == "overloaded"
            assert most == state_reader.READ_AT_ONCE
            assert (await get("/v1/users/ada/recommendations", params=params)).status_code == 200

        client.runner.run(law())
        client.close()

    def test_an_undo_in_a_long_log_is_folded_in_the_background(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(user_data, "MAX_MISSING_EVENTS", 5)
        events = [{"user_id": "ada", "item_id": item_id(row), "event_id": f"e{row}"} for row in range(30)]
        assert client.post("/v1/events", json=events).json()["accepted"] == 30
        assert client.request("DELETE", "/v1/users/ada/events/e3").json()["changed"]
        while (answer := client.get("/v1/users/ada")).status_code == 503:
            assert_refused(answer, 503)
            assert answer.json()["error"]["code"] == "state_not_ready"
            assert "retry-after" in answer.headers
        assert answer.json()["event_count"] == 29
        assert_refused(client.get("/v1/users/nobody"), 404)


def test_a_process_whose_database_was_replaced_is_not_ready(client: Client, tmp_path: Path) -> None:
    client.click("ada", "item-1")
    assert client.get("/readyz").status_code == 200
    (tmp_path / "lisarec.sqlite3").rename(tmp_path / "elsewhere")
    event = {"user_id": "ada", "item_id": "item-2", "event_id": "e1"}
    assert_refused(client.post("/v1/events", json=[event]), 503)
    while client.get("/readyz").status_code == 200:
        client.runner.run(asyncio.sleep(0.01))
    assert_refused(client.get("/readyz"), 503)
    assert client.recommend("ada")["source"] == "popular"
    (tmp_path / "elsewhere").rename(tmp_path / "lisarec.sqlite3")
    while client.get("/readyz").status_code == 503:
        client.runner.run(asyncio.sleep(0.01))
    client.post("/v1/events", json=[event])
    assert [logged.item_id for logged in client.log("ada")] == ["item-1", "item-2"]

"""Long computations run one at a time in a thread, in turn by key, and never block the event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from app.http import charged_calls, dependencies
from app.recommendation.batching import MAX_TURNS, Limits, MicroBatcher, Requester
from app.recommendation.executor import AdaptiveExecutor, EngineThreads
from app.recommendation.fair_thread import FairThread
from app.schemas.recommendations import RecommendationRequest, Recommendations
from storage.sqlite.database import Database
from storage.state import switch_interval
from storage.state.switch_interval import SWITCH_INTERVAL_S
from tests.app.conftest import Client, item_id
from tests.app.support import assert_refused
from tests.waiting import until

BUSY_S = 0.005


@pytest.fixture(autouse=True)
def usual_turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start with the default switch interval: a shared service may be in the middle of a computation."""
    monkeypatch.setattr(switch_interval, "_OF_PROCESS", switch_interval._ShortTurns())  # noqa: SLF001
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(BUSY_S)
    yield
    sys.setswitchinterval(before_s)


class Overlap:
    """Counts concurrent calls, and records their threads."""

    def __init__(self) -> None:
        self.most = 0
        self.threads: set[str] = set()
        self._at_work = 0
        self._lock = threading.Lock()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            with self.counting():
                return function(*arguments)

        return counted

    @contextmanager
    def counting(self) -> Iterator[None]:
        with self._lock:
            self._at_work += 1
            self.most = max(self.most, self._at_work)
            self.threads.add(threading.current_thread().name)
        time.sleep(BUSY_S)  # long enough for another thread to come
        yield
        with self._lock:
            self._at_work -= 1


@pytest.fixture
def fair() -> Iterator[FairThread]:
    with ThreadPoolExecutor(2) as threads:
        yield FairThread(threads)


def test_computations_run_one_at_a_time(fair: FairThread) -> None:
    overlap = Overlap()

    async def law() -> None:
        results = [fair.run(partial(overlap.around(abs), -n), 1.0, Requester(flow=str(n % 3))) for n in range(20)]
        assert await asyncio.gather(*results) == list(range(20))

    asyncio.run(law())
    assert overlap.most == 1


def test_the_switch_interval_is_shorter_during_a_computation(fair: FairThread) -> None:
    usual_s = sys.getswitchinterval()

    async def law() -> None:
        during_s = await asyncio.gather(*(fair.run(sys.getswitchinterval, 1.0) for _ in range(3)))
        assert max(during_s) == pytest.approx(SWITCH_INTERVAL_S)
        with pytest.raises(ZeroDivisionError):
            await fair.run(lambda: 1 // 0, 1.0)

    asyncio.run(law())
    assert sys.getswitchinterval() == usual_s > 2 * SWITCH_INTERVAL_S


def test_keys_take_turns_by_cost(fair: FairThread) -> None:
    order: list[str] = []

    async def law() -> None:
        may_go = threading.Event()
        first = asyncio.ensure_future(fair.run(may_go.wait, 1.0, Requester(flow="first")))
        await asyncio.sleep(0)
        many = [fair.run(lambda: order.append("many"), 2.0, Requester(flow="many")) for _ in range(20)]
        few = [fair.run(lambda: order.append("few"), 1.0, Requester(flow="few")) for _ in range(4)]
        waiting = asyncio.gather(*many, *few)
        await asyncio.sleep(0)
        may_go.set()
        await asyncio.gather(first, waiting)

    asyncio.run(law())
    assert [order[: n + 1].count("few") for n in range(6)] == [0, 1, 2, 2, 3, 4]


def test_a_batch_waits_for_more_of_a_key_only_while_no_other_key_waits() -> None:
    batches: list[list[str]] = []

    async def work(asks: list[str]) -> list[str]:
        batches.append(asks)
        return asks

    async def law() -> None:
        batcher = MicroBatcher(work, lambda _: 1.0, Limits(max_batch=64, max_waiting=100))
        answers = []
        for turn in range(MAX_TURNS):
            answers.append(batcher.submit(["many"], Requester(flow="many")))
            if turn == 3:
                assert not batches
                answers.append(batcher.submit(["few"], Requester(flow="few")))
            await asyncio.sleep(0)
        await asyncio.gather(*answers)

    asyncio.run(law())
    assert "few" in batches[0]
    assert len(batches[0]) <= 6  # with those of at most one more turn


@pytest.mark.parametrize("is_costly", [True, False])
def test_the_event_loop_runs_often_during_long_work(tmp_path: Path, *, is_costly: bool) -> None:
    """The ranking thread for costly requests, and the thread that reads long logs from SQLite."""

    async def law() -> float:
        if not is_costly:
            database = Database(tmp_path / "store")
            try:
                return await database.read_page(lambda _: sys.getswitchinterval())
            finally:
                await database.close()
        with ThreadPoolExecutor(1) as thread:
            threads = EngineThreads(thread, thread, FairThread(thread))
            executor = AdaptiveExecutor[None, float](lambda *_: sys.getswitchinterval(), threads)
            return await executor.run_costly([], None, 2.0)

    assert asyncio.run(law()) == pytest.approx(SWITCH_INTERVAL_S)


def test_failures_reach_only_their_caller_and_cancelled_work_is_skipped(fair: FairThread) -> None:
    worked: list[str] = []

    async def law() -> None:
        may_go = threading.Event()
        calls_ = [
            fair.run(may_go.wait, 1.0),
            fair.run(lambda: 1 / 0, 1.0),
            fair.run(lambda: worked.append("gone"), 1.0, Requester(lambda: True)),
            fair.run(lambda: worked.append("there"), 1.0),
        ]
        waiting = [asyncio.ensure_future(call) for call in calls_]
        await asyncio.sleep(0)
        may_go.set()
        _, failed, gone, there = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(failed, ZeroDivisionError)
        assert isinstance(gone, ClientDisconnect)
        assert there is None

    asyncio.run(law())
    assert worked == ["there"]


class TestRequests:
    @pytest.fixture
    def overlap(self, monkeypatch: pytest.MonkeyPatch) -> Overlap:
        overlap = Overlap()
        monkeypatch.setattr(dependencies, "parse_json", overlap.around(dependencies.parse_json))
        monkeypatch.setattr(charged_calls, "parse_request", overlap.around(charged_calls.parse_request))
        return overlap

    def test_long_bodies_are_parsed_one_at_a_time_off_the_event_loop(self, client: Client, overlap: Overlap) -> None:
        ids = [item_id(row % 60) for row in range(5_000)]

        async def law() -> None:
            bodies = [{"user_id": f"user-{n}", "candidates": ids} for n in range(8)]
            answers = await asyncio.gather(*(client.http.post("/v1/recommendations", json=body) for body in bodies))
            assert [answer.status_code for answer in answers] == [200] * 8

        client.runner.run(law())
        assert overlap.most == 1
        assert threading.current_thread().name not in overlap.threads

    def test_long_search_results_are_encoded_off_the_event_loop(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        overlap, catalogue = Overlap(), client.service.catalogue
        monkeypatch.setattr(catalogue, "items_of", overlap.around(catalogue.items_of))
        for limit, is_here in ((10, True), (1_000, False)):
            overlap.threads.clear()
            assert client.get(f"/v1/items?query=i&user_id=ada&limit={limit}").json()["items"]
            assert (threading.current_thread().name in overlap.threads) == is_here

    def test_a_short_body_does_not_wait_for_long_ones(self, client: Client, overlap: Overlap) -> None:
        assert client.post("/v1/recommendations", json={"user_id": "ada"}).status_code == 200
        assert overlap.threads == {threading.current_thread().name}

    def test_large_calls_of_a_key_run_in_turn_and_small_ones_overtake(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recommender, may_go, at_work = client.service.switcher.recommender, asyncio.Event(), list[int]()
        recommend, most = recommender.recommend, 0

        async def held(requests: Sequence[RecommendationRequest], requester: Requester) -> list[Recommendations]:
            nonlocal most
            if len(requests) > 1:
                at_work.append(len(requests))
                most = max(most, len(at_work))
                await may_go.wait()
                at_work.pop()
            answers: list[Recommendations] = await recommend(requests, requester)
            return answers

        monkeypatch.setattr(recommender, "recommend", held)
        batch = {"requests": [{"user_id": "ada"}] * charged_calls.LARGE_COST}
        costly = {"requests": [{"user_id": "ada", "k": 1_000}] * charged_calls.LARGE_COST}
        long = {"requests": [{"user_id": "ada"}] * 100}

        async def law() -> None:
            bodies = [batch, costly, long] * 2
            large = [asyncio.create_task(client.http.post("/v1/recommendations", json=body)) for body in bodies]
            await until(lambda: at_work)
            for _ in range(3):
                assert (await client.http.post("/v1/recommendations", json={"user_id": "bob"})).status_code == 200
            assert not any(one.done() for one in large)
            may_go.set()
            assert [answer.status_code for answer in await asyncio.gather(*large)] == [200] * 6

        client.runner.run(law())
        assert most == 1
        assert not client.services.large_calls

    def test_errors_in_a_long_body_are_reported(self, client: Client) -> None:
        text = "x" * (dependencies.LONG_BODY_BYTES + 1)
        for body in (f'{{"user_id": "{text}', f'{{"a": "{text}", "a": 1}}', f'"{text}'):
            answer = client.post("/v1/recommendations", content=body, headers={"content-type": "application/json"})
            assert_refused(answer, 400)
            assert answer.json()["error"]["code"] == "invalid_json"
        assert client.post("/v1/events", content=b'"' + text.encode() + b"\xff").status_code == 400

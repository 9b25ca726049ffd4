"""Rate limits of keys: in one process, on one Redis, and on a Redis Cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import TryAgainError

from app.errors import TooManyNewUsers, TooManyRequests
from app.http.auth import quota_counters
from app.http.auth.keys import add, make
from app.http.auth.quota_counters import LocalCounters, Quota, Refusal, SharedCounters
from app.http.auth.rate_limit import ALLOWANCES, RateLimiter
from app.recommendation.batching import Limits
from storage.errors import StorageError
from storage.redis.connections.client import RedisServers
from storage.redis.connections.nodes import Command
from tests.app.conftest import Client
from tests.app.support import assert_refused, bearer
from tests.storage.redis.servers import RedisServer, redis_users, running_cluster, tls_cluster
from tests.waiting import PATIENCE_S


def test_a_key_gets_429_beyond_its_rate(
    start: Callable[..., Client], tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota_counters, "REDIS_TIMEOUT_S", PATIENCE_S)  # on a machine with other things to do
    few, few_key = make("main", ["recs:read"], requests_per_minute=5)
    many, many_key = make("main", ["recs:read"])
    add(tmp_path / "keys", few_key)
    add(tmp_path / "keys", many_key)
    server = request.getfixturevalue("redis_server")
    for redis_url in (None, server.url):
        clients = [start(tmp_path, keys_file=tmp_path / "keys", redis_url=redis_url) for _ in range(2)]
        together = clients if redis_url else clients[:1]  # without Redis each process counts for itself
        answers = [together[n % len(together)].get("/v1/model", headers=bearer(few)) for n in range(8)]
        assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 3
        assert_refused(answers[-1], 429)
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
        assert clients[0].get("/v1/model", headers=bearer(many)).status_code == 200
        if redis_url:
            server.kill()  # from now on each process counts alone
            answers = [clients[0].get("/v1/model", headers=bearer(few)) for n in range(7)]
            assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 2
        for client in clients:
            client.close()


@pytest.mark.slow
@pytest.mark.parametrize("has_tls", [False, True], ids=["password file", "tls"])
def test_processes_on_a_cluster_share_the_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, has_tls: bool
) -> None:
    password = redis_users().password
    (tmp_path / "password").write_text(password)
    by_file = f"{running_cluster().url.replace(f':{password}@', '@')}?password_file={tmp_path / 'password'}"
    monkeypatch.setattr(quota_counters, "REDIS_TIMEOUT_S", PATIENCE_S)  # on a machine with other things to do
    _, key = make("main", ["recs:read"], requests_per_minute=5)
    _, other = make("main", ["recs:read"], requests_per_minute=5)
    _, page = make(f"tenant-{key.id}", ["events:write"], ["https://shop.example"], new_users_per_hour=6)

    async def law() -> None:
        processes = [RateLimiter(url, "lisarec") for _ in range(2)]
        try:
            for n in range(5):
                await processes[n % 2].count(key)
            for process in processes:
                with pytest.raises(TooManyRequests):
                    await process.count(key)
                await process.count(other)
            for n in range(3):
                await processes[n % 2].count_new_users(page, tenant_quota=6, count=1)
            for process in processes:
                with pytest.raises(TooManyNewUsers, match="all page keys"):
                    await process.count_new_users(page, tenant_quota=6, count=1)
        finally:
            for process in processes:
                await process.close()

    with tls_cluster(tmp_path) if has_tls else nullcontext(by_file) as url:
        asyncio.run(law())


@pytest.mark.parametrize("costs", [[1], [1, 1, 1, 7, 2], [40, 1]])
def test_a_high_rate_is_counted_in_allowances(redis_server: RedisServer, costs: Sequence[int]) -> None:
    """Two processes together accept the rate, except for allowances that they have taken and not used."""
    rate, refusals, trips = 6_000, 50, 0
    ahead = rate // ALLOWANCES
    _, key = make("main", ["recs:read"], requests_per_minute=rate)
    spend = SharedCounters.spend

    async def spend_counted(self: SharedCounters, *arguments: Any) -> Refusal | None:
        nonlocal trips
        trips += 1
        return await spend(self, *arguments)

    async def law() -> tuple[int, int]:
        processes = [RateLimiter(redis_server.url, "lisarec") for _ in range(2)]
        accepted, accepted_large, refused, begin_s = 0, 0, 0, time.monotonic()
        for process, cost in zip(cycle(processes), cycle(costs), strict=False):
            try:
                await process.count(key, cost)
                accepted += cost
                accepted_large += cost >= ahead
            except TooManyRequests:
                refused += 1
            if refused == refusals:
                break
        for process in processes:
            await process.close()
        later = rate * (time.monotonic() - begin_s) / 60  # what the sliding window has let go meanwhile
        assert rate - 2 * ahead - max(costs) < accepted <= rate + later + max(costs)
        return accepted, accepted_large

    timeout, counted = (
        patch.object(quota_counters, "REDIS_TIMEOUT_S", PATIENCE_S),
        patch.object(SharedCounters, "spend", spend_counted),
    )
    with timeout, counted:
        accepted, accepted_large = asyncio.run(law())
    assert trips <= accepted_large + 2 * accepted / ahead + refusals + 4 * ahead


def test_concurrent_requests_take_one_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    rate, spent = 60 * ALLOWANCES, list[int]()
    _, key = make("main", ["recs:read"], requests_per_minute=rate)

    async def spend(_: RateLimiter, _quotas: Sequence[Quota], cost: int, _window_s: int) -> None:
        spent.append(cost)
        await asyncio.sleep(0)

    async def law() -> None:
        limiter = RateLimiter(None, "lisarec")
        await asyncio.gather(*(limiter.count(key) for _ in range(30)))
        assert sorted(spent) == [1] * 29 + [60]
        await asyncio.gather(*(limiter.count(key) for _ in range(59)))
        assert len(spent) == 30
        await limiter.close()

    monkeypatch.setattr(RateLimiter, "_spend", spend)
    asyncio.run(law())


def test_a_refused_key_takes_allowances_again_when_it_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rate, now_s = 20 * ALLOWANCES, 1_800_000_000.0
    _, key = make("main", ["recs:read"], requests_per_minute=rate)
    monkeypatch.setattr(quota_counters, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def law() -> None:
        nonlocal now_s
        limiter = RateLimiter(None, "lisarec")
        await limiter.count(key, rate)
        with patch.object(LocalCounters, "spend", autospec=True, side_effect=LocalCounters.spend) as spend:
            for _ in range(10):
                with pytest.raises(TooManyRequests):
                    await limiter.count(key)
            assert spend.call_count == 1 + 10  # one ahead
            now_s += 120
            for _ in range(20):
                await limiter.count(key)
            assert spend.call_count == 11 + 2  # one alone, the others ahead
        await limiter.close()

    asyncio.run(law())


async def test_processes_count_alone_while_the_cluster_is_down() -> None:
    _, key = make("main", ["recs:read"], requests_per_minute=2)
    alone = RateLimiter("redis://127.0.0.1:1,127.0.0.1:2", "lisarec")
    try:
        await alone.count(key)
        await alone.count(key)
        with pytest.raises(TooManyRequests):
            await alone.count(key)
    finally:
        await alone.close()


def test_only_one_request_waits_for_a_hung_redis(redis_server: RedisServer) -> None:
    async def is_counted_together(processes: list[RateLimiter]) -> bool:
        _, key = make("main", ["recs:read"], requests_per_minute=1)
        for process in processes:
            try:
                await process.count(key)
            except TooManyRequests:
                return True
        return False

    async def law() -> None:
        processes = [RateLimiter(redis_server.url, "lisarec") for _ in range(2)]
        try:
            await wait_until_counted_together(processes)
            redis_server.freeze()
            assert not await is_counted_together(processes)  # this one waits
            begin_s = time.monotonic()
            for _ in range(100):
                assert not await is_counted_together(processes)
            assert time.monotonic() - begin_s < 100 * quota_counters.REDIS_TIMEOUT_S
            redis_server.thaw()
            await wait_until_counted_together(processes)
        finally:
            for process in processes:
                await process.close()

    async def wait_until_counted_together(processes: list[RateLimiter]) -> None:
        give_up_at_s = time.monotonic() + PATIENCE_S
        while not await is_counted_together(processes):
            assert time.monotonic() < give_up_at_s
            await asyncio.sleep(0.01)

    asyncio.run(law())


def test_concurrent_requests_share_round_trips(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_counters, "REDIS_TIMEOUT_S", PATIENCE_S)
    keys = [make("main", ["recs:read"], requests_per_minute=20)[1] for _ in range(2)]

    async def law() -> None:
        limiter = RateLimiter(redis_server.url, "lisarec")
        try:
            await limiter.count(keys[0])
            with patch.object(
                RedisServers, "execute_all", autospec=True, side_effect=RedisServers.execute_all
            ) as calls:
                counted = [limiter.count(key) for key in keys for _ in range(25)]
                found = await asyncio.gather(*counted, return_exceptions=True)
            assert [isinstance(one, TooManyRequests) for one in found] == [n >= 19 for n in range(25)] + [
                n >= 20 for n in range(25)
            ]
            assert calls.call_count <= 3
        finally:
            await limiter.close()

    asyncio.run(law())


def test_requests_beyond_the_queue_limit_are_counted_in_the_process(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quota_counters, "AT_ONCE", Limits(max_batch=1, max_waiting=1))
    _, key = make("main", ["recs:read"], requests_per_minute=20)

    async def law() -> None:
        limiter = RateLimiter(redis_server.url, "lisarec")
        try:
            await asyncio.gather(*(limiter.count(key) for _ in range(5)))
        finally:
            await limiter.close()

    asyncio.run(law())
    assert "Overloaded" in caplog.text


async def test_a_moved_slot_fails_only_its_own_request(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota_counters, "REDIS_TIMEOUT_S", PATIENCE_S)
    execute_all = RedisServers.execute_all

    async def first_moves(servers: RedisServers, commands: Sequence[Command], **how: bool) -> list[Any]:
        assert how == {"return_try_again": True}
        replies = await execute_all(servers, commands, **how)
        moving = (command.key == "moving-0" for command in commands)
        return [TryAgainError() if is_moving else reply for is_moving, reply in zip(moving, replies, strict=True)]

    counters = SharedCounters(redis_server.url)
    try:
        with patch.object(RedisServers, "execute_all", first_moves):
            spent = (counters.spend([Quota(f"moving-{place}", 5)], 1, 60) for place in range(3))
            moved, *others = await asyncio.gather(*spent, return_exceptions=True)
        assert isinstance(moved, StorageError)
        assert others == [None, None]
    finally:
        await counters.close()


@given(st.lists(st.tuples(st.floats(0, 90), st.integers(1, 5), st.booleans()), max_size=60))
def test_no_window_exceeds_the_limit_and_retry_after_is_right(
    calls: list[tuple[float, int, bool]],
) -> None:
    one, both, limit, window_s = Quota("one", 7), Quota("both", 5), 5, 60
    counters, now_s, spent = LocalCounters(), 1_800_000_000.0, list[tuple[float, int]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now_s)
        for gap_s, cost, is_of_one in calls:
            now_s += gap_s
            quotas = [one, both] if is_of_one else [both]
            refusal = counters.spend(quotas, cost, window_s)
            if refusal is not None:
                assert 1 <= refusal.wait_s <= window_s
                if refusal.wait_s < window_s and quotas[refusal.place] == both:
                    now_s += refusal.wait_s
                    refusal = counters.spend([both], cost, window_s)
                    assert refusal is None
            if refusal is None:
                spent.append((now_s, cost))
            recent = [cost for at_s, cost in spent if at_s > now_s - window_s]
            assert sum(recent) <= 2 * limit


@pytest.mark.parametrize("jump_s", [-7200.0, 7200.0])
def test_a_changed_clock_restores_no_quota(jump_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    counters, quota = LocalCounters(), Quota("one", 7)
    assert counters.spend([quota], 7, 3600) is None
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + jump_s)
    assert counters.spend([quota], 7, 3600) is not None


def test_redis_counts_the_same_sliding_window_as_a_process(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota_counters, "REDIS_TIMEOUT_S", PATIENCE_S)  # on a machine with other things to do
    now_s, client = time.time(), redis_server.client
    window_s = int(now_s) * 4 // 5  # so a quarter of the second window since the epoch is over
    used, unused = Quota("used", 85), Quota("unused", 9)
    spendings = [([used], 4), ([unused, used], 5), ([unused, used], 1), ([unused], 5), ([unused], 4), ([used], 60)]

    async def spend_in_redis() -> list[Refusal | None]:
        counters = SharedCounters(redis_server.url)
        try:
            return [await counters.spend(quotas, cost, window_s) for quotas, cost in spendings]
        finally:
            await counters.close()

    client.hset(used.key, mapping={"-1": 9, "0": 101})
    shared = asyncio.run(spend_in_redis())
    assert client.hgetall(used.key) == {b"0": b"101", b"1": b"9"}
    assert client.pttl(used.key) > 1_750 * window_s  # until the second window counts no longer
    alone = LocalCounters()
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    assert alone.spend([Quota(used.key, 101)], 101, window_s) is None
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    expected = [alone.spend(quotas, cost, window_s) for quotas, cost in spendings]
    places = [[one and one.place for one in refusals] for refusals in (shared, expected)]
    assert places == [[None, None, 1, 0, None, 0]] * 2
    waits, expected_waits = ([one.wait_s for one in refusals if one] for refusals in (shared, expected))
    assert waits == pytest.approx(expected_waits, abs=PATIENCE_S)  # of years


async def test_what_was_spent_under_a_clock_ahead_is_not_counted_when_its_time_comes(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota_counters, "REDIS_TIMEOUT_S", PATIENCE_S)
    quota, window_s, now_s = Quota("key", 3), 1, int(redis_server.client.time()[0])
    redis_server.client.hset(quota.key, mapping={str(now_s + ahead): 3 for ahead in range(60, 120)})
    counters = SharedCounters(redis_server.url)
    try:
        assert await counters.spend([quota], 1, window_s) is None
    finally:
        await counters.close()
    assert all(int(window) < now_s + 60 for window in redis_server.client.hkeys(quota.key))

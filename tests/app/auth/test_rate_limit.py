"""The rate limits of keys: in one process, on one Redis, and on a cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from app.errors import TooManyRequests
from app.http.auth import rate_limit
from app.http.auth.keys import add, make
from app.http.auth.rate_limit import RateLimiter
from tests.app.conftest import Client
from tests.app.support import assert_refused, bearer
from tests.storage.redis.servers import RedisServer, redis_users, running_cluster, tls_cluster
from tests.waiting import PATIENCE_S


def test_a_key_has_as_many_requests_as_it_says(
    start: Callable[..., Client], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
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
def test_processes_on_a_cluster_count_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, has_tls: bool
) -> None:
    password = redis_users().password
    (tmp_path / "password").write_text(password)
    by_file = f"{running_cluster().url.replace(f':{password}@', '@')}?password_file={tmp_path / 'password'}"
    monkeypatch.setattr(rate_limit, "REDIS_TIMEOUT_S", 60.0)  # on a machine with other things to do
    _, key = make("main", ["recs:read"], requests_per_minute=5)
    _, other = make("main", ["recs:read"], requests_per_minute=5)

    async def law() -> None:
        processes = [RateLimiter(url, "lisarec") for _ in range(2)]
        try:
            for n in range(5):
                await processes[n % 2].count(key)
            for process in processes:
                with pytest.raises(TooManyRequests):
                    await process.count(key)
                await process.count(other)
        finally:
            for process in processes:
                await process.close()

    with tls_cluster(tmp_path) if has_tls else nullcontext(by_file) as url:
        asyncio.run(law())


def test_without_the_cluster_each_process_counts_alone() -> None:
    _, key = make("main", ["recs:read"], requests_per_minute=2)

    async def law() -> None:
        alone = RateLimiter("redis://127.0.0.1:1,127.0.0.1:2", "lisarec")
        try:
            await alone.count(key)
            await alone.count(key)
            with pytest.raises(TooManyRequests):
                await alone.count(key)
        finally:
            await alone.close()

    asyncio.run(law())


def test_one_request_waits_for_a_redis_that_hangs_and_later_all_count_together_again(redis_server: RedisServer) -> None:
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
            assert time.monotonic() - begin_s < 100 * rate_limit.REDIS_TIMEOUT_S
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

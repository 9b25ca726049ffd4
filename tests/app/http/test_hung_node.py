"""A hung node of a Redis Cluster: users on other nodes do not wait, and its own users get a quick error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import count, islice
from pathlib import Path

import httpx
import pytest

from storage.redis.layout.keys import Keyspace
from storage.redis.store import PARTITIONS
from tests.app.conftest import Client
from tests.storage.redis.servers import RedisCluster
from tests.waiting import until

NOBODY_GIVES_UP_S = 120.0
MANY = 100  # requests; twice as many are more than a process works on at a time

_event_ids = (f"event-{number}" for number in count())


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    cluster = RedisCluster(timeout_ms=600_000)  # no node calls another one dead
    yield cluster
    cluster.stop()


def users_on(cluster: RedisCluster, place: int, prefix: str) -> Iterator[str]:
    keys = Keyspace("lisarec", PARTITIONS)
    names = (f"{prefix}-{number}" for number in count())
    return (name for name in names if cluster.owner(keys.user("main", name).head) is cluster.primaries[place])


@pytest.fixture
def users(cluster: RedisCluster) -> dict[int, list[str]]:
    """Users by the index of their node."""
    return {place: list(islice(users_on(cluster, place, "user"), 20)) for place in range(3)}


@pytest.fixture
def serve(cluster: RedisCluster, start: Callable[..., Client], tmp_path: Path) -> Iterator[Callable[[float], Client]]:
    """Start a service with this timeout for nodes."""
    clients: list[Client] = []

    def start_client(socket_timeout_s: float) -> Client:
        clients.append(start(tmp_path, socket_timeout_s, redis_url=cluster.url))
        return clients[-1]

    yield start_client
    for client in clients:
        client.close()


@contextmanager
def hung(cluster: RedisCluster, place: int) -> Iterator[None]:
    cluster.primaries[place].freeze()
    try:
        yield
    finally:
        cluster.primaries[place].thaw()


def post(http: httpx.AsyncClient, *user_ids: str) -> asyncio.Task[httpx.Response]:
    events = [{"user_id": user_id, "item_id": "item-1", "event_id": next(_event_ids)} for user_id in user_ids]
    return asyncio.create_task(http.post("/v1/events", json=events))


def ask(http: httpx.AsyncClient, *user_ids: str) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(http.post("/v1/recommendations", json={"requests": [{"user_id": u} for u in user_ids]}))


def ask_all_unseen(http: httpx.AsyncClient, user_id: str) -> asyncio.Task[httpx.Response]:
    request = {"user_id": user_id, "exclude_seen": "all"}
    return asyncio.create_task(http.post("/v1/recommendations", json={"requests": [request]}))


async def sources(answer: asyncio.Task[httpx.Response]) -> list[str]:
    response = await answer
    assert response.status_code == 200, response.text
    return [result["source"] for result in response.json()["results"]]


async def are_at_work(client: Client, requests: Sequence[asyncio.Task[httpx.Response]]) -> None:
    """Wait until the service processes all of the requests, and no others."""
    await until(lambda: client.services.metrics.requests.in_progress == len(requests))


@asynccontextmanager
async def finished(cluster: RedisCluster, waiting: list[asyncio.Task[httpx.Response]]) -> AsyncIterator[None]:
    """Hang node 0 within the block; then resume it and wait for all responses."""
    with hung(cluster, 0):
        yield
    await asyncio.wait(waiting)


async def recovered(http: httpx.AsyncClient, user_id: str) -> None:
    async def is_taken() -> bool:
        return (await post(http, user_id)).status_code == 200

    await until(is_taken)


def test_users_on_other_nodes_do_not_wait(
    cluster: RedisCluster, users: dict[int, list[str]], serve: Callable[[float], Client]
) -> None:
    client = serve(NOBODY_GIVES_UP_S)

    async def law() -> None:
        http, (lost, *_), others = client.http, users[0], [*users[1], *users[2]]
        for user_id in (lost, *others):
            assert (await post(http, user_id)).status_code == 200
        waiting: list[asyncio.Task[httpx.Response]] = []
        async with finished(cluster, waiting):
            waiting += [post(http, lost), ask(http, lost), ask(http, lost, others[0]), post(http, lost, others[0])]
            waiting += [ask_all_unseen(http, lost) for _ in range(5)]
            await are_at_work(client, waiting)
            for user_id in others:
                answers = [ask(http, user_id), post(http, user_id), ask(http, user_id, others[0])]
                assert await sources(answers[0]) == ["personalised"]
                assert (await answers[1]).status_code == 200
                assert await sources(answers[2]) == ["personalised"] * 2
                assert await sources(ask_all_unseen(http, user_id)) == ["personalised"]
            assert not any(one.done() for one in waiting)

    client.runner.run(law())


def test_a_merged_user_on_the_hung_node_delays_nobody(
    cluster: RedisCluster, users: dict[int, list[str]], serve: Callable[[float], Client]
) -> None:
    client = serve(NOBODY_GIVES_UP_S)

    async def law() -> None:
        http, neighbours = client.http, users[1]
        user_id, visitor = next(users_on(cluster, 0, "known")), next(users_on(cluster, 1, "visitor"))
        for one in (user_id, visitor, *neighbours):
            assert (await post(http, one)).status_code == 200
        assert (await http.post(f"/v1/users/{user_id}/merge", json={"from": visitor})).status_code == 200
        assert await sources(ask(http, visitor)) == ["personalised"]
        waiting: list[asyncio.Task[httpx.Response]] = []
        async with finished(cluster, waiting):
            waiting += [ask(http, visitor), post(http, visitor)]
            await are_at_work(client, waiting)
            for neighbour in neighbours:
                assert await sources(ask(http, neighbour)) == ["personalised"]
                assert (await post(http, neighbour)).status_code == 200
            assert not any(one.done() for one in waiting)

    client.runner.run(law())


def test_requests_for_the_hung_node_leave_slots_for_others(
    cluster: RedisCluster, users: dict[int, list[str]], serve: Callable[[float], Client]
) -> None:
    client = serve(NOBODY_GIVES_UP_S)

    async def law() -> None:
        http, (lost, *_), (served, *_) = client.http, users[0], users[1]
        assert (await post(http, served)).status_code == 200
        waiting: list[asyncio.Task[httpx.Response]] = []
        async with finished(cluster, waiting):
            waiting += [send(http, lost) for _ in range(MANY) for send in (post, ask)]
            await until(lambda: sum(one.done() for one in waiting) >= 2 * MANY - 64 - 32)
            refusals = {one.result().json()["error"]["code"] for one in waiting if one.done()}
            assert refusals == {"storage_busy", "overloaded"}
            for _ in range(20):
                assert await sources(ask(http, served)) == ["personalised"]
                assert (await post(http, served)).status_code == 200

    client.runner.run(law())


def test_requests_fail_fast_after_one_timeout_until_the_node_recovers(
    cluster: RedisCluster, users: dict[int, list[str]], serve: Callable[[float], Client]
) -> None:
    client = serve(2.0)

    async def law() -> None:
        http, (lost, *_), (served, *_) = client.http, users[0], users[1]
        for user_id in (lost, served):
            await recovered(http, user_id)
        with hung(cluster, 0):
            refusal = await post(http, lost)
            assert refusal.json()["error"]["message"].startswith("the store does not respond in time")
            begin_s = time.monotonic()
            for _ in range(20):
                assert (await post(http, lost)).json()["error"]["code"] == "storage_unavailable"
                assert (await post(http, lost, served)).json()["error"]["code"] == "partly_applied"
                assert await sources(ask(http, lost, served)) == ["popular", "personalised"]
            assert time.monotonic() - begin_s < 20 * 2.0  # one time-out each would be three times as much
        await recovered(http, lost)
        assert await sources(ask(http, lost, served)) == ["personalised"] * 2

    client.runner.run(law())

"""Load balancer, replicas and Redis as docker-compose.yml runs them: restarts and scaling fail no request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.harness.topology import FIRST_ADDRESS, MAX_DISCOVERED, Topology, topology
from benchmarks.rollout import scaling
from model.artifact.model_directory import load
from tests.waiting import PATIENCE_S, wait_until

BODY_LIMIT = 1 << 20


@pytest.fixture(scope="module")
def running(model_dir: Path) -> Iterator[Topology]:
    try:
        with topology(model_dir, 2) as running:
            yield running
    except FileNotFoundError as exc:  # CI turns this into a failure
        pytest.skip(str(exc))


def addresses(running: Topology) -> list[str]:
    return [f"http://{replica.address}:{running.replica_port}" for replica in running.replicas]


def test_events_are_visible_on_other_replicas_at_once(running: Topology) -> None:
    running.scale(2)
    first, second = addresses(running)
    for n in range(1, 11):
        event = {"user_id": "ada", "item_id": f"item-{n}"}
        assert httpx.post(f"{first}/v1/events", json=event).json()["accepted"] == 1
        state = httpx.get(f"{second}/v1/users/ada").json()
        assert (state["event_count"], state["last_item_id"]) == (n, f"item-{n}")
        first, second = second, first


def test_the_largest_body_passes_and_a_larger_one_gets_413_of_the_service(running: Topology) -> None:
    event = b'{"user_id": "bea", "item_id": "item-1"}'
    answers = [
        httpx.post(f"{running.url}/v1/events", content=event.ljust(size)) for size in (BODY_LIMIT, BODY_LIMIT + 1)
    ]
    assert [answer.status_code for answer in answers] == [200, 413]
    assert answers[1].json()["error"]["code"] == "body_too_large"


def test_a_request_without_a_valid_id_gets_one(running: Topology) -> None:
    def answered(*given: str) -> str:
        headers = [("X-Request-ID", one) for one in given]
        return str(httpx.get(f"{running.url}/healthz", headers=headers).headers["x-request-id"])

    assert answered("a.b-c_1") == "a.b-c_1"
    for insane in ((), ("a b",), ("x" * 65,), ("one", "two")):
        assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", answered(*insane))


def test_a_too_large_head_is_refused(running: Topology) -> None:
    answer = httpx.get(f"{running.url}/healthz", headers={"x-long": "x" * 20_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (431, "head_too_large")


@pytest.mark.parametrize("path", ["/metrics", "/%6detrics", "/v1/admin/generations/tiny/activate", "/v1/%61dmin/x"])
def test_operator_paths_are_not_passed_on(running: Topology, path: str) -> None:
    answer = httpx.get(f"{running.url}{path}")
    assert (answer.status_code, answer.json()["error"]["message"].endswith(("/metrics", "/v1/admin"))) == (404, True)


def test_no_request_fails_while_replicas_come_and_go(
    running: Topology, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 -> 2 replicas, each restarted, one killed, 2 -> 1, under 2,000 requests: none fails, each event counts once."""
    monkeypatch.setattr(scaling, "PAUSE_S", 0.02)  # else visitors send several times as many while replicas start
    running.scale(1)
    items = load(model_dir).items.ids
    tally = asyncio.run(scaling.measure(running, items, requests=2_000, visitors=6, fewest=1, most=2))
    assert tally.failures == {}
    assert tally.requests >= 2_000


def servers(running: Topology, state: str) -> int:
    """Number of servers in this state at the load balancer; those without an address are in MAINT."""
    exported = httpx.get(f"http://{running.balancer_environment['LISAREC_METRICS_BIND']}/metrics").text
    return len(re.findall(rf'^haproxy_server_status{{proxy="replicas",.*state="{state}"}} 1$', exported, re.M))


def test_replicas_resolved_before_they_listen_fail_no_request(running: Topology) -> None:
    """As many as may be added at a time: the first request after that meets them all, and with one retry less fails."""
    running.scale(1)
    silent = {FIRST_ADDRESS + 20 + n for n in range(MAX_DISCOVERED - 1)}
    statuses: set[int] = set()
    with httpx.Client(base_url=running.url, timeout=PATIENCE_S) as client:

        def are_found() -> bool:
            found = servers(running, "MAINT") == 0
            # hardly with a pause, or health checks would be first
            statuses.update(client.get("/v1/items/popular").status_code for _ in range(20))
            return found

        for _ in range(3):
            running.names.addresses |= silent
            wait_until(are_found)
            running.names.addresses -= silent
            assert statuses == {200}
            wait_until(lambda: servers(running, "MAINT") == len(silent))


def test_without_replicas_clients_get_503_with_retry_after(running: Topology) -> None:
    running.scale(0)
    # the balancer may try again for some seconds before it knows
    answer = httpx.get(f"{running.url}/v1/users/whisper", headers={"X-Request-ID": "no-replica-1"}, timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert answer.headers["retry-after"] == "1"
    line = wait_until(lambda: re.search(r".* GET no-replica-1$", running.balancer_log(), re.M), running.balancer_log)
    assert " 503 " in line[0]
    assert "whisper" not in running.balancer_log()
    running.scale(1)
    wait_until(lambda: servers(running, "UP") == 1)
    assert httpx.get(f"{running.url}/v1/model").status_code == 200


@pytest.mark.parametrize("size", [0, BODY_LIMIT])
def test_a_request_refused_by_a_lost_replica_is_retried_on_another(running: Topology, size: int) -> None:
    running.scale(2)
    wait_until(lambda: servers(running, "UP") == 2)
    lost = running.replicas.pop(0)
    lost.process.kill()
    lost.process.wait()
    with httpx.Client(base_url=running.url) as client:
        for n in range(20):
            event = b'{"event_id": "e-%d", "user_id": "cleo-%d", "item_id": "item-1"}' % (n, size)
            answer = client.post("/v1/events", content=event.ljust(size))
            assert answer.json() == {
                "accepted": 1,
                "duplicates": 0,
                "unknown_items": 0,
                "unknown_types": 0,
                "refused": 0,
            }
    running.names.addresses.discard(lost.address)

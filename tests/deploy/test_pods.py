"""Pods of the chart as processes: roll-outs, drains and kills fail no request; probes are accurate."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.rollout import scaling
from benchmarks.rollout.scaling import ScalingTally, Visitor
from model.artifact.model_directory import load
from tests.deploy.chart import environment_of, pods, rendered_variant
from tests.deploy.cluster import ENDPOINTS_LATE_S, Cluster, url_of
from tests.deploy.kubelet import wait_until_ready
from tests.waiting import PATIENCE_S, wait_until

# Sooner than by default, but later than everybody has noticed.
VALUES: dict[str, Any] = {
    "model": "tiny",
    "app": {"drainSeconds": 3},
    "balancer": {"drainSeconds": int(2 * ENDPOINTS_LATE_S)},
}


@pytest.fixture(autouse=True)
def _little_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of requests a second suffice, and leave CPU time to other tests."""
    monkeypatch.setattr(scaling, "PAUSE_S", 0.01)


@pytest.mark.parametrize(
    ("given", "bound"),
    [({}, "[::]:8000 [::]:8405"), ({"LISAREC_BIND": "10.0.0.1:80"}, "10.0.0.1:80 [::]:8405")],
    ids=str,
)
def test_a_load_balancer_listens_on_all_addresses_of_ipv4_and_ipv6(given: dict[str, str], bound: str) -> None:
    (container,) = pods(rendered_variant("defaults"))["balancer"]["containers"]
    *shell, script = container["command"]
    prepared, start, _ = script.partition("exec haproxy ")
    assert start
    environment = {**os.environ, **environment_of(container), **given}
    show = [*shell, f'{prepared} echo "$LISAREC_BIND $LISAREC_METRICS_BIND"']
    assert subprocess.run(show, env=environment, capture_output=True, text=True, check=True).stdout == f"{bound}\n"


@pytest.fixture
def cluster(tmp_path: Path, model_dir: Path) -> Iterator[Cluster]:
    models = tmp_path / "models"
    shutil.copytree(model_dir, models / model_dir.name)
    cluster = Cluster(tmp_path, models, VALUES)
    for name in ("app", "archive", "redis"):
        (container,) = cluster.specs[name]["containers"]
        container["readinessProbe"] |= {"periodSeconds": 1}  # the probe of the chart, asked more often
    try:
        yield cluster
    finally:
        cluster.close()


class KubeProxy(httpx.AsyncBaseTransport):
    """Sends each request to one of the currently known endpoints."""

    def __init__(self, endpoints: set[str]) -> None:
        self._endpoints = endpoints
        self._transport = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        endpoint = httpx.URL(random.choice(sorted(self._endpoints)))
        request.url = request.url.copy_with(host=endpoint.host, port=endpoint.port)
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        await self._transport.aclose()


async def under_load(cluster: Cluster, model_dir: Path, **phases: Callable[[], None]) -> ScalingTally:
    """Post events and request lists during the phases; collects users with wrong counts."""
    tally, done = ScalingTally(), asyncio.Event()
    items = load(model_dir).items.ids
    headers = cluster.headers
    proxied = partial(
        httpx.AsyncClient, base_url="http://lisarec", transport=KubeProxy(cluster.endpoints), timeout=PATIENCE_S
    )
    async with (
        proxied(headers=headers) as lasting,
        proxied(headers={**headers, "connection": "close"}) as brief,
        asyncio.TaskGroup() as group,
    ):
        for n in range(4):
            group.create_task(Visitor(f"visitor-{n}", items, brief if n % 2 else lasting, tally).visit(done))
        for name, phase in phases.items():
            tally.phase = name
            await asyncio.to_thread(phase)
        done.set()
    with cluster.client(url_of(cluster.balancers[0])) as client:
        for user_id, posted in tally.posted.items():
            answer = client.get(f"/v1/users/{user_id}")
            if answer.json().get("event_count") != posted:
                tally.failures["end", f"{posted} events acknowledged, then: {answer.text}"] += 1
    return tally


def test_no_request_fails_while_pods_are_replaced_evicted_and_killed(cluster: Cluster, model_dir: Path) -> None:
    cluster.start()
    tally = asyncio.run(
        under_load(
            cluster,
            model_dir,
            upgrade=cluster.upgrade,
            drain=cluster.drain_a_node,
            kill=cluster.kill_an_app,
        )
    )
    assert tally.failures == Counter()
    assert tally.latencies_ms.keys() == {"upgrade", "drain", "kill"}
    assert len(cluster.ended) == 6
    assert not any(pod.killed_late for pod in cluster.ended)
    assert {pod.exit_code for pod in cluster.ended} == {0}


def test_no_request_fails_with_late_dns_updates(cluster: Cluster, model_dir: Path) -> None:
    """Updates take longer than a pod's start and another one's end."""
    cluster.start()
    cluster.names_late_s *= 8
    cluster.hurry("app", 8)
    tally = asyncio.run(under_load(cluster, model_dir, upgrade=cluster.roll_out_app, drain=cluster.drain_a_node))
    assert tally.failures == Counter()
    assert len(cluster.ended) == 4


def test_without_the_pre_stop_sleep_a_load_balancer_refuses_requests(cluster: Cluster, model_dir: Path) -> None:
    """Shows that the test above can fail: HAProxy stops accepting at the signal, while clients still connect."""
    for container in cluster.specs["balancer"]["containers"]:
        del container["lifecycle"]
    cluster.start()
    tally = asyncio.run(under_load(cluster, model_dir, upgrade=cluster.roll_out_balancers))
    assert sum(tally.failures.values()) > 0


def test_only_a_data_loss_of_redis_ends_readiness(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start()
    redis, (app, *_) = cluster.redis, cluster.apps
    assert redis is not None
    with cluster.client() as client:

        def post(event_id: str) -> httpx.Response:
            return client.post("/v1/events", json={"event_id": event_id, "user_id": "ada", "item_id": "item-1"})

        def recommended() -> str:
            answer = client.get("/v1/users/ada/recommendations")
            assert answer.status_code == 200
            return str(answer.json()["source"])

        assert post("e-1").status_code == 200
        assert recommended() != "popular"
        redis.delete()
        assert redis.exit_code == 0
        assert post("e-2").status_code == 503
        assert recommended() == "popular"
        with cluster.client(
            url_of(app)
        ) as direct:  # it goes on being ready for many probes: nobody would be there else
            assert direct.get("/readyz").status_code == 200
        assert app.ready

        data = tmp_path / "data"
        kept = data.rename(tmp_path / "kept")
        data.mkdir()
        redis = cluster.start_redis()
        wait_until(lambda: not any(pod.ready for pod in cluster.apps))
        redis.delete()
        for file in data.iterdir():
            subprocess.run(["rm", "-r", file], check=True)
        data.rmdir()
        kept.rename(data)
        cluster.start_redis()
        wait_until(lambda: all(pod.ready for pod in cluster.apps))
        wait_until(lambda: post("e-2").status_code == 200)
        assert client.get("/v1/users/ada").json()["event_count"] == 2
        assert [pod.restarts for pod in cluster.apps] == [0, 0]


def test_archiver_and_trainer_run(cluster: Cluster, tmp_path: Path) -> None:
    """In their writable folders, and without keys of others."""
    cluster.start()
    with cluster.client() as client:
        events = [{"event_id": f"e-{n}", "user_id": "ada", "item_id": f"item-{n}"} for n in range(10)]
        assert client.post("/v1/events", json=events).status_code == 200
    archiver = cluster.start_job("archive")
    wait_until_ready(archiver)
    wait_until(lambda: (tmp_path / "archive" / "archive.json").exists(), archiver.log)
    archiver.delete()
    trainer = cluster.start_job("trainer")
    wait_until(lambda: trainer.exit_code is not None, trainer.log)
    assert trainer.exit_code == 0, trainer.log()  # there is too little to train on, which is well
    assert (cluster.models / "retrain.json").exists()
    assert trainer.restarts == 0


def test_a_hung_process_is_restarted(cluster: Cluster) -> None:
    """With the probe of the chart at a shorter interval."""
    (container,) = cluster.specs["app"]["containers"]
    container["livenessProbe"] |= {"periodSeconds": 1, "timeoutSeconds": 3}
    cluster.start()
    hung = cluster.apps[0]
    hung.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: hung.restarts)
    wait_until_ready(hung)
    assert cluster.apps[1].restarts == 0


def test_keys_and_the_password_of_redis_are_changed_without_a_restart(cluster: Cluster) -> None:
    """As in docs/how-to/deploy/kubernetes.md; the node updates the files of both Secrets."""
    cluster.start()
    (app, *_) = cluster.apps
    later = cluster.add_key()

    def status(key: str | None = None) -> int:
        with cluster.client(url_of(app), key) as client:
            return client.get("/v1/model").status_code

    assert (status(), status(later)) == (200, 401)
    app.update_secret("lisarec-keys", {"keys": cluster.keys.read_bytes()})
    wait_until(lambda: status(later) == 200)
    _, *others = cluster.keys.read_bytes().splitlines(keepends=True)
    app.update_secret("lisarec-keys", {"keys": b"".join(others)})
    wait_until(lambda: status() == 401)
    assert status(later) == 200

    redis = cluster.redis
    assert redis is not None
    password = redis.place.root / "secrets" / "redis_password"
    old = password.read_text()

    def logs_in(word: str) -> bool:
        said = redis.execute("sh", "-c", f"REDISCLI_AUTH={word} redis-cli --user lisarec ping 2>&1")
        return said.strip() == "PONG"

    next_one = {"redis_password": old.encode(), "redis_password.next": b"another-one"}
    for files, accepts_old in ((next_one, True), ({"redis_password": b"another-one"}, True), ({}, False)):
        if files:
            redis.update_secret("lisarec-redis", files)
        redis.execute("make-secrets", "/secrets", "/acl", "/given")
        redis.execute("redis-load-users", "/acl/users.acl", "-p", str(redis.place.ports["redis"]))
        assert (logs_in(old), logs_in("another-one")) == (accepts_old, True)


@pytest.mark.parametrize(
    ("resolver", "name_server"),
    [
        ("search shop.svc.cluster.local\nnameserver 10.96.0.10\noptions ndots:5\n", "10.96.0.10:53"),
        ("nameserver fd00:10:96::a\nnameserver 10.96.0.10\n", "fd00:10:96::a:53"),
    ],
)
def test_the_load_balancer_uses_the_name_server_of_its_pod(resolver: str, name_server: str, tmp_path: Path) -> None:
    (container,) = pods(rendered_variant("defaults"))["balancer"]["containers"]
    (tmp_path / "resolv.conf").write_text(resolver)
    (tmp_path / "haproxy").write_text('#!/bin/sh\necho "$LISAREC_DNS"\n')
    (tmp_path / "haproxy").chmod(0o755)
    command = [word.replace("/etc/resolv.conf", str(tmp_path / "resolv.conf")) for word in container["command"]]
    said = subprocess.run(
        command,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert said.stdout.strip() == name_server

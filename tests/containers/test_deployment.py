"""docker-compose.yml in a real engine, from an empty host on. Each test goes on where the one before it ended."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import httpx
import pytest

from tests.containers.conftest import Measured
from tests.containers.deployment import IMAGE, Deployment
from tests.containers.engine import Engine, EngineFailed
from tests.containers.shoppers import FEW_CLIENTS, Shoppers, failed, failed_otherwise
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

MAX_START_S = 5.0  # where a core is free
MAX_START_CPU_S = 15.0  # it is 4 where no other process wants the caches, and 30 for one that compiles
STAY = ("app", "archive", "trainer", "redis", "haproxy", "prometheus", "grafana")


def test_compose_up_waits_until_all_is_ready_without_a_model(
    deployment: Deployment, key: str, measured: Measured
) -> None:
    begin_s = time.monotonic()
    deployment.compose("up", "--wait")
    measured.append(("first start until everything is healthy, s", f"{time.monotonic() - begin_s:.1f}"))
    assert len(deployment.containers("app")) == 2
    assert deployment.generation(key) == "none"
    for service in STAY:
        assert deployment.state(deployment.container(service), "Status") == "running"


def test_a_restarted_replica_is_ready_soon(deployment: Deployment, measured: Measured, long: bool) -> None:
    """The long form requires seconds, given a free core."""
    container = deployment.container("app")
    deployment.engine.docker("stop", container)
    has_a_free_core = os.getloadavg()[0] < (os.cpu_count() or 1)
    begin_s = time.monotonic()
    deployment.engine.docker("start", container)
    url = f"http://{deployment.address(container)}:8000/readyz"
    wait_until(lambda: is_ready(url))
    ready_s = time.monotonic() - begin_s
    measured.append(("start to ready, s", f"{ready_s:.1f}{'' if has_a_free_core else ', no core free'}"))
    used_s = deployment.processor_s(container)
    measured.append(("start to ready, s of processor time", f"{used_s:.1f}"))
    assert used_s < MAX_START_CPU_S
    assert ready_s < MAX_START_S or not (long and has_a_free_core)
    deployment.wait_until_healthy("app", 2)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.HTTPError:
        return False


def test_a_second_compose_up_changes_nothing(deployment: Deployment) -> None:
    before = {service: deployment.containers(service) for service in STAY}
    deployment.compose("up", "--wait")
    assert {service: deployment.containers(service) for service in STAY} == before


@pytest.mark.parametrize("service", STAY)
def test_containers_run_unprivileged_and_read_only(deployment: Deployment, service: str) -> None:
    container = deployment.container(service)
    processes = deployment.engine.docker("top", container, "-eo", "uid,pid,comm").splitlines()[1:]
    assert [line for line in processes if line.split()[0] == "0"] == []
    assert deployment.engine.inspect("container", container, "{{.HostConfig.ReadonlyRootfs}}") == "true"
    assert deployment.engine.inspect("container", container, "{{.HostConfig.CapDrop}}") == "[ALL]"
    assert deployment.engine.inspect("container", container, "{{.HostConfig.Privileged}}") == "false"


def test_only_the_service_reads_passwords_and_redis_requires_them(deployment: Deployment) -> None:
    app = deployment.container("app")
    assert deployment.execute(app, "stat", "-c", "%u %a", "/secrets/redis_password") == "10001 444"
    assert deployment.execute(app, "ls", "/acl") == ""  # the folder of the image: the volume is Redis's
    for place in ("/secrets/x", "/models/x", "/archive/x", "/keys/x", "/x", "/opt/lisarec/x"):
        with pytest.raises(EngineFailed, match=r"Read-only|Permission"):
            deployment.execute(app, "touch", place)
    ping = "import socket; s = socket.create_connection(('redis', 6379)); s.send(b'PING\\r\\n'); print(s.recv(99))"
    assert "NOAUTH" in deployment.execute(app, "python", "-c", ping)


def test_requests_are_answered_without_a_model(deployment: Deployment, shoppers: Shoppers, long: bool) -> None:
    with shoppers.shop() as outcomes:
        deployment.wait_for(lambda: shoppers.events > (20_000 if long else 5_000))
    assert failed(outcomes) == {}
    assert set(shoppers.sources) == {"popular"}


def test_the_first_model_is_activated_automatically(deployment: Deployment, key: str, shoppers: Shoppers) -> None:
    with shoppers.shop(FEW_CLIENTS) as outcomes:  # the trainer waits for enough users who have done something since
        deployment.wait_for(lambda: deployment.generation(key) != "none")
        deployment.wait_for(lambda: "personalised" in shoppers.sources)
    assert failed(outcomes) == {}


@pytest.mark.parametrize("service", ["app", "archive", pytest.param("trainer", marks=pytest.mark.full)])
def test_start_training_and_switch_compile_nothing(deployment: Deployment, service: str) -> None:
    """Containers use only compiled code of the image."""
    for container in deployment.containers(service):
        assert deployment.execute(container, "diff", "-rq", "/opt/lisarec/compiled", "/tmp/numba") == ""


def test_prometheus_scrapes_all_targets_without_alerts(deployment: Deployment) -> None:
    def ask(path: str) -> dict[str, list[dict[str, dict[str, str]]]]:
        code = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())"
        url = f"http://prometheus:9090/api/v1/{path}"
        answer = deployment.execute(deployment.container("app"), "python", "-c", code, url)
        found: dict[str, list[dict[str, dict[str, str]]]] = json.loads(answer)["data"]
        return found

    def up() -> set[str]:
        return {each["labels"]["job"] for each in ask("targets")["activeTargets"] if str(each["health"]) == "up"}

    deployment.wait_for(lambda: {"app", "archive", "trainer", "haproxy", "prometheus"} <= up())
    alerts = {alert["labels"]["alertname"] for alert in ask("alerts")["alerts"]}
    assert alerts & {"ManyUnknownItems", "NoReplica", "NoArchiver", "NoTrainer", "StoreFails"} == set()


@pytest.mark.full
def test_scaling_and_restarts_fail_no_request(
    deployment: Deployment, shoppers: Shoppers, long: bool, measured: Measured
) -> None:
    most = 8 if long else 4
    with shoppers.shop() as outcomes:
        for _ in range(3 if long else 1):
            deployment.compose("up", "--detach", "--no-recreate", "--scale", f"app={most}")
            deployment.wait_until_healthy("app", most)
            deployment.rolling_restart()
            deployment.compose("up", "--detach", "--no-recreate")
    measured.append(("requests while replicas came, restarted and went", f"{outcomes.total():,}; {failed(outcomes)}"))
    assert failed(outcomes) == {}
    assert len(deployment.containers("app")) == 2


def test_a_password_change_fails_no_request(deployment: Deployment, shoppers: Shoppers) -> None:
    """A replica may start at any time, and then has only the file of the services."""
    redis = deployment.container("redis")
    old = deployment.execute(deployment.container("app"), "cat", "/secrets/redis_password")
    given = deployment.folder / "secrets" / "redis_password"
    following = given.with_name("redis_password.next")
    with shoppers.shop() as outcomes:
        following.write_text("another one\n")
        _make_secrets_and_restart_a_replica(deployment)
        _load_users(deployment)  # takes both
        following.rename(given)
        _make_secrets_and_restart_a_replica(deployment)  # which has the new one
        _make_secrets_and_restart_a_replica(deployment)
        _load_users(deployment)  # takes only the new one
    assert failed(outcomes) == {}
    assert deployment.container("redis") == redis
    for service in ("archive", "trainer"):
        deployment.wait_until_healthy(service)
    log_in = ["redis-cli", "--user", "lisarec", "--no-auth-warning", "--pass"]
    assert deployment.execute(redis, *log_in, "another one", "PING") == "PONG"
    assert "NOAUTH" in deployment.execute(redis, *log_in, old, "PING")


def _make_secrets_and_restart_a_replica(deployment: Deployment) -> None:
    deployment.compose("run", "--rm", "secrets")
    replica = deployment.container("app")
    deployment.engine.docker("restart", replica)
    deployment.wait_for_state(replica, "Health.Status", "healthy")


def _load_users(deployment: Deployment) -> None:
    deployment.compose("exec", "-T", "redis", "redis-load-users", "/acl/users.acl")


def test_an_unreadable_password_is_refused_and_nothing_changes(deployment: Deployment, shoppers: Shoppers) -> None:
    given = deployment.folder / "secrets" / "redis_password"
    for content, mode in (("", 0o444), ("x", 0)):
        given.chmod(0o644)
        given.write_text(content)
        given.chmod(mode)
        with pytest.raises(EngineFailed, match="make-secrets"):
            deployment.compose("run", "--rm", "secrets")
    given.unlink()
    assert failed(shoppers.shop_for(2)) == {}


def test_a_restarted_redis_has_every_event(
    deployment: Deployment, shoppers: Shoppers, measured: Measured, long: bool
) -> None:
    users = deployment.compose("exec", "-T", "redis", "cat", "/acl/users.acl")
    with shoppers.shop() as outcomes:
        for _ in range(5 if long else 1):
            deployment.compose("restart", "redis")
            deployment.wait_until_healthy("redis")
    measured.append(("requests while Redis was restarted", f"{outcomes.total():,}; {failed(outcomes)}"))
    assert failed_otherwise(outcomes) == {}
    assert deployment.compose("exec", "-T", "redis", "cat", "/acl/users.acl") == users
    deployment.wait_for(lambda: failed(shoppers.shop_for(0.5)) == {})


@pytest.mark.full
def test_killed_containers_restart_without_losing_acknowledged_events(
    deployment: Deployment, shoppers: Shoppers, long: bool, measured: Measured
) -> None:
    expected = {container: _restarts(deployment, container) for container in deployment.containers()}
    with shoppers.shop() as outcomes:
        for _ in range(10 if long else 1):
            for service in ("app", "redis", "archive", "trainer", "haproxy"):
                container = deployment.container(service)
                _kill(deployment, container)
                expected[container] += 1
                deployment.wait_for(lambda: expected[container] == _restarts(deployment, container))  # noqa: B023
                deployment.wait_for_state(container, "Status", "running")
                time.sleep(2)
            deployment.wait_until_healthy("redis")
            deployment.wait_until_healthy("app", 2)
    measured.append(("requests while everything was killed in turn", f"{outcomes.total():,}; {failed(outcomes)}"))
    assert {container: _restarts(deployment, container) for container in deployment.containers()} == expected
    deployment.wait_for(lambda: failed(shoppers.shop_for(0.5)) == {})


def _restarts(deployment: Deployment, container: str) -> int:
    return int(deployment.engine.inspect("container", container, "{{.RestartCount}}"))


def _kill(deployment: Deployment, container: str) -> None:
    """Kill all processes of the container, as in a crash; after `docker kill` it would not restart."""
    deployment.engine.run("kill", "-KILL", deployment.state(container, "Pid"))


@pytest.mark.full
@pytest.mark.parametrize("service", ["app", "archive", "trainer", "redis", "haproxy"])
def test_a_stopped_container_exits_gracefully(deployment: Deployment, service: str) -> None:
    """Its process handles the signal, and is not killed after the grace period (137)."""
    container = deployment.container(service)
    deployment.engine.docker("stop", container)
    assert deployment.state(container, "ExitCode") in ("0", "143")
    deployment.engine.docker("start", container)
    deployment.wait_until_healthy("app", 2)
    deployment.wait_until_healthy("redis")


@pytest.mark.full
def test_logs_are_json_lines_on_standard_output_only(deployment: Deployment) -> None:
    for service in ("app", "archive", "trainer"):
        container = deployment.container(service)
        lines = deployment.log(container)
        assert lines
        for line in lines:
            assert {"time", "level", "message"} <= json.loads(line).keys()
        assert deployment.execute(container, "find", "/tmp", "-name", "*.log") == ""


@pytest.mark.full
def test_a_new_image_does_not_restart_redis_or_fail_requests(
    deployment: Deployment, shoppers: Shoppers, tmp_path: Path
) -> None:
    redis = deployment.container("redis")
    begun = deployment.state(redis, "StartedAt")
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nLABEL release=next\n")
    deployment.engine.run(
        "docker", "build", "--tag", IMAGE, str(tmp_path), environment={"DOCKER_BUILDKIT": "0"}
    )  # as `docker compose build` after `git pull` does
    with shoppers.shop() as outcomes:
        deployment.renew()
    assert failed(outcomes) == {}
    assert (deployment.container("redis"), deployment.state(redis, "StartedAt")) == (redis, begun)
    new = deployment.engine.inspect("image", IMAGE, "{{.Id}}")
    for service in ("app", "archive", "trainer"):
        for container in deployment.containers(service):
            assert deployment.engine.inspect("container", container, "{{.Image}}") == new


@pytest.mark.full
def test_a_backup_is_restored_into_an_empty_redis(deployment: Deployment, key: str, shoppers: Shoppers) -> None:
    backups = deployment.folder / "backups"
    backups.mkdir()
    deployment.engine.run("chown", "10001", str(backups))
    mounted = ["run", "--rm", "--no-deps", "--volume", f"{backups}:/backups", "app"]
    deployment.compose(*mounted, "backup", "--out", "/backups/log.jsonl.gz")
    generation = deployment.generation(key)
    deployment.compose("down")
    deployment.engine.docker("volume", "rm", "lisarec_redis", "lisarec_archive")
    deployment.compose("up", "--wait", "redis")
    deployment.compose(*mounted, "restore", "/backups/log.jsonl.gz", "--model", f"/models/{generation}")
    deployment.compose("up", "--wait")
    deployment.compose("run", "--rm", "--no-deps", "app", "activate", generation)
    deployment.wait_for(lambda: deployment.generation(key) == generation)
    before = shoppers.sources["personalised"]
    assert failed(shoppers.shop_for(3)) == {}
    assert shoppers.sources["personalised"] > before


def test_compose_down_leaves_nothing(deployment: Deployment) -> None:
    engine: Engine = deployment.engine
    deployment.compose("--profile", "*", "down", "--volumes")
    assert engine.docker("ps", "--all", "--quiet") == ""
    assert engine.docker("volume", "ls", "--quiet") == ""

"""benchmarks/harness runs the services of docker-compose.yml as local processes: same commands, settings and files.

Where they differ the difference stands here, with its reason. Whatever the compose file gets anew is in neither list,
and fails.
"""

from __future__ import annotations

import os
import re
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

from app.settings import PREFIX, Settings
from benchmarks.harness import compose
from benchmarks.harness.compose import RedisUsers, node_command, redis_command
from benchmarks.harness.topology import (
    HAPROXY_CONFIG,
    STOP_TIMEOUT_S,
    NameServer,
    balancer_command,
    balancer_environment,
    replica_command,
)
from tests.deploy.compose_values import COMPOSE, filled_in, seconds_of

RUN = ("app", "haproxy", "redis", "redis-1", "secrets")
NOT_RUN = {
    "archive": "benchmarks start an archiver where they need one",
    "trainer": "benchmarks start training where they need it",
    "train": "the same",
    "train-gpu": "the same",
    "consume": "benchmarks/kafka runs it",
    "publish": "tests/app/jobs/kafka/test_publish.py runs it",
    "keys": "the replicas listen on loopback, so they need no keys",
    "app-gpu": "the machines of tests have no GPU",
    "prometheus": "benchmarks/harness/monitoring.py runs it",
    "grafana": "it only reads",
    "redis-cluster": "benchmarks/harness/redis_cluster.py forms clusters; tests/docker/test_redis_users.py runs it",
    **{f"redis-{number}": "as redis-1" for number in range(2, 7)},
}

# Keys of a service that a test below compares, and those that only an engine of containers can carry out.
COMPARED = {"command", "entrypoint", "environment", "stop_grace_period", "volumes"}
OF_CONTAINERS = {
    "build": "the processes run the working tree",
    "image": "Debian's Redis is 7.0, its HAProxy 2.6; tests/docker/shells.py brings the shell of Redis's image",
    "user": "a test has one user",
    "read_only": "tests/containers",
    "cap_drop": "tests/containers",
    "security_opt": "tests/containers",
    "tmpfs": "belongs to read_only",
    "init": "nothing is process 1",
    "cpus": "all share the machine",
    "mem_limit": "the same; tests/containers fills a Redis",
    "pids_limit": "the same",
    "logging": "files of a temporary directory",
    "restart": "benchmarks restart what they kill",
    "scale": "Topology.scale",
    "profiles": "both kinds of Redis are run",
    "depends_on": "make_users returns before Redis starts, and Redis is up before the replicas",
    "healthcheck": "tests/docker asks as it asks; the times are those of the engine",
    "networks": "loopback",
    "network_mode": "loopback",
    "ports": "free ports",
}

DIFFERENT_SETTINGS = {
    "host": "a loopback address for each replica, instead of a container's network",
    "port": "a free one",
    "redis_url": "the same, with the password in it",
    "redis_password_file": "the same",
    "model_dir": "they start with a model",
    "models_dir": "its folder",
    "archive_dir": "there is none unless a benchmark gives one",
    "keys_file": "they listen on loopback",
    "open_metrics": "the same: nobody else reaches /metrics",
    "data_dir": "unused with Redis",
    "log_format": "lines for people",
}
DIFFERENT_IN_THE_BALANCER = {
    "LISAREC_BIND": "a free port of loopback",
    "LISAREC_METRICS_BIND": "the same",
    "LISAREC_DNS": "NameServer instead of Docker's",
    "LISAREC_APP_PORT": "a free one",
    "LISAREC_MAX_REPLICAS": "no more than are added; every further one is a name server's empty answer",
    "MALLOC_MMAP_THRESHOLD_": "what tune.memory.hot-size is in HAProxy 3.0",
    "MALLOC_TRIM_THRESHOLD_": "the same",
}
DIFFERENT_GRACE_S = {"haproxy": 35, "redis": 60}  # the harness waits for a replica's, and kills what still runs

USERS = RedisUsers(Path("/ACL/users.acl"), "password", "admin password")
PLACES = {
    str(compose.REDIS_START): "redis-start",
    "SERVER": "redis-server",
    str(compose.REDIS_CONFIG): "/etc/redis.conf",
    str(compose.CLUSTER_CONFIG): "/etc/redis-cluster.conf",
    "/DATA": "/data",
    "/ACL": "/acl",
}
LISTEN = ["--bind", "127.0.0.1", "--port", "7000"]


def in_container(words: list[str]) -> list[str]:
    """The words of a command with the paths of the container."""
    for local, there in PLACES.items():
        words = [word.replace(local, there) for word in words]
    return words


def test_every_service_is_run_or_excluded_with_a_reason() -> None:
    assert COMPOSE.keys() == {*RUN, *NOT_RUN}


@pytest.mark.parametrize("name", RUN)
def test_every_key_of_a_service_is_compared_or_excluded_with_a_reason(name: str) -> None:
    assert COMPOSE[name].keys() <= COMPARED | OF_CONTAINERS.keys()


def test_redis_has_the_same_command() -> None:
    command = redis_command("SERVER", Path("/DATA"), USERS, 7000)
    assert in_container(command) == [*filled_in(COMPOSE["redis"]["command"]), *LISTEN]


def test_cluster_nodes_have_the_same_command() -> None:
    command = node_command("SERVER", Path("/DATA"), USERS, 7000)
    *shell, script = filled_in(COMPOSE["redis-1"]["command"])
    for name, value in filled_in(COMPOSE["redis-1"]["environment"]).items():
        script = script.replace(f"${name}", value)
    assert in_container(command) == [*shell, f"{script.strip()} {' '.join(LISTEN)}"]


def test_configuration_files_equal_the_mounted_ones() -> None:
    volumes = [volume.split(":") for name in RUN for volume in COMPOSE[name]["volumes"]]
    mounted = {compose.ROOT / source: target for source, target, *_ in volumes if source.startswith("./docker/")}
    scripts = {compose.REDIS_START, compose.REDIS_LOAD_USERS, compose.MAKE_SECRETS}
    assert mounted == {
        **{script: f"/usr/local/bin/{script.name}" for script in scripts},
        **{config: f"/etc/{config.name}" for config in (compose.REDIS_CONFIG, compose.CLUSTER_CONFIG)},
        HAPROXY_CONFIG: "/usr/local/etc/haproxy/haproxy.cfg",
    }
    # as make_users calls it, but for a password that is given
    assert COMPOSE["secrets"]["entrypoint"] == [compose.MAKE_SECRETS.name, "/secrets", "/acl", "/given"]


def test_only_the_secrets_service_sees_all_secrets() -> None:
    sees_all = {
        name for name, one in COMPOSE.items() if any(v.startswith("./secrets:") for v in one.get("volumes", []))
    }
    assert sees_all == {"secrets"}
    (seen,) = {
        v.partition(":")[0] for name in ("consume", "publish") for v in COMPOSE[name]["volumes"] if "/given" in v
    }
    upgrade = compose.ROOT / "docs" / "how-to" / "deploy" / "upgrade.md"
    assert f"into `{seen.removeprefix('./')}`" in upgrade.read_text(encoding="utf-8")
    pages = "\n".join(page.read_text(encoding="utf-8") for page in upgrade.parent.glob("*.md"))
    assert "can read this folder" not in pages


def test_replicas_have_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    _, *command = replica_command(Path("/m/a"), ["--redis-url", USERS.url(6379)], IPv4Address("127.0.0.11"), 9)
    assert command[:3] == ["-m", "app", *COMPOSE["app"]["command"]]
    words = zip(command[3::2], command[4::2], strict=True)
    options: dict[str, Any] = {option.removeprefix("--").replace("-", "_"): value for option, value in words}
    here = Settings(model_dir=options.pop("model"), **options)
    dockerfile = (compose.ROOT / "docker" / "Dockerfile").read_text()
    of_image = dict(re.findall(rf"({PREFIX}\w+)=(\S+)", dockerfile))
    for name, value in (of_image | filled_in(COMPOSE["app"]["environment"])).items():
        monkeypatch.setenv(name, value)
    there = Settings()
    different = {name for name in Settings.model_fields if getattr(here, name) != getattr(there, name)}
    assert different == DIFFERENT_SETTINGS.keys()


def test_the_load_balancer_has_the_same_environment_and_command() -> None:
    names = NameServer()
    here = balancer_environment("127.0.0.1:9", names, 9)
    names.close()
    there = filled_in(COMPOSE["haproxy"]["environment"])
    defaults = dict(re.findall(r"\$\{(LISAREC_\w+)-([^}]*)\}", HAPROXY_CONFIG.read_text()))
    different = {
        name
        for name in here.keys() | there.keys()
        if here.get(name, defaults.get(name)) != there.get(name, defaults.get(name))
    }
    assert different == DIFFERENT_IN_THE_BALANCER.keys()
    # the image's own command, and without -W: one process, which benchmarks stop and whose memory they read
    assert "command" not in COMPOSE["haproxy"]
    assert balancer_command()[1:] == ["-db", "-f", str(HAPROXY_CONFIG)]


def test_stop_grace_periods_are_the_same() -> None:
    grace_s = {name: seconds_of(COMPOSE[name]["stop_grace_period"]) for name in ("app", "haproxy", "redis")}
    assert grace_s == {"app": STOP_TIMEOUT_S, **DIFFERENT_GRACE_S}

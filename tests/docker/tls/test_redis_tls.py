"""docker/tls.yml merged by Compose, as local processes: Redis and its clients use only TLS."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from app.settings import PREFIX
from benchmarks.harness import compose
from benchmarks.harness.compose import (
    REDIS_CONFIG,
    REDIS_LOAD_USERS,
    ROOT,
    RedisUsers,
    compose_document,
    make_users,
    node_command,
    redis_command,
)
from benchmarks.harness.redis_cluster import command, free_node_port, is_whole
from benchmarks.harness.service_process import free_port
from benchmarks.harness.topology import program
from storage.redis.connections.nodes import ReplicaAcks
from tests.app.conftest import Client
from tests.docker.tls.merged import merged, mounts, run_make_secrets
from tests.storage.oracles.random_events import click
from tests.storage.redis.servers import make_certificate
from tests.storage.redis.stores import opened, until_applied
from tests.waiting import PATIENCE_S, wait_until

KEEP_CLUSTER = ROOT / "docker" / "redis" / "redis-cluster-keep"
URL = "rediss://lisarec@redis:6379/0?ssl_ca_certs=/secrets/redis.crt"
HOST = "localhost"  # in place of `redis` and `redis-1` to `redis-6`


def test_clients_get_the_tls_url_and_redis_the_certificate() -> None:
    plain, by_tls = compose_document()["services"], merged()["services"]
    assert plain.keys() == by_tls.keys()
    clients = {name for name in plain if f"{PREFIX}REDIS_URL" in plain[name].get("environment", {})}
    assert clients == {"app", "app-gpu", "archive", "publish", "trainer"}
    for name in clients:
        assert by_tls[name]["environment"][f"{PREFIX}REDIS_URL"] == URL
        assert mounts(name)["/secrets"] == "secrets"
    servers = {name for name in plain if plain[name]["image"].startswith("redis:")}
    assert len(servers) == 8
    for name in servers:
        assert mounts(name)["/usr/local/sbin/redis-cli"] == str(ROOT / "docker" / "redis" / "redis-cli-tls")
        assert mounts(name)["/etc/redis.conf"] == str(ROOT / "docker" / "redis" / "redis-tls.conf")
        assert mounts(name)["/etc/redis-plain.conf"] == str(REDIS_CONFIG)
        assert mounts(name)["/acl"] == "acl"
    nodes = servers - {"redis", "redis-cluster"}
    for name in nodes:
        *shell, script = by_tls[name]["command"]
        *plain_shell, plain_script = plain[name]["command"]
        announced = '--cluster-preferred-endpoint-type hostname --cluster-announce-hostname "$$HOSTNAME"'
        assert (shell, script.split()) == (plain_shell, f"{plain_script} {announced}".split())
        assert by_tls[name]["hostname"] == name
        assert by_tls[name]["networks"]["back"] == {"aliases": ["redis"]}
    assert set(by_tls["secrets"]["command"]) == {"/tls", "redis", *nodes}


@pytest.mark.parametrize(
    ("name", "trusted_in", "own_in", "names", "mode"),
    [("redis", "secrets", "acl", ["redis", "redis-1"], 0o444), ("app", "tls", "tls", ["app"], 0o400)],
)
def test_a_certificate_is_generated_once_or_given_with_its_key(
    tmp_path: Path, name: str, trusted_in: str, own_in: str, names: list[str], mode: int
) -> None:
    trusted, own, given = tmp_path / trusted_in / f"{name}.crt", tmp_path / own_in / f"{name}.pem", tmp_path / "given"

    def made() -> tuple[str, str]:
        assert run_make_secrets(tmp_path, "redis", "redis-1").returncode == 0
        return trusted.read_text(), own.read_text()

    first = made()
    assert first == made()
    assert first[0] in first[1]
    assert "PRIVATE KEY" in first[1]
    shown = subprocess.run(["openssl", "x509", "-in", trusted, "-noout", "-text"], capture_output=True, text=True)
    assert re.findall(r"DNS:([\w-]+)", shown.stdout) == names
    assert (trusted.stat().st_mode & 0o777, own.stat().st_mode & 0o777) == (0o444, mode)

    certificate, _ = make_certificate(tmp_path)
    for suffix, source in ((".crt", certificate), (".key", tmp_path / "key.pem")):
        shutil.copy(source, given / f"{name}{suffix}")
    (tmp_path / "secrets" / f"{name}.key").write_text("as it was copied before TLS was on")
    second = made()
    assert second[0] == certificate.read_text()
    assert second[1].endswith((given / f"{name}.key").read_text())
    assert not list(tmp_path.glob(f"secrets/{name}.key"))  # the services need none
    for suffix in (".crt", ".key"):
        (given / f"{name}{suffix}").unlink()
    assert second == made()


@pytest.mark.parametrize("name", ["redis", "app"])
@pytest.mark.parametrize("given", ["only .crt", "only .key", "of another", "garbage"])
def test_a_certificate_without_its_key_is_refused(tmp_path: Path, given: str, name: str) -> None:
    certificate, _ = make_certificate(tmp_path)
    (tmp_path / "given").mkdir()
    shutil.copy(certificate, tmp_path / "given" / f"{name}.crt")
    if given == "of another":
        make_certificate(tmp_path)
    shutil.copy(tmp_path / "key.pem", tmp_path / "given" / f"{name}.key")
    for file in (tmp_path / "given").iterdir():
        if given == "garbage":
            file.write_text("of no use")
        elif given.startswith("only") and file.suffix not in given:
            file.unlink()
    refused = run_make_secrets(tmp_path, "redis")
    assert refused.returncode != 0
    assert str(tmp_path / "given" / f"{name}.") in refused.stderr
    assert not [*(tmp_path / "acl").iterdir(), *(tmp_path / "tls").iterdir()]


def turn_on_tls(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, use commands and redis-cli of the containers, and a certificate for this machine."""
    assert run_make_secrets(directory, *merged()["services"]["secrets"]["command"][1:], HOST).returncode == 0
    (files := directory / "files").mkdir()
    for place in ("/etc/redis.conf", "/usr/local/sbin/redis-cli"):
        text = Path(mounts("redis-1")[place]).read_text()
        local = text.replace("/acl/", f"{directory}/acl/").replace("/etc/redis-plain.conf", str(REDIS_CONFIG))
        (file := files / Path(place).name).write_text(local)
        file.chmod(0o755)
    monkeypatch.setattr(compose, "compose_document", merged)
    monkeypatch.setattr(compose, "REDIS_CONFIG", files / "redis.conf")
    monkeypatch.setattr(compose, "_listen_options", lambda port: ("--bind", "127.0.0.1", "--tls-port", str(port)))
    monkeypatch.setenv("HOSTNAME", HOST)
    monkeypatch.setenv("PATH", f"{files}{os.pathsep}{os.environ['PATH']}")


def by_tls(url: str, certificate: Path) -> str:
    """URL of a local server as in docker/tls.yml."""
    return f"{url.replace('redis://', 'rediss://')}?ssl_ca_certs={certificate}"


@contextmanager
def running(words: list[str], log: Path, ending: signal.Signals = signal.SIGKILL) -> Iterator[None]:
    with log.open("ab") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.send_signal(ending)
        process.wait(PATIENCE_S)


def answers_healthcheck(users: RedisUsers, port: int) -> bool:
    """Result of the health check of Redis, before and after enabling TLS."""
    _, check = compose_document()["services"]["redis"]["healthcheck"]["test"]
    script = check.replace("$$", "$").replace("/acl/", f"{users.acl_file.parent}/")
    script = script.replace("redis-cli ", f"redis-cli -p {port} ")
    return subprocess.run(["sh", "-c", script], capture_output=True, timeout=PATIENCE_S).returncode == 0


def refuses_plain_connections(users: RedisUsers, port: int) -> bool:
    with redis.Redis.from_url(users.admin_url(port), retry=Retry(NoBackoff(), 0), socket_timeout=PATIENCE_S) as plain:
        with pytest.raises(redis.ConnectionError):
            plain.ping()
        return True


@pytest.mark.usefixtures("alpine_shell")
def test_redis_continues_over_tls_only_with_its_data(
    start: Callable[..., Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port, users, log = free_port(), make_users(tmp_path), tmp_path / "log"
    (tmp_path / "data").mkdir()
    url, certificate = users.url(port, HOST), tmp_path / "secrets" / "redis.crt"

    @contextmanager
    def redis_runs(ending: signal.Signals) -> Iterator[None]:
        with running(redis_command(program("redis-server"), tmp_path / "data", users, port), log, ending):
            wait_until(lambda: answers_healthcheck(users, port), log.read_text)
            yield

    def clicks_after_one_more(url: str) -> int:
        client = start(tmp_path, redis_url=url)
        try:
            client.click("ada", "item-1")
            return int(client.get("/v1/users/ada").json()["event_count"])
        finally:
            client.close()

    with redis_runs(signal.SIGTERM):
        assert clicks_after_one_more(url) == 1
    turn_on_tls(tmp_path, monkeypatch)
    with redis_runs(signal.SIGKILL):
        assert clicks_after_one_more(by_tls(url, certificate)) == 2
    with redis_runs(signal.SIGTERM):
        assert clicks_after_one_more(by_tls(url, certificate)) == 3
        assert refuses_plain_connections(users, port)
        subprocess.run(["sh", REDIS_LOAD_USERS, users.acl_file, "-p", str(port)], check=True, timeout=PATIENCE_S)
        caplog.clear()
        client = start(tmp_path, redis_url=by_tls(url, make_certificate(tmp_path)[0]))
        try:
            assert client.recommend("ada")["source"] == "popular"
            assert client.post("/v1/events", json={"user_id": "ada", "item_id": "item-1"}).status_code == 503
        finally:
            client.close()
        assert re.search("CERTIFICATE_VERIFY_FAILED.*authority.*ssl_ca_certs=FILE", caplog.text)


def addresses(node: Any) -> set[tuple[str, int]]:
    """Addresses to which clients are redirected: primaries, and replicas once they have data."""
    slots = command(node, "CLUSTER", "SLOTS")
    return {(host.decode(), port) for _, _, *owners in slots for host, port, *_ in owners}


@pytest.mark.usefixtures("alpine_shell")
def test_cluster_nodes_replicate_over_tls_and_announce_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users, log, ports = make_users(tmp_path), tmp_path / "log", [free_node_port() for _ in range(6)]
    turn_on_tls(tmp_path, monkeypatch)
    monkeypatch.setenv("LISAREC_KEEP_EVERY_S", "1")
    certificate, user_ids = tmp_path / "secrets" / "redis.crt", [f"user-{number}" for number in range(20)]

    @contextmanager
    def cluster_runs() -> Iterator[list[Any]]:
        keep = ["sh", str(KEEP_CLUSTER), str(users.acl_file.with_name("admin_password"))]
        with ExitStack() as stack:
            for port in ports:
                (data := tmp_path / str(port)).mkdir(exist_ok=True)
                stack.enter_context(running(node_command(program("redis-server"), data, users, port), log))
            stack.enter_context(running([*keep, *(f"127.0.0.1:{port}" for port in ports)], log))
            urls = [by_tls(users.admin_url(port, HOST), certificate) for port in ports]
            nodes = [stack.enter_context(redis.Redis.from_url(url, protocol=2)) for url in urls]
            wait_until(lambda: all(is_whole(node) for node in nodes), log.read_text)
            yield nodes

    async def append_and_count() -> list[int]:
        url = by_tls(users.url(ports[0], HOST), certificate)
        async with opened(url, acks=ReplicaAcks(1)) as store:
            await until_applied(store, [click(f"e{os.urandom(8).hex()}", user_id) for user_id in user_ids])
            return [len(await store.events("main", user_id, limit=10)) for user_id in user_ids]

    with cluster_runs() as nodes:
        wait_until(lambda: addresses(nodes[0]) == {(HOST, port) for port in ports}, log.read_text)
        assert all(refuses_plain_connections(users, port) for port in ports)
        assert asyncio.run(append_and_count()) == [1] * len(user_ids)
    with cluster_runs():
        assert asyncio.run(append_and_count()) == [2] * len(user_ids)

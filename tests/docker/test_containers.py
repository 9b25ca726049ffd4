"""The Dockerfile and Compose files, checked by the tools that use them."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typing_extensions import override

from app.settings import Settings
from benchmarks.harness.compose import COMPOSE_FILE, REDIS_CONFIG, compose_document
from benchmarks.harness.service_process import free_port
from benchmarks.harness.topology import HAPROXY_CONFIG, program
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
COMPILED = ROOT / "var" / "compiled"  # what is compiled for the image, from one run of the tests to the next
COMPOSE = compose_document()
PROFILES = sorted({profile for service in COMPOSE["services"].values() for profile in service.get("profiles", [])})


def run(*command: str) -> str:
    """Run a command, which must succeed; return its output."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_hadolint_passes() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    assert hadolint.exists(), "hadolint is missing; install the extra 'test'"
    assert run(str(hadolint), str(DOCKERFILE)) == ""


@pytest.mark.parametrize("profile", ["", *PROFILES, "*"])
def test_compose_accepts_the_file(profile: str) -> None:
    if shutil.which("docker-compose") is None:
        pytest.skip("Docker Compose is not installed")
    assert run("docker-compose", "--profile", profile, "-f", str(COMPOSE_FILE), "config", "--quiet") == ""


def test_haproxy_accepts_its_configuration() -> None:
    try:
        haproxy = program("haproxy")
    except FileNotFoundError as exc:
        pytest.skip(str(exc))
    completed = run(haproxy, "-c", "-V", "-f", str(HAPROXY_CONFIG))
    assert "valid" in completed
    assert "WARNING" not in completed


def test_load_balancer_defaults_equal_those_of_compose() -> None:
    """So that tests without Compose use the shipped configuration."""
    environment = COMPOSE["services"]["haproxy"]["environment"]
    of_compose = dict(re.findall(r"\$\{(LISAREC_MAX_\w+):-(\w+)\}", " ".join(environment.values())))
    assert of_compose == dict(re.findall(r"\$\{(LISAREC_MAX_\w+)-(\w+)\}", HAPROXY_CONFIG.read_text()))


def test_haproxy_stays_within_the_open_file_limit_of_engines(tmp_path: Path) -> None:
    """It raises its own limit for its connections, which an engine may forbid."""
    assert "ulimits" not in COMPOSE["services"]["haproxy"]
    try:
        haproxy = program("haproxy")
    except FileNotFoundError as exc:
        pytest.skip(str(exc))
    log = tmp_path / "log"
    address = f"127.0.0.1:{free_port()}"
    environment = {"LISAREC_BIND": address, "LISAREC_METRICS_BIND": f"127.0.0.1:{free_port()}"}

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 20_000))

    with log.open("w") as output:
        command = [haproxy, "-db", "-f", str(HAPROXY_CONFIG)]
        balancer = subprocess.Popen(command, env=environment, stdout=output, stderr=output, preexec_fn=limit)
    try:
        wait_until(lambda: answers(address) or balancer.poll() is not None, log.read_text)
        assert balancer.poll() is None, log.read_text()
        assert "limit" not in log.read_text()
    finally:
        balancer.kill()
        balancer.wait()


def answers(address: str) -> bool:
    """Return whether a server listens there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1):
            return True
    except OSError:
        return False


def test_kernels_in_the_image_are_compiled_once(tmp_path: Path) -> None:
    """The build fails where a second run writes; that containers find it is seen in tests/containers.

    `make test` makes the first run, for the whole suite. Where it did not, or numba compiles again what has changed,
    the first one is here: where the files are there already, a run that writes nothing is a second one.
    """
    (step,) = (part for part in DOCKERFILE.read_text().split("\nRUN ") if "compile_kernels &&" in part)
    assert step.count("python -P -m lisarec.compile_kernels") == 2
    assert "-newer" in step
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(COMPILED), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", str(ROOT / "docker" / "compile.py")]

    def files() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in COMPILED.rglob("*") if file.is_file()}

    def written() -> dict[Path, int]:
        subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True, timeout=1_500)
        return files()

    before, first = files(), written()
    assert first
    if first != before and written() != first:
        shutil.rmtree(COMPILED)  # so that this fails the next time, too
        raise AssertionError("a second run compiles again")


def test_a_container_starts_with_a_copy_of_the_compiled_kernels(tmp_path: Path) -> None:
    compiled, programs = tmp_path / "compiled", tmp_path / "programs"
    compiled.mkdir()
    (compiled / "kernels.nbi").write_text("of the image")
    programs.mkdir()
    (programs / "lisarec").write_text('#!/bin/sh\nprintf "%s," "$@"\n')
    (programs / "lisarec").chmod(0o755)
    start = tmp_path / "start"
    start.write_text((ROOT / "docker" / "start").read_text().replace("/opt/lisarec/compiled", str(compiled)))
    cache = tmp_path / "tmp" / "numba"
    cache.parent.mkdir()
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "NUMBA_CACHE_DIR": str(cache)}
    for _ in range(2):  # a container that is started again keeps what it has
        completed = subprocess.run(["sh", str(start), "serve", "a b"], env=environment, capture_output=True, check=True)
        assert completed.stdout == b"serve,a b,"
        assert [file.name for file in cache.iterdir()] == ["kernels.nbi"]


@pytest.mark.parametrize(("status", "is_healthy"), [(200, True), (503, False), (None, False)])
def test_the_healthcheck_equals_readiness(status: int | None, is_healthy: bool) -> None:
    class Readiness(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if status and self.path == "/readyz" else 500)
            self.end_headers()

        @override
        def log_message(self, format: str, *args: object) -> None: ...

    found = re.search(r"^HEALTHCHECK .*\\\n *CMD (.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert found is not None
    _, *options = json.loads(found[1])
    with ThreadingHTTPServer(("127.0.0.1", 0), Readiness) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = free_port() if status is None else server.server_port
        environment = {"LISAREC_PORT": str(port)}
        check = subprocess.run([sys.executable, *options], env=environment, capture_output=True, timeout=PATIENCE_S)
        server.shutdown()
    assert (check.returncode == 0) is is_healthy, check.stderr


def test_each_image_is_built_by_one_service() -> None:
    """Concurrent builds of one tag fail."""
    built = [service["image"] for service in COMPOSE["services"].values() if "build" in service]
    assert len(built) == len(set(built))
    assert set(built) == {
        service["image"] for service in COMPOSE["services"].values() if "lisarec:" in service["image"]
    }
    assert "profiles" not in COMPOSE["services"]["app"]
    assert "build" in COMPOSE["services"]["app"]


def test_the_number_of_replicas_comes_from_the_environment() -> None:
    """Otherwise `up` without `--scale` would reset it to one."""
    assert COMPOSE["services"]["app"]["scale"] == "${LISAREC_REPLICAS:-1}"


def test_every_long_running_service_has_a_healthcheck() -> None:
    """`up --wait` fails for a running service whose healthcheck is disabled."""
    silent = {
        name for name, service in COMPOSE["services"].items() if (service.get("healthcheck") or {}).get("disable")
    }
    assert {name for name in silent if "restart" in COMPOSE["services"][name]} == set()
    awaited = {
        dependency: condition["condition"]
        for service in COMPOSE["services"].values()
        for dependency, condition in service.get("depends_on", {}).items()
    }
    assert awaited == {"secrets": "service_completed_successfully"}
    for name in ("archive", "trainer"):
        command, environment = COMPOSE["services"][name]["command"], COMPOSE["services"][name]["environment"]
        assert command[command.index("--metrics") + 1] == f"[::]:{environment['LISAREC_PORT']}"


def test_no_service_creates_an_anonymous_volume() -> None:
    """The image of Redis declares one at /data, that of Prometheus one at /prometheus."""
    declared = {"redis:": "/data", "prom/": "/prometheus"}
    for name, service in COMPOSE["services"].items():
        for image, place in declared.items():
            if service["image"].startswith(image):
                mounted = [volume.split(":")[1] for volume in service.get("volumes", [])]
                assert place in [*mounted, *service.get("tmpfs", [])], name


def test_images_are_pinned() -> None:
    bases = [line.split()[1] for line in DOCKERFILE.read_text().splitlines() if line.startswith("FROM ")]
    images = [service["image"] for service in COMPOSE["services"].values()]
    for image in bases + images:
        name, _, tag = image.partition(":")
        assert tag, f"{name} has no tag"
        assert "latest" not in tag


def test_services_run_unprivileged() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
    (user,) = (line.split()[1] for line in DOCKERFILE.read_text().splitlines() if line.startswith("USER "))
    assert user.partition(":")[0] not in ("0", "root")


def test_only_load_balancer_and_dashboard_are_published_on_loopback() -> None:
    published = {name: service["ports"] for name, service in COMPOSE["services"].items() if "ports" in service}
    assert published.keys() == {"haproxy", "grafana"}
    for (port,) in published.values():
        assert ":-127.0.0.1:" in port


def test_every_service_has_limits_and_log_rotation() -> None:
    for name, service in COMPOSE["services"].items():
        assert {"mem_limit", "cpus", "pids_limit"} <= service.keys(), name
        if name == "keys":  # what it prints is for one pair of eyes
            assert service["logging"] == {"driver": "none"}
        else:
            assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
    drain_s = Settings.model_fields["drain_s"].default + Settings.model_fields["shutdown_timeout_s"].default
    assert int(COMPOSE["services"]["app"]["stop_grace_period"].removesuffix("s")) > drain_s


def test_redis_requires_a_password() -> None:
    for name, service in COMPOSE["services"].items():
        if service["image"].startswith("redis:"):
            assert service["user"] == "redis", name
            assert "acl:/acl:ro" in service["volumes"], name
            assert "/acl/users.acl" in str(service["command"]) or name == "redis-cluster"
            assert service["depends_on"]["secrets"] == {"condition": "service_completed_successfully"}
        elif name != "secrets":
            assert not any(volume.startswith("acl:") for volume in service.get("volumes", ())), name


def test_the_cluster_environment_matches_its_services() -> None:
    lines = (ROOT / "docker" / "cluster.env").read_text().splitlines()
    environment = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    nodes = [name for name in COMPOSE["services"] if name.removeprefix("redis-").isdigit()]
    assert len(nodes) == 6
    assert environment["LISAREC_REDIS_URL"] == f"redis://lisarec@{','.join(f'{node}:6379' for node in nodes)}"
    assert COMPOSE["services"]["redis-cluster"]["command"] == [f"{node}:6379" for node in nodes]
    for node in nodes:
        assert "--include /acl/replica.conf" in str(COMPOSE["services"][node]["command"])
        assert f"{node}:/data" in COMPOSE["services"][node]["volumes"]


def test_the_service_requires_keys() -> None:
    app, keys = COMPOSE["services"]["app"], COMPOSE["services"]["keys"]
    file = Path(app["environment"]["LISAREC_KEYS_FILE"])
    assert file == Path(keys["environment"]["LISAREC_KEYS_FILE"])
    assert f"keys:{file.parent}:ro" in app["volumes"]  # the directory: a file that is replaced stays the old one
    assert f"keys:{file.parent}" in keys["volumes"]
    assert "INSECURE" not in COMPOSE_FILE.read_text() + DOCKERFILE.read_text()


def test_redis_syncs_acknowledged_writes() -> None:
    settings = dict(line.split(maxsplit=1) for line in REDIS_CONFIG.read_text().splitlines() if line[:1].isalpha())
    wanted = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
    assert {name: settings[name] for name in wanted} == wanted


def test_dockerignore_keeps_every_copied_file() -> None:
    """Files that .dockerignore excludes cannot be copied."""
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = [line.split()[1:-1] for line in DOCKERFILE.read_text().splitlines() if line.startswith("COPY ")]
    copied = {file for files in copies for file in files if not files[0].startswith("--from")}
    assert copied == let_through
    assert all((ROOT / file).exists() for file in copied)

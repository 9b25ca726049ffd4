"""docker/tls.yml between load balancer and replicas: real processes with the certificates of `secrets`."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from app.settings import PREFIX
from benchmarks.harness.compose import compose_document
from benchmarks.harness.monitoring import CONFIG, MOUNTED, Prometheus
from benchmarks.harness.service_process import fetch, free_port, is_ready
from benchmarks.harness.topology import NameServer, Topology, balancer_command, balancer_environment, program, topology
from tests.docker.tls.merged import merged, mounts, run_make_secrets
from tests.storage.redis.servers import make_certificate
from tests.waiting import PATIENCE_S, wait_until

DOWN = re.compile('^haproxy_server_status{.*server="app1".*state="DOWN"} 1', re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The volume `tls`."""
    directory = tmp_path_factory.mktemp("volumes")
    made = run_make_secrets(directory, *merged()["services"]["secrets"]["command"][1:])
    assert made.returncode == 0, made.stderr
    return directory / "tls"


def added(service: str, folder: Path) -> dict[str, str]:
    """Environment that docker/tls.yml adds to a service, for a local folder."""
    plain = compose_document()["services"][service]["environment"]
    by_tls = merged()["services"][service]["environment"]
    return {name: value.replace("/tls/", f"{folder}/") for name, value in by_tls.items() if name not in plain}


@pytest.fixture(scope="module")
def running(model_dir: Path, folder: Path) -> Iterator[Topology]:
    environment, balancer = added("app", folder), added("haproxy", folder)
    try:
        with topology(model_dir, 1, redis=False, environment=environment, balancer=balancer) as running:
            yield running
    except FileNotFoundError as exc:  # CI turns this into a failure
        pytest.skip(str(exc))


def replica_url(running: Topology) -> str:
    return f"https://{running.targets()[0]}"


def test_servers_get_the_key_and_clients_only_the_certificate() -> None:
    plain, by_tls = compose_document()["services"], merged()["services"]
    with_volume = {name for name in by_tls if mounts(name).get("/tls") == "tls"}
    assert with_volume == {"app", "app-gpu", "haproxy", "prometheus", "secrets"}
    assert {name for name in plain if f"{PREFIX}TLS_KEY" in by_tls[name].get("environment", {})} == {"app", "app-gpu"}
    for name in ("haproxy", "prometheus"):
        assert by_tls[name]["depends_on"]["secrets"]["condition"] == "service_completed_successfully"
    assert mounts("prometheus")["/etc/prometheus/prometheus.yml"] == str(MOUNTED / "prometheus-tls.yml")


def test_events_and_lists_pass_through_the_load_balancer(running: Topology) -> None:
    with httpx.Client(base_url=running.url, timeout=PATIENCE_S) as client:
        assert client.post("/v1/events", json={"user_id": "ada", "item_id": "item-1"}).status_code == 200
        assert client.get("/v1/users/ada/recommendations").json()["items"]
        assert client.get("/v1/users/ada").json()["event_count"] == 1
    with pytest.raises(httpx.TransportError):
        fetch(replica_url(running).replace("https", "http"))


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_client_that_reads_only_after_sending_gets_the_413(running: Topology, is_declared: bool) -> None:
    chunks = [b" " * 65_536] * 128
    for _ in range(5):
        client = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=PATIENCE_S)
        client.request("POST", "/v1/events", b"".join(chunks) if is_declared else iter(chunks))
        answer = client.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (413, "body_too_large")
        client.close()


@contextmanager
def balancer(running: Topology, names: NameServer, changes: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Another load balancer of the same replica; yields its URL and its metrics URL."""
    bind = f"127.0.0.1:{free_port()}"
    environment = balancer_environment(bind, names, running.replica_port) | changes
    process = subprocess.Popen(balancer_command(), env=environment)
    try:
        yield f"http://{bind}", f"http://{environment['LISAREC_METRICS_BIND']}/metrics"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("problem", ["another authority", "another name", "no TLS"])
def test_a_replica_without_a_valid_certificate_gets_no_request(
    running: Topology, folder: Path, tmp_path: Path, problem: str
) -> None:
    names, changes = running.names, {"LISAREC_APP_CA": str(folder / "app.crt")}
    match problem:
        case "another authority":
            changes = {"LISAREC_APP_CA": str(make_certificate(tmp_path, "DNS:app")[0])}
        case "another name":
            names = NameServer()
            names.NAME, names.addresses = b"\x05other\x00", running.names.addresses
            changes["LISAREC_APP"] = "other"
        case "no TLS":
            changes = {}

    def served() -> list[str]:
        return re.findall('.*seconds_count{.*"/v1/items/popular".*', fetch(f"{replica_url(running)}/metrics").text)

    with balancer(running, names, changes) as (url, metrics):
        wait_until(lambda: answers(metrics) and DOWN.search(fetch(metrics).text))
        before = served()
        assert {fetch(f"{url}/v1/items/popular", PATIENCE_S).status_code for _ in range(5)} == {503}
        assert served() == before
    if names is not running.names:
        names.close()


def answers(url: str) -> bool:
    return is_ready(url, "")


def test_prometheus_scrapes_replicas_over_tls(running: Topology, folder: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((MOUNTED / "prometheus-tls.yml").read_text().replace("/tls/", f"{folder}/"))
    job = config["scrape_configs"][0]
    plain = {key: value for key, value in job.items() if key not in ("scheme", "tls_config")}
    assert config | {"scrape_configs": [plain, *config["scrape_configs"][1:]]} == CONFIG

    target = {"static_configs": [{"targets": running.targets()}], "scrape_interval": "1s"}
    config = {"scrape_configs": [{key: value for key, value in job.items() if key != "dns_sd_configs"} | target]}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    listening = f"127.0.0.1:{free_port()}"
    command = [program("prometheus"), f"--config.file={tmp_path / 'prometheus.yml'}"]
    command += [f"--web.listen-address={listening}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: is_ready(f"http://{listening}", "/-/ready"))
        wait_until(lambda: Prometheus(f"http://{listening}").number('up{job="app"}') == 1)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def test_the_healthcheck_uses_tls(running: Topology, folder: Path) -> None:
    _, _, *options = merged()["services"]["app"]["healthcheck"]["test"]
    host, port = running.targets()[0].split(":")
    options[-1] = options[-1].replace("/tls/", f"{folder}/").replace("127.0.0.1", host)

    def check(port: int) -> int:
        environment = {"LISAREC_PORT": str(port)}
        return subprocess.run(
            [sys.executable, *options], env=environment, capture_output=True, timeout=PATIENCE_S
        ).returncode

    assert check(int(port)) == 0
    assert check(free_port()) != 0

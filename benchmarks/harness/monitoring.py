"""Run the archiver, the trainer and Prometheus next to a topology, as docker-compose.yml runs them.

Prometheus uses docker/prometheus/prometheus.yml and the rule files next to it, which the container mounts. An HTTP
server of this process replaces Docker's DNS and returns the current addresses, even while replicas come and go.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

import yaml

from benchmarks.harness.compose import ROOT
from benchmarks.harness.service_process import END_TIMEOUT_S, fetch, free_port, wait_until_ready
from benchmarks.harness.topology import Topology, program

ARCHIVE = "archive"
MOUNTED = ROOT / "docker" / "prometheus"
LISAREC = (sys.executable, "-m", "app")
CONFIG = yaml.safe_load((MOUNTED / "prometheus.yml").read_text())


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus that watches a topology and its archiver."""

    url: str

    def query(self, expression: str) -> list[Any]:
        """Return the current result of a PromQL expression."""
        answer = fetch(f"{self.url}/api/v1/query?{urlencode({'query': expression})}").json()
        assert answer["status"] == "success", (expression, answer)
        found: list[Any] = answer["data"]["result"]
        return found

    def number(self, expression: str) -> float:
        """Return the sum of an expression over all labels."""
        return sum(float(one["value"][1]) for one in self.query(expression))

    def names(self) -> set[str]:
        """Return the names of all metrics that were ever scraped."""
        return set(fetch(f"{self.url}/api/v1/label/__name__/values").json()["data"])


@contextmanager
def monitored(
    running: Topology,
    directory: Path,
    archiver_options: Sequence[str],
    *,
    models: Path | None = None,
    others: Mapping[str, str] = MappingProxyType({}),
    every_s: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Prometheus]:
    """Start the processes, and stop them at the end; their logs and other files are in the directory.

    directory         also contains the archive, as ARCHIVE
    archiver_options  options in addition to the Redis URL and the archive directory
    models            models directory of the trainer, which trains once a day; None: no trainer
    others            the metrics addresses of processes that already run, by the names of their services
    every_s           overrides of `global` in Prometheus' file, for a test that cannot wait so long
    """
    archiver, trainer, listening = (f"127.0.0.1:{free_port()}" for _ in range(3))
    balancer = running.balancer_environment["LISAREC_METRICS_BIND"]
    known = {"archive": [archiver], "trainer": [trainer], "haproxy": [balancer]}
    known |= {name: [others[name]] if name in others else [] for name in ("consume", "publish")}
    with _service_discovery(running, known) as names_url:
        jobs = [_job(job, names_url, listening) for job in CONFIG["scrape_configs"]]
        rules = [str(MOUNTED / Path(name).name) for name in CONFIG["rule_files"]]
        config = CONFIG | {"global": CONFIG["global"] | every_s, "rule_files": rules, "scrape_configs": jobs}
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        place = ["--redis-url", str(running.redis_url), "--archive-dir", str(directory / ARCHIVE)]
        commands = {"archive": [*LISAREC, "archive", *place, "--metrics", archiver, *archiver_options]}
        if models is not None:
            retrain = ["retrain", *place, "--models-dir", str(models), "--every", "24h", "--metrics", trainer]
            commands["trainer"] = [*LISAREC, *retrain]
        prometheus = [program("prometheus"), f"--config.file={directory / 'prometheus.yml'}"]
        prometheus += [f"--web.listen-address={listening}", f"--storage.tsdb.path={directory / 'tsdb'}"]
        commands["prometheus"] = prometheus
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for name, command in commands.items():
                with (directory / f"{name}.log").open("ab") as log:
                    processes.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log))
            addresses = {"archive": archiver, "trainer": trainer, "prometheus": listening}
            for name, process in zip(commands, processes, strict=True):
                path = "/-/ready" if name == "prometheus" else "/metrics"
                wait_until_ready(f"http://{addresses[name]}", process, path)
            yield Prometheus(f"http://{listening}")
        finally:
            for process in processes:
                process.terminate()
                process.wait(timeout=END_TIMEOUT_S)


def _job(job: dict[str, Any], names_url: str, own: str) -> dict[str, Any]:
    """Return a scrape job of the mounted file that queries this process instead of Docker's DNS."""
    kept = {key: value for key, value in job.items() if not key.endswith("_sd_configs") and key != "static_configs"}
    if "static_configs" in job:  # Prometheus itself
        return kept | {"static_configs": [{"targets": [own]}]}
    (asked,) = job["dns_sd_configs"]
    (name,) = asked["names"]
    return kept | {"http_sd_configs": [{"url": f"{names_url}/{name}", "refresh_interval": "1s"}]}


@contextmanager
def _service_discovery(running: Topology, known: Mapping[str, list[str]]) -> Iterator[str]:
    """Run an HTTP server that returns the addresses of a name to Prometheus."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # http.server requires this name
            name = self.path.removeprefix("/")
            body = json.dumps([{"targets": running.targets() if name == "app" else known[name]}]).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()

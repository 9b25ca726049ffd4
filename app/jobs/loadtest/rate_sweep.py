"""A rate sweep: raises the rate of requests until the service no longer keeps up.

Two thirds of the requests ask for recommendations of known users, one third posts an event each. Service, Redis and
load generator share one machine, so the CPU time of all three is reported beside the latencies.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import httpx
import numpy as np
import redis
from uuid_utils import uuid7

from app.jobs.loadtest import synthetic_catalogue
from app.jobs.loadtest.load_generator import NO_RESPONSE, Address, LoadGenerator, Responses, ScheduledRequest, get, post
from app.jobs.replay import ServiceAddress

USERS = 2_000
HISTORY = 20
EVENTS_PER_RECOMMENDATION = 0.5
GROWTH = 1.25  # from rate to rate
CONNECTIONS = 64  # to each process
ITEMS_USED = 10_000
SYNCS = 50
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
PROGRAM = __name__.partition(".jobs.")[0]  # the command line
REDIS_FILES = Path(__file__).parents[3] / "docker" / "redis"
RECOMMENDATIONS, EVENTS = "recommendations", "events"


class BenchError(ValueError):
    """The measurement cannot start. The message says what to do."""


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """The measured service: the address of each process, and item ids of its catalogue."""

    addresses: list[Address]
    item_ids: list[str]
    redis_url: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one rate. Latencies count from the time a request was due, for responses with status 200."""

    recommendations_per_s: float
    events_per_s: float
    seconds: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    events_p99_ms: float
    errors: dict[str, int]  # by status, 0 for no response
    unannounced: int  # refusals without Retry-After
    service_us: float  # CPU time per request, like the next two
    redis_us: float
    generator_us: float
    resident_mb: list[int]  # of each process

    def keeps_up(self, p90_ms: float) -> bool:
        """Return whether there were no errors, and the latencies stayed within their bounds."""
        return not self.errors and self.p90_ms <= p90_ms and self.events_p99_ms < 1e3


@contextmanager
def enlarged_service(
    model: Path, items: int, codes: synthetic_catalogue.Codes, processes: int, *, on_redis: bool
) -> Iterator[BenchTarget]:
    """Run `lisarec serve` on an empty store, with the model's weights and a catalogue of `items` items.

    raises  BenchError, ArtifactError, ValueError
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="lisarec-bench-")))
        synthetic_catalogue.write_enlarged(directory / "model", model, items, codes)
        redis_url = stack.enter_context(running_redis(directory)) if on_redis else None
        store = ["--data-dir", str(directory)] if redis_url is None else ["--redis-url", redis_url]
        addresses = [
            stack.enter_context(_process(directory, [*store, "--model", str(directory / "model")]))
            for _ in range(processes)
        ]
        used = np.random.default_rng(0).choice(items, min(items, ITEMS_USED), replace=False).tolist()
        yield BenchTarget(addresses, [synthetic_catalogue.item_id(number) for number in used], redis_url)


def disk_sync_ms() -> tuple[float, float]:
    """Return the time that the disk takes to sync 4 kB: median and 90th percentile. Every event waits for a sync."""
    times_s = []
    with TemporaryFile() as file:
        for _ in range(SYNCS):
            file.write(b"." * 4096)
            file.flush()
            begin_s = time.perf_counter()
            os.fdatasync(file.fileno())
            times_s.append(time.perf_counter() - begin_s)
    p50, p90 = np.percentile(times_s, [50, 90]).tolist()
    return p50 * 1e3, p90 * 1e3


def running_target(service: ServiceAddress) -> BenchTarget:
    """Return the target for a running service, whose store keeps the events.

    raises  ValueError  when no service answers there, or the load generator cannot log in
    """
    url, place = service.url, httpx.URL(service.url)
    if service.auth is not None or place.scheme != "http":
        raise ValueError("the load has neither TLS nor a password; pass the service's own address as http://HOST:PORT")
    try:
        popular = httpx.get(f"{url}/v1/items/popular", params={"k": 1000}).raise_for_status().json()["items"]
    except httpx.HTTPError as exc:
        raise ValueError(f"{url} does not answer like a lisarec service without API keys ({exc})") from exc
    return BenchTarget([(place.host, place.port or 80)], [item["item_id"] for item in popular])


class RateSweep:
    """Creates users with a history in the service, then measures one rate after another."""

    def __init__(self, service: BenchTarget, connections: int = CONNECTIONS) -> None:
        self._service = service
        self._random = random.Random(1)  # noqa: S311  # nothing secret
        self._load = LoadGenerator(service.addresses, connections * len(service.addresses))
        # slowly: this is preparation, not measurement
        self._load.run(
            ScheduledRequest(n / 50, EVENTS, post("/v1/events", events)) for n, events in enumerate(self._histories())
        )

    def close(self) -> None:
        """Close the connections to the service."""
        self._load.close()

    def measure(self, rate: float, seconds: float) -> Row:
        """Request recommendations at this mean rate, at random times, and post half as many events."""
        requests = list(self._requests(rate, seconds))
        before = self._cpu_s()
        begin_s = time.perf_counter()
        outcomes = self._load.run(requests)
        took_s = time.perf_counter() - begin_s
        spent = [(late - early) / len(requests) * 1e6 for early, late in zip(before, self._cpu_s(), strict=True)]
        recommended, posted = outcomes.get(RECOMMENDATIONS, Responses()), outcomes.get(EVENTS, Responses())
        p50, p90, p99 = np.percentile(recommended.latencies_ms or [np.inf], [50, 90, 99]).tolist()
        statuses = recommended.statuses + posted.statuses
        if NO_RESPONSE in recommended.statuses or NO_RESPONSE in posted.statuses:
            statuses[NO_RESPONSE] = recommended.statuses[NO_RESPONSE] + posted.statuses[NO_RESPONSE]
        return Row(
            recommendations_per_s=len(recommended.latencies_ms) / took_s,
            events_per_s=len(posted.latencies_ms) / took_s,
            seconds=took_s,
            p50_ms=p50,
            p90_ms=p90,
            p99_ms=p99,
            events_p99_ms=float(np.percentile(posted.latencies_ms or [np.inf], 99)),
            errors={str(status): count for status, count in sorted(statuses.items()) if status != 200},
            unannounced=recommended.unannounced + posted.unannounced,
            service_us=spent[0],
            redis_us=spent[1],
            generator_us=spent[2],
            resident_mb=self.resident_mb(),
        )

    def resident_mb(self) -> list[int]:
        """Return the resident memory of each process."""
        return [int(value) >> 20 for value in self._metric_of_processes("process_resident_memory_bytes")]

    def until_overloaded(self, rate: float, seconds: float, p90_ms: float) -> Iterator[Row]:
        """Measure rates that grow by a quarter, up to the first one that the service cannot keep up with."""
        while True:
            row = self.measure(rate, seconds)
            yield row
            if not row.keeps_up(p90_ms):
                return
            rate *= GROWTH

    def _requests(self, rate: float, seconds: float) -> Iterator[ScheduledRequest]:
        at_s = self._random.expovariate(rate)
        while at_s < seconds:
            user = f"user-{self._random.randrange(USERS)}"
            path = f"/v1/users/{user}/recommendations"
            yield ScheduledRequest(at_s, RECOMMENDATIONS, get(path))
            if self._random.random() < EVENTS_PER_RECOMMENDATION:
                yield ScheduledRequest(at_s, EVENTS, post("/v1/events", self._event(user)))
            at_s += self._random.expovariate(rate)

    def _histories(self) -> Iterator[list[dict[str, str]]]:
        for first in range(0, USERS, 10):
            users = [f"user-{number}" for number in range(first, first + 10)]
            yield [self._event(user) for user in users for _ in range(HISTORY)]

    def _event(self, user: str) -> dict[str, str]:
        return {"event_id": str(uuid7()), "user_id": user, "item_id": self._random.choice(self._service.item_ids)}

    def _cpu_s(self) -> tuple[float, float, float]:
        """Return the CPU time so far of service, Redis and this process."""
        spent_by_redis = 0.0
        if self._service.redis_url is not None:
            with redis.Redis.from_url(self._service.redis_url) as client:
                cpu: Any = client.info("cpu")
                spent_by_redis = cpu["used_cpu_user"] + cpu["used_cpu_sys"]
        return sum(self._metric_of_processes("process_cpu_seconds_total")), spent_by_redis, time.process_time()

    def _metric_of_processes(self, metric: str) -> list[float]:
        """Return the metric of each process."""
        urls = [
            httpx.URL(scheme="http", host=host, port=port, path="/metrics") for host, port in self._service.addresses
        ]
        texts = [httpx.get(url, timeout=STOP_TIMEOUT_S).text for url in urls]
        found = [re.search(rf"^{metric} (\S+)$", text, re.MULTILINE) for text in texts]
        return [float(one[1]) if one else 0.0 for one in found]


@contextmanager
def running_redis(directory: Path) -> Iterator[str]:
    """Run Redis as docker-compose.yml does, with the same start, configuration and users. Yields its URL.

    raises  BenchError  when it cannot be started
    """
    program = shutil.which("redis-server", path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin")
    if program is None or not (REDIS_FILES / "redis.conf").is_file():
        raise BenchError("--redis needs redis-server and the repository's docker/redis; omit --redis")
    port, data = _free_port(), directory / "redis"
    for folder in (data, data / "secrets", data / "acl"):
        folder.mkdir()
    subprocess.run([REDIS_FILES / "make-secrets", data / "secrets", data / "acl"], check=True, timeout=STOP_TIMEOUT_S)  # noqa: S603
    listen = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(data)]
    server = [program, str(REDIS_FILES / "redis.conf"), *listen, "--aclfile", str(data / "acl" / "users.acl")]
    command = [str(REDIS_FILES / "redis-start"), str(data), *server]
    with _running(command, directory / "redis.log") as process:
        _wait_until_ready(
            process, directory / "redis.log", lambda: socket.create_connection(("127.0.0.1", port), 1).close()
        )
        password = (data / "secrets" / "redis_password").read_text()
        yield f"redis://lisarec:{password}@127.0.0.1:{port}/0"


@contextmanager
def _process(directory: Path, options: Sequence[str]) -> Iterator[Address]:
    port = _free_port()
    log = directory / f"{port}.log"
    with _running([sys.executable, "-m", PROGRAM, "serve", "--port", str(port), *options], log) as process:
        _wait_until_ready(
            process,
            log,
            lambda: httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=STOP_TIMEOUT_S).raise_for_status(),
        )
        yield "127.0.0.1", port


@contextmanager
def _running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the block ends."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)  # noqa: S603  # our own command
    try:
        yield process
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, probe: Any) -> None:
    give_up_at_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_at_s and process.poll() is None:
        try:
            probe()
            return
        except (OSError, httpx.HTTPError):
            time.sleep(0.1)
    raise BenchError(f"{process.args!r} did not start: {log.read_text(errors='replace')[-500:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""What Prometheus reads: how long requests took and where, what became of events, what waits and what is served.

Several worker processes behind one port write their numbers into files that they share (prometheus_client's
multiprocess mode), and whichever is asked answers for all of them: counters and histograms outlive a worker that dies,
gauges do not. One process alone keeps its numbers in memory.
"""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, GCCollector, Histogram, ProcessCollector
from prometheus_client import generate_latest as in_text
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import trace
from app.logs import LINES_A_SECOND
from app.trace import Trace
from storage.errors import StorageError
from storage.records import AppendResult

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
STORE_BUCKETS_S = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2, 5)
COMPUTE_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

StoreCall = Literal["append", "states", "log"]
Stage = Literal["step", "scan"]
Queue = Literal["requests", "engine", "store"]

logger = logging.getLogger(__name__)


class Metrics:
    """The numbers of one app, in a registry of its own, so that two apps in one process do not share them.

    shared_dir  where the workers of one service keep their numbers; it must stand in PROMETHEUS_MULTIPROC_DIR, too,
                before prometheus_client is imported. None: this process is the only one

    `at_work` and `at_engine` count requests that are answered just now, and those of them that wait for the engine or
    have it: plain numbers, which `sample` takes.
    """

    def __init__(self, shared_dir: Path | None = None) -> None:
        self.shared_dir = shared_dir
        self.at_work = 0
        self.at_engine = 0
        self._registry = CollectorRegistry()
        if shared_dir is None:
            ProcessCollector(registry=self._registry)
            GCCollector(registry=self._registry)
        self._request_seconds = self._histogram(
            "lisarec_request_seconds",
            "Time from a request's head to the end of its answer",
            LATENCY_BUCKETS_S,
            ["method", "route", "status"],
        )
        self._requests: dict[tuple[str, str, int], Late] = {}  # finding a label's child costs more than using it
        self._late: list[Late] = []
        store = self._histogram(
            "lisarec_store_seconds", "Time until the store had answered a call", STORE_BUCKETS_S, ["call"]
        )
        self._store_seconds = {
            call: self._late_for(store.labels(call), STORE_BUCKETS_S) for call in ("append", "states", "log")
        }
        failures = self._counter("lisarec_store_failures", "Calls that the store failed", ["call"])
        self._store_failures = {call: failures.labels(call) for call in ("append", "states", "log")}
        compute = self._histogram(
            "lisarec_engine_seconds",
            "Time of the engine for one batch, by stage: step makes queries from states, scan ranks the catalogue",
            COMPUTE_BUCKETS_S,
            ["stage"],
        )
        self._step_seconds = self._late_for(compute.labels("step"), COMPUTE_BUCKETS_S)
        self._scan_seconds = self._late_for(compute.labels("scan"), COMPUTE_BUCKETS_S)
        batch_queries = self._histogram(
            "lisarec_batch_queries", "Queries that the engine was given at a time", BATCH_BUCKETS
        )
        self._batch_queries = self._late_for(batch_queries, BATCH_BUCKETS)
        switches = self._counter(
            "lisarec_switches", "Attempts to serve another model, by outcome: switched or failed", ["outcome"]
        )
        self._switches = {outcome: switches.labels(outcome) for outcome in ("switched", "failed")}
        events = self._counter(
            "lisarec_events", "Valid events by outcome; unknown_item and late ones are accepted too", ["outcome"]
        )
        self._accepted, self._duplicate = events.labels("accepted"), events.labels("duplicate")
        self._unknown_item, self._late_event = events.labels("unknown_item"), events.labels("late")
        self._recommendations = self._counter(
            "lisarec_recommendations", "Answers by the source of their items", ["source"]
        )
        self._sources: dict[str, Counter] = {}
        of_list = ["tenant", "generation", "experiment"]
        self._shown = self._counter(
            "lisarec_shown_lists", "Lists by their length, 21 for longer ones", [*of_list, "length"]
        )
        self._chosen = self._counter(
            "lisarec_chosen_items", "Events that came of a list, by the item's place in it", [*of_list, "place", "type"]
        )
        self._failed_reads = self._counter(
            "lisarec_failed_state_reads",
            "Recommendations answered with popular items because the store could not be read",
        )
        self._queue_depth = self._gauge(
            "lisarec_queue_depth",
            "Requests at work, those of them at the engine, and reads and writes that wait for the store",
            ["queue"],
        )
        self._generation = self._gauge(
            "lisarec_generation", "Processes that serve the generation", ["tenant", "generation", "tag"]
        )
        self._served: dict[str, Gauge] = {}
        self._log_lag: Gauge | None = None
        self._state_bytes = self._gauge(
            "lisarec_state_bytes", "Size of one user's state in the generation served", ["tenant"], mode="livemax"
        )

    def exposition(self) -> bytes:
        """All numbers of all workers, in Prometheus' text format."""
        if self.shared_dir is None:
            return in_text(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(self.shared_dir))  # type: ignore[no-untyped-call]
        registry.register(_Processes(_living_workers(self.shared_dir)))
        return in_text(registry)

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        key = (method, route, status)
        child = self._requests.get(key)
        if child is None:
            histogram = self._request_seconds.labels(method, route, str(status))
            child = self._requests[key] = self._late_for(histogram, LATENCY_BUCKETS_S)
        child.observe(seconds)

    def asking_store(self, call: StoreCall) -> "Asking":
        """Used with `with`: how long the store takes, and whether it fails."""
        return Asking(self._store_seconds[call], self._store_failures[call])

    def observe_batch(self, queries: int, step_s: float, scan_s: float) -> None:
        self._batch_queries.observe(queries)
        self._step_seconds.observe(step_s)
        self._scan_seconds.observe(scan_s)

    def count_events(self, appended: Sequence[AppendResult]) -> None:
        duplicates = sum(one.duplicate for one in appended)
        self._accepted.inc(len(appended) - duplicates)
        if duplicates:
            self._duplicate.inc(duplicates)
        if unknown := sum(one.unknown_item for one in appended):
            self._unknown_item.inc(unknown)
        if late := sum(one.late for one in appended):
            self._late_event.inc(late)

    def count_recommendations(self, source: str) -> None:
        child = self._sources.get(source)
        if child is None:
            child = self._sources[source] = self._recommendations.labels(source)
        child.inc()

    def count_places(self, tenant: str, tallies: Mapping[str, int]) -> None:
        """Of lists and events, by the names that `app.clicks` gives them."""
        for name, count in tallies.items():
            what, *labels = name.split("|")
            (self._shown if what == "shown" else self._chosen).labels(tenant, *labels).inc(count)

    def count_switch(self, outcome: Literal["switched", "failed"]) -> None:
        self._switches[outcome].inc()

    def count_failed_read(self) -> None:
        self._failed_reads.inc()

    def sample(self, store_waiting: int) -> None:
        """Note how much is under way and waits just now, and all that was observed since the last time."""
        for late in self._late:
            late.flush()
        depths: dict[Queue, int] = {"requests": self.at_work, "engine": self.at_engine, "store": store_waiting}
        for queue, depth in depths.items():
            self._queue_depth.labels(queue).set(depth)

    def note_log_lag(self, seconds: float) -> None:
        """Note how long ago everything that had been logged was in the archive; a service without one says nothing."""
        if self._log_lag is None:
            self._log_lag = self._gauge(
                "lisarec_log_lag_seconds",
                "How long ago everything that had been logged was in the archive",
                [],
                mode="livemax",
            )
        self._log_lag.set(seconds)

    def serve(self, tenant: str, generation: str, tag: str, state_bytes: int) -> None:
        """Note what is served to a tenant from now on."""
        if (before := self._served.get(tenant)) is not None:
            before.set(0)  # several processes cannot take a series back
        self._served[tenant] = self._generation.labels(tenant, generation, tag)
        self._served[tenant].set(1)
        self._state_bytes.labels(tenant).set(state_bytes)

    def _counter(self, name: str, documentation: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(name, documentation, labels, registry=self._registry)

    def _histogram(
        self, name: str, documentation: str, buckets: Sequence[float], labels: Iterable[str] = ()
    ) -> Histogram:
        return Histogram(name, documentation, labels, buckets=buckets, registry=self._registry)

    def _late_for(self, histogram: Histogram, buckets: Sequence[float]) -> "Late":
        late = Late(histogram, buckets)
        self._late.append(late)
        return late

    def _gauge(
        self, name: str, documentation: str, labels: Iterable[str], mode: Literal["livesum", "livemax"] = "livesum"
    ) -> Gauge:
        return Gauge(name, documentation, labels, registry=self._registry, multiprocess_mode=mode)


class Late:
    """A histogram that is told what was observed all at once: ten times cheaper than one by one.

    It goes into the library's buckets directly, which no method of it does; the tests compare it with `observe`.
    """

    def __init__(self, histogram: Histogram, buckets: Sequence[float]) -> None:
        self._histogram = histogram
        self._bounds = np.array(buckets)
        self._observed: list[float] = []
        self.observe = self._observed.append

    def flush(self) -> None:
        """Other threads may go on observing; only one may flush."""
        if not self._observed:
            return
        values = np.array(self._observed)
        del self._observed[: len(values)]
        counts = np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._bounds) + 1)
        for bucket in counts.nonzero()[0]:
            self._histogram._buckets[bucket].inc(float(counts[bucket]))
        self._histogram._sum.inc(float(values.sum()))


class Asking:
    """One call of the store: a context, and not a generator's, which would cost more than what it measures."""

    __slots__ = ("_begin_s", "_failures", "_seconds")

    def __init__(self, seconds: Late, failures: Counter) -> None:
        self._seconds = seconds
        self._failures = failures

    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._seconds.observe(time.perf_counter() - self._begin_s)
        if kind is not None and issubclass(kind, StorageError):
            self._failures.inc()


class RequestTimer:
    """ASGI middleware around every request: its time, its id, where its time went; a line of log when it went wrong.

    Times are kept under the route's template, so that ids make no new series. A slow or failed request is logged under
    the same, with its id; no more than a few each second, since overload is no time to write much.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, slow_s: float) -> None:
        self._app = app
        self._metrics = metrics
        self._slow_s = slow_s
        self._second = 0
        self._lines = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        at_hand = Trace(next((value for name, value in scope["headers"] if name == b"x-request-id"), None))
        trace.begin(at_hand)  # in the request's own task
        status = 500

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message["headers"]
                headers.append((b"x-request-id", at_hand.id))
                if at_hand.spans:
                    headers.append((b"server-timing", at_hand.server_timing()))
            await send(message)

        metrics = self._metrics
        metrics.at_work += 1
        begin = time.perf_counter()
        try:
            await self._app(scope, receive, send_noting_status)
        finally:
            seconds = time.perf_counter() - begin
            metrics.at_work -= 1
            method = scope["method"] if scope["method"] in KNOWN_METHODS else "other"
            route = getattr(scope.get("route"), "path", "unmatched")
            metrics.observe_request(method, route, status, seconds)
            if status >= 500 or seconds >= self._slow_s:
                self._log(method, route, status, seconds)

    def _log(self, method: str, route: str, status: int, seconds: float) -> None:
        if (second := int(time.monotonic())) != self._second:
            if self._lines > LINES_A_SECOND:
                logger.warning("%d more slow or failed requests in that second", self._lines - LINES_A_SECOND)
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines <= LINES_A_SECOND:
            logger.warning("%s %s answered %d after %.3f s", method, route, status, seconds)


def _living_workers(shared_dir: Path) -> list[int]:
    """Those who write there. What the dead counted stays; what they served and had waiting is gone."""
    workers = {int(file.stem.rpartition("_")[2]) for file in shared_dir.glob("*.db")}
    living = {pid for pid in workers if _lives(pid)}
    for dead in workers - living:
        mark_process_dead(dead, str(shared_dir))  # type: ignore[no-untyped-call]
    return sorted(living)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's: the number was given away again
        return False
    return True


class _Processes(Collector):
    """Memory, processor time and open files of each worker, by its process id."""

    def __init__(self, workers: Sequence[int]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        by_name: dict[str, Metric] = {}
        for worker in self._workers:
            for metric in ProcessCollector(pid=partial(int, worker), registry=None).collect():
                together = by_name.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    together.add_sample(sample.name, {**sample.labels, "pid": str(worker)}, sample.value)
        yield from by_name.values()

"""The metrics for Prometheus: requests, events, store, engine and the served generations.

Several worker processes behind one port write their numbers into shared files (prometheus_client's multiprocess mode),
and the worker that is scraped reports for all of them. Counters and histograms outlive a worker that dies, gauges do
not. A single process keeps its numbers in memory.
"""

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, GCCollector, ProcessCollector
from prometheus_client import generate_latest as in_text

from app.observability.buffers import BufferedCounter, BufferedHistogram
from app.observability.instruments import DeclaredMetric, Instruments
from app.observability.multiprocess import SERVED, WorkerNumbers, WorkerProcesses, living_workers
from storage.errors import FAILURE_CAUSES, StorageError
from storage.records import Tally

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
STORE_BUCKETS_S = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2, 5)
COMPUTE_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_SCENARIO_SERIES = 100  # scenarios of a tenant that this process counts by name

logger = logging.getLogger(__name__)

ENGINE_STAGES = ("step", "scan", "device")
StoreCall = Literal["append", "states", "log"]
STORE_CALLS: tuple[StoreCall, ...] = ("append", "states", "log")
EventOutcome = Literal["accepted", "duplicate", "unknown_item", "unknown_type", "late", "refused"]
EVENT_OUTCOMES: tuple[EventOutcome, ...] = get_args(EventOutcome)


class Metrics:
    """The metrics of one app, by subject, in its own registry: two apps in one process share no numbers.

    shared_dir  where the workers of one service keep their numbers. PROMETHEUS_MULTIPROC_DIR must name it too, before
                prometheus_client is imported. None: this process is the only one
    """

    def __init__(self, shared_dir: Path | None = None) -> None:
        self.shared_dir = shared_dir
        self._instruments = instruments = Instruments()
        if shared_dir is None:
            ProcessCollector(registry=instruments.registry)
            GCCollector(registry=instruments.registry)
        self.requests = RequestMetrics(instruments)
        self.store = StoreMetrics(instruments)
        self.engine = EngineMetrics(instruments)
        self.events = EventMetrics(instruments)
        self.recommendations = RecommendationMetrics(instruments, is_shared=shared_dir is not None)
        self.generations = GenerationMetrics(instruments, is_shared=shared_dir is not None)
        self._queue_depth = instruments.gauge(
            "lisarec_queue_depth",
            "Requests in progress (requests), those at the engine (engine), and operations waiting for the "
            "store (store), updated every second",
            ["queue"],
        )
        self._ignored = instruments.gauge(
            "lisarec_keys_file_ignored", "1 while a process cannot use the changed keys file", mode="livemax"
        )

    @property
    def declared(self) -> Sequence[DeclaredMetric]:
        """All metrics, including those without observations."""
        return self._instruments.declared

    def exposition(self) -> bytes:
        """Return the metrics of all workers in Prometheus' text format."""
        if self.shared_dir is None:
            return in_text(self._instruments.registry)
        registry = CollectorRegistry()
        registry.register(WorkerNumbers(self.shared_dir))
        registry.register(WorkerProcesses(living_workers(self.shared_dir)))
        return in_text(registry)

    def sample(self, store_waiting: int, *, ignores_keys_file: bool = False) -> None:
        """Record these numbers and the other queue depths, and flush the observations since the last call."""
        self._instruments.flush()
        self._queue_depth.labels("requests").set(self.requests.in_progress)
        self._queue_depth.labels("engine").set(self.engine.in_progress)
        self._queue_depth.labels("store").set(store_waiting)
        self._ignored.set(ignores_keys_file)


class RequestMetrics:
    """Durations of requests. `in_progress` is the number of requests in progress; the middleware sets it."""

    def __init__(self, instruments: Instruments) -> None:
        self.in_progress = 0
        self._instruments = instruments
        self._seconds = instruments.histogram(
            "lisarec_request_seconds",
            "Time from the end of a request's headers to the end of its response; _count is the number of requests",
            LATENCY_BUCKETS_S,
            ["method", "route", "status"],
        )
        self._series: dict[tuple[str, str, int], BufferedHistogram] = {}  # faster than the library's look-up

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Record one finished request."""
        key = (method, route, status)
        series = self._series.get(key)
        if series is None:
            labelled = self._seconds.labels(method, route, str(status))
            series = self._series[key] = self._instruments.buffered(labelled, LATENCY_BUCKETS_S)
        series.observe(seconds)


class StoreMetrics:
    """Durations and failures of store calls, and how far the archive is behind the log.

    failed_reads  number of recommendations of this process without the user's state, because the store failed
    """

    def __init__(self, instruments: Instruments) -> None:
        self.failures = StoreFailures(instruments)
        self.failed_reads = 0
        self._instruments = instruments
        seconds = instruments.histogram(
            "lisarec_store_seconds",
            "Duration of a store call (append, states or log), including waiting",
            STORE_BUCKETS_S,
            ["call"],
        )
        failures = instruments.counter("lisarec_store_failures", "Failed store calls (append, states or log)", ["call"])
        self._seconds = {call: instruments.buffered(seconds.labels(call), STORE_BUCKETS_S) for call in STORE_CALLS}
        self._failures = {call: failures.labels(call) for call in STORE_CALLS}
        self._failed_reads = instruments.counter(
            "lisarec_failed_state_reads",
            "Recommendations of popular items because the store could not be read",
        )
        self._distrusted = instruments.gauge(
            "lisarec_store_distrusted",
            "1 while the service writes nothing to the store, because it has lost or could lose acknowledged events",
            mode="livemax",
        )
        self._log_lag: Gauge | None = None

    def observe(self, call: StoreCall, seconds: float, *, is_failed: bool) -> None:
        """Record one call of the store."""
        self._seconds[call].observe(seconds)
        if is_failed:
            self._failures[call].inc()

    def count_failed_read(self) -> None:
        """Count a recommendation without the user's state, because the store failed."""
        self.failed_reads += 1
        self._failed_reads.inc()

    def set_distrusted(self, is_distrusted: bool) -> None:
        """Record whether the store rejects writes until an operator repairs it."""
        self._distrusted.set(is_distrusted)

    def set_log_lag(self, seconds: float) -> None:
        """Record how far the archive is behind the log. A service without an archive doesn't have this series."""
        if self._log_lag is None:
            self._log_lag = self._instruments.gauge(
                "lisarec_log_lag_seconds",
                "Seconds by which the archive is behind the event log; absent before the archiver's first run",
                mode="livemax",
            )
        self._log_lag.set(seconds)


class StoreFailures:
    """Store failures by cause: all are counted, and one per second and cause is logged."""

    def __init__(self, instruments: Instruments) -> None:
        errors = instruments.counter(
            "lisarec_store_errors",
            "Store failures by cause that led to a 503 or to popular items",
            ["cause"],
        )
        self._errors = {cause: errors.labels(cause) for cause in FAILURE_CAUSES}
        self._silent_until_s = dict.fromkeys(FAILURE_CAUSES, 0.0)

    def report(self, failure: StorageError) -> None:
        """Count a failure, and log its message unless one of the same cause was logged within the last second."""
        cause, now_s = failure.failure_cause, time.monotonic()
        self._errors[cause].inc()
        if now_s >= self._silent_until_s[cause]:
            self._silent_until_s[cause] = now_s + 1.0
            logger.error("the store fails (%s): %s", cause, failure)


class EngineMetrics:
    """Durations of the engine's batches. `in_progress` is the number of requests in or waiting for the engine."""

    def __init__(self, instruments: Instruments) -> None:
        self.in_progress = 0
        seconds = instruments.histogram(
            "lisarec_engine_seconds",
            "Duration of a batch in the engine by stage: step computes queries from states, scan ranks the catalogue, "
            "device is the GPU time",
            COMPUTE_BUCKETS_S,
            ["stage"],
        )
        self._seconds = {
            stage: instruments.buffered(seconds.labels(stage), COMPUTE_BUCKETS_S) for stage in ENGINE_STAGES
        }
        waits = instruments.histogram(
            "lisarec_batch_wait_seconds",
            "Time that a request waits for its batch (batch) and that a batch waits for the engine (engine)",
            STORE_BUCKETS_S,
            ["until"],
        )
        self._request_waits = instruments.buffered(waits.labels("batch"), STORE_BUCKETS_S)
        self._batch_waits = instruments.buffered(waits.labels("engine"), STORE_BUCKETS_S)
        queries = instruments.histogram("lisarec_batch_queries", "Number of queries per batch", BATCH_BUCKETS)
        self._batch_queries = instruments.buffered(queries, BATCH_BUCKETS)

    def observe_batch(self, queries: int, stages_s: Mapping[str, float]) -> None:
        """Record one batch and the durations of its stages."""
        self._batch_queries.observe(queries)
        for stage, seconds in stages_s.items():
            self._seconds[stage].observe(seconds)

    def observe_waits(self, requests_s: Iterable[float], batch_s: float) -> None:
        """Record how long the requests waited for their batch, and the batch for the engine."""
        for seconds in requests_s:
            self._request_waits.observe(seconds)
        self._batch_waits.observe(batch_s)


class TenantEventMetrics:
    """Outcomes of one tenant's events.

    The counters are those of all tenants, which scrapes of any worker see at once, and of this one, a second later.
    """

    def __init__(self, counters: Mapping[EventOutcome, tuple[Counter, BufferedCounter]]) -> None:
        self._counters = counters

    def count(self, counts: Mapping[EventOutcome, int]) -> None:
        """Count the events of one call, by outcome."""
        for outcome, count in counts.items():
            if count:
                of_all, own = self._counters[outcome]
                of_all.inc(count)
                own.count += count


class EventMetrics:
    """Outcomes of posted events."""

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments
        events = instruments.counter(
            "lisarec_events",
            "Valid events by outcome: accepted, duplicate, unknown_item, unknown_type, late or refused. unknown_item, "
            "unknown_type and late events are also counted as accepted",
            ["outcome"],
        )
        self._by_outcome = {outcome: events.labels(outcome) for outcome in EVENT_OUTCOMES}
        self._of_tenants = instruments.counter(
            "lisarec_tenant_events",
            "Valid events by tenant and outcome; lisarec_events_total counts those of all tenants",
            ["tenant", "outcome"],
        )

    def of_tenant(self, tenant: str) -> TenantEventMetrics:
        """Return the metrics of the tenant's events, all of which exist from now on."""
        buffered = self._instruments.buffered_counter
        return TenantEventMetrics(
            {
                outcome: (of_all, buffered(self._of_tenants.labels(tenant, outcome)))
                for outcome, of_all in self._by_outcome.items()
            }
        )


class RecommendationMetrics:
    """Sources of recommendations, and the events that they lead to."""

    def __init__(self, instruments: Instruments, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._recommendations = instruments.counter(
            "lisarec_recommendations",
            "Lists by source: personalised, blended, popular, similar, together or repeat",
            ["source"],
        )
        self._instruments = instruments
        self._by_source: dict[str, BufferedCounter] = {}
        of_list = ["tenant", "generation", "experiment"]
        self._shown = instruments.counter(
            "lisarec_shown_lists", "Lists by length; 21 stands for all longer lists", [*of_list, "length"]
        )
        self._chosen = instruments.counter(
            "lisarec_chosen_items",
            "Events with a recommendation_id, by the item's place in that list",
            [*of_list, "place", "type"],
        )
        self._values = instruments.counter(
            "lisarec_chosen_value",
            "Sum of the value of events with a recommendation_id, by the item's place in that list",
            [*of_list, "place", "type"],
        )
        self._scenario_lists = instruments.counter(
            "lisarec_scenario_lists",
            "Scenarios' lists by outcome: full, filled (only with the fallback), short or empty. A process counts 100 "
            "scenarios per tenant by name, and further ones as other",
            ["tenant", "scenario", "outcome"],
        )
        self._scenario_events = instruments.counter(
            "lisarec_scenario_events",
            "Events with the recommendation_id of a scenario's list",
            ["tenant", "scenario", "type"],
        )
        self._scenario_values = instruments.counter(
            "lisarec_scenario_value",
            "Sum of the value of events with the recommendation_id of a scenario's list",
            ["tenant", "scenario", "type"],
        )
        self._scenarios: dict[str, set[str]] = {}

    def count(self, source: str) -> None:
        """Count one list."""
        series = self._by_source.get(source)
        if series is None:
            labelled = self._recommendations.labels(source)
            series = self._by_source[source] = self._instruments.buffered_counter(labelled)
        series.count += 1

    def count_places(self, tenant: str, tallies: Mapping[Tally, float]) -> None:
        """Count lists, events and their values, from the tallies of `app.events.click_through`."""
        counters = {
            "shown": self._shown,
            "chosen": self._chosen,
            "value": self._values,
            "scenario-list": self._scenario_lists,
            "scenario-event": self._scenario_events,
            "scenario-value": self._scenario_values,
        }
        for (what, *labels), amount in tallies.items():
            if str(what).startswith("scenario-"):
                scenario, _, label = labels
                labels = [self._series_of(tenant, str(scenario)), label]
            counters[str(what)].labels(tenant, *labels).inc(amount)

    def forget(self, tenant: str, generations: Collection[str]) -> None:
        """Remove the series of these generations' lists; with several processes, a series cannot be removed."""
        if self._is_shared:
            return
        for counter in (self._shown, self._chosen, self._values):
            samples = [sample for metric in counter.collect() for sample in metric.samples]
            series = [sample.labels for sample in samples if sample.name.endswith("_total")]
            for labels in series:
                if labels["tenant"] == tenant and labels["generation"] in generations:
                    counter.remove(*labels.values())

    def _series_of(self, tenant: str, scenario: str) -> str:
        """Return the label of the scenario: its name, or `other` if the tenant has too many series already."""
        names = self._scenarios.setdefault(tenant, set())
        if len(names) < MAX_SCENARIO_SERIES:
            names.add(scenario)
        return scenario if scenario in names else "other"


class GenerationMetrics:
    """The active generation of each tenant, and switches between generations."""

    def __init__(self, instruments: Instruments, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._switches = instruments.counter(
            "lisarec_switches", "Attempts to switch models by outcome: switched or failed", ["tenant", "outcome"]
        )
        self._processes = instruments.gauge(
            SERVED, "Number of processes that serve the generation", ["tenant", "generation", "tag"]
        )
        self._state_bytes = instruments.gauge(
            "lisarec_state_bytes",
            "Largest size of a user's state in the active generation, in bytes",
            ["tenant"],
            mode="livemax",
        )
        self._served: dict[str, tuple[str, str, str]] = {}

    def count_switch(self, tenant: str, outcome: Literal["switched", "failed"]) -> None:
        """Count one attempt to switch the tenant to another generation."""
        self._switches.labels(tenant, outcome).inc()

    def set_served(self, tenant: str, generation: str, tag: str, state_bytes: int) -> None:
        """Record the generation that serves the tenant from now on."""
        if (before := self._served.get(tenant)) is None:
            for outcome in ("switched", "failed"):
                self._switches.labels(tenant, outcome)  # so that both exist before the first one
        elif self._is_shared:
            self._processes.labels(*before).set(0)  # a series cannot be removed; WorkerNumbers leaves it out
        else:
            self._processes.remove(*before)
        self._served[tenant] = tenant, generation, tag
        self._processes.labels(tenant, generation, tag).set(1)
        self._state_bytes.labels(tenant).set(state_bytes)

"""What Prometheus reads: how long requests took, and what became of events and recommendations."""

import time
from collections.abc import Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, ProcessCollector, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from storage.store import Appended

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    """The numbers of one app, in a registry of its own, so that two apps in one process do not share them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._request_seconds = Histogram(
            "lisarec_request_seconds",
            "Time from a request's head to the end of its answer",
            ["method", "route", "status"],
            buckets=LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self._switches = Counter(
            "lisarec_switches",
            "Attempts to serve another model, by outcome: switched or failed",
            ["outcome"],
            registry=self._registry,
        )
        self._events = Counter(
            "lisarec_events",
            "Valid events by outcome; unknown_item and late ones are accepted too",
            ["outcome"],
            registry=self._registry,
        )
        self._recommendations = Counter(
            "lisarec_recommendations", "Answers by the source of their items", ["source"], registry=self._registry
        )
        self._failed_reads = Counter(
            "lisarec_failed_state_reads",
            "Recommendations answered with popular items because the store could not be read",
            registry=self._registry,
        )

    def exposition(self) -> bytes:
        """All numbers, in Prometheus' text format."""
        return generate_latest(self._registry)

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._request_seconds.labels(method, route, str(status)).observe(seconds)

    def count_events(self, appended: Sequence[Appended]) -> None:
        duplicates = sum(one.duplicate for one in appended)
        self._events.labels("accepted").inc(len(appended) - duplicates)
        self._events.labels("duplicate").inc(duplicates)
        self._events.labels("unknown_item").inc(sum(one.unknown_item for one in appended))
        self._events.labels("late").inc(sum(one.late for one in appended))

    def count_recommendations(self, source: str) -> None:
        self._recommendations.labels(source).inc()

    def count_switch(self, outcome: Literal["switched", "failed"]) -> None:
        self._switches.labels(outcome).inc()

    def count_failed_read(self) -> None:
        self._failed_reads.inc()


class RequestTimer:
    """ASGI middleware that times every request under its route's template, so that ids make no new series."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        begin = time.perf_counter()
        try:
            await self._app(scope, receive, send_noting_status)
        finally:
            method = scope["method"] if scope["method"] in KNOWN_METHODS else "other"
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.observe_request(method, route, status, time.perf_counter() - begin)

"""The service that receives the events. Calls wait while it is down, and report the events that it rejects."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import httpx

from app.jobs.kafka.failures import KafkaFailure, Stopped
from app.jobs.kafka.metrics import ConsumerMetrics
from app.jobs.replay import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    ServiceAddress,
    counted,
    error_code,
    error_message,
    retry_after_s,
)

MAX_RETRY_AFTER_S = 60.0
WAITED_OUT = frozenset({408, 429})  # and all of 5xx
# caused by an event of the request, or by the number of events
REFUSALS = frozenset(
    {"invalid_json", "invalid_events", "body_too_large", "too_many_events", "too_many_new_users_at_once"}
)

logger = logging.getLogger(__name__)


class EventService:
    """Posts events to a service, one request at a time."""

    def __init__(self, service: ServiceAddress, stopping: threading.Event, metrics: ConsumerMetrics) -> None:
        self._client = httpx.Client(**service.of_client())
        self._client.headers["content-type"] = "application/json"
        self._stopping = stopping
        self._metrics = metrics

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def send(self, events: Sequence[bytes]) -> dict[int, str]:
        """Send the events in order. Return the reason for each event that the service rejects, by position.

        All others are durable when this returns. It waits as long as the service or its store is down.

        raises  Stopped       when the command ends first
                KafkaFailure  when the service rejects the requests themselves
                ReplayError   when a server other than lisarec answers
        """
        refused: dict[int, str] = {}
        parts = [list(range(len(events)))]
        while parts:
            part = [position for position in parts.pop(0) if position not in refused]
            if not part:
                continue
            answer = self._post(b"[%s]" % b",".join([events[position] for position in part]))
            if answer.status_code == httpx.codes.OK:
                self._count(answer)
                continue
            named = self._refused(answer)
            if named:
                refused |= {part[index]: reason for index, reason in named.items()}
                parts.insert(0, part)
            elif len(part) == 1:
                refused[part[0]] = error_message(answer)
            else:  # one of them is to blame, or all of them together are too large
                parts[:0] = [part[: len(part) // 2], part[len(part) // 2 :]]
        return refused

    def _post(self, body: bytes) -> httpx.Response:
        pause_s = FIRST_PAUSE_S
        while True:
            at_least_s = 0.0
            try:
                answer = self._client.post("/v1/events", content=body)
            except httpx.TransportError as exc:
                problem = f"cannot be reached ({str(exc) or type(exc).__name__})"
            else:
                if answer.status_code < 500 and answer.status_code not in WAITED_OUT:
                    return answer
                problem = f"answers {answer.status_code}: {error_message(answer)}"
                at_least_s = retry_after_s(answer, MAX_RETRY_AFTER_S)
            self._metrics.failures.inc()
            logger.warning("retrying: %s %s", self._client.base_url, problem)
            if self._stopping.wait(max(pause_s, at_least_s)):
                raise Stopped
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _refused(self, answer: httpx.Response) -> dict[int, str]:
        """Return the reasons for the events that the answer names, by position; none if it names no events."""
        if error_code(answer) not in REFUSALS:
            raise KafkaFailure(f"{self._client.base_url} answers {answer.status_code}: {error_message(answer)}")
        details = [detail for detail in answer.json()["error"].get("details", []) if detail.get("index") is not None]
        return {detail["index"]: f"{detail['field'] or 'event'}: {detail['reason']}" for detail in reversed(details)}

    def _count(self, answer: httpx.Response) -> None:
        accepted, duplicates, refused = counted(answer, "accepted", "duplicates", "refused")
        if refused:
            raise KafkaFailure("a key with --origin drops events on unknown items; use a key without --origin")
        self._metrics.count("accepted", accepted)
        self._metrics.count("duplicate", duplicates)

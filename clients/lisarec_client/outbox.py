"""The outbox: a queue of events and the thread that sends them."""

import atexit
import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import httpx

from .responses import (
    RETRY_FOR_S,
    LisarecError,
    invalid_fields,
    not_lisarec_error,
    parse_response,
    pauses_s,
    unreachable_error,
)

QUEUE_SIZE = 10_000  # events; some 5 MB
BATCH_SIZE = 200  # events in one request
MAX_BEHIND_S = 300.0  # as far as the service allows a clock to be ahead
REFUSED_AS_A_WHOLE = frozenset({413, 422})  # without an event's index: a smaller batch may be accepted

OwnerT = TypeVar("OwnerT")

logger = logging.getLogger("lisarec")
_starts: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()


def start_in_children(owner: OwnerT, start: Callable[[OwnerT], None]) -> None:
    """Start the object again in each process that is forked during its lifetime, where none of its threads runs."""
    _starts[owner] = start


def _start_all() -> None:
    for owner, start in list(_starts.items()):
        start(owner)


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_start_all)


def is_clock_behind(answer: httpx.Response) -> bool:
    """Return whether this machine's clock is far behind the one that dated the response."""
    try:
        date_s = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (LookupError, ValueError):
        return False
    return date_s > time.time() + MAX_BEHIND_S


class Queued(NamedTuple):
    """An event in the queue."""

    number: int
    time_s: float  # by this machine's clock
    event: dict[str, Any]


class Outbox:
    """A bounded queue of events and a thread that sends them, oldest first.

    Events that arrive during a request go into the next request. So batches grow with the load, and no event waits for
    a timer. The thread starts with the first event.

    An event without a timestamp gets the time at which it is queued; once this machine's clock turns out to be wrong,
    that at which it arrives.
    """

    def __init__(self, service: dict[str, Any], queue_size: int) -> None:
        self._service = service  # arguments of httpx.Client
        self._queue_size = queue_size
        self._is_closed = False
        self._start_empty()
        start_in_children(self, Outbox._start_empty)  # the parent sends what it has queued

    def _start_empty(self) -> None:
        self.dropped = 0  # events that were not queued, because the queue was full
        self.refused = 0  # events that the service rejected as invalid
        self._batch_size = BATCH_SIZE
        self._dates_events = True
        self._waiting: deque[Queued] = deque()  # includes the batch in flight
        self._newest = self._flushed_to = self._newest_refused = 0
        self._was_full = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, event: dict[str, Any]) -> bool:
        """Queue the event, or drop it if the queue is full. Return whether it was queued."""
        with self._changed:
            is_queued = len(self._waiting) < self._queue_size and not self._is_closed
            is_first_drop = not is_queued and not self._was_full
            self._was_full = not is_queued
            if is_queued:
                self._newest += 1
                self._waiting.append(Queued(self._newest, time.time(), event))
                self._start()
                self._changed.notify_all()
            else:
                self.dropped += 1
        if is_first_drop:
            logger.error("dropping events: the queue is full (%d events) or the client is closed", self._queue_size)
        return is_queued

    def flush(self, timeout_s: float) -> bool:
        """Wait for the events queued so far. Return False after the timeout, or if one was rejected since last time."""
        with self._changed:
            newest = self._newest
            if not self.drain(timeout_s):
                return False
            all_accepted = self._newest_refused <= self._flushed_to
            self._flushed_to = newest
            return all_accepted

    def drain(self, timeout_s: float) -> bool:
        """Wait until the events queued so far are logged or rejected. Return False after the timeout."""
        with self._changed:
            newest = self._newest
            self._changed.wait_for(lambda: self._is_closed or not self._waits_up_to(newest), timeout_s)
            return not self._waits_up_to(newest)

    def close(self, timeout_s: float = RETRY_FOR_S) -> bool:
        """Flush, and stop the thread. Events that can't be sent in time are lost; the log says how many."""
        all_accepted = self.flush(timeout_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            lost = len(self._waiting)
        if lost:  # the thread may be in the middle of a request
            logger.error("closed with %d unsent events; they are lost", lost)
        elif self._thread is not None:
            self._thread.join()
        atexit.unregister(self.close)
        return all_accepted and not lost

    def _waits_up_to(self, newest: int) -> bool:
        return bool(self._waiting) and self._waiting[0].number <= newest

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._send_all, name="lisarec events", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def _send_all(self) -> None:
        pauses, logged = pauses_s(), ""
        with httpx.Client(**self._service, timeout=RETRY_FOR_S) as http:
            while batch := self._next_batch():
                try:
                    self._send(http, batch)
                    pauses, logged = pauses_s(), ""
                except LisarecError as exc:
                    if str(exc) != logged:
                        logged = str(exc)
                        logger.warning("events stay queued and are retried: %s", logged)
                    self._pause(next(pauses) if exc.retry_after_s is None else exc.retry_after_s)

    def _next_batch(self) -> list[Queued]:
        """Wait for events and return the oldest batch; an empty one once the outbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            return [] if self._is_closed else list(itertools.islice(self._waiting, self._batch_size))

    def _pause(self, pause_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, pause_s)

    def _send(self, http: httpx.Client, batch: list[Queued]) -> None:
        """Post the batch once, and remove the events that the service has logged or rejected as invalid.

        raises  LisarecError  if it did neither. Some events may be logged; the service recognises their ids on a retry
        """
        sent = [self._dated(queued) for queued in batch]
        try:
            answer = http.post("/v1/events", json=sent)
        except httpx.HTTPError as exc:
            raise unreachable_error(exc) from exc
        if self._dates_events and is_clock_behind(answer):
            self._leave_times_to_service("behind")
        invalid = [(index, field) for index, field in invalid_fields(answer) if index < len(batch)]
        ahead = [
            batch[index].event
            for index, field in invalid
            if field == "timestamp" and sent[index].get("timestamp", math.inf) <= batch[index].time_s
        ]
        if ahead:
            self._leave_times_to_service("ahead of", ahead)
        elif invalid:
            self._drop_refused({batch[index].number for index, _ in invalid}, answer)
        elif answer.status_code in REFUSED_AS_A_WHOLE and len(batch) > 1:
            self._batch_size = len(batch) // 2
        elif answer.status_code in REFUSED_AS_A_WHOLE:
            self._drop_refused({batch[0].number}, answer)
        elif sum(parse_response(answer).get(name, 0) for name in ("accepted", "duplicates")) == len(batch):
            self._remove_oldest(len(batch))
            self._batch_size = min(2 * self._batch_size, BATCH_SIZE)  # one large event must not keep batches small
        else:
            raise not_lisarec_error(answer)

    def _dated(self, queued: Queued) -> dict[str, Any]:
        return {"timestamp": queued.time_s, **queued.event} if self._dates_events else queued.event

    def _leave_times_to_service(self, clock: str, events: Iterable[dict[str, Any]] = ()) -> None:
        """Send these events without times, and those without timestamps from now on."""
        if self._dates_events:
            logger.warning("this clock is 5 minutes or more %s the service's, which now dates events on arrival", clock)
        self._dates_events = False
        for event in events:
            event.pop("timestamp", None)

    def _remove_oldest(self, count: int) -> None:
        with self._changed:
            for _ in range(count):
                self._waiting.popleft()
            self._changed.notify_all()

    def _drop_refused(self, numbers: set[int], answer: httpx.Response) -> None:
        """Remove events that the service will never accept. The others are sent again without them."""
        logger.error("the service rejected %d events: %s", len(numbers), answer.text)
        with self._changed:
            self.refused += len(numbers)
            self._newest_refused = max(numbers)
            self._waiting = deque(queued for queued in self._waiting if queued.number not in numbers)
            self._changed.notify_all()

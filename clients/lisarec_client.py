"""A client of lisarec in one file: copy it into your project; it needs Python 3.11 or newer and httpx.

    lisarec = Client("https://recs.shop.example", key=KEY)         # AsyncClient in asyncio; one for each process
    answer = lisarec.recommendations("ann", k=5, fallback=["tea-2", "cup-1"])
    lisarec.event("ann", "tea-2", type="purchase", recommendation_id=answer.recommendation_id)

**Recommendations never fail and never take longer than their time-out**: when the service is away, slow or busy, the
answer is the fallback list, its `source` is "fallback" and the log says why.

**Events never wait.** `event` puts them into a bounded queue, which a thread sends in the background, in order, again
and again with the same ids until the service has them in its log. When the queue is full, `event` takes no more until
there is room: it gives None instead of an id, counts `dropped`, and the log says so. What was taken stays in the queue
until the service has it, or refuses it as invalid (`refused`), or the process ends: `close`, and the end of the
program, wait some seconds for the rest. `flush` says whether all of it is in the service's log.

Everything else (`user`, `undo`, `merge`, `erase`) asks again until it is done or the time is up; then it raises.
"""

import asyncio
import atexit
import itertools
import logging
import math
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from uuid import UUID

import httpx

TIMEOUT_S = 0.25  # for recommendations: a page that waits longer is worse than one with popular items
PATIENCE_S = 10.0  # for everything else
QUEUE_SIZE = 10_000  # events; some 5 MB
BATCH_SIZE = 200  # events in one request
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0  # between two attempts, where the service does not say

ID = re.compile(r"[A-Za-z0-9_.:@-]{1,128}")
VISITOR = re.compile(r"visitor-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
WORTH_ANOTHER_TRY = frozenset({0, 408, 429, 500, 502, 503, 504})

logger = logging.getLogger("lisarec")
Result = TypeVar("Result")


class LisarecError(Exception):
    """The service refused, or could not be reached in time (status 0); the message says which."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{status} {code}: {message}" if status else message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Recommendations:
    """Items, best first. Give the `recommendation_id` to the events that come of them."""

    items: list[dict[str, Any]]  # {"item_id", "score", "title" ...}; of a fallback {"item_id"}
    source: str  # the service's word ("personalised", "popular" ...), or "fallback"
    recommendation_id: str | None = None
    cursor: str | None = None  # of the next page, where pages were asked for; None after the last one
    because: dict[str, Any] | None = None  # {"item_id", "title"}: the item that these are most like

    @property
    def item_ids(self) -> list[str]:
        return [item["item_id"] for item in self.items]


def visitor_in(cookie: str | None) -> str | None:
    """The visitor's id in the cookie `lisarec` that /client.js sets; None where there is none, or it is no such id.

    Visitors can write into their cookies what they like. Whoever took it as it comes would show one user's
    recommendations to another one, or merge one into another.
    """
    return cookie if cookie and VISITOR.fullmatch(cookie) else None


def new_event_id() -> str:
    """A UUIDv7 (RFC 9562, section 5.7): 48 bits of Unix milliseconds, then 74 random ones."""
    random_bits = int.from_bytes(os.urandom(10), "big")
    version_and_random = 0x7000 | (random_bits >> 64) & 0x0FFF
    variant_and_random = 1 << 63 | random_bits & (1 << 62) - 1
    return str(UUID(int=time.time_ns() // 1_000_000 << 80 | version_and_random << 64 | variant_and_random))


class AsyncClient:
    """For asyncio: one for each process, made and used in one event loop. See the module."""

    def __init__(
        self, url: str, key: str | None = None, *, timeout_s: float = TIMEOUT_S, queue_size: int = QUEUE_SIZE
    ) -> None:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=None)  # noqa: S113  # asyncio.timeout has it
        self._timeout_s = timeout_s
        self._silent_until_s = 0.0  # what Retry-After asked for
        self.outbox = Outbox(url, headers, queue_size)

    def event(
        self,
        user_id: str,
        item_id: str,
        type: str = "click",  # noqa: A002  # the service's word
        *,
        value: float | None = None,
        recommendation_id: str | None = None,
        timestamp_s: float | None = None,
        event_id: str | None = None,
    ) -> str | None:
        """Let an event be sent. Returns its id at once, or None when the queue is full and the event is dropped.

        timestamp_s  when it happened, in Unix seconds; now, unless said otherwise
        event_id     only for an event that was given an id elsewhere
        raises       ValueError for what the service would refuse, as an id with a space in it
        """
        event: dict[str, Any] = {"event_id": event_id or new_event_id(), "user_id": user_id, "item_id": item_id}
        event |= {"type": type, "timestamp": time.time() if timestamp_s is None else timestamp_s}
        if recommendation_id is not None:
            event["recommendation_id"] = recommendation_id
        if value is not None:
            event["value"] = value
        for name, said in event.items():
            _require_number(name, said) if name in ("timestamp", "value") else _require_id(name, said)
        return str(event["event_id"]) if self.outbox.put(event) else None

    async def recommendations(
        self,
        user_id: str | None,
        k: int = 10,
        *,
        fallback: Iterable[str] = (),
        timeout_s: float | None = None,
        **wishes: Any,
    ) -> Recommendations:
        """The user's best items, or within the time-out the first k of the fallback. Never raises.

        wishes  whatever else `POST /v1/recommendations` takes: categories, categories_all, categories_none, exclude,
                exclude_seen, candidates, history, boost, pin, diversity, max_per_category, cursor, because, explain
        """
        question = {"k": k, **wishes} if user_id is None else {"user_id": user_id, "k": k, **wishes}
        try:
            async with asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s):
                return await self._ask(question)
        except Exception as exc:  # whatever it is, the page needs something to show
            logger.warning("recommending the fallback: %s", str(exc) or type(exc).__name__)
            return Recommendations([{"item_id": item_id} for item_id in itertools.islice(fallback, k)], "fallback")

    async def _ask(self, question: dict[str, Any]) -> Recommendations:
        if time.monotonic() < self._silent_until_s:
            raise LisarecError(0, "silent", "the service asked not to be asked for some seconds")
        try:
            answer = await self._http.post("/v1/recommendations", json=question)
        except httpx.TransportError:  # as when the service closes a connection that was idle
            answer = await self._http.post("/v1/recommendations", json=question)
        self._silent_until_s = time.monotonic() + (_retry_after_s(answer) or 0.0)
        said = _said(answer)
        return Recommendations(
            said["items"], said["source"], said["recommendation_id"], said.get("cursor"), said.get("because")
        )

    async def user(self, user_id: str) -> dict[str, Any] | None:
        """What the service knows of the user; None of one without events."""
        try:
            return await self._call("GET", _path(user_id))
        except LisarecError as exc:
            if exc.code == "user_not_found":
                return None
            raise

    async def undo(self, user_id: str, event_id: str) -> bool:
        """Take an event back; False where it was taken back before.

        raises  LisarecError  with the code event_not_found for an event that is not there
        """
        _require_id("event_id", event_id)
        await self._send_first()  # it may be about an event that still waits
        return bool((await self._call("DELETE", _path(user_id, "events", event_id)))["changed"])

    async def merge(self, user_id: str, visitor: str) -> bool:
        """Let the visitor become the user, as when somebody logs in; False where it was so before.

        raises  LisarecError  with the code merge_refused where the visitor has become another user
        """
        _require_id("visitor", visitor)
        return bool((await self._call("POST", _path(user_id, "merge"), {"from": visitor}))["changed"])

    async def erase(self, user_id: str) -> str:
        """Forget the user, with the events that still wait in this client; returns when the last copies are gone."""
        await self._send_first()  # or they would come after it, and begin a new user
        return str((await self._call("DELETE", _path(user_id)))["files_by"])

    async def flush(self, timeout_s: float = PATIENCE_S) -> bool:
        """Wait until the events are sent. True: all that were taken since the last flush are in the service's log."""
        return await asyncio.to_thread(self.outbox.flush, timeout_s)

    async def close(self, timeout_s: float = PATIENCE_S) -> bool:
        """Send what waits, as `flush` does, and end."""
        all_sent = await asyncio.to_thread(self.outbox.close, timeout_s)
        await self._http.aclose()
        return all_sent

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _send_first(self) -> None:
        if not await self.flush():
            raise LisarecError(0, "not_flushed", "events still wait to be sent, or were refused; nothing was done")

    async def _call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Call until there is an answer: each of these calls may be repeated.

        raises  LisarecError  when the service refuses, or time is up
        """
        give_up_at_s = time.monotonic() + PATIENCE_S
        for pause_s in _pauses():
            trouble = LisarecError(0, "unreachable", f"the service did not answer within {PATIENCE_S:g} s")
            try:
                async with asyncio.timeout(give_up_at_s - time.monotonic()):
                    return _said(await self._http.request(method, path, json=body))
            except httpx.HTTPError as exc:
                trouble = _unreachable(exc)
            except LisarecError as exc:
                trouble = exc
            except TimeoutError:
                raise trouble from None
            wait_s = pause_s if trouble.retry_after_s is None else trouble.retry_after_s
            if trouble.status not in WORTH_ANOTHER_TRY or time.monotonic() + wait_s >= give_up_at_s:
                raise trouble
            await asyncio.sleep(wait_s)
        raise AssertionError("there is always another pause")


class Client:
    """Blocking calls from any thread: one for each process. See the module.

    It runs an `AsyncClient` in a thread of its own, since only there a time-out ends whatever takes too long.
    """

    def __init__(
        self, url: str, key: str | None = None, *, timeout_s: float = TIMEOUT_S, queue_size: int = QUEUE_SIZE
    ) -> None:
        self._client = AsyncClient(url, key, timeout_s=timeout_s, queue_size=queue_size)
        self.outbox = self._client.outbox
        self.event = self._client.event
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def recommendations(
        self,
        user_id: str | None,
        k: int = 10,
        *,
        fallback: Iterable[str] = (),
        timeout_s: float | None = None,
        **wishes: Any,
    ) -> Recommendations:
        """As `AsyncClient.recommendations`."""
        return self._run(self._client.recommendations(user_id, k, fallback=fallback, timeout_s=timeout_s, **wishes))

    def user(self, user_id: str) -> dict[str, Any] | None:
        """As `AsyncClient.user`."""
        return self._run(self._client.user(user_id))

    def undo(self, user_id: str, event_id: str) -> bool:
        """As `AsyncClient.undo`."""
        return self._run(self._client.undo(user_id, event_id))

    def merge(self, user_id: str, visitor: str) -> bool:
        """As `AsyncClient.merge`."""
        return self._run(self._client.merge(user_id, visitor))

    def erase(self, user_id: str) -> str:
        """As `AsyncClient.erase`."""
        return self._run(self._client.erase(user_id))

    def flush(self, timeout_s: float = PATIENCE_S) -> bool:
        """As `AsyncClient.flush`."""
        return self.outbox.flush(timeout_s)

    def close(self, timeout_s: float = PATIENCE_S) -> bool:
        """As `AsyncClient.close`."""
        all_sent = self.outbox.close(timeout_s)
        if self._loop is not None and self._thread is not None and self._thread.is_alive():
            self._run(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        return all_sent

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, call: Coroutine[Any, Any, Result]) -> Result:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="lisarec calls", daemon=True)
                self._thread.start()
        if self._loop.is_closed() or self._thread is None or not self._thread.is_alive():
            call.close()
            raise RuntimeError("this client is closed, or of the process before a fork: make one in each process")
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


class Outbox:
    """Events on their way: a bounded queue, and a thread that sends what waits, oldest first.

    What comes while a request is under way goes with the next one, so batches grow with the load and nothing waits for
    a timer. The thread starts with the first event.
    """

    def __init__(self, url: str, headers: dict[str, str], queue_size: int) -> None:
        self.dropped = 0  # events that found the queue full
        self.refused = 0  # events that the service called invalid
        self._url = url
        self._headers = headers
        self._queue_size = queue_size
        self._batch_size = BATCH_SIZE
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque()  # numbered in order; also those under way
        self._newest = self._flushed_to = self._newest_refused = 0
        self._was_full = self._ends = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, event: dict[str, Any]) -> bool:
        """Take the event, or drop it where there is no room."""
        with self._changed:
            is_taken = len(self._waiting) < self._queue_size and not self._ends
            is_news = not is_taken and not self._was_full
            self._was_full = not is_taken
            if is_taken:
                self._newest += 1
                self._waiting.append((self._newest, event))
                self._start()
                self._changed.notify_all()
            else:
                self.dropped += 1
        if is_news:
            logger.error("events are dropped: %d wait already, or the client is closed", self._queue_size)
        return is_taken

    def flush(self, timeout_s: float) -> bool:
        """Wait for the events taken so far; False where time was up, or the service has refused one since last time."""
        with self._changed:
            mark = self._newest
            self._changed.wait_for(lambda: self._ends or not self._waits_before(mark), timeout_s)
            if self._waits_before(mark):
                return False
            is_whole = self._newest_refused <= self._flushed_to
            self._flushed_to = mark
            return is_whole

    def close(self, timeout_s: float = PATIENCE_S) -> bool:
        """Flush, and end the thread; what could not be sent in time is lost, and the log says how many."""
        is_whole = self.flush(timeout_s)
        with self._changed:
            self._ends = True
            self._changed.notify_all()
            lost = len(self._waiting)
        if lost:  # the thread may be in the middle of a request
            logger.error("%d events were not sent", lost)
        elif self._thread is not None:
            self._thread.join()
        atexit.unregister(self.close)
        return is_whole and not lost

    def _waits_before(self, mark: int) -> bool:
        return bool(self._waiting) and self._waiting[0][0] <= mark

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._send_all, name="lisarec events", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def _send_all(self) -> None:
        pauses, told = _pauses(), ""
        with httpx.Client(base_url=self._url, headers=self._headers, timeout=PATIENCE_S) as http:
            while batch := self._next_batch():
                try:
                    self._send(http, batch)
                    pauses, told = _pauses(), ""
                except LisarecError as exc:
                    if str(exc) != told:
                        told = str(exc)
                        logger.warning("events wait, and will be sent again: %s", told)
                    self._rest(next(pauses) if exc.retry_after_s is None else exc.retry_after_s)

    def _next_batch(self) -> list[tuple[int, dict[str, Any]]]:
        """The oldest events that wait, as soon as there are any; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ends)
            return [] if self._ends else list(itertools.islice(self._waiting, self._batch_size))

    def _rest(self, pause_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ends, pause_s)

    def _send(self, http: httpx.Client, batch: list[tuple[int, dict[str, Any]]]) -> None:
        """Post the batch once, and settle what the service took or called invalid.

        raises  LisarecError  when it did neither: some events may be in its log, which it knows by their ids
        """
        try:
            answer = http.post("/v1/events", json=[event for _, event in batch])
        except httpx.HTTPError as exc:
            raise _unreachable(exc) from exc
        if answer.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE and len(batch) > 1:
            self._batch_size = len(batch) // 2
        elif invalid := {batch[index][0] for index in _invalid(answer) if index < len(batch)}:
            self._refuse(invalid, answer)
        elif sum(_said(answer).get(name, 0) for name in ("accepted", "duplicates")) == len(batch):
            self._settle(len(batch))
            self._batch_size = min(2 * self._batch_size, BATCH_SIZE)  # one large event must not keep batches small
        else:
            raise _not_lisarec(answer)

    def _settle(self, count: int) -> None:
        with self._changed:
            for _ in range(count):
                self._waiting.popleft()
            self._changed.notify_all()

    def _refuse(self, numbers: set[int], answer: httpx.Response) -> None:
        """Let go of events that the service will never take; the others are sent without them."""
        logger.error("%d events were refused: %s", len(numbers), answer.text)
        with self._changed:
            self.refused += len(numbers)
            self._newest_refused = max(numbers)
            self._waiting = deque(entry for entry in self._waiting if entry[0] not in numbers)
            self._changed.notify_all()


def _said(answer: httpx.Response) -> dict[str, Any]:
    """What the service answers.

    raises  LisarecError  when it refuses, or when this is something else that answers
    """
    if not answer.is_success:
        raise _refusal(answer)
    try:
        said = answer.json()
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise _not_lisarec(answer)
    return said


def _refusal(answer: httpx.Response) -> LisarecError:
    try:
        error = answer.json()["error"]
        code, message = str(error["code"]), str(error["message"])
    except (ValueError, TypeError, LookupError):  # something before the service has answered
        code, message = "http_error", answer.reason_phrase
    return LisarecError(answer.status_code, code, message, _retry_after_s(answer))


def _not_lisarec(answer: httpx.Response) -> LisarecError:
    return LisarecError(answer.status_code, "not_lisarec", "this is not how lisarec answers; is the address right?")


def _unreachable(exc: Exception) -> LisarecError:
    return LisarecError(0, "unreachable", f"the service cannot be reached: {str(exc) or type(exc).__name__}")


def _retry_after_s(answer: httpx.Response) -> float | None:
    """The seconds that the service asks to wait; None where it says nothing, or what only proxies say, a date."""
    seconds = answer.headers.get("retry-after", "")
    return float(seconds) if seconds.isascii() and seconds.isdigit() else None


def _invalid(answer: httpx.Response) -> list[int]:
    """The places in the batch of the events that the service calls invalid: at least one where there are any."""
    if answer.status_code != httpx.codes.UNPROCESSABLE_ENTITY:
        return []
    try:
        places = [detail["index"] for detail in answer.json()["error"]["details"]]
    except (ValueError, TypeError, LookupError):
        return []
    return [place for place in places if isinstance(place, int)]


def _pauses() -> Iterator[float]:
    """Seconds to wait between attempts: longer and longer, and not the same for all clients of one service."""
    for doubled in itertools.count():
        longest_s = min(SHORTEST_PAUSE_S * 2 ** min(doubled, 20), LONGEST_PAUSE_S)
        yield random.uniform(longest_s / 2, longest_s)  # noqa: S311


def _require_id(name: str, said: object) -> None:
    if not isinstance(said, str) or not ID.fullmatch(said) or said in (".", ".."):
        raise ValueError(f"{name} has to be 1 to 128 letters, digits or _.:@- and neither . nor ..")


def _require_number(name: str, said: object) -> None:
    if isinstance(said, bool) or not isinstance(said, int | float) or not math.isfinite(said):
        raise ValueError(f"{name} has to be a finite number")


def _path(user_id: str, *rest: str) -> str:
    """The address of a user, or of something of a user's; ids have no character that means something in one."""
    _require_id("user_id", user_id)
    return "/".join(("/v1/users", user_id, *rest))

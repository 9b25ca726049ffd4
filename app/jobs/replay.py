"""Posting a data set as events into a running service, each user's in order."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple
from uuid import NAMESPACE_URL, uuid5

import httpx
import numpy as np
from numpy.typing import NDArray

from app.schemas.fields import MAX_AHEAD_US
from model.data.interactions import Interactions
from storage.records import EPOCH

EventJson = dict[str, str | float]

EVENTS = uuid5(NAMESPACE_URL, "lisarec/replay")  # the namespace of the events' ids
TIMEOUT_S = 30.0
RETRY_FOR_S = 60.0  # how long a service may be unreachable before the replay gives up
MESSAGE_LIMIT = 1000  # characters of a service's message
START_FOR_S = 20.0  # how long a service may take to start
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
RETRIED_STATUSES = frozenset({429, 502, 503, 504})
MAX_RETRY_AFTER_S = 3600.0  # the longest window of a quota
HINTS = {
    "unauthenticated": "; pass a file with a valid key, with --key-file",
    "too_many_requests": "; a key with a higher --rate is faster",
    "too_many_new_users": "; to continue sooner, raise LISAREC_NEW_USERS_PER_HOUR, or the key's --new-users",
    "too_many_new_users_at_once": "; send fewer events at once, with --batch",
    "too_many_events": "; send fewer events at once, with --batch",
    "too_costly": "; send fewer events at once, with --batch",
}
"""What to do, by the code of the service's error."""

logger = logging.getLogger(__name__)


class ReplayError(Exception):
    """The service rejected an event or stayed unreachable. The message says what to do."""


@dataclass
class ReplayCounts:
    """The service's counts of the events. If a batch was sent twice, its events may count as duplicates, too."""

    accepted: int = 0
    duplicates: int = 0
    unknown_items: int = 0
    requests: int = 0
    retries: int = 0


def acceptable_events(
    interactions: Interactions, hold_out: int, say: Callable[[str], None], *, skips_bad_lines: bool
) -> Interactions:
    """Return the events that the service takes, and each user's last ``hold_out`` events; `say` how many are skipped.

    raises  ReplayError  when others may not be skipped
    """
    lengths = np.diff(interactions.starts)
    before_the_end = np.repeat(interactions.starts[1:], lengths) - np.arange(len(interactions))  # 1: the user's last
    is_sent = before_the_end > hold_out
    is_ahead = is_sent & (interactions.timestamp_us > time.time_ns() // 1_000 + MAX_AHEAD_US)
    is_negative = is_sent & (interactions.value < 0) & ~is_ahead
    for bad, one, all_ in (
        (is_ahead, "a time in the future", "times in the future"),
        (is_negative, "a negative value", "negative values"),
    ):
        if bad.any():
            if not skips_bad_lines:
                raise _refused(interactions, bad, all_)
            say(f"{bad.sum():,} events with {one} are skipped, because the service rejects them")
    return interactions.where(~(is_ahead | is_negative))


def _refused(interactions: Interactions, bad: NDArray[np.bool_], what: str) -> ReplayError:
    """Return the error about bad events, which names the first one."""
    row = int(bad.argmax())
    event = _event(interactions, row, Counter())
    moment = EPOCH + timedelta(microseconds=int(interactions.timestamp_us[row]))
    value = f", {event['value']:g}" if "value" in event else ""
    return ReplayError(
        f"the service rejects {what}, and {bad.sum():,} of {len(interactions):,} events have one, "
        f"such as that of user {event['user_id']!r}, item {event['item_id']!r} at {moment:%Y-%m-%d %H:%M:%S} UTC"
        f"{value}; remove these lines, or skip them with --skip-bad-lines"
    )


def histories(interactions: Interactions, hold_out: int = 0) -> Iterator[list[EventJson]]:
    """Yield each user's events, as ``POST /v1/events`` takes them, without the user's last ``hold_out`` events.

    The id of an event depends only on its user, item, type and time, and on the number of such events before it. A
    replay may therefore be repeated, also with a longer table or another column, and nothing counts twice.
    """
    for begin, end in pairwise(interactions.starts.tolist()):
        seen: Counter[str] = Counter()
        events = [_event(interactions, row, seen) for row in range(begin, end - hold_out)]
        if events:
            yield events


def _event(interactions: Interactions, row: int, seen: Counter[str]) -> EventJson:
    user_id = interactions.user_ids[interactions.user[row]]
    item_id = interactions.item_ids[interactions.item[row]]
    type_name = interactions.type_names[interactions.type[row]]
    timestamp_us = int(interactions.timestamp_us[row])
    seconds, rest_us = divmod(timestamp_us, 1_000_000)
    content = f"{user_id}\n{item_id}\n{type_name}\n{timestamp_us}"
    seen[content] += 1
    value = float(interactions.value[row])
    order_id = interactions.order_id(row)
    return {
        "event_id": str(uuid5(EVENTS, f"{content}\n{seen[content]}")),
        "user_id": user_id,
        "item_id": item_id,
        "type": type_name,
        "timestamp": seconds + rest_us / 1e6 if rest_us else seconds,
        **({} if math.isnan(value) else {"value": value}),
        **({} if order_id is None else {"order_id": order_id}),
    }


async def replay(
    histories: Iterable[Sequence[EventJson]],
    url: str,
    *,
    batch_size: int = 500,
    concurrency: int = 4,
    key: str | None = None,
    retry_for_s: float = RETRY_FOR_S,
    on_sent: Callable[[int], None] = lambda events: None,
) -> ReplayCounts:
    """Post the histories, each user's events in order and one request at a time.

    histories   the events of one user each
    key         an API key that may write events, if the service has keys
    on_sent     called after each request with the number of acknowledged events
    retry_for_s  how long the service may be unreachable or busy; until then the same events are sent again
    raises      ReplayError when the service refuses events, or is unreachable for longer
    """
    service = ServiceAddress.of(url, key)
    counts = ReplayCounts()
    waiting = iter(histories)
    warned: set[str] = set()
    async with httpx.AsyncClient(**service.of_client()) as client:

        async def send_users() -> None:
            for batch in _batches(waiting, batch_size):
                await _send(client, batch, Retries(service.url, retry_for_s, warned), counts)
                on_sent(len(batch))

        try:
            async with asyncio.TaskGroup() as senders:
                for _ in range(concurrency):
                    senders.create_task(send_users())
        except ExceptionGroup as failures:
            # the first failure has stopped the other senders
            raise failures.exceptions[0] from None
    return counts


def wait_for_service(url: str, say: Callable[[str], None]) -> None:
    """Wait up to START_FOR_S for a service that is starting; report the wait with `say`.

    raises  ReplayError  when no service answers
    """
    service = ServiceAddress.of(url)
    give_up_s, pause_s = time.monotonic() + START_FOR_S, FIRST_PAUSE_S
    with httpx.Client(**service.of_client()) as client:
        while True:
            try:
                client.get("/healthz")
            except httpx.TransportError as exc:
                if time.monotonic() + pause_s > give_up_s:
                    hint = "start the service with 'lisarec serve' and wait until it prints its address"
                    raise ReplayError(f"{service.url} cannot be reached ({exc}); {hint}") from exc
            else:
                return
            if pause_s == FIRST_PAUSE_S:
                say(f"waiting for {service.url}: no answer yet")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)


def _batches(waiting: Iterator[Sequence[EventJson]], batch_size: int) -> Iterator[list[EventJson]]:
    """Take whole histories, so that one sender has all events of a user."""
    pending: list[EventJson] = []
    for history in waiting:
        pending += history
        while len(pending) >= batch_size:
            yield pending[:batch_size]
            del pending[:batch_size]
    if pending:
        yield pending


class Retries:
    """The pauses between the attempts to send one request.

    warned  the warnings about used-up quotas so far, each of which is logged once for all requests
    """

    def __init__(self, url: str, retry_for_s: float, warned: set[str]) -> None:
        self._url, self._retry_for_s, self._warned = url, retry_for_s, warned
        self._pause_s = FIRST_PAUSE_S
        self._give_up_s = time.monotonic() + retry_for_s

    def pause_s(self, failure: httpx.Response | httpx.TransportError, name_of: Callable[[int], str]) -> float:
        """Return the seconds to wait before the next attempt.

        A service that answers 429 with Retry-After works, so this wait does not count as busy.

        name_of  returns what the request has at an index, for the message
        raises   ReplayError  when the service refuses the request, or has been unreachable or busy for too long
        """
        if isinstance(failure, httpx.Response):
            hint = HINTS.get(error_code(failure), "")
            problem = f"{self._url} answers {failure.status_code}: {error_message(failure, name_of)}{hint}"
            if failure.status_code not in RETRIED_STATUSES:
                raise ReplayError(problem)
            is_over_limit = failure.status_code == httpx.codes.TOO_MANY_REQUESTS
            if is_over_limit and (wait_s := retry_after_s(failure, MAX_RETRY_AFTER_S)):
                self._warn(problem)
                self._give_up_s = time.monotonic() + wait_s + self._retry_for_s
                return wait_s
        else:
            problem = f"{self._url} cannot be reached ({str(failure) or type(failure).__name__})"
        if time.monotonic() + self._pause_s > self._give_up_s:
            raise ReplayError(
                f"{problem}; gave up after {self._retry_for_s:g} s. "
                "Run the same command again once the service is back; it is safe to repeat"
            )
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, MAX_PAUSE_S)
        return pause_s

    def _warn(self, problem: str) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            logger.warning("waiting as long as the service asks: %s", problem)


def retry_after_s(answer: httpx.Response, max_s: float) -> float:
    """Return the seconds that the answer asks to wait, at most `max_s`; 0 if it asks for none."""
    given = answer.headers.get("retry-after", "")
    return min(float(given), max_s) if given.isdecimal() else 0.0


async def _send(client: httpx.AsyncClient, batch: list[EventJson], retries: Retries, counts: ReplayCounts) -> None:
    while (failure := await _post(client, batch, counts)) is not None:
        await asyncio.sleep(retries.pause_s(failure, lambda index: _name(batch[index])))
        counts.retries += 1


def _name(event: EventJson) -> str:
    return f"event of user {event['user_id']!r}, item {event['item_id']!r} at {event['timestamp']}"


async def _post(
    client: httpx.AsyncClient, batch: list[EventJson], counts: ReplayCounts
) -> httpx.Response | httpx.TransportError | None:
    """Post once; return the failure, or None when the service acknowledged the events."""
    counts.requests += 1
    try:
        answer = await client.post("/v1/events", json=batch)
    except httpx.TransportError as exc:
        return exc
    if answer.status_code != httpx.codes.OK:
        return answer
    accepted, duplicates, unknown_items = counted(answer, "accepted", "duplicates", "unknown_items")
    counts.accepted += accepted
    counts.duplicates += duplicates
    counts.unknown_items += unknown_items
    return None


def counted(answer: httpx.Response, *names: str) -> list[int]:
    """Return these counts of a successful response; raise ReplayError if it has none, because it is not lisarec's."""
    try:
        counts = answer.json()
        return [int(counts[name]) for name in names]
    except (ValueError, TypeError, LookupError) as exc:
        raise ReplayError(f"the server at {answer.url} is not lisarec; check the URL") from exc


def error_message(answer: httpx.Response, name_of: Callable[[int], str] | None = None) -> str:
    """Return the message of the service's error response with its first problem, or the HTTP reason.

    name_of  returns what the request has at an index, such as an event; the message then says whose problem it is
    """
    try:
        error = answer.json()["error"]
        first = "".join(f"; the first problem: {_problem(one, name_of)}" for one in error.get("details", [])[:1])
        return f"{error['message']}{first}"[:MESSAGE_LIMIT]
    except (ValueError, TypeError, LookupError):
        return answer.reason_phrase or "no reason"


def _problem(detail: Mapping[str, Any], name_of: Callable[[int], str] | None) -> str:
    index = detail.get("index")
    whose = "" if name_of is None or index is None else f"{name_of(index)}: "
    return whose + " ".join(filter(None, (detail.get("field"), detail["reason"])))


def error_code(answer: httpx.Response) -> str:
    """Return the code of the service's error response, or an empty text."""
    try:
        return str(answer.json()["error"]["code"])
    except (ValueError, TypeError, LookupError):
        return ""


class ServiceAddress(NamedTuple):
    """The URL of a service, and the credentials for it.

    url   without user and password, so that it may be printed
    auth  user and password for basic authentication
    key   the API key
    """

    url: str
    auth: tuple[str, str] | None
    key: str | None = None

    @classmethod
    def of(cls, url: str, key: str | None = None) -> ServiceAddress:
        """Parse the URL that an operator gives.

        raises  ReplayError  when it is not an HTTP address, or not certain where a password ends
        """
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as exc:
            _require_no_credentials(url)
            raise ReplayError(f"{url!r} is not a valid URL ({exc}); use one such as http://127.0.0.1:8000") from exc
        bare = url if not parsed.userinfo else str(parsed.copy_with(userinfo=b""))
        _require_no_credentials(bare)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ReplayError(f"{bare!r} is not an HTTP URL; use one such as http://127.0.0.1:8000")
        return cls(bare, (parsed.username, parsed.password) if parsed.userinfo else None, key)

    def of_client(self) -> dict[str, Any]:
        """Return the arguments of an HTTP client, whose URLs and messages then contain no password either."""
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        return {"base_url": self.url, "auth": self.auth, "headers": headers, "timeout": TIMEOUT_S}


def _require_no_credentials(url: str) -> None:
    """Raise ReplayError if the URL may contain a password where it has none; the message does not show it."""
    if "@" in url:
        raise ReplayError(
            "the URL has an @ but no valid user and password before it; use one such as "
            "http://USER:PASSWORD@127.0.0.1:8000, and encode special characters of a password, as %2F for /"
        )

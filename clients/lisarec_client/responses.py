"""Parsing of the service's responses and errors."""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

RETRY_FOR_S = 10.0  # for everything but recommendations
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 30.0  # between two attempts, unless the service says how long
SHOWN_DETAILS = 3  # in a message; `details` has all
RETRIED_STATUSES = frozenset({0, 408, 429, 500, 502, 503, 504})


class LisarecError(Exception):
    """The service rejected the request, or could not be reached in time (status 0). The message says which.

    details  one mapping for each problem in the request: `field`, `reason` and, in a batch, the `index` of the event or
             item. Unknown parts are missing
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        retry_after_s: float | None = None,
        details: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        parts = [message, *map(_in_words, details[:SHOWN_DETAILS])]
        if len(details) > SHOWN_DETAILS:
            parts.append(f"and {len(details) - SHOWN_DETAILS} more")
        super().__init__(f"{status} {code}: {'; '.join(parts)}" if status else message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        self.details = tuple(details)


@dataclass(frozen=True, slots=True)
class Recommendations:
    """Items, best first. Pass the `recommendation_id` with the events that result from them."""

    items: list[dict[str, Any]]  # {"item_id", "score", "title" ...}; in a fallback {"item_id"}
    source: str  # from the service ("personalised", "popular" ...), or "fallback"
    recommendation_id: str | None = None
    cursor: str | None = None  # of the next page, if the request was for pages; None on the last page
    because: dict[str, Any] | None = None  # {"item_id", "title"}: the item that these are similar to
    short: dict[str, Any] | None = None  # {"reason", "left"}: why there are fewer than k items
    debug: dict[str, Any] | None = None  # {"items", "removed", "left"}: how many items each part of the request removed
    generation: str | None = None  # the model
    scenario: str | None = None  # in an experiment over scenarios, the user's
    experiment: str | None = None

    @property
    def item_ids(self) -> list[str]:
        """The ids of the items, best first."""
        return [item["item_id"] for item in self.items]


def parse_response(answer: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of a successful response.

    raises  LisarecError  if the service rejected the request, or if something else answered
    """
    if not answer.is_success:
        raise _error_of(answer)
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise not_lisarec_error(answer)
    return body


def _error_of(answer: httpx.Response) -> LisarecError:
    try:
        error = answer.json()["error"]
        code, message = str(error["code"]), str(error["message"])
        details = [detail for detail in error.get("details", ()) if isinstance(detail, dict)]
    except (ValueError, TypeError, LookupError, AttributeError):  # the response comes from a proxy or another server
        if answer.status_code not in RETRIED_STATUSES:
            return not_lisarec_error(answer)
        code, message, details = "http_error", answer.reason_phrase, []
    return LisarecError(answer.status_code, code, message, retry_after_s(answer), details)


def _in_words(detail: Mapping[str, Any]) -> str:
    """Return a detail as text, such as `[3] timestamp has no time zone`."""
    place = "" if detail.get("index") is None else f"[{detail['index']}]"
    named = " ".join(str(part) for part in (place, detail.get("field")) if part)
    return " ".join(str(part) for part in (named, detail.get("reason")) if part)


def not_lisarec_error(answer: httpx.Response) -> LisarecError:
    """Return the error for a response that does not come from lisarec."""
    at = answer.url.copy_with(query=None, userinfo=b"")
    return LisarecError(answer.status_code, "not_lisarec", f"the server at {at} is not lisarec; check the base URL")


def unreachable_error(exc: Exception) -> LisarecError:
    """Return the error for a request without a response."""
    return LisarecError(0, "unreachable", f"the service cannot be reached: {str(exc) or type(exc).__name__}")


def retry_after_s(answer: httpx.Response) -> float | None:
    """Return the seconds in `Retry-After`, or None if it is missing or is a date, which only proxies send."""
    seconds = answer.headers.get("retry-after", "")
    return float(seconds) if seconds.isascii() and seconds.isdigit() else None


def invalid_fields(answer: httpx.Response) -> list[tuple[int, str | None]]:
    """Return the index and the field of what the service rejects in the batch's events; the list may be incomplete."""
    if answer.status_code != httpx.codes.UNPROCESSABLE_ENTITY:
        return []
    try:
        invalid = [(detail["index"], detail.get("field")) for detail in answer.json()["error"]["details"]]
    except (ValueError, TypeError, LookupError, AttributeError):
        return []
    return [(index, field) for index, field in invalid if isinstance(index, int)]


def pauses_s() -> Iterator[float]:
    """Return the pauses between attempts: exponential backoff with jitter."""
    for attempt in itertools.count():
        max_pause_s = min(MIN_PAUSE_S * 2 ** min(attempt, 20), MAX_PAUSE_S)
        yield random.uniform(max_pause_s / 2, max_pause_s)  # noqa: S311

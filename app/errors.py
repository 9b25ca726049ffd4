"""The errors of requests.

Their HTTP responses are in `app.http.error_responses`; docs/reference/errors.md tells clients how to react.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from storage.errors import PartlyApplied, StorageError, StorageUnavailable

MAX_DETAILS = 20

SchemaT = TypeVar("SchemaT", bound=BaseModel)


class ErrorDetail(BaseModel):
    """A problem in a request.

    `field` is a name from the API, never one that the client chose. `reason` does not quote the value.
    """

    index: int | None = None
    field: str | None = None
    reason: str


class RequestError(Exception):
    """The client can fix the request. Messages and details do not quote it."""

    def __init__(self, message: str, details: Sequence[ErrorDetail] = ()) -> None:
        super().__init__(message)
        self.details = list(details[:MAX_DETAILS])


class InvalidJson(RequestError):
    """The body is not JSON."""


class InvalidRequest(RequestError):
    """The body, the path or the query is invalid."""


class InvalidEvents(RequestError):
    """At least one event is invalid, so none was applied."""


class InvalidItems(RequestError):
    """At least one item is invalid, so none was updated."""


class ItemNotFound(RequestError):
    """Neither the model nor the shop's catalogue has the item."""


class ScenarioNotFound(RequestError):
    """There is no scenario with this name, or it lacks the version."""


class PropertyInUse(RequestError):
    """The property cannot be removed while a scenario uses it."""


class TooCostly(RequestError):
    """The call costs more than any call may, or more than its key may spend in a minute."""


class TooManyEvents(RequestError):
    """The request has more events than its key may send at once."""


class TooManyNewUsersAtOnce(RequestError):
    """The request has more new users than its key or tenant may add at once."""


class BodyTooLarge(RequestError):
    """The body is larger than the service accepts."""


class BodyTooSlow(RequestError):
    """The body did not arrive in time."""


class HeadTooLarge(RequestError):
    """The URL and the headers together are larger than the service accepts."""


class NotHttp(RequestError):
    """The connection carried something other than an HTTP request."""


class TooManyPipelined(RequestError):
    """The client pipelines too many requests on one connection."""


class UnsupportedMediaType(RequestError):
    """The content type of the body is not JSON."""


class UserNotFound(RequestError):
    """The user has no events."""


class Unauthenticated(RequestError):
    """The request has no key, or an invalid one."""


class Forbidden(RequestError):
    """The key lacks the permission."""


class TooManyRequests(RequestError):
    """The key has used up its quota of requests for now."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PartlyAccepted(PartlyApplied):
    """The store failed after it had applied some events of a body; `counts` has the numbers of durable events."""

    def __init__(self, failure: StorageError, results: Mapping[int, Any], counts: Mapping[str, int]) -> None:
        super().__init__(failure, results)
        self.counts = counts


class NotYetRead(StorageUnavailable):
    """This process has not read the tenant's items or scenarios since it started, or since the store was replaced."""

    def __init__(self, what: str) -> None:
        message = f"this process has not read the {what} from the store yet; retry the same request later"
        super().__init__(message, "unreachable")


class TooManyNewUsers(TooManyRequests):
    """The tenant, or the key, has used up its quota of new users for now."""


class Overloaded(Exception):
    """The process already has the maximum number of requests in progress."""


class StateNotReady(Exception):
    """The state of a user with a long log is being folded in the background."""


class InvalidSealedState(Exception):
    """A sealed state cannot be opened; clients do not learn why. In a batch, `details` name the request."""

    reason = "cannot be opened"

    def __init__(self) -> None:
        super().__init__()
        self.details: list[ErrorDetail] = []


class SealedStateExpired(InvalidSealedState):
    """The state was sealed too long ago."""

    reason = "has expired"


class SealingNotConfigured(Exception):
    """The service has no seal keys."""


class DeviceLost(Exception):
    """The GPU of the process does not respond."""


class Draining(Exception):
    """The process is shutting down and accepts no further requests."""


def validate(schema: type[SchemaT], body: object, problem: str, context: Mapping[str, Any] | None = None) -> SchemaT:
    """Validate a parsed body and return the request; raise InvalidRequest with the problem as its message."""
    try:
        return schema.model_validate(body, context=context)
    except ValidationError as exc:
        raise InvalidRequest(problem, details_of(exc)) from None


def details_of(failure: ValidationError, index: int | None = None) -> list[ErrorDetail]:
    """Return the first details of a failed validation; `index` is that of the event or item in an array of them."""
    return details_of_errors(failure.errors(include_url=False, include_context=False), index)


def details_of_errors(errors: Sequence[Any], index: int | None = None) -> list[ErrorDetail]:
    """Return the first details of a list of Pydantic's errors, as `details_of` does."""
    return [
        ErrorDetail(index=index, field=_field(error["loc"]), reason=_reason(error)) for error in errors[:MAX_DETAILS]
    ]


def _reason(error: Mapping[str, Any]) -> str:
    is_null = error.get("input", "") is None and error["type"].endswith(("_type", "literal_error"))
    return "is null; give it a value, or leave it out if it is optional" if is_null else str(error["msg"])


def _field(location: Sequence[int | str]) -> str | None:
    path = location[1:] if location[:1] in (("query",), ("path",)) else location  # the search has a parameter `query`
    return ".".join(map(str, path)) or None

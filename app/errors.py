"""Every way in which a request can fail.

The HTTP response to each is in `app.http.error_responses`, and docs/reference/errors.md tells clients how to react.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from storage.errors import PartlyApplied, StorageError, StorageUnavailable

MAX_DETAILS = 20

SchemaT = TypeVar("SchemaT", bound=BaseModel)


class ErrorDetail(BaseModel):
    """One fault in the request.

    `field` is never a name that the request made up, and `reason` never repeats a value.
    """

    index: int | None = None
    field: str | None = None
    reason: str


class RequestError(Exception):
    """The client can do better. Messages and details are the service's own words, never the request's."""

    def __init__(self, message: str, details: Sequence[ErrorDetail] = ()) -> None:
        super().__init__(message)
        self.details = list(details[:MAX_DETAILS])


class InvalidJson(RequestError):
    """The body cannot be read as JSON."""


class InvalidRequest(RequestError):
    """The body, path or query says something the service does not take."""


class InvalidEvents(RequestError):
    """At least one event is invalid, and so none was applied."""


class InvalidItems(RequestError):
    """At least one item is invalid, and so nothing was noted."""


class ItemNotFound(RequestError):
    """Neither the model nor the shop has said anything of the item."""


class ScenarioNotFound(RequestError):
    """The shop keeps no scenario of this name, or not the version."""


class PropertyInUse(RequestError):
    """A property cannot be taken back while a scenario needs it."""


class TooCostly(RequestError):
    """One call costs more than any may, or than its key has in a whole minute."""


class TooManyEvents(RequestError):
    """One request has more events than its key may send at once."""


class TooManyNewUsersAtOnce(RequestError):
    """One request brings more new users than its key or tenant may ever bring at once."""


class BodyTooLarge(RequestError):
    """The body has more bytes than the service reads."""


class BodyTooSlow(RequestError):
    """The body did not arrive in time."""


class HeadTooLarge(RequestError):
    """Address and headers have more bytes than the service reads."""


class NotHttp(RequestError):
    """What came over the connection is no request."""


class TooManyPipelined(RequestError):
    """The client sends request after request on one connection and does not wait for answers."""


class UnsupportedMediaType(RequestError):
    """The body says that it is not JSON."""


class UserNotFound(RequestError):
    """No event of the user was ever logged."""


class Unauthenticated(RequestError):
    """The request has no key, or none that is valid."""


class Forbidden(RequestError):
    """The key may not do this."""


class TooManyRequests(RequestError):
    """The key has used up its requests for now."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PartlyAccepted(PartlyApplied):
    """As PartlyApplied, of the events of a body; `counts` are the numbers of those that are durable."""

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
    """The process works on as many requests as it can."""


class StateNotReady(Exception):
    """The state of a user with a long log is being folded in the background."""


class InvalidSealedState(Exception):
    """A sealed state cannot be opened here; nobody learns why. In a batch, `details` name the request."""

    reason = "cannot be opened"

    def __init__(self) -> None:
        super().__init__()
        self.details: list[ErrorDetail] = []


class SealedStateExpired(InvalidSealedState):
    """The state was sealed too long ago."""

    reason = "has expired"


class SealingNotConfigured(Exception):
    """The service has no keys that seal states."""


class DeviceLost(Exception):
    """The GPU of the process no longer answers."""


class Draining(Exception):
    """The process is shutting down and wants no further requests."""


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

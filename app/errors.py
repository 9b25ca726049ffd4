"""Every way in which a request can fail: one table from exceptions to answers, one shape of the answer."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from app.models_folder import NoSuchModel
from model.artifact import ArtifactError
from storage.errors import (
    MergeRefused,
    MergeTooLarge,
    PartlyApplied,
    StorageBusy,
    StorageError,
    StorageUnavailable,
    UnknownEvent,
)

logger = logging.getLogger(__name__)

MAX_DETAILS = 20
MAX_RUNS = 300
MAX_REASON_CHARS = 120  # 20 details of this length stay well below the 4 kB that an error may have


class ErrorDetail(BaseModel):
    """One thing that is wrong. The field is never a name that the request made up, the reason never its value."""

    index: int | None = None
    field: str | None = None
    reason: str


class Error(BaseModel):
    code: str
    message: str
    details: list[ErrorDetail] = []


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: Error

    model_config = {
        "json_schema_extra": {
            "examples": [
                {
                    "error": {
                        "code": "invalid_events",
                        "message": "nothing was applied; correct the events named here and send them all again",
                        "details": [{"index": 3, "field": "timestamp", "reason": "has no time zone"}],
                    }
                }
            ]
        }
    }


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


class BodyTooLarge(RequestError):
    """The body has more bytes than the service reads."""


class BodyTooSlow(RequestError):
    """The body did not arrive in time."""


class HeadTooLarge(RequestError):
    """Address and headers have more bytes than the service reads."""


class NotHttp(RequestError):
    """What came over the connection is no request."""


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


class Overloaded(Exception):
    """The process works on as many requests as it can."""


class Draining(Exception):
    """The process is shutting down and wants no further requests."""


class Answer(NamedTuple):
    """How one exception is answered; without a message of its own, the exception's is used."""

    status: int
    code: str
    message: str | None = None


ANSWERS: dict[type[Exception], Answer] = {
    InvalidJson: Answer(400, "invalid_json"),
    InvalidRequest: Answer(422, "invalid_request"),
    InvalidEvents: Answer(422, "invalid_events"),
    InvalidItems: Answer(422, "invalid_items"),
    ItemNotFound: Answer(404, "item_not_found"),
    BodyTooLarge: Answer(413, "body_too_large"),
    BodyTooSlow: Answer(408, "body_too_slow"),
    HeadTooLarge: Answer(431, "head_too_large"),
    NotHttp: Answer(400, "not_http"),
    UnsupportedMediaType: Answer(415, "unsupported_media_type"),
    UserNotFound: Answer(404, "user_not_found"),
    UnknownEvent: Answer(404, "event_not_found", "no event of this user has this id; nothing changed"),
    MergeRefused: Answer(409, "merge_refused"),
    MergeTooLarge: Answer(409, "merge_too_large"),
    NoSuchModel: Answer(404, "model_not_found", "no model of this name lies in the models folder; nothing changed"),
    ArtifactError: Answer(
        409,
        "model_unusable",
        "the model is incomplete, damaged or of another version, the log says why; nothing changed",
    ),
    Unauthenticated: Answer(401, "unauthenticated"),
    Forbidden: Answer(403, "forbidden"),
    TooManyRequests: Answer(429, "too_many_requests"),
    Overloaded: Answer(503, "overloaded", "this process has more to do than it can; nothing was done, try again"),
    Draining: Answer(503, "draining", "this process is shutting down; ask another one"),
    StorageBusy: Answer(503, "storage_busy", "too much is waiting to be written; nothing was applied, try again"),
    PartlyApplied: Answer(503, "partly_applied", "not all events were applied; send all of them again, with their ids"),
    StorageUnavailable: Answer(503, "storage_unavailable", "the store cannot be reached; send the same again later"),
    StorageError: Answer(503, "storage_failed", "the store could not take or give this; its log says why"),
    # Nobody reads this answer, but an unhandled exception would be logged as a fault of ours.
    ClientDisconnect: Answer(400, "client_disconnected", "the request ended before its body did"),
    Exception: Answer(500, "internal_error", "the service failed; its log says why"),
}

EXPECTED = tuple(kind for kind in ANSWERS if kind is not Exception)
"""For those who answer exceptions themselves: what is left is a fault, which goes on to whoever logs it."""

HTTP_ERRORS = {
    404: Answer(404, "not_found", "there is nothing at this path; /openapi.json lists what there is"),
    405: Answer(405, "method_not_allowed", "this path does not take this method; the Allow header names those it does"),
}

RETRY_AFTER_S = "1"


def install(app: FastAPI) -> None:
    """Answer every exception in the one shape, also those of the framework."""
    for exception in ANSWERS:
        app.add_exception_handler(exception, _answer_own)
    app.add_exception_handler(RequestValidationError, _answer_validation)
    app.add_exception_handler(HTTPException, _answer_http)


def details_of(failure: ValidationError, index: int | None = None) -> list[ErrorDetail]:
    """The first details of a failed validation, of the event at that index if it was an array of events."""
    return _details(failure.errors(include_url=False, include_context=False, include_input=False), index)


def _details(errors: Sequence[Any], index: int | None = None) -> list[ErrorDetail]:
    return [
        ErrorDetail(index=index, field=_field(error["loc"]), reason=error["msg"][:MAX_REASON_CHARS])
        for error in errors[:MAX_DETAILS]
    ]


def _field(location: Sequence[int | str]) -> str | None:
    path = [part for part in location if part not in ("query", "path")]
    return ".".join(map(str, path)) or None


async def _answer_own(_request: Request, exc: Exception) -> JSONResponse:
    return answer_to(exc)


def answer_to(exc: Exception) -> JSONResponse:
    """The answer, also for middleware, whose exceptions the framework does not see."""
    answer = next(ANSWERS[kind] for kind in type(exc).__mro__ if kind in ANSWERS)
    details = exc.details if isinstance(exc, RequestError) else _applied(exc) if isinstance(exc, PartlyApplied) else []
    if type(exc) is StorageError:
        logger.error("the store failed: %s", exc)
    if isinstance(exc, ArtifactError):
        logger.error("a model cannot be activated: %s", exc)
    return _response(answer, answer.message or str(exc), details, _headers(exc, answer.status))


def _headers(exc: Exception, status: int) -> dict[str, str]:
    if isinstance(exc, Unauthenticated):
        return {"WWW-Authenticate": 'Bearer realm="lisarec"'}
    if isinstance(exc, TooManyRequests):
        return {"Retry-After": str(exc.retry_after_s)}
    return {"Retry-After": RETRY_AFTER_S} if status == 503 else {}


def _applied(exc: PartlyApplied) -> list[ErrorDetail]:
    """Which events are durable, as runs of indices: as many as fit."""
    applied = set(exc.applied)
    first_of_run = [index for index in sorted(applied) if index - 1 not in applied]
    last_of_run = [index for index in sorted(applied) if index + 1 not in applied]
    runs = [str(a) if a == b else f"{a}-{b}" for a, b in zip(first_of_run, last_of_run, strict=True)]
    rest = f" and {len(runs) - MAX_RUNS} more runs" if len(runs) > MAX_RUNS else ""
    return [ErrorDetail(reason=f"applied: {', '.join(runs[:MAX_RUNS])}{rest}")]


async def _answer_validation(_request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, RequestValidationError)
    answer = ANSWERS[InvalidRequest]
    return _response(answer, "the path or the query is not valid", _details(exc.errors()))


async def _answer_http(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, HTTPException)
    answer = HTTP_ERRORS.get(exc.status_code, Answer(exc.status_code, "http_error", "the request was refused"))
    headers = {"Allow": _methods(request)} if exc.status_code == 405 else exc.headers
    return _response(answer, str(answer.message), headers=headers)


def _methods(request: Request) -> str:
    """All that the path takes; the framework names those of the first route that has the path."""
    declared = [context.original_route for context in iter_route_contexts(request.app.routes)]
    routes = [one for one in declared if isinstance(one, APIRoute) and one.path_regex.match(request.scope["path"])]
    return ", ".join(sorted({method for one in routes if one.path == routes[0].path for method in one.methods or ()}))


def _response(answer: Answer, message: str, details: Sequence[ErrorDetail] = (), headers: Any = None) -> JSONResponse:
    body = ErrorBody(error=Error(code=answer.code, message=message, details=list(details)))
    content = body.model_dump()
    return JSONResponse(content, answer.status, headers)

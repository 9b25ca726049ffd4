"""The HTTP response to each exception: one table, and one shape of the body."""

import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from app.errors import (
    BodyTooLarge,
    BodyTooSlow,
    DeviceLost,
    Draining,
    ErrorDetail,
    Forbidden,
    HeadTooLarge,
    InvalidEvents,
    InvalidItems,
    InvalidJson,
    InvalidRequest,
    InvalidSealedState,
    ItemNotFound,
    NotHttp,
    NotYetRead,
    Overloaded,
    PartlyAccepted,
    PropertyInUse,
    RequestError,
    ScenarioNotFound,
    SealedStateExpired,
    SealingNotConfigured,
    StateNotReady,
    TooCostly,
    TooManyEvents,
    TooManyNewUsers,
    TooManyNewUsersAtOnce,
    TooManyPipelined,
    TooManyRequests,
    Unauthenticated,
    UnsupportedMediaType,
    UserNotFound,
    details_of_errors,
)
from app.observability.metrics import Metrics
from app.schemas.fields import with_example
from app.serving.model_registry import NoSuchModel
from model.artifact.model_directory import ArtifactError
from storage.errors import (
    FailureCause,
    MergeRefused,
    MergeTooLarge,
    PartlyApplied,
    StorageBusy,
    StorageError,
    StorageUnavailable,
    UnknownEvent,
)

logger = logging.getLogger(__name__)

MAX_APPLIED_RUNS = 300
MAX_DETAILS_CHARS = 3_000  # a whole error stays below 4 kB


class Error(BaseModel):  # a docstring would be its description in /openapi.json  # noqa: D101
    code: str
    message: str
    details: list[ErrorDetail] = []


class ErrorBody(BaseModel):
    """The body of every error response."""

    error: Error

    model_config = with_example(
        {
            "error": {
                "code": "invalid_events",
                "message": "nothing was applied; correct the events in `details` and send all events again",
                "details": [{"index": 3, "field": "timestamp", "reason": "has no time zone"}],
            }
        }
    )


class Problem(NamedTuple):
    """The response to an exception: status, code and message. The message defaults to that of the exception."""

    status: int
    code: str
    message: str | None = None


PROBLEMS: dict[type[Exception], Problem] = {
    InvalidJson: Problem(400, "invalid_json"),
    InvalidRequest: Problem(422, "invalid_request"),
    InvalidEvents: Problem(422, "invalid_events"),
    InvalidItems: Problem(422, "invalid_items"),
    ItemNotFound: Problem(404, "item_not_found"),
    ScenarioNotFound: Problem(404, "scenario_not_found"),
    PropertyInUse: Problem(409, "property_in_use"),
    BodyTooLarge: Problem(413, "body_too_large"),
    BodyTooSlow: Problem(408, "body_too_slow"),
    HeadTooLarge: Problem(431, "head_too_large"),
    NotHttp: Problem(400, "not_http"),
    TooManyPipelined: Problem(400, "too_many_pipelined"),
    UnsupportedMediaType: Problem(415, "unsupported_media_type"),
    UserNotFound: Problem(404, "user_not_found"),
    UnknownEvent: Problem(
        404, "event_not_found", "no event was posted with this user and id, see the user's log; nothing changed"
    ),
    MergeRefused: Problem(409, "merge_refused"),
    MergeTooLarge: Problem(409, "merge_too_large"),
    NoSuchModel: Problem(
        404, "model_not_found", "the models folder has no model of this name; nothing changed, copy the model there"
    ),
    ArtifactError: Problem(
        409,
        "model_unusable",
        "the model is incomplete, damaged, unsigned, of another version or too large; "
        "nothing changed, see the service's log",
    ),
    InvalidSealedState: Problem(
        422, "invalid_sealed_state", "the sealed state cannot be opened; nothing was done, start again without a state"
    ),
    SealedStateExpired: Problem(
        422, "sealed_state_expired", "the sealed state has expired; nothing was done, start again without a state"
    ),
    SealingNotConfigured: Problem(
        409,
        "sealing_not_configured",
        "this service has no seal keys; create them with 'lisarec keys seal', and set "
        "LISAREC_SEAL_KEYS_FILE to their file",
    ),
    Unauthenticated: Problem(401, "unauthenticated"),
    Forbidden: Problem(403, "forbidden"),
    TooManyRequests: Problem(429, "too_many_requests"),
    TooManyNewUsers: Problem(429, "too_many_new_users"),
    TooManyNewUsersAtOnce: Problem(422, "too_many_new_users_at_once"),
    TooManyEvents: Problem(413, "too_many_events"),
    TooCostly: Problem(422, "too_costly"),
    Overloaded: Problem(503, "overloaded", "this process is overloaded; nothing was done, try again"),
    StateNotReady: Problem(
        503, "state_not_ready", "the user's long history is being processed; try again in a few seconds"
    ),
    DeviceLost: Problem(503, "device_lost", "the GPU of this process no longer responds; use another process"),
    Draining: Problem(503, "draining", "this process is shutting down; use another process"),
    StorageBusy: Problem(
        503, "storage_busy", "too many writes are queued for the store; nothing was applied, try again"
    ),
    PartlyApplied: Problem(
        503, "partly_applied", "some events were not applied: {reason}; send all of them again with the same ids"
    ),
    NotYetRead: Problem(503, "storage_unavailable"),
    StorageUnavailable: Problem(503, "storage_unavailable", "{reason}; retry the same request later"),
    StorageError: Problem(503, "storage_failed", "{reason}"),
    # No client reads this response, but an unhandled exception would be logged as an error of the service.
    ClientDisconnect: Problem(400, "client_disconnected", "the request ended before its body was complete"),
    Exception: Problem(500, "internal_error", "internal error; see the service's log"),
}

STORAGE_REASONS: dict[FailureCause, str] = {
    "unreachable": "the store cannot be reached",
    "timeout": "the store does not respond in time",
    "loading": "the store is starting",
    "refused": "the store rejects the service's connection",
    "read_only": "the store is read-only",
    "memory_full": "the store's memory is full",
    "disk_full": "the store's disk is full",
    "disk_error": "the store's disk has failed",
    "locked": "the store is locked by another program",
    "damaged": "the store is damaged",
    "wrong_store": "the store lacks data that it had acknowledged, or was replaced",
    "unsafe": "the store could lose acknowledged events",
    "too_few_replicas": "the store rejects writes, because it has too few replicas",
    "unconfirmed": "too few replicas of the store have confirmed the write",
    "archive": "the archive of older events cannot be read",
    "contention": "too many concurrent changes to the same users",
    "busy": "too many operations are queued for the store",
    "closed": "this process is shutting down",
    "failed": "the store failed to read or write; see the service's log",
}
"""The text for each kind of store failure in the message of a response. It reveals no details of the store."""

EXPECTED_ERRORS = tuple(kind for kind in PROBLEMS if kind is not Exception)
"""The exceptions that do not indicate a bug in the service. All others must also reach the server, which logs them."""

FRAMEWORK_PROBLEMS = {
    404: Problem(404, "not_found", "this path does not exist; /openapi.json lists all paths"),
    405: Problem(
        405, "method_not_allowed", "this path does not support this method; the Allow header lists those it supports"
    ),
}

RETRY_AFTER_S = "1"


def install_error_handlers(app: FastAPI) -> None:
    """Install handlers that give all exceptions the same shape of response, including those of the framework."""
    for exception in PROBLEMS:
        app.add_exception_handler(exception, _handle)
    app.add_exception_handler(RequestValidationError, _handle_validation)
    app.add_exception_handler(HTTPException, _handle_http)


async def _handle(request: Request, exc: Exception) -> JSONResponse:
    return response_to(exc, request.state.services.metrics)


def response_to(exc: Exception, metrics: Metrics) -> JSONResponse:
    """Return the response to an exception of a request; count and log a failure of the store."""
    if isinstance(exc, StorageError):
        metrics.store.failures.report(exc)
    return error_response(exc)


def error_response(exc: Exception) -> JSONResponse:
    """Return the response to an exception. Middleware also calls this: the framework does not see its exceptions."""
    problem = next(PROBLEMS[kind] for kind in type(exc).__mro__ if kind in PROBLEMS)
    details = exc.details if isinstance(exc, RequestError | InvalidSealedState) else []
    if isinstance(exc, PartlyApplied):
        details = [_applied_runs(exc)]
    if isinstance(exc, PartlyAccepted):
        details += [ErrorDetail(field=name, reason=str(count)) for name, count in exc.counts.items()]
    if isinstance(exc, ArtifactError):
        logger.error("cannot activate a model: %s", exc)
    message = problem.message or str(exc)
    if isinstance(exc, StorageError):
        message = message.format(reason=STORAGE_REASONS[exc.failure_cause])
    return _as_json(problem, message, details, _headers(exc, problem.status))


def _headers(exc: Exception, status: int) -> dict[str, str]:
    if isinstance(exc, Unauthenticated):
        return {"WWW-Authenticate": 'Bearer realm="lisarec"'}
    if isinstance(exc, TooManyRequests):
        return {"Retry-After": str(exc.retry_after_s)}
    return {"Retry-After": RETRY_AFTER_S} if status == 503 else {}


def _applied_runs(exc: PartlyApplied) -> ErrorDetail:
    """Return the indices of the durable events as runs, at most MAX_APPLIED_RUNS."""
    applied = exc.results.keys()
    first_of_run = [index for index in sorted(applied) if index - 1 not in applied]
    last_of_run = [index for index in sorted(applied) if index + 1 not in applied]
    runs = [str(a) if a == b else f"{a}-{b}" for a, b in zip(first_of_run, last_of_run, strict=True)]
    rest = f" and {len(runs) - MAX_APPLIED_RUNS} more runs" if len(runs) > MAX_APPLIED_RUNS else ""
    return ErrorDetail(reason=f"applied: {', '.join(runs[:MAX_APPLIED_RUNS])}{rest}")


async def _handle_validation(_request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, RequestValidationError)
    return _as_json(PROBLEMS[InvalidRequest], "the path or the query is not valid", details_of_errors(exc.errors()))


async def _handle_http(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, HTTPException)
    unnamed = Problem(exc.status_code, "http_error", "the request was rejected")
    problem = FRAMEWORK_PROBLEMS.get(exc.status_code, unnamed)
    headers = {"Allow": _allowed_methods(request)} if exc.status_code == 405 else exc.headers
    return _as_json(problem, str(problem.message), headers=headers)


def _allowed_methods(request: Request) -> str:
    """Return all methods of the path; the framework would name only those of the first route with this path."""
    declared = request.app.routes
    routes = [one for one in declared if isinstance(one, APIRoute) and one.path_regex.match(request.scope["path"])]
    return ", ".join(sorted({method for one in routes if one.path == routes[0].path for method in one.methods or ()}))


def _as_json(problem: Problem, message: str, details: Sequence[ErrorDetail] = (), headers: Any = None) -> JSONResponse:
    body = ErrorBody(error=Error(code=problem.code, message=message, details=_first_details(details)))
    return JSONResponse(body.model_dump(), problem.status, headers)


def _first_details(details: Sequence[ErrorDetail]) -> list[ErrorDetail]:
    """Return the first details, each in full: as many as fit in a response, and at least one."""
    ends = list(accumulate(len(detail.model_dump_json()) for detail in details))
    return [detail for detail, end in zip(details, ends, strict=True) if end <= max(MAX_DETAILS_CHARS, ends[0])]

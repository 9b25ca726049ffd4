"""Calls with retries, until the service answers or the deadline passes."""

import asyncio
import socket
import time
from typing import Any

import httpx

from .responses import (
    RETRIED_STATUSES,
    RETRY_FOR_S,
    LisarecError,
    not_lisarec_error,
    parse_response,
    pauses_s,
    unreachable_error,
)

TIMED_OUT = f"the service did not answer within {RETRY_FOR_S:g} s"


async def call(http: httpx.AsyncClient, method: str, path: str, body: Any) -> dict[str, Any]:
    """Return the JSON object of the response.

    raises  LisarecError  if the service rejects the request, if something else answers, or after the deadline
    """
    give_up_at_s = time.monotonic() + RETRY_FOR_S
    for pause_s in pauses_s():
        try:
            async with asyncio.timeout(give_up_at_s - time.monotonic()):
                return parse_response(await http.request(method, path, json=body))
        except httpx.HTTPError as exc:
            failure = unreachable_error(exc)
            if is_unknown_host(exc):
                raise failure from exc
        except LisarecError as exc:
            failure = exc
        except TimeoutError:
            raise LisarecError(0, "unreachable", TIMED_OUT) from None
        wait_s = pause_s if failure.retry_after_s is None else failure.retry_after_s
        if failure.status not in RETRIED_STATUSES or time.monotonic() + wait_s >= give_up_at_s:
            raise failure
        await asyncio.sleep(wait_s)
    raise AssertionError("there is always another pause")


async def check(http: httpx.AsyncClient) -> None:
    """Check once, without retries, that the service is ready and accepts the key.

    raises  LisarecError  if it doesn't
    """
    try:
        async with asyncio.timeout(RETRY_FOR_S):
            ready = await http.get("/readyz")
            if parse_response(ready).get("status") != "ready":
                raise not_lisarec_error(ready)
            await _check_key(http)
    except httpx.HTTPError as exc:
        raise unreachable_error(exc) from exc
    except TimeoutError:
        raise LisarecError(0, "unreachable", TIMED_OUT) from None


async def _check_key(http: httpx.AsyncClient) -> None:
    try:
        parse_response(await http.get("/v1/model"))
    except LisarecError as exc:
        if exc.code != "forbidden":  # the key is valid, but has another scope
            raise


def is_unknown_host(exc: BaseException) -> bool:
    """Return whether a request failed because the host name doesn't resolve; a retry would not help."""
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, socket.gaierror):
            return cause.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
        cause = cause.__cause__ or cause.__context__
    return False

"""Answers frequent calls from the callbacks of their connection.

An ASGI task per request and the middleware around the app cost more than a recommendation in a batch. Plain requests
for recommendations have no body, and no query field except `k`, so they can join a batch at once; those that are
counted, or wait for their key's turn, need a task before that. The other calls of the fast path need a task, but no
middleware around it. All other requests go to the app, as do those whose key, origin or form it would reject.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple, Protocol, TypeAlias

from starlette.types import Scope

from app.catalogue.trained_catalogue import encode
from app.errors import Draining
from app.http.access import Caller, uncounted_caller
from app.http.auth.keys import Scope as KeyScope
from app.http.charged_calls import recommend
from app.http.error_responses import EXPECTED_ERRORS, response_to
from app.http.middleware.cors import BROWSER_HEADERS_OF_READS, PATHS
from app.http.middleware.fast_path import GET_RECOMMENDATIONS, JSON_CONTENT_TYPE, POSTS, plain_request
from app.http.middleware.load_shedding import RequestsInProgress, Source
from app.http.middleware.request_metrics import NO_STORE, RequestRecorder, request_id, trace_headers
from app.http.services import Services
from app.observability import tracing
from app.observability.tracing import Trace
from app.recommendation.cost import LIGHT, cost_of
from app.schemas.recommendations import Recommendations

URL = re.compile(rb"/v1/users/([\w.~:-]{1,128})/recommendations(?:\?([^#]+))?")  # \w is ASCII
ONLY_K = re.compile(rb"k=\d+|")
# Parsing a cursor takes milliseconds, so the app counts such a request first.
CURSOR_OR_ENCODED_FIELD = re.compile(rb"(?:^|&)(?:cursor|[^=&]*%)")
MAX_QUERY_BYTES = 512  # parsed within 30 µs
HEADERS_FOR_APP = frozenset(
    {b"transfer-encoding", b"expect", b"upgrade", b"origin", b"sec-fetch-site", b"content-encoding"}
)
HEADERS_OF_GET_FOR_APP = HEADERS_FOR_APP | {b"content-length"}
MAX_BODY_BYTES = 32_768  # some 250 events; for more, the connection stops reading until the app takes what has come

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
Answer: TypeAlias = Recommendations | bytes

logger = logging.getLogger(__name__)


class Responder(Protocol):
    """Receives the response to a request, or is told that there is none, in a later turn of the event loop."""

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send the response."""

    def abort(self) -> None:
        """Close the connection without a response."""


class Call(NamedTuple):
    """Method and route under which the request metrics count a request."""

    method: str
    route: str


VARY = ((b"vary", b"Origin"),)  # as `CrossOriginPolicy` adds it
GET_LIST = Call("GET", GET_RECOMMENDATIONS.path)


class PlainRequest:
    """A request that waits for its response: the waiter of its batch, and for the server a task that it may cancel.

    source   the source that it counts for while it is in progress
    begin_s  the time at which it began, as of ``time.perf_counter``
    """

    __slots__ = ("_end", "_is_done", "begin_s", "call", "responder", "source", "task", "trace")

    def __init__(self, call: Call, scope: Scope, responder: Responder, end: End) -> None:
        self.call, self.source, self.trace = call, Source.of(scope), Trace(request_id(scope))
        self.responder = responder
        self.begin_s = 0.0
        self.task: asyncio.Task[bytes] | None = None  # if it does more than join a batch
        self._end = end
        self._is_done = False

    def done(self) -> bool:
        """Return whether the response is sent."""
        return self._is_done

    def set_result(self, answers: list[Recommendations], /) -> None:
        """Send the answer."""
        self._is_done = True
        self._end(self, answers[0])

    def set_exception(self, failure: BaseException, /) -> None:
        """Send the response to a failure."""
        self._is_done = True
        self._end(self, failure)

    def wait_for(self, work: Coroutine[None, None, bytes]) -> None:
        """Send the answer of the work when it ends."""
        self.task = asyncio.create_task(work)
        self.task.add_done_callback(self._receive)

    def cancel(self, msg: object = None) -> None:
        """Send the response to a request that takes too long, in a later turn of the event loop."""
        if self.task is not None:
            self.task.cancel(msg)
        else:
            asyncio.get_running_loop().call_soon(self._be_cancelled)

    def _be_cancelled(self) -> None:
        if not self._is_done:
            self.set_exception(asyncio.CancelledError())

    def _receive(self, task: asyncio.Task[bytes]) -> None:
        if task.cancelled():
            self.set_exception(asyncio.CancelledError())
        elif (failure := task.exception()) is not None:
            self.set_exception(failure)
        else:
            self._is_done = True
            self._end(self, task.result())


End = Callable[[PlainRequest, Answer | BaseException], None]
"""Ends a request with its answer or a failure."""


class PlainRequests:
    """Answers plain requests. They are counted, measured, shed and logged together with those that the app answers."""

    def __init__(self, services: Services, in_progress: RequestsInProgress, recorder: RequestRecorder) -> None:
        self._services = services
        self._in_progress = in_progress
        self._recorder = recorder
        self._of_get_for_app = HEADERS_OF_GET_FOR_APP
        if services.keyring is None:  # the app checks the origins of pages
            self._of_get_for_app |= BROWSER_HEADERS_OF_READS

    def begin(self, url: bytes, scope: Scope, responder: Responder) -> PlainRequest | None:
        """Start to answer a GET request; return it, or None if the app must answer, for any reason.

        scope  the request's headers and state
        """
        match = URL.fullmatch(url)
        if match is None or not self._is_plain(scope, self._of_get_for_app):
            return None
        query = match[2] or b""
        if query and (len(query) > MAX_QUERY_BYTES or CURSOR_OR_ENCODED_FIELD.search(query)):
            return None
        try:
            return self._begin(match[1].decode(), query, scope, responder)
        except Exception:  # the app fails in the same way, and reports it
            return None

    def takes_body(self, url: bytes, scope: Scope) -> bool:
        """Return whether to collect the body of this POST request for `begin_with_body`."""
        post, size = POSTS.get(url.decode("latin-1")), _declared_bytes(scope)
        if post is None or size is None or size > min(MAX_BODY_BYTES, self._services.settings.max_body_bytes):
            return False
        try:
            is_plain = self._is_plain(scope, HEADERS_FOR_APP) and _is_json(scope)
            return is_plain and self._caller(scope, post.scope) is not None
        except Exception:
            return False

    def begin_with_body(self, url: bytes, scope: Scope, body: bytes, responder: Responder) -> PlainRequest | None:
        """Start to answer a request for which `takes_body` was true; return None if the app must answer now."""
        path = url.decode()
        post = POSTS[path]
        try:
            caller = None if self._services.draining else self._caller(scope, post.scope)
        except Exception:
            return None
        if caller is None:
            return None
        request = PlainRequest(Call("POST", path), scope, responder, self._end)
        work = self._counted(caller, partial(post.answer, self._services, caller, body))
        return self._start(request, partial(request.wait_for, work))

    def _is_plain(self, scope: Scope, for_app: frozenset[bytes]) -> bool:
        return not self._services.draining and for_app.isdisjoint(map(itemgetter(0), scope["headers"]))

    def _caller(self, scope: Scope, required: KeyScope) -> Caller | None:
        """Return the caller of a request that may begin now; None if the app has to count or reject it."""
        caller = uncounted_caller(self._services, scope, required)
        return caller if self._in_progress.has_room(Source.of(scope)) else None

    def _begin(self, user_id: str, query: bytes, scope: Scope, responder: Responder) -> PlainRequest | None:
        caller = self._caller(scope, "recs:read")
        wish = None if caller is None else plain_request(user_id, query)
        if caller is None or wish is None:
            return None
        request = PlainRequest(GET_LIST, scope, responder, self._end)
        if ONLY_K.fullmatch(query) and (cost := cost_of(wish)) < LIGHT and not self._must_wait(caller):
            recommend_plain = self._services.by_tenant[caller.tenant].switcher.recommender.recommend_plain
            return self._start(request, partial(recommend_plain, wish, cost, request, caller.requester))
        work = self._counted(caller, partial(recommend, self._services, caller, wish))
        return self._start(request, partial(request.wait_for, work))

    def _must_wait(self, caller: Caller) -> bool:
        """Return whether a plain request has to be counted, or to wait for its key's turn."""
        has_rate = caller.key is not None and caller.key.requests_per_minute is not None
        return has_rate or self._services.key_turns.is_needed(caller.requester.flow)

    def _start(self, request: PlainRequest, submit: Callable[[], None]) -> PlainRequest:
        token = tracing.current.set(request.trace)
        try:
            submit()
        finally:
            tracing.current.reset(token)
        self._in_progress.begin(request.source)
        request.begin_s = self._recorder.begin()
        return request

    async def _counted(self, caller: Caller, answer: Callable[[], Coroutine[None, None, bytes]]) -> bytes:
        """Count a request, then answer it; raises TooManyRequests, and as the answer does."""
        if caller.key is not None:
            await self._services.rate_limiter.count(caller.key)
        return await answer()

    def _end(self, request: PlainRequest, answer: Answer | BaseException) -> None:
        token, status = tracing.current.set(request.trace), 500
        try:
            status, headers, body = self._response(answer)
            vary = VARY if self._services.keyring is not None and request.call.route in PATHS else ()
            request.responder.respond(status, [*headers, *vary, NO_STORE, *trace_headers(request.trace)], body)
        except Exception:  # its batch has other requests
            logger.exception("cannot send a response")
            status = 500
            request.responder.abort()
        finally:
            self._in_progress.end(request.source)
            self._recorder.end(*request.call, status, request.begin_s, lambda: request.source)
            tracing.current.reset(token)

    def _response(self, answer: Answer | BaseException) -> tuple[int, Headers, bytes]:
        """Return the response; to a request that the server cancels at shutdown, that of `Draining`."""
        failure: Exception
        if not isinstance(answer, BaseException):
            try:
                body = answer if isinstance(answer, bytes) else encode(answer)
                return 200, [(b"content-length", b"%d" % len(body)), JSON_CONTENT_TYPE], body
            except Exception as exc:
                failure = exc
        else:
            failure = answer if isinstance(answer, Exception) else Draining()
        if not isinstance(failure, EXPECTED_ERRORS):
            logger.error("a request failed", exc_info=failure)
        response = response_to(failure, self._services.metrics)
        return response.status_code, response.raw_headers, bytes(response.body)


def _declared_bytes(scope: Scope) -> int | None:
    """Return the length of the body, which the parser has checked; None if the head declares none."""
    return next((int(value) for name, value in scope["headers"] if name == b"content-length"), None)


def _is_json(scope: Scope) -> bool:
    """Return whether the body is JSON, which it is without a content type too; False if the app has to decide."""
    types = [value for name, value in scope["headers"] if name == b"content-type"]
    return not types or (len(types) == 1 and types[0].partition(b";")[0].strip().lower() == JSON_CONTENT_TYPE[1])

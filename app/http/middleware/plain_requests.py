"""Answers plain requests for recommendations from the callbacks of their connection.

An ASGI task per request and the middleware around the app cost more than a recommendation in a batch. Plain requests
have no body, and no query field except `k`, so they can join a batch at once; those that are counted, or wait for their
key's turn, need a task before that. All other requests go to the app, as do those that it would reject for anything but
their rate.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from starlette.types import Scope

from app.catalogue.trained_catalogue import encode
from app.errors import Draining
from app.http.access import Caller, uncounted_caller
from app.http.error_responses import EXPECTED_ERRORS, response_to
from app.http.middleware.fast_path import GET_RECOMMENDATIONS, JSON_CONTENT_TYPE, plain_request
from app.http.middleware.load_shedding import RequestsInProgress, Source
from app.http.middleware.request_metrics import RequestRecorder, request_id, trace_headers
from app.http.services import Services
from app.observability import tracing
from app.observability.tracing import Trace
from app.recommendation.cost import LIGHT, cost_of
from app.schemas.recommendations import RecommendationRequest, Recommendations

URL = re.compile(rb"/v1/users/([\w.~:-]{1,128})/recommendations(?:\?(k=\d+))?")  # \w is ASCII
OF_OTHERS = frozenset({b"content-length", b"transfer-encoding", b"expect", b"upgrade", b"origin", b"sec-fetch-site"})

Headers = Sequence[tuple[bytes, bytes]]
Respond = Callable[[int, Headers, bytes], None]
"""Sends a response: status, headers and body."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PlainRequest:
    """A request that waits for its response."""

    source: Source | None
    trace: Trace
    begin_s: float
    respond: Respond


class PlainRequests:
    """Answers plain requests. They are counted, measured, shed and logged together with those that the app answers."""

    def __init__(self, services: Services, in_progress: RequestsInProgress, recorder: RequestRecorder) -> None:
        self._services = services
        self._in_progress = in_progress
        self._recorder = recorder

    def begin(self, url: bytes, scope: Scope, respond: Respond) -> "asyncio.Future[list[Recommendations]] | None":
        """Start to answer a GET request; return a future that can be cancelled; `respond` is called when it is done.

        scope    the request's headers and state
        returns  None if the app must answer, for any reason
        """
        match = URL.fullmatch(url)
        if match is None or self._services.draining or not OF_OTHERS.isdisjoint([name for name, _ in scope["headers"]]):
            return None
        try:
            return self._begin(match[1].decode(), match[2] or b"", scope, respond)
        except Exception:  # the app fails in the same way, and reports it
            return None

    def _begin(
        self, user_id: str, query: bytes, scope: Scope, respond: Respond
    ) -> "asyncio.Future[list[Recommendations]] | None":
        services, source = self._services, Source.of(scope)
        caller = uncounted_caller(services, scope, "recs:read")
        if caller is None or not self._in_progress.has_room(source):
            return None
        request_trace = Trace(request_id(scope))
        token = tracing.current.set(request_trace)
        try:
            answer = self._submit(caller, user_id, query)
            if answer is not None:
                self._in_progress.begin(source)
                request = PlainRequest(source, request_trace, self._recorder.begin(), respond)
                answer.add_done_callback(lambda _: self._end(request, answer))  # in this context, with its trace
        finally:
            tracing.current.reset(token)
        return answer

    def _submit(self, caller: Caller, user_id: str, query: bytes) -> "asyncio.Future[list[Recommendations]] | None":
        request = plain_request(user_id, query)
        if request is None or cost_of(request) >= LIGHT:
            return None
        has_rate = caller.key is not None and caller.key.requests_per_minute is not None
        if has_rate or self._services.key_turns.is_needed(caller.requester.flow):
            return asyncio.create_task(self._recommend_in_turn(caller, request))
        return asyncio.ensure_future(self._recommend(caller, request))

    async def _recommend_in_turn(self, caller: Caller, request: RecommendationRequest) -> list[Recommendations]:
        """Count a request that costs less than two plain ones, so as one, and answer it; raises TooManyRequests."""
        if caller.key is not None:
            await self._services.rate_limiter.count(caller.key)
        async with self._services.key_turns.turn(caller.requester):
            return await self._recommend(caller, request)

    def _recommend(self, caller: Caller, request: RecommendationRequest) -> Awaitable[list[Recommendations]]:
        recommender = self._services.by_tenant[caller.tenant].switcher.recommender
        return recommender.recommend([request], caller.requester)

    def _end(self, request: PlainRequest, answer: "asyncio.Future[list[Recommendations]]") -> None:
        self._in_progress.end(request.source)
        try:
            (found,) = answer.result()
            status, body = 200, encode(found)
            headers: Headers = [(b"content-length", b"%d" % len(body)), JSON_CONTENT_TYPE]
        except (Exception, asyncio.CancelledError) as exc:
            status, headers, body = self._failure(exc)
        request.respond(status, [*headers, *trace_headers(request.trace)], body)
        self._recorder.end("GET", GET_RECOMMENDATIONS.path, status, request.begin_s)

    def _failure(self, exc: BaseException) -> tuple[int, Headers, bytes]:
        """Return the response to a failure; a request that the server cancels at shutdown gets `Draining`."""
        failure = exc if isinstance(exc, Exception) else Draining()
        if not isinstance(failure, EXPECTED_ERRORS):
            logger.error("a request failed", exc_info=failure)
        response = response_to(failure, self._services.metrics)
        return response.status_code, response.raw_headers, bytes(response.body)

"""Load shedding: a process accepts a bounded number of concurrent requests, and rejects others at once with a 503."""

from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import Overloaded
from app.http.access import verified_key
from app.http.error_responses import error_response
from app.http.services import Services

# Monitoring needs these responses most when the process is overloaded.
NEVER_SHED = frozenset({"/healthz", "/readyz", "/metrics"})
REFUSAL = error_response(Overloaded())  # made once, because an overloaded process has no time for it


async def _refuse(send: Send) -> None:
    # a copy of the headers, because outer middleware adds to them
    await send({"type": "http.response.start", "status": REFUSAL.status_code, "headers": list(REFUSAL.raw_headers)})
    await send({"type": "http.response.body", "body": REFUSAL.body})


class Source(NamedTuple):
    """The source of a request: a valid key of a tenant."""

    tenant: str
    key_id: str

    @classmethod
    def of(cls, scope: Scope) -> "Source | None":
        """Return the source of a request; None if it has no valid key, or if the service has no keys."""
        services: Services | None = scope.get("state", {}).get("services")
        if services is None or services.keyring is None or (key := verified_key(services, scope)) is None:
            return None
        return cls(key.tenant, key.id)


class RequestsInProgress:
    """Counts requests in progress by source, and decides whether to accept one more.

    There is room for `most` requests, and beyond that for sources that use less than their share. Tenants with requests
    in progress have equal shares of `most`, and the keys of a tenant have equal shares of the tenant's. So each source
    has room for its share, however many requests the others send. Requests without a source have no share.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._total = 0
        self._by_tenant: dict[str, dict[str, int]] = {}

    def has_room(self, source: Source | None) -> bool:
        """Return whether a request of the source may be accepted."""
        if source is None or self._total < self._most:
            return self._total < self._most
        keys = self._by_tenant.get(source.tenant, {})
        tenants = len(self._by_tenant) + (source.tenant not in self._by_tenant)
        return keys.get(source.key_id, 0) < self._most / tenants / (len(keys) + (source.key_id not in keys))

    def begin(self, source: Source | None) -> None:
        """Add a request of the source to the count."""
        self._total += 1
        if source is None:
            return
        keys = self._by_tenant.setdefault(source.tenant, {})
        keys[source.key_id] = keys.get(source.key_id, 0) + 1

    def end(self, source: Source | None) -> None:
        """Remove a request of the source from the count."""
        self._total -= 1
        if source is None:
            return
        keys = self._by_tenant[source.tenant]
        if keys[source.key_id] > 1:
            keys[source.key_id] -= 1
            return
        del keys[source.key_id]
        if not keys:
            del self._by_tenant[source.tenant]


class LoadShedding:
    """ASGI middleware that rejects a request while the maximum number of others is in progress.

    Tenants and keys share the room. A request does not count while it waits for its client to send the body, nor after
    its response starts, which is complete by then. So slow clients cannot lock others out.
    """

    def __init__(self, app: ASGIApp, in_progress: RequestsInProgress) -> None:
        self._app = app
        self._in_progress = in_progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request (ASGI)."""
        if scope["type"] != "http" or scope["path"] in NEVER_SHED:
            await self._app(scope, receive, send)
            return
        in_progress, source = self._in_progress, Source.of(scope)
        if not in_progress.has_room(source):
            await _refuse(send)
            return
        has_more_body, is_counted, is_answered = True, True, False

        def count(is_counted_now: bool) -> None:
            nonlocal is_counted
            if is_counted_now != is_counted:
                is_counted = is_counted_now
                (in_progress.begin if is_counted else in_progress.end)(source)

        async def receive_uncounted() -> Message:
            nonlocal has_more_body
            count(False)
            try:
                message = await receive()
                if has_more_body and not message.get("more_body", False):
                    has_more_body = False
                    if not is_answered and not in_progress.has_room(source):
                        raise Overloaded
            finally:
                count(not is_answered)  # the response may have started meanwhile
            return message

        async def send_uncounted(message: Message) -> None:
            nonlocal is_answered
            is_answered = True
            count(False)
            await send(message)

        in_progress.begin(source)
        try:
            await self._app(scope, receive_uncounted, send_uncounted)
        finally:
            if is_counted:  # there was no response
                count(False)

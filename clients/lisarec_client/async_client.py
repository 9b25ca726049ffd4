"""The client for asyncio."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any, Self
from urllib.parse import urlencode

import httpx

from . import calls
from .arguments import items_at, require_address, require_event, require_id, require_key, require_positive
from .fallback import Fallback
from .ids import new_event_id, user_path
from .outbox import QUEUE_SIZE, Outbox, start_in_children
from .responses import (
    RETRY_FOR_S,
    LisarecError,
    Recommendations,
    parse_response,
    retry_after_s,
)

TIMEOUT_S = 0.25  # for recommendations: a page that loads late is worse than one with popular items
PORTABLE = "/v1/portable/events"
OPTIONAL = ("cursor", "because", "short", "debug", "generation", "scenario", "experiment")  # fields of lists


def new_event(required: Mapping[str, Any], **optional: Any) -> dict[str, Any]:
    """Return an event with an id, and with the optional fields that are not None; raise ValueError if it is invalid."""
    given = {name: field for name, field in optional.items() if field is not None}
    event = {"event_id": new_event_id(), **required, **given}
    require_event(event)
    return event


class AsyncClient:
    """The client for asyncio. Create one per process, and use it in one event loop. See the package's docstring.

    raises  ValueError  if an argument is invalid
    """

    def __init__(
        self, url: str, key: str | None = None, *, timeout_s: float = TIMEOUT_S, queue_size: int = QUEUE_SIZE
    ) -> None:
        require_address(url)
        require_key(key)
        require_positive("timeout_s", timeout_s)
        require_positive("queue_size", queue_size)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        tls = httpx.create_ssl_context()  # once: it takes some 50 ms, and a fork meanwhile would leave OpenSSL locked
        self._service: dict[str, Any] = {"base_url": url, "headers": headers, "verify": tls}
        self._start()
        start_in_children(self, AsyncClient._start)  # the connections of the parent are not for its children
        self._timeout_s = timeout_s
        self._pause_until_s = 0.0  # set by Retry-After
        self.outbox = Outbox(self._service, queue_size)
        self.fallback = Fallback()

    def _start(self) -> None:
        self._http = httpx.AsyncClient(**self._service, timeout=None)  # noqa: S113  # asyncio.timeout ends it

    def event(
        self,
        user_id: str,
        item_id: str,
        type: str = "click",  # noqa: A002  # the API's field name
        *,
        value: float | None = None,
        recommendation_id: str | None = None,
        timestamp_s: float | None = None,
        event_id: str | None = None,
    ) -> str | None:
        """Queue an event and return its id at once; if the queue is full, drop the event and return None.

        value        the value of the event, such as the price paid; 0 or greater
        timestamp_s  the time of the event in Unix seconds; default: now
        event_id     default: a new UUIDv7
        raises       ValueError if an argument is invalid, such as an empty id
        """
        event = new_event(
            {"user_id": user_id, "item_id": item_id, "type": type},
            event_id=event_id or None,
            timestamp=timestamp_s,
            recommendation_id=recommendation_id,
            value=value,
        )
        return self._queue(event)

    def order(
        self,
        user_id: str,
        order_id: str,
        items: Iterable[str] | Mapping[str, float],
        *,
        recommendation_id: str | None = None,
    ) -> list[str | None]:
        """Queue the purchases of one order, one event per item. Return their ids, as `event` does.

        items   the ids of the items, or a mapping from each id to the price paid
        raises  ValueError if an argument is invalid; then nothing is queued
        """
        order = {"user_id": user_id, "type": "purchase", "order_id": order_id}
        events = [
            new_event(
                {**order, "item_id": item_id} | ({"value": items[item_id]} if isinstance(items, Mapping) else {}),
                recommendation_id=recommendation_id,
            )
            for item_id in items
        ]
        return [self._queue(event) for event in events]

    def impression(
        self,
        user_id: str,
        shown: Recommendations | Iterable[str],
        places: Iterable[int] | None = None,
        *,
        recommendation_id: str | None = None,
    ) -> str | None:
        """Queue an impression: the items that the user has actually seen, for `rotation`. Return its id, like `event`.

        shown   the response, or 1 to 50 item ids; of a response without items nothing is queued
        places  the places in the list that were seen, counted from 1; default: all
        raises  ValueError if an argument is invalid
        """
        if isinstance(shown, Recommendations):
            if not shown.items:
                return None  # an outage without a fallback must not break the page
            recommendation_id = recommendation_id or shown.recommendation_id
            shown = shown.item_ids
        items = list(shown)
        if places is not None:
            items = items_at(items, places)
        event = {"user_id": user_id, "items": items, "type": "impression"}
        return self._queue(new_event(event, recommendation_id=recommendation_id))

    async def recommendations(
        self,
        user_id: str | None,
        k: int | None = None,
        *,
        fallback: Iterable[str] = (),
        timeout_s: float | None = None,
        **options: Any,
    ) -> Recommendations:
        """Return the user's best items, or the first k items of the fallback after the timeout. Never raise.

        k        default: that of the scenario, or 10
        options  the other fields of `POST /v1/recommendations`: mode, categories, categories_all,
                 categories_none, exclude, exclude_seen, exclude_events, within, candidates, history, state, boost, pin,
                 diversity, objective, rotation, rotation_days, max_per_category, max_per, cursor, because, basket,
                 basket_only, explain, filter, params, current_item, scenario, debug
        """
        given = {"user_id": user_id, "k": k}
        request = {name: value for name, value in given.items() if value is not None} | options
        try:
            async with asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s):
                return await self._post(request)
        except Exception as exc:  # whatever went wrong, the page needs items to show
            return self.fallback.recommend(exc, fallback, k)

    async def _post(self, request: dict[str, Any]) -> Recommendations:
        if time.monotonic() < self._pause_until_s:
            raise LisarecError(0, "silent", "no request was sent, because the service asked for a pause (Retry-After)")
        try:
            answer = await self._http.post("/v1/recommendations", json=request)
        except httpx.TransportError:  # for example, the service has closed an idle connection
            answer = await self._http.post("/v1/recommendations", json=request)
        self._pause_until_s = time.monotonic() + (retry_after_s(answer) or 0.0)
        body = parse_response(answer)
        optional = {name: body.get(name) for name in OPTIONAL}
        return Recommendations(body["items"], body["source"], body["recommendation_id"], **optional)

    async def portable_events(self, state: str | None, events: Iterable[Mapping[str, Any]]) -> str:
        """Fold events into a visitor's sealed state and return the new state. The service stores nothing.

        state   the state that the previous call returned, or None for a new visitor. If the service can't open the
                state, or the state has expired, the visitor starts again without a history
        events  each with an `item_id`, and optionally `type`, `value` and `recommendation_id`, as in `event`; missing
                ids are filled in
        raises  LisarecError  with the code sealing_not_configured if the service has no sealing keys

        Pass the returned state to `recommendations(None, state=...)`.
        """
        posted = [{"event_id": new_event_id(), **event} for event in events]
        try:
            return str((await self.call("POST", PORTABLE, {"state": state, "events": posted}))["state"])
        except LisarecError as exc:
            if state is None or exc.code not in ("invalid_sealed_state", "sealed_state_expired"):
                raise
        return await self.portable_events(None, posted)

    async def check(self) -> None:
        """Check once, without retries, that the service is ready and accepts the key. Call it at startup.

        raises  LisarecError  if the service isn't ready, isn't lisarec, or rejects the key
        """
        await calls.check(self._http)

    async def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Call any other endpoint, such as `call("GET", "/v1/stats")`, with retries.

        raises  LisarecError  if the service rejects the request, or can't be reached in time
        """
        return await calls.call(self._http, method, path, body)

    async def search(self, query: str, user_id: str | None = None, limit: int = 20) -> list[dict[str, Any]]:
        """Return the items whose titles or ids match the query: best match first, or ranked for the user if given."""
        asked: dict[str, str | int] = {"query": query, "limit": limit}
        if user_id is not None:
            require_id("user_id", user_id)
            asked["user_id"] = user_id
        return list((await self.call("GET", f"/v1/items?{urlencode(asked)}"))["items"])

    async def user(self, user_id: str) -> dict[str, Any] | None:
        """Return what the service knows about the user, or None if the user has no events."""
        try:
            return await self.call("GET", user_path(user_id))
        except LisarecError as exc:
            if exc.code == "user_not_found":
                return None
            raise

    async def properties(self, user_id: str) -> dict[str, Any]:
        """Return the user's properties by name; an empty mapping if none were set."""
        return dict((await self.call("GET", user_path(user_id, "properties")))["properties"])

    async def put_properties(self, user_id: str, properties: dict[str, Any]) -> dict[str, Any]:
        """Set properties of the user and return all of them. The value None removes a property.

        raises  LisarecError  with the code invalid_request if a value has the wrong type for its property
        """
        return dict(
            (await self.call("PUT", user_path(user_id, "properties"), {"properties": properties}))["properties"]
        )

    async def undo(self, user_id: str, event_id: str) -> bool:
        """Undo an event. Return False if it was already undone.

        raises  LisarecError  with the code event_not_found if there is no such event
        """
        require_id("event_id", event_id)
        await self._send_queue()  # the event may still be in the queue
        return bool((await self.call("DELETE", user_path(user_id, "events", event_id)))["changed"])

    async def merge(self, user_id: str, visitor: str) -> bool:
        """Merge the visitor into the user, for example at login. Return False if they were already merged.

        raises  LisarecError  with the code merge_refused if the visitor was merged into another user
        """
        require_id("visitor", visitor)
        return bool((await self.call("POST", user_path(user_id, "merge"), {"from": visitor}))["changed"])

    async def erase(self, user_id: str) -> str:
        """Erase the user and all their events, including queued ones. Return the time when the last copies are gone."""
        await self._send_queue()  # an event that arrives after the erasure would create the user again
        return str((await self.call("DELETE", user_path(user_id)))["files_by"])

    async def flush(self, timeout_s: float = RETRY_FOR_S) -> bool:
        """Wait until the queue is empty. Return whether the service has logged all events since the last flush."""
        return await asyncio.to_thread(self.outbox.flush, timeout_s)

    async def close(self, timeout_s: float = RETRY_FOR_S) -> bool:
        """Flush the queue and close the client. Return whether the service has logged all events."""
        all_sent = await asyncio.to_thread(self.outbox.close, timeout_s)
        await self._http.aclose()
        return all_sent

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _queue(self, event: dict[str, Any]) -> str | None:
        return str(event["event_id"]) if self.outbox.put(event) else None

    async def _send_queue(self) -> None:
        if not await asyncio.to_thread(self.outbox.drain, RETRY_FOR_S):
            raise LisarecError(0, "not_flushed", "nothing was changed: some queued events are still unsent")

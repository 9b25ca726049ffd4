"""The client for asyncio."""

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any, Self
from urllib.parse import urlencode

import httpx

from .arguments import items_at, require_address, require_event, require_id, require_key, require_positive
from .calls import Calls
from .ids import new_event_id, user_path
from .outbox import QUEUE_SIZE, Outbox
from .responses import (
    RETRY_FOR_S,
    LisarecError,
    Recommendations,
    parse_response,
    retry_after_s,
)

TIMEOUT_S = 0.25  # for recommendations: a page that waits longer is worse than one with popular items
PORTABLE = "/v1/portable/events"

logger = logging.getLogger("lisarec")


class AsyncClient:
    """The client for asyncio: make one for each process, and use it in one event loop. See the package.

    raises  ValueError  when an argument cannot be right: every recommendation would be the fallback, and no event sent
    """

    def __init__(
        self, url: str, key: str | None = None, *, timeout_s: float = TIMEOUT_S, queue_size: int = QUEUE_SIZE
    ) -> None:
        require_address(url)
        require_key(key)
        require_positive("timeout_s", timeout_s)
        require_positive("queue_size", queue_size)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=None)  # noqa: S113  # asyncio.timeout has it
        self._calls = Calls(self._http)
        self._timeout_s = timeout_s
        self._pause_until_s = 0.0  # as Retry-After asked
        self.outbox = Outbox(url, headers, queue_size)

    def event(
        self,
        user_id: str,
        item_id: str,
        type: str = "click",  # noqa: A002  # the service's word
        *,
        value: float | None = None,
        recommendation_id: str | None = None,
        timestamp_s: float | None = None,
        event_id: str | None = None,
    ) -> str | None:
        """Queue an event. Return its id at once, or None when the queue is full and the event is dropped.

        value        what it is worth, such as what was paid; 0 or more
        timestamp_s  when it happened, in Unix seconds; now, unless said otherwise
        event_id     only for an event that was given an id elsewhere
        raises       ValueError for what the service would refuse, as an id with a space in it
        """
        event: dict[str, Any] = {"event_id": event_id or new_event_id(), "user_id": user_id, "item_id": item_id}
        event |= {"type": type, "timestamp": time.time() if timestamp_s is None else timestamp_s}
        if recommendation_id is not None:
            event["recommendation_id"] = recommendation_id
        if value is not None:
            event["value"] = value
        require_event(event)
        return str(event["event_id"]) if self.outbox.put(event) else None

    def order(
        self,
        user_id: str,
        order_id: str,
        items: Iterable[str] | Mapping[str, float],
        *,
        recommendation_id: str | None = None,
    ) -> list[str | None]:
        """Queue the purchases of one order, an event for each item. Return their ids, as `event` does.

        items   what was bought, or what was paid for each
        raises  ValueError for what the service would refuse; nothing is queued then
        """
        of_all: dict[str, Any] = {"user_id": user_id, "type": "purchase", "order_id": order_id}
        of_all["timestamp"] = time.time()
        if recommendation_id is not None:
            of_all["recommendation_id"] = recommendation_id
        events: list[dict[str, Any]] = [
            {"event_id": new_event_id(), "item_id": item_id, **of_all}
            | ({"value": items[item_id]} if isinstance(items, Mapping) else {})
            for item_id in items
        ]
        for event in events:
            require_event(event)
        return [str(event["event_id"]) if self.outbox.put(event) else None for event in events]

    def impression(
        self,
        user_id: str,
        shown: Recommendations | Iterable[str],
        places: Iterable[int] | None = None,
        *,
        recommendation_id: str | None = None,
    ) -> str | None:
        """Queue what the user has really seen, for `rotation`. Return the id of the event, as `event` does.

        shown   an answer, or at most 50 items
        places  those of the answer that were seen, from 1; by default all
        raises  ValueError for what the service would refuse
        """
        items = list(shown.item_ids if isinstance(shown, Recommendations) else shown)
        if isinstance(shown, Recommendations):
            recommendation_id = recommendation_id or shown.recommendation_id
        if places is not None:
            items = items_at(items, places)
        event: dict[str, Any] = {"event_id": new_event_id(), "user_id": user_id, "items": items}
        event |= {"type": "impression", "timestamp": time.time()}
        if recommendation_id is not None:
            event["recommendation_id"] = recommendation_id
        require_event(event)
        return str(event["event_id"]) if self.outbox.put(event) else None

    async def recommendations(
        self,
        user_id: str | None,
        k: int | None = None,
        *,
        fallback: Iterable[str] = (),
        timeout_s: float | None = None,
        **options: Any,
    ) -> Recommendations:
        """Return the user's best items, or the first k of the fallback after the time-out. Never raise.

        k        10, unless said otherwise, by a scenario too
        options  everything else that `POST /v1/recommendations` takes: mode, categories, categories_all,
                 categories_none, exclude, exclude_seen, exclude_events, within, candidates, history, state, boost, pin,
                 diversity, objective, rotation, rotation_days, max_per_category, max_per, cursor, because, basket,
                 basket_only, explain, filter, params, current_item, scenario, debug
        """
        given = {"user_id": user_id, "k": k}
        request = {name: value for name, value in given.items() if value is not None} | options
        try:
            async with asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s):
                return await self._post(request)
        except Exception as exc:  # whatever it is, the page needs items to show
            logger.warning("recommending the fallback: %s", str(exc) or type(exc).__name__)
            first = itertools.islice(fallback, 10 if k is None else k)
            return Recommendations([{"item_id": item_id} for item_id in first], "fallback")

    async def _post(self, request: dict[str, Any]) -> Recommendations:
        if time.monotonic() < self._pause_until_s:
            raise LisarecError(0, "silent", "the service asked not to be asked for some seconds")
        try:
            answer = await self._http.post("/v1/recommendations", json=request)
        except httpx.TransportError:  # as when the service closes a connection that was idle
            answer = await self._http.post("/v1/recommendations", json=request)
        self._pause_until_s = time.monotonic() + (retry_after_s(answer) or 0.0)
        body = parse_response(answer)
        optional = {name: body.get(name) for name in ("cursor", "because", "short", "debug")}
        return Recommendations(body["items"], body["source"], body["recommendation_id"], **optional)

    async def portable_events(self, state: str | None, events: Iterable[Mapping[str, Any]]) -> str:
        """Fold events into the sealed state of a visitor who keeps it; return the new one. Nothing is logged.

        state   what the call before returned, for `recommendations(None, state=...)` too; None for a new visitor.
                The visitor begins anew where the service cannot open it, or no longer
        events  each with an `item_id`, and `type`, `value` and `recommendation_id` as of `event`; one without an id or
                a time gets them here
        raises  LisarecError  with the code sealing_not_configured where the service has no keys that seal
        """
        posted = [{"event_id": new_event_id(), "timestamp": time.time(), **event} for event in events]
        try:
            return str((await self.call("POST", PORTABLE, {"state": state, "events": posted}))["state"])
        except LisarecError as exc:
            if state is None or exc.code not in ("invalid_sealed_state", "sealed_state_expired"):
                raise
        return await self.portable_events(None, posted)

    async def check(self) -> None:
        """Ask once, as when a program starts, whether a service that is ready answers, and whether it knows the key.

        raises  LisarecError  when it does not: recommendations would be the fallback, and events would wait
        """
        await self._calls.check()

    async def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Make any other call of the API, such as `call("GET", "/v1/stats")`, again until there is an answer.

        raises  LisarecError  when the service refuses, or cannot be reached in time
        """
        return await self._calls.call(method, path, body)

    async def search(self, query: str, user_id: str | None = None, limit: int = 20) -> list[dict[str, Any]]:
        """Return the items whose titles or ids match, the closest first, or the likeliest for a user."""
        asked: dict[str, str | int] = {"query": query, "limit": limit}
        if user_id is not None:
            require_id("user_id", user_id)
            asked["user_id"] = user_id
        return list((await self.call("GET", f"/v1/items?{urlencode(asked)}"))["items"])

    async def user(self, user_id: str) -> dict[str, Any] | None:
        """Return what the service knows of the user; None for a user without events."""
        try:
            return await self.call("GET", user_path(user_id))
        except LisarecError as exc:
            if exc.code == "user_not_found":
                return None
            raise

    async def properties(self, user_id: str) -> dict[str, Any]:
        """Return the user's properties by name; none for a user of whom nothing was put."""
        return dict((await self.call("GET", user_path(user_id, "properties")))["properties"])

    async def put_properties(self, user_id: str, properties: dict[str, Any]) -> dict[str, Any]:
        """Set properties of the user, None takes one away; return all that the user has then.

        raises  LisarecError  with the code invalid_request for a value of another type than its property
        """
        return dict(
            (await self.call("PUT", user_path(user_id, "properties"), {"properties": properties}))["properties"]
        )

    async def undo(self, user_id: str, event_id: str) -> bool:
        """Undo an event; return False if it was undone before.

        raises  LisarecError  with the code event_not_found for an event that is not there
        """
        require_id("event_id", event_id)
        await self._flush_or_raise()  # the event may still be in the queue
        return bool((await self.call("DELETE", user_path(user_id, "events", event_id)))["changed"])

    async def merge(self, user_id: str, visitor: str) -> bool:
        """Merge the visitor into the user, as at login; return False if this was done before.

        raises  LisarecError  with the code merge_refused where the visitor has become another user
        """
        require_id("visitor", visitor)
        return bool((await self.call("POST", user_path(user_id, "merge"), {"from": visitor}))["changed"])

    async def erase(self, user_id: str) -> str:
        """Erase the user with all events, also those in this client's queue; return when the last copies are gone."""
        await self._flush_or_raise()  # events that come after the erasure would begin a new user
        return str((await self.call("DELETE", user_path(user_id)))["files_by"])

    async def flush(self, timeout_s: float = RETRY_FOR_S) -> bool:
        """Wait until the queue is sent. Return whether all events since the last flush are in the service's log."""
        return await asyncio.to_thread(self.outbox.flush, timeout_s)

    async def close(self, timeout_s: float = RETRY_FOR_S) -> bool:
        """Flush, and close the client."""
        all_sent = await asyncio.to_thread(self.outbox.close, timeout_s)
        await self._http.aclose()
        return all_sent

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _flush_or_raise(self) -> None:
        if not await self.flush():
            raise LisarecError(0, "not_flushed", "events still wait to be sent, or were refused; nothing was done")

"""The route that takes in events."""

from typing import Annotated

from pydantic import Field

from app.http.access import needs
from app.http.charged_calls import append_events
from app.http.dependencies import NO_QUERY, CallerDep, RawBody, ServicesDep
from app.http.openapi import errors, json_request
from app.http.routes.guarded_route import GuardedRouter
from app.schemas.events import MAX_EVENTS, EventCounts, PostedEvent

router = GuardedRouter(tags=["events"], dependencies=[needs("events:write")])

EXAMPLE = {
    "event_id": "01932c07-5e00-7d4b-a1c3-2f8e6b9d0a11",
    "user_id": "ada",
    "item_id": "tea-2",
    "type": "click",
    "timestamp": "2024-11-14T18:20:00Z",
}
IMPRESSION = {"user_id": "ada", "type": "impression", "items": ["tea-2", "cup-1"]}
BODY = json_request(
    PostedEvent | Annotated[list[PostedEvent], Field(min_length=1, max_length=MAX_EVENTS)],
    {"one": EXAMPLE, "several": [EXAMPLE, {"user_id": "ada", "item_id": "cup-1"}], "what was shown": IMPRESSION},
)


@router.post("/v1/events", openapi_extra=BODY, responses=errors(400, 408, 413, 415), dependencies=[NO_QUERY])
async def post_events(body: RawBody, services: ServicesDep, caller: CallerDep) -> EventCounts:
    """Log and fold one event, or up to 1,000 in an array: all of them, durably, or none.

    An event of type `impression` says what a user was shown: `items`, up to 50, in the place of `item_id`. It moves
    nothing but lists with `rotation`.

    A 503 `partly_applied` lists which are durable, and how many of them are accepted: these are counted already, and
    are duplicates when all are sent again. Types that no served model has a weight for are logged, and step no state.
    With a key of pages, events on items that neither the shop nor a served model has are not logged (`refused`).

    Each event counts as a request against the key's rate. A key of pages posts at most 100 events at once (413
    `too_many_events`) and 20 new users (422 `too_many_new_users_at_once`); a key and its tenant bring a limited number
    of new users an hour (429 `too_many_new_users`, and 422 where one request has more than that).
    """
    return await append_events(services, caller, body)

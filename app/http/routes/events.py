"""The route that ingests events."""

from typing import Annotated

from fastapi import Response
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
ANOTHER = {"event_id": "01932c07-5e00-7d4b-a1c3-2f8e6b9d0a12", "user_id": "ada", "item_id": "cup-1"}
IMPRESSION = {
    "event_id": "01932c07-5e00-7d4b-a1c3-2f8e6b9d0a13",
    "user_id": "ada",
    "type": "impression",
    "items": ["tea-2", "cup-1"],
}
BODY = json_request(
    PostedEvent | Annotated[list[PostedEvent], Field(min_length=1, max_length=MAX_EVENTS)],
    {"one": EXAMPLE, "several": [EXAMPLE, ANOTHER], "an impression": IMPRESSION},
)


@router.post(
    "/v1/events",
    response_model=EventCounts,
    openapi_extra=BODY,
    responses=errors(400, 408, 413, 415),
    dependencies=[NO_QUERY],
)
async def post_events(body: RawBody, services: ServicesDep, caller: CallerDep) -> Response:
    """Log and fold one event, or an array of up to 1,000: all of them durably, or none.

    An event of type `impression` records what a user was shown. It has `items`, up to 50, in place of `item_id`. It
    affects only lists with `rotation`.

    A 503 `partly_applied` lists the events that are durable and says how many of them were accepted. These already
    count, and are duplicates when you send all events again. Events of a type that no served model weighs are logged,
    but change no state. With a page key, events on items that neither the shop nor a served model has are not logged
    (`refused`).

    Each event counts as one request against the key's rate. A page key posts at most 100 events at once (413
    `too_many_events`) and at most 20 new users at once (422 `too_many_new_users_at_once`). A key and its tenant can add
    a limited number of new users per hour. Beyond it the response is 429 `too_many_new_users`, or 422 if one request
    has more new users than that.
    """
    return Response(await append_events(services, caller, body), media_type="application/json")

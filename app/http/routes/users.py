"""The routes of users: state, log, undo, merge, erasure."""

from typing import Annotated

from fastapi import Query, Response

from app.http import charged_calls
from app.http.access import audit, audited_user, needs
from app.http.dependencies import (
    NO_QUERY,
    CallerDep,
    EventId,
    JsonBody,
    ServiceDep,
    ServicesDep,
    UserId,
)
from app.http.openapi import errors, json_request
from app.http.routes.guarded_route import GuardedRouter
from app.schemas.properties import PostedUserProperties, UserProperties
from app.schemas.users import Erasure, Merged, MergeRequest, Undone, UserEvents, UserEventsQuery, UserState
from app.serving.property_types import user_properties

router = GuardedRouter(tags=["users"], dependencies=[needs("users:admin")])

PROPERTIES = json_request(
    PostedUserProperties,
    {"set": {"properties": {"member": True, "region": "south"}}, "take away": {"properties": {"region": None}}},
)
MERGE = json_request(MergeRequest, {"a visitor who has logged in": {"from": "visitor-7"}})


@router.get("/v1/users/{user_id}", responses=errors(404), dependencies=[NO_QUERY])
async def get_user(user_id: UserId, service: ServiceDep) -> UserState:
    """The state that the user's recommendations are made from; 404 for a user without events.

    503 `state_not_ready` for some seconds after an undo in a long log.
    """
    return await service.users.state(user_id)


@router.get("/v1/users/{user_id}/events", responses=errors(404), response_model=UserEvents)
async def get_user_events(
    user_id: UserId, query: Annotated[UserEventsQuery, Query()], services: ServicesDep, caller: CallerDep
) -> Response:
    """The user's log, oldest first, in pages.

    It counts as 1, and 1 for 100 entries of the limit. What is in the archive counts by its files, 5 each, but at most
    as half of what the key has in a minute.
    """
    page = await charged_calls.user_events(services, caller, user_id, query)
    # The framework would go through all of it three times more, while everybody waits.
    return Response(page.model_dump_json(), media_type="application/json")


@router.get("/v1/users/{user_id}/properties", dependencies=[NO_QUERY])
async def get_user_properties(user_id: UserId, service: ServiceDep, caller: CallerDep) -> UserProperties:
    """The properties of the user, who need not have any events; after a merge those of both."""
    return await user_properties(service.store, caller.tenant, user_id)


@router.put(
    "/v1/users/{user_id}/properties",
    openapi_extra=PROPERTIES,
    responses=errors(400, 408, 413, 415),
    dependencies=[NO_QUERY],
)
async def put_user_properties(
    user_id: UserId, body: JsonBody, services: ServicesDep, caller: CallerDep
) -> UserProperties:
    """Set properties of the user; those that are left out stay, and `null` takes one away.

    They have types of their own, apart from those of items. A merge keeps the user's values, and the visitor's fill
    what is missing. Erasing the user takes them away, too. A user of whom nothing is known counts as a new one.
    """
    return await charged_calls.put_user_properties(services, caller, user_id, body)


@router.delete("/v1/users/{user_id}/events/{event_id}", responses=errors(404), dependencies=[NO_QUERY])
async def undo_event(user_id: UserId, event_id: EventId, services: ServicesDep, caller: CallerDep) -> Undone:
    """Take back the event that was posted with this user and id: the state is as if it had never come.

    Undo, merge and erasure count by the logs that they go through: 1, and 1 for 25 entries, but at most half of what
    the key has in a minute.
    """
    return await charged_calls.undo(services, caller, user_id, event_id)


@router.post(
    "/v1/users/{user_id}/merge",
    openapi_extra=MERGE,
    responses=errors(400, 408, 409, 413, 415),
    dependencies=[NO_QUERY],
)
async def merge_user(user_id: UserId, body: JsonBody, services: ServicesDep, caller: CallerDep) -> Merged:
    """Let a visitor become this user: the visitor's events follow the user's, and later ones are the user's too."""
    merged = await charged_calls.merge(services, caller, user_id, body)
    if merged.changed:
        visitor = await audited_user(services, caller, merged.visitor)
        await audit(services, caller, "user.merge", await audited_user(services, caller, user_id), {"visitor": visitor})
    return merged


@router.delete("/v1/users/{user_id}", status_code=202, dependencies=[NO_QUERY])
async def erase_user(user_id: UserId, services: ServicesDep, caller: CallerDep) -> Erasure:
    """Forget the user: state, log and ids at once, copies in files by the deadline. Later events are a new user's."""
    erasure = await charged_calls.erase(services, caller, user_id)
    await audit(services, caller, "user.erase", await audited_user(services, caller, user_id))
    return erasure

"""The routes of users: state, log, properties, undo, merge, erasure."""

from typing import Annotated

from fastapi import Query, Response

from app.http import charged_calls
from app.http.access import audit, audited_user, needs
from app.http.dependencies import NO_QUERY, CallerDep, EventId, JsonBody, ServiceDep, ServicesDep, UserId
from app.http.openapi import errors, json_request
from app.http.routes.guarded_route import GuardedRouter
from app.schemas.fields import LogPageQuery
from app.schemas.properties import PostedUserProperties, UserProperties
from app.schemas.users import Erasure, Merged, MergeRequest, Undone, UserEvents, UserState
from app.serving.property_types import user_properties

router = GuardedRouter(tags=["users"], dependencies=[needs("users:admin")])

PROPERTIES = json_request(
    PostedUserProperties,
    {"set": {"properties": {"member": True, "region": "south"}}, "take away": {"properties": {"region": None}}},
)
MERGE = json_request(MergeRequest, {"a visitor who has logged in": {"from": "visitor-7"}})


@router.get("/v1/users/{user_id}", responses=errors(404), dependencies=[NO_QUERY])
async def get_user(user_id: UserId, service: ServiceDep) -> UserState:
    """Return the state that the user's recommendations are made from.

    A user without events is a 404. After an undo in a long log, the response is 503 `state_not_ready` for some seconds.
    """
    return await service.users.state(user_id)


@router.get("/v1/users/{user_id}/events", responses=errors(404), response_model=UserEvents)
async def get_user_events(
    user_id: UserId, query: Annotated[LogPageQuery, Query()], services: ServicesDep, caller: CallerDep
) -> Response:
    """List the user's log in pages, oldest first.

    A call costs 1 request, and 1 more for each 100 entries of `limit`. Archive files that have to be read cost 5 more
    each, together at most half of the key's requests per minute.
    """
    page = await charged_calls.user_events(services, caller, user_id, query)
    # The framework would traverse the page three more times, while all other requests wait.
    return Response(page.model_dump_json(), media_type="application/json")


@router.get("/v1/users/{user_id}/properties", dependencies=[NO_QUERY])
async def get_user_properties(user_id: UserId, service: ServiceDep, caller: CallerDep) -> UserProperties:
    """Return the properties of the user, who need not have any events.

    After a merge, these are the properties of both.
    """
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
    """Set properties of the user. Properties that you leave out keep their values, and `null` removes one.

    Properties of users have types of their own, separate from those of items. A merge keeps the user's values, and the
    visitor's values fill those that are missing. Erasing the user also removes the properties. A user about whom
    nothing is known counts as a new user.
    """
    return await charged_calls.put_user_properties(services, caller, user_id, body)


@router.delete("/v1/users/{user_id}/events/{event_id}", responses=errors(404), dependencies=[NO_QUERY])
async def undo_event(user_id: UserId, event_id: EventId, services: ServicesDep, caller: CallerDep) -> Undone:
    """Undo an event: the state is as if the event had never been posted.

    Undo and erasure cost 1 request, and 1 more for each 25 log entries that they read, and a merge for each 12 of them.
    None costs more than half of the key's requests per minute.
    """
    return await charged_calls.undo(services, caller, user_id, event_id)


@router.post(
    "/v1/users/{user_id}/merge",
    openapi_extra=MERGE,
    responses=errors(400, 408, 409, 413, 415),
    dependencies=[NO_QUERY],
)
async def merge_user(user_id: UserId, body: JsonBody, services: ServicesDep, caller: CallerDep) -> Merged:
    """Merge a visitor into this user.

    The visitor's events follow the user's, and later events of either id belong to the user.
    """
    merged = await charged_calls.merge(services, caller, user_id, body)
    # also if nothing changed: the call that did merge them may have failed before it was logged
    about = {"visitor": await audited_user(services, caller, merged.visitor), "changed": merged.changed}
    await audit(services, caller, "user.merge", await audited_user(services, caller, user_id), about)
    return merged


@router.delete("/v1/users/{user_id}", status_code=202, dependencies=[NO_QUERY])
async def erase_user(user_id: UserId, services: ServicesDep, caller: CallerDep) -> Erasure:
    """Erase the user.

    The state, the log and the ids are erased at once, copies in files by a deadline. Later events with this id belong
    to a new user.
    """
    erasure = await charged_calls.erase(services, caller, user_id)
    await audit(services, caller, "user.erase", await audited_user(services, caller, user_id))
    return erasure

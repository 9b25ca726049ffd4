"""What is known of a user."""

from typing import Annotated

from fastapi import APIRouter, Query

from app.access import needs
from app.dependencies import NO_QUERY, ServiceDep, UserId
from app.openapi import errors
from app.schemas import Erasure, UserEvents, UserEventsQuery, UserState

router = APIRouter(tags=["users"], dependencies=[needs("users:admin")])


@router.get("/v1/users/{user_id}", responses=errors(404), dependencies=[NO_QUERY])
async def get_user(user_id: UserId, service: ServiceDep) -> UserState:
    """The state that the user's recommendations are made from; 404 for a user without events."""
    return await service.users.state(user_id)


@router.get("/v1/users/{user_id}/events", responses=errors(404))
async def get_user_events(
    user_id: UserId, query: Annotated[UserEventsQuery, Query()], service: ServiceDep
) -> UserEvents:
    """The user's log, oldest first, in pages."""
    return await service.users.events(user_id, query.after, query.limit)


@router.delete("/v1/users/{user_id}", status_code=202, dependencies=[NO_QUERY])
async def erase_user(user_id: UserId, service: ServiceDep) -> Erasure:
    """Forget the user: state, log and ids at once, copies in files by the deadline. Later events are a new user's."""
    return await service.users.erase(user_id)

"""What is known of a user."""

from fastapi import APIRouter

from app.dependencies import NO_QUERY, ServiceDep, UserId
from app.openapi import errors
from app.schemas import UserState

router = APIRouter(tags=["users"])


@router.get("/v1/users/{user_id}", responses=errors(404), dependencies=[NO_QUERY])
async def get_user(user_id: UserId, service: ServiceDep) -> UserState:
    """The state that the user's recommendations are made from; 404 for a user without events."""
    return await service.users.state(user_id)

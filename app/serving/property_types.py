"""The types of a tenant's properties through the API."""

from pydantic import ValidationError

from app.errors import ErrorDetail, InvalidRequest, details_of
from app.schemas.properties import DeclaredTypes, HeldTypes
from storage.errors import PropertyRefused
from storage.protocol import UserStore

REFUSED = "the body declares no types of properties; nothing was declared"


async def declare_types(store: UserStore, tenant: str, body: object) -> HeldTypes:
    """Hold the types in the parsed body of ``PUT /v1/admin/properties``; return all types.

    raises  InvalidRequest  when it is not valid, a property has another type, or there would be too many
    """
    try:
        declared = DeclaredTypes.model_validate(body)
    except ValidationError as exc:
        raise InvalidRequest(REFUSED, details_of(exc)) from None
    try:
        await store.properties.declare(tenant, {"item": declared.items, "user": declared.users})
    except PropertyRefused as exc:
        raise InvalidRequest(REFUSED, [ErrorDetail(reason=str(exc))]) from None
    return await held_types(store, tenant)


async def held_types(store: UserStore, tenant: str) -> HeldTypes:
    """Return the types of all properties; StorageError."""
    types = await store.properties.types(tenant)
    return HeldTypes(items=dict(types["item"]), users=dict(types["user"]))

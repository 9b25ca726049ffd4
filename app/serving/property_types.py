"""The types of a tenant's properties, and the properties of its users, through the API."""

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from app.errors import ErrorDetail, InvalidRequest, details_of
from app.schemas.properties import (
    DeclaredTypes,
    HeldTypes,
    PostedUserProperties,
    TypesSoFar,
    UserProperties,
    refusal,
    shown,
)
from storage.errors import PropertyRefused
from storage.protocol import UserStore
from storage.records import PropertyValue

NO_PROPERTIES = "the body has no properties of a user; nothing was changed"
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


async def put_user_properties(store: UserStore, tenant: str, user_id: str, body: object) -> UserProperties:
    """Set the properties in the parsed body of ``PUT /v1/users/{user_id}/properties``; return all that the user has.

    raises  InvalidRequest  when it is not valid
            StorageError    when the store did not take it; sending it again is safe
    """
    types: TypesSoFar = dict((await store.properties.types(tenant))["user"])
    try:
        posted = PostedUserProperties.model_validate(body, context={"types": types})
    except ValidationError as exc:
        raise InvalidRequest(NO_PROPERTIES, details_of(exc)) from None
    try:
        await store.properties.put_of_user(tenant, user_id, posted.properties)
    except PropertyRefused as exc:
        raise InvalidRequest(NO_PROPERTIES, [refusal_detail(exc, [posted.properties])]) from None
    return await user_properties(store, tenant, user_id)


async def user_properties(store: UserStore, tenant: str, user_id: str) -> UserProperties:
    """Return the user's properties; StorageError."""
    properties = await store.properties.of_user(tenant, user_id)
    return UserProperties(user_id=user_id, properties={name: shown(value) for name, value in properties.items()})


def refusal_detail(refused: PropertyRefused, given: Sequence[Mapping[str, PropertyValue | None]]) -> ErrorDetail:
    """Return which of the given values was refused: another request has decided on its type just now."""
    value = next(value for value in (one.get(refused.name) for one in given) if value is not None)
    return ErrorDetail(field="properties", reason=refusal(refused.name, refused.given, shown(value), refused.held))

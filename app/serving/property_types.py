"""The API of property types, and of the properties of users."""

from collections.abc import Iterable, Mapping, Sequence, Set

from app.errors import MAX_DETAILS, ErrorDetail, InvalidRequest, PropertyInUse, validate
from app.recommendation.scenarios import properties_of
from app.schemas.properties import (
    DeclaredTypes,
    HeldTypes,
    PostedUserProperties,
    TypesSoFar,
    UserProperties,
    refusal,
    shown,
)
from app.schemas.scenarios import ScenarioVersion
from app.serving.scenario_registry import ScenarioRegistry
from storage.errors import PropertyRefused
from storage.protocol import UserStore
from storage.records import HeldProperties, PropertyOwner, PropertyValue, TypeChanges

NO_PROPERTIES = "the body has no user properties; nothing was changed"
REFUSED = "the body declares no property types; nothing was declared"


async def declare_types(store: UserStore, scenarios: ScenarioRegistry, tenant: str, body: object) -> HeldProperties:
    """Declare the types in the parsed body of ``PUT /v1/admin/properties``. Return all declared types.

    raises  InvalidRequest  when the body is not valid, a property has another type, or there would be too many
            PropertyInUse   when a property to be removed is used by a scenario
            StorageError    when the store did not accept the change; resending is safe
    """
    declared = validate(DeclaredTypes, body, REFUSED)
    changes: TypeChanges = {"item": declared.items, "user": declared.users}
    gone = {(owner, name) for owner, types in changes.items() for name, type_ in types.items() if type_ is None}
    if gone:
        _require_unused(gone, await scenarios.scenarios())
    try:
        await store.properties.declare(tenant, changes)
    except PropertyRefused as exc:
        hint = f"; pass null to remove {exc.name} with all its values" if exc.held else ""
        raise InvalidRequest(REFUSED, [ErrorDetail(reason=f"{exc}{hint}")]) from None
    return await store.properties.held(tenant)


def _require_unused(gone: Set[tuple[PropertyOwner, str]], scenarios: Iterable[ScenarioVersion]) -> None:
    needed = [
        ErrorDetail(field=f"{owner}s", reason=f"scenario {one.name} uses {name}; change the scenario first")
        for one in scenarios
        if one.settings is not None
        for owner, name in sorted(properties_of(one.settings) & gone)
    ]
    if needed:
        raise PropertyInUse("a scenario uses the property to remove; nothing changed", needed[:MAX_DETAILS])


def shown_types(held: HeldProperties) -> HeldTypes:
    """Return the types of all properties."""
    return HeldTypes(items=dict(held.types["item"]), users=dict(held.types["user"]))


async def put_user_properties(store: UserStore, tenant: str, user_id: str, body: object) -> UserProperties:
    """Set the properties in the parsed body of ``PUT /v1/users/{user_id}/properties``; return all of the user's.

    raises  InvalidRequest  when the body is not valid
            StorageError    when the store did not accept the change; resending is safe
    """
    types: TypesSoFar = dict((await store.properties.held(tenant)).types["user"])
    posted = validate(PostedUserProperties, body, NO_PROPERTIES, {"types": types})
    try:
        await store.properties.put_of_user(tenant, user_id, posted.properties)
    except PropertyRefused as exc:
        raise InvalidRequest(NO_PROPERTIES, [refusal_detail(exc, [posted.properties])]) from None
    return await user_properties(store, tenant, user_id)


async def user_properties(store: UserStore, tenant: str, user_id: str) -> UserProperties:
    """Return the user's properties; raise StorageError."""
    properties = await store.properties.of_user(tenant, user_id)
    return UserProperties(user_id=user_id, properties={name: shown(value) for name, value in properties.items()})


def refusal_detail(refused: PropertyRefused, given: Sequence[Mapping[str, PropertyValue | None]]) -> ErrorDetail:
    """Return which of the given values was rejected because another request has just set the property's type."""
    value = next(value for value in (one.get(refused.name) for one in given) if value is not None)
    return ErrorDetail(field="properties", reason=refusal(refused.name, refused.given, shown(value), refused.held))

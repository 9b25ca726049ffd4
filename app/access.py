"""Who may call a route: each says which scope it needs, and none reaches a tenant's data without having said so."""

from collections.abc import Sequence

from fastapi import Depends, Request
from fastapi.params import Depends as Dependency
from starlette.datastructures import Headers
from starlette.types import Scope as HTTPScope

from app.errors import Forbidden, Unauthenticated
from app.http_state import Services
from app.keys import Key, Keyring, Scope


class Needs:
    """A dependency: the caller has a key with this scope; afterwards the request works for that key's tenant.

    Where the service has no keys it is reachable from this machine alone, and everybody works for its only tenant.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    async def __call__(self, request: Request) -> None:
        """raises  Unauthenticated, Forbidden, TooManyRequests"""
        request.state.tenant = await tenant_of(request.state.services, request.scope, self.scope)


async def tenant_of(services: Services, request: HTTPScope, needed: Scope) -> str:
    """Whom a request that needs the scope works for, counted among those of its key.

    raises  Unauthenticated, Forbidden, TooManyRequests
    """
    if services.keyring is None or (needed == "metrics:read" and services.settings.open_metrics):
        return services.settings.tenant
    headers = Headers(scope=request)
    key = _key_of(services.keyring, headers.getlist("authorization"))
    if needed not in key.scopes:
        raise Forbidden(f"this call needs a key with the scope {needed}")
    if key.origins and headers.get("origin") not in key.origins:
        raise Forbidden("this key is for pages of other origins")
    await services.rates.count(key)
    return key.tenant


class Open:
    """A dependency: everybody may call this, as it says nothing about tenants."""

    async def __call__(self) -> None: ...


def needs(scope: Scope) -> Dependency:
    """What a router or route declares among its dependencies."""
    dependency: Dependency = Depends(Needs(scope))
    return dependency


OPEN: Dependency = Depends(Open())


def declared(dependencies: Sequence[Dependency]) -> list[Scope | None]:
    """The scopes that a route's dependencies declare, None for OPEN; one for every route that is right."""
    found = [dependency.dependency for dependency in dependencies]
    return [one.scope if isinstance(one, Needs) else None for one in found if isinstance(one, Needs | Open)]


def _key_of(keyring: Keyring, headers: list[str]) -> Key:
    """One answer for no key, half a key and a wrong key: it says nothing about those that exist."""
    scheme, _, text = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
    key = keyring.find(text.strip()) if scheme.lower() == "bearer" else None
    if key is None:
        raise Unauthenticated("this call needs a valid key: Authorization: Bearer KEY")
    return key

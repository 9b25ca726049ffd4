"""Access control: every route declares the scope that it needs, and none reaches a tenant's data without one."""

from collections.abc import Sequence
from typing import NamedTuple

from fastapi import Depends, Request
from fastapi.params import Depends as Dependency
from starlette.datastructures import Headers
from starlette.types import Scope as HTTPScope

from app.errors import Forbidden, TooCostly, Unauthenticated
from app.http.auth.keys import Key, Keyring, Scope
from app.http.services import Services
from app.recommendation.batching import Requester, never_disconnected


class Caller(NamedTuple):
    """Who sends a request: a tenant, by one of its keys; without keys whoever reaches the service."""

    tenant: str
    key: Key | None
    requester: Requester


class RequireScope:
    """A dependency that requires a key with this scope, and lets the request work for that key's tenant.

    A service without keys is reachable from its own machine only, and every request works for its only tenant.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    async def __call__(self, request: Request) -> None:
        """Authenticate the request.

        raises  Unauthenticated, Forbidden, TooManyRequests
        """
        await authorise(request.state.services, request.scope, self.scope)


async def authorise(services: Services, request: HTTPScope, required: Scope) -> Caller:
    """Check the request's key for the scope, count it against the key's rate limit, and return whose it is.

    A request that passes several checks for the same scope is counted once; `request.state.caller` is whose it is.

    raises  Unauthenticated, Forbidden, TooManyRequests
    """
    state = request["state"]
    if state.get("authorised_for") != required:
        state["caller"] = await _caller_of(services, request, required)
        state["authorised_for"] = required
    caller: Caller = state["caller"]
    return caller


async def _caller_of(services: Services, request: HTTPScope, required: Scope) -> Caller:
    is_disconnected = request["state"].get("is_disconnected", never_disconnected)
    if services.keyring is None or (required == "metrics:read" and services.settings.open_metrics):
        return Caller(services.settings.tenant, None, Requester(is_disconnected))
    headers = Headers(scope=request)
    key = _key_of(services.keyring, headers.getlist("authorization"))
    if required not in key.scopes:
        raise Forbidden(f"this call needs a key with the scope {required}")
    if key.is_public and headers.get("origin") not in key.origins:
        raise Forbidden("this key is for pages of other origins")
    await services.rate_limiter.count(key)
    return Caller(key.tenant, key, Requester(is_disconnected, key.id))


async def charge(services: Services, caller: Caller, cost: int) -> None:
    """Count what a call costs, in plain requests, against the rate of its key.

    raises  TooCostly, TooManyRequests
    """
    if caller.key is None:
        return
    rate = caller.key.requests_per_minute
    if rate is not None and cost > rate:
        raise TooCostly(f"this call costs {cost:,} plain requests, and this key has {rate:,} a minute")
    await services.rate_limiter.count(caller.key, cost - 1)  # one was counted with the call


class NoScope:
    """A dependency that requires no key, for routes that reveal nothing about tenants."""

    async def __call__(self) -> None:
        """Let every request pass."""


def needs(scope: Scope) -> Dependency:
    """Return the dependency that requires a key with the scope."""
    dependency: Dependency = Depends(RequireScope(scope))
    return dependency


NO_SCOPE: Dependency = Depends(NoScope())


def declared_scopes(dependencies: Sequence[Dependency]) -> list[Scope | None]:
    """Return the scopes that a route's dependencies declare, None for NO_SCOPE. A route declares exactly one."""
    declarations = [one.dependency for one in dependencies if isinstance(one.dependency, RequireScope | NoScope)]
    return [one.scope if isinstance(one, RequireScope) else None for one in declarations]


def _key_of(keyring: Keyring, headers: list[str]) -> Key:
    """Return the key of the request. No key and a wrong key get the same error, which reveals no existing key."""
    scheme, _, text = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
    key = keyring.find(text.strip()) if scheme.lower() == "bearer" else None
    if key is None:
        raise Unauthenticated("this call needs a valid key: Authorization: Bearer KEY")
    return key

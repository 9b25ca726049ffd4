"""Access control: every route declares the scope that it needs, and no route reaches a tenant's data without one.

The actions of operators are recorded in the tenant's audit log.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import Depends, Request
from fastapi.params import Depends as Dependency
from starlette.datastructures import Headers
from starlette.types import Scope as HTTPScope

from app.errors import Forbidden, TooCostly, Unauthenticated
from app.http.auth.keys import Key, Keyring, Scope
from app.http.services import Services
from app.recommendation.batching import Requester, never_disconnected
from storage.items.audit import AuditEntry, user_mark


class Caller(NamedTuple):
    """The sender of a request: a tenant and one of its keys. Without keys, anyone who can reach the service."""

    tenant: str
    key: Key | None
    requester: Requester

    @property
    def name(self) -> str:
        """The key's id, and its note if it has one; empty without keys."""
        if self.key is None:
            return ""
        return f"{self.key.id} ({self.key.note})" if self.key.note else self.key.id

    @property
    def audience(self) -> str:
        """The audience whose sealed states the caller may open."""
        return "" if self.key is None else self.key.audience


class RequireScope:
    """A dependency that requires a key with this scope; the request then acts for the key's tenant.

    Without keys, every request acts for the service's only tenant. Such a service listens only on its own machine,
    unless it is started with --insecure.

    scope  None for routes that need no key, because they reveal nothing about tenants
    """

    def __init__(self, scope: Scope | None) -> None:
        self.scope = scope

    async def __call__(self, request: Request) -> None:
        """Authenticate the request.

        raises  Unauthenticated, Forbidden, TooManyRequests
        """
        if self.scope is not None:
            await authorise(request.state.services, request.scope, self.scope)


async def authorise(services: Services, request: HTTPScope, required: Scope) -> Caller:
    """Check that the request's key has the scope, count the request against its rate limit, and return the caller.

    A request that is checked several times for the same scope is counted once. `request.state.caller` is the caller.

    raises  Unauthenticated, Forbidden, TooManyRequests
    """
    state = request["state"]
    if state.get("authorised_for") != required:
        state["caller"] = await _caller_of(services, request, required)
        state["authorised_for"] = required
    caller: Caller = state["caller"]
    return caller


async def _caller_of(services: Services, request: HTTPScope, required: Scope) -> Caller:
    if services.keyring is None or (required == "metrics:read" and services.settings.open_metrics):
        return _caller(services, None, request)
    key = verified_key(services, request)
    if key is None:  # the same message for a missing and a wrong key reveals no existing key
        raise Unauthenticated("this call needs a valid API key; send Authorization: Bearer KEY")
    caller = _caller(services, key, request)
    require_scope(caller, required)
    if key.is_public and Headers(scope=request).get("origin") not in key.origins:
        raise Forbidden("this key does not allow this web origin")
    await services.rate_limiter.count(key)
    return caller


def uncounted_caller(services: Services, request: HTTPScope, required: Scope) -> Caller | None:
    """Return the caller if its key has the scope and no web origins, but do not count the request; else None."""
    if services.keyring is None:
        return _caller(services, None, request)
    key = verified_key(services, request)
    if key is None or key.is_public or not key.allows(required):
        return None
    return _caller(services, key, request)


def verified_key(services: Services, request: HTTPScope) -> Key | None:
    """Return the valid key in the request's header; None if there is none, or if the service has no keys.

    The key is looked up once per request, and kept in the request's state.
    """
    state = request["state"]
    if "key" not in state:
        state["key"] = None if services.keyring is None else _key_of(services.keyring, Headers(scope=request))
    key: Key | None = state["key"]
    return key


def require_scope(caller: Caller, required: Scope) -> None:
    """Raise Forbidden if the caller's key lacks the scope."""
    if caller.key is not None and not caller.key.allows(required):
        raise Forbidden(f"this call needs a key with the scope {required}")


async def charge(services: Services, caller: Caller, cost: int, counted: int = 1) -> None:
    """Count the cost of a call, in plain requests, against the rate limit of its key.

    counted  the part of the cost that was already counted; `authorise` counts 1 for every call

    raises  TooCostly, TooManyRequests
    """
    if caller.key is None:
        return
    rate = caller.key.requests_per_minute
    if rate is not None and cost > rate:
        raise TooCostly(
            f"this call costs {cost:,} plain requests, but the rate limit of this key is {rate:,} per minute"
        )
    await services.rate_limiter.count(caller.key, cost - counted)


async def charge_operation(services: Services, caller: Caller, cost: int, counted: int = 1) -> None:
    """Count the cost of an operation, at most half of the key's requests per minute, so that it is never too costly.

    counted  as for `charge`
    raises   TooManyRequests
    """
    limit = operation_limit(caller)
    if caller.key is not None and limit is not None:
        await services.rate_limiter.count(caller.key, min(cost, limit) - min(counted, limit))


def operation_limit(caller: Caller) -> int | None:
    """Return the largest cost of an operation, in plain requests; None if the caller has no rate limit."""
    if caller.key is None or caller.key.requests_per_minute is None:
        return None
    return max(1, caller.key.requests_per_minute // 2)


async def audit(
    services: Services, caller: Caller, action: str, subject: str = "", details: Mapping[str, Any] | None = None
) -> None:
    """Append the caller's action to the tenant's audit log; raises StorageError.

    action, subject, details  fields of `AuditEntry`; a user is named by `audited_user`
    """
    actor = "" if caller.key is None else caller.key.id
    entry = AuditEntry.now(actor, action, subject, details)
    await services.by_tenant[caller.tenant].store.audit.append(caller.tenant, [entry])


async def audited_user(services: Services, caller: Caller, user_id: str) -> str:
    """Return the keyed hash that replaces the user's id in the audit log; raises StorageError."""
    return user_mark(await services.by_tenant[caller.tenant].store.secret(), caller.tenant, user_id)


def needs(scope: Scope | None) -> Dependency:
    """Return the dependency that requires a key with the scope, or none."""
    dependency: Dependency = Depends(RequireScope(scope))
    return dependency


NO_SCOPE = needs(None)


def declared_scopes(dependencies: Sequence[Dependency]) -> list[Scope | None]:
    """Return the scopes that a route's dependencies declare, with None for NO_SCOPE. A route declares exactly one."""
    return [one.dependency.scope for one in dependencies if isinstance(one.dependency, RequireScope)]


def _caller(services: Services, key: Key | None, request: HTTPScope) -> Caller:
    is_disconnected = request["state"].get("is_disconnected", never_disconnected)
    if key is None:
        return Caller(services.settings.tenant, None, Requester(is_disconnected))
    return Caller(key.tenant, key, Requester(is_disconnected, key.id))


def _key_of(keyring: Keyring, headers: Headers) -> Key | None:
    values = headers.getlist("authorization")
    scheme, _, text = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    return keyring.find(text.strip()) if scheme.lower() == "bearer" else None

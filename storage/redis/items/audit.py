"""Audit logs of tenants in Redis, next to the tenant's items."""

from collections.abc import Sequence

from typing_extensions import override

from storage.items.audit import AuditEntry, AuditLog, KeysSeen, NumberedEntry
from storage.redis.items.properties import register_tenant
from storage.redis.scripts.audit import APPEND_AUDIT
from storage.redis.session.redis_session import RedisSession


class RedisAudit(AuditLog):
    """The audit logs of all tenants: one list per tenant, in which an entry's position is its number."""

    def __init__(self, session: RedisSession) -> None:
        self._session = session

    @override
    async def append(self, tenant: str, entries: Sequence[AuditEntry], keys: KeysSeen | None = None) -> bool:
        await register_tenant(self._session, tenant)
        of_tenant = self._session.keys.items(tenant)
        noted = ("0", "", "") if keys is None else ("1", *keys)
        args = [*noted, *(entry.to_json() for entry in entries)]
        names = [of_tenant.audit, of_tenant.keys_seen]
        return bool(await self._session.write(APPEND_AUDIT, names, args, wait_for_replicas=True))

    @override
    async def entries(self, tenant: str, *, after: int = 0, limit: int = 100) -> list[NumberedEntry]:
        await self._session.require_open()
        key = self._session.keys.items(tenant).audit
        found = await self._session.call("LRANGE", key, after, after + limit - 1)
        return [NumberedEntry(number, AuditEntry.from_json(text)) for number, text in enumerate(found, after + 1)]

    @override
    async def keys_seen(self, tenant: str) -> str:
        await self._session.require_open()
        found = await self._session.call("GET", self._session.keys.items(tenant).keys_seen)
        return (found or b"").decode()

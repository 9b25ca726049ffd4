"""Versions of tenants' scenarios in Redis, next to the tenant's items."""

import secrets

from typing_extensions import override

from storage.protocol import ScenarioStore
from storage.records import MAX_SCENARIO_VERSIONS, Scenarios
from storage.redis.connections.nodes import Argument
from storage.redis.items.properties import register_tenant
from storage.redis.scripts.scenarios import ADD_SCENARIO_VERSION
from storage.redis.session.redis_session import RedisSession


class RedisScenarios(ScenarioStore):
    """The scenarios of all tenants. A tenant's scenarios share a slot, so each step is one script."""

    def __init__(self, session: RedisSession) -> None:
        self._session = session

    @override
    async def revision(self, tenant: str) -> str:
        await self._session.require_open()
        found = await self._session.call("GET", self._session.keys.items(tenant).scenarios_revision)
        return (found or b"").decode()

    @override
    async def scenarios(self, tenant: str) -> Scenarios:
        revision = await self.revision(tenant)  # first, so that versions that are newer are read again
        found = await self._session.call("HGETALL", self._session.keys.items(tenant).scenarios)
        return Scenarios(revision, {name.decode(): version.decode() for name, version in sorted(found.items())})

    @override
    async def versions(self, tenant: str, name: str) -> list[str]:
        await self._session.require_open()
        found = await self._session.call("LRANGE", self._session.keys.items(tenant).scenario(name), 0, -1)
        return [version.decode() for version in found]

    @override
    async def add(self, tenant: str, name: str, text: str, *, believed: str, dropped: str | None = None) -> bool:
        await register_tenant(self._session, tenant)
        keys = self._session.keys.items(tenant)
        names = [keys.scenarios_revision, keys.scenarios, keys.scenario(name)]
        args: list[Argument] = [believed, secrets.token_hex(8), MAX_SCENARIO_VERSIONS, name, text]
        if dropped is not None:
            names.append(keys.scenario(dropped))
            args.append(dropped)
        return bool(await self._session.write(ADD_SCENARIO_VERSION, names, args, wait_for_replicas=True))

"""Erasing a tenant, or all of its users."""

import asyncio
from collections.abc import Callable, Collection

from storage.maintenance.backup import complete_logs
from storage.protocol import UserStore

ERASED_AT_ONCE = 64  # users; in Redis, those of one partition share copies of its log


async def erase_tenant(store: UserStore, tenant: str, on_progress: Callable[[int], None] = lambda _: None) -> int:
    """Erase whatever the store has of the tenant, except its audit log; return how many users. It may be repeated."""
    erased = await erase_users(store, tenant, on_progress)
    await store.erase_tenant(tenant)
    return erased


async def erase_users(store: UserStore, tenant: str, on_progress: Callable[[int], None] = lambda _: None) -> int:
    """Erase all users of the tenant, with events or only with properties; return how many. It may be repeated."""
    erased = 0
    async for entries in complete_logs(store):
        with_log = sorted({entry.record.user_id for owner, entry in entries if owner == tenant})
        erased += await _erase(store, tenant, with_log)
        on_progress(erased)
    with_properties = [user_id async for owner, user_id, _ in store.properties.of_users() if owner == tenant]
    return erased + await _erase(store, tenant, with_properties)


async def _erase(store: UserStore, tenant: str, user_ids: Collection[str]) -> int:
    waiting = [*user_ids]
    for begin in range(0, len(waiting), ERASED_AT_ONCE):
        await asyncio.gather(*(store.erase(tenant, user_id) for user_id in waiting[begin : begin + ERASED_AT_ONCE]))
    return len(waiting)

"""Erasing all users of a tenant."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection

from storage.protocol import UserStore
from storage.state.event import digest

ERASED_AT_ONCE = 64  # users; in Redis, those of one partition share copies of its log


async def erase_users(store: UserStore, tenant: str, on_progress: Callable[[int], None] = lambda _: None) -> int:
    """Erase all users of the tenant, with events or only with properties; return how many. It may be repeated."""
    erased = 0
    async for user_ids in _users_with_log(store, tenant):
        erased += await _erase(store, tenant, user_ids)
        on_progress(erased)
    with_properties = [user_id async for owner, user_id, _ in store.properties.of_users() if owner == tenant]
    return erased + await _erase(store, tenant, with_properties)


async def _users_with_log(store: UserStore, tenant: str) -> AsyncIterator[list[str]]:
    user_ids: set[str] = set()
    async for page in store.log():
        if page.starts_over:
            user_ids.clear()
        erased = {user for owner, user in page.erased if owner == tenant}
        user_ids = {user_id for user_id in user_ids if digest(user_id) not in erased} if erased else user_ids
        user_ids.update(entry.record.user_id for owner, entry in page.entries if owner == tenant)
        if page.is_complete:
            yield sorted(user_ids)
            user_ids = set()


async def _erase(store: UserStore, tenant: str, user_ids: Collection[str]) -> int:
    waiting = [*user_ids]
    for begin in range(0, len(waiting), ERASED_AT_ONCE):
        await asyncio.gather(*(store.erase(tenant, user_id) for user_id in waiting[begin : begin + ERASED_AT_ONCE]))
    return len(waiting)

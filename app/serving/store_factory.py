"""Opens the store from the settings, for the service and for commands."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from app.settings import StoreSettings
from storage.errors import StorageError, StoreUnused
from storage.items.audit import COMMAND_LINE, AuditEntry
from storage.protocol import UserStore
from storage.redis.connections.nodes import ReplicaAcks
from storage.redis.store import RedisOptions, RedisStore
from storage.sqlite.database import FILE_NAME
from storage.sqlite.store import SQLiteStore
from storage.state.generation import Generation

logger = logging.getLogger(__name__)


async def open_store(
    settings: StoreSettings, *generations: Generation, is_new: bool = False, must_exist: bool = False
) -> UserStore:
    """Open the store from the settings. An unreachable Redis is not an error unless it must exist.

    is_new      whether the store may lack data that an archive has
    must_exist  whether the store must be reachable, and have been used before

    raises  StorageError, ValueError  when the store cannot be used in its current condition
    """
    if must_exist and settings.redis_url is None and not (settings.data_dir / FILE_NAME).exists():
        raise StoreUnused(
            f"'{settings.data_dir}' has no users; pass the same --data-dir or --redis-url as to 'lisarec serve'"
        )
    ttl_days = settings.state_ttl_days
    if settings.redis_url is None:
        store = await SQLiteStore.open(
            settings.data_dir,
            generations,
            tenant=settings.tenant,
            state_ttl_days=ttl_days,
            archive_dir=settings.archive,
        )
        try:
            if generations and not is_new:
                await store.require_whole()
        except StorageError:
            await store.close()
            raise
        return store
    return await RedisStore.open(
        settings.redis_url_with_password,
        generations,
        tenant=settings.tenant,
        prefix=settings.redis_prefix,
        archive_dir=settings.archive,
        options=RedisOptions(
            must_exist=must_exist,
            state_ttl_days=ttl_days,
            acks=ReplicaAcks(
                settings.redis_replicas, settings.redis_replicas_timeout_s, synced=settings.redis_replicas_synced
            ),
        ),
    )


@asynccontextmanager
async def opened_store(
    settings: StoreSettings, *generations: Generation, is_new: bool = False
) -> AsyncIterator[UserStore]:
    """Open the store of the settings, which must exist unless it is new, and close it afterwards."""
    store = await open_store(settings, *generations, is_new=is_new, must_exist=not is_new)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def opened_tenant(
    settings: StoreSettings, *generations: Generation, may_be_new: bool = False
) -> AsyncIterator[UserStore]:
    """Open the store as `opened_store` does, unless only other tenants are in it: the name may be misspelt.

    may_be_new  whether that is only a warning

    raises  StorageError
    """
    async with opened_store(settings, *generations) as store:
        tenants = await store.tenants()
        if tenants and settings.tenant not in tenants and not await store.generations.known():
            reason = (
                f"no service has served tenant {settings.tenant!r} from this store, only others: "
                f"{', '.join(sorted(tenants))}; check LISAREC_TENANT"
            )
            if not may_be_new:
                raise StorageError(reason)
            logger.warning("%s", reason)
        yield store


async def audit_command(
    store: UserStore, settings: StoreSettings, action: str, subject: str = "", **details: Any
) -> None:
    """Record an action of the command line in the tenant's audit log."""
    entry = AuditEntry.now(COMMAND_LINE, action, subject, details)
    await store.audit.append(settings.tenant, [entry])

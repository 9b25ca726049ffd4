"""Backing up a store's log, restoring and repairing it, erasing a tenant, and reading an audit log."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from app.serving import empty_model
from app.serving.model_locations import load_model
from app.serving.served_generation import generation_of
from app.serving.store_factory import audit_command, opened_store, opened_tenant
from app.serving.switcher import LIVE_FOR_S
from app.settings import StoreSettings
from storage.errors import StorageError
from storage.folders.folder import add_file
from storage.folders.place import ObjectUrl, Place, open_folder
from storage.items.audit import NumberedEntry, user_mark
from storage.maintenance import backup as storage_backup
from storage.maintenance import tenants as tenant_erasure
from storage.records import NamedGeneration
from storage.state.generation import Generation

AUDIT_PAGE = 500

logger = logging.getLogger(__name__)


async def backup(settings: StoreSettings, out: Place, on_progress: Callable[[int], None]) -> int:
    """Write the store's log to a file, and return its number of entries.

    raises  StorageError, ValueError, OSError  also if no service has served the tenant, whose audit log has an entry
    """
    if isinstance(out, ObjectUrl):
        return await _backup_to_bucket(settings, out, on_progress)
    if out.exists():
        raise ValueError(f"'{out}' exists already; choose another name with --out")
    async with opened_tenant(settings) as store:
        await store.require_whole()
        entries = await storage_backup.backup(store, out, on_progress)
        try:
            await audit_command(store, settings, "export.backup", entries=entries)
        except BaseException:
            out.unlink()
            raise
        return entries


async def _backup_to_bucket(settings: StoreSettings, out: ObjectUrl, on_progress: Callable[[int], None]) -> int:
    """Write the file on this machine first, because the store and an upload would slow each other down."""
    folder = open_folder(out.parent, settings.cache_dir)
    if await asyncio.to_thread(folder.has, out.name):
        raise ValueError(f"'{out}' exists already; choose another name with --out")
    settings.cache_dir.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=settings.cache_dir, prefix="backup-") as directory:
        file = Path(directory) / out.name
        entries = await backup(settings, file, on_progress)
        await asyncio.to_thread(add_file, folder, out.name, file, is_new=True)
    return entries


async def restore(
    settings: StoreSettings,
    file: Place,
    models: Mapping[str, Place],
    *,
    resume: bool,
    on_progress: Callable[[int], None],
) -> int:
    """Fill the store with a backup, fold each tenant's events for its model, and return the number of entries.

    Events of a tenant without a model are folded as by a service without one.

    raises  ArtifactError, StorageError, ValueError, OSError
    """
    if isinstance(file, ObjectUrl):
        folder = open_folder(file.parent, settings.cache_dir)
        copy = await asyncio.to_thread(folder.path, file.name)
        entries = await restore(settings, copy, models, resume=resume, on_progress=on_progress)
        copy.unlink()
        return entries
    generations = defaultdict[str, Generation](lambda: generation_of(empty_model.artifact()))
    names = defaultdict[str, str](lambda: empty_model.NAME)
    for tenant, place in models.items():
        loaded = await asyncio.to_thread(load_model, place, settings)
        generations[tenant], names[tenant] = generation_of(loaded), loaded.name
    async with opened_store(settings, generations[settings.tenant], is_new=True) as store:
        entries = await storage_backup.restore(store, file, generations, resume=resume, on_progress=on_progress)
    for tenant, generation in generations.items():
        async with opened_store(settings.model_copy(update={"tenant": tenant})) as store:
            named = NamedGeneration(names[tenant], generation.tag)
            await store.generations.announce(named, 0)  # so that it can be dropped, even if nobody ever serves it
    for tenant in sorted(generations.keys() - models.keys()):
        logger.warning(
            "tenant %s is restored without a model: run 'LISAREC_TENANT=%s lisarec rebuild --model DIR' on this store, "
            "or restore with --tenant %s=DIR",
            *[tenant] * 3,
        )
    return entries


async def repair(settings: StoreSettings, *, accept_loss: bool) -> int:
    """Rebuild damaged data from the log and the archive. Return the number of repaired users.

    raises  StorageError, ValueError
    """
    is_new = accept_loss and settings.redis_url is not None  # it may have come back empty
    async with opened_store(settings, is_new=is_new) as store:
        return await store.repair(accept_loss=accept_loss)


async def erase_tenant(settings: StoreSettings, on_progress: Callable[[int], None]) -> int:
    """Erase the tenant, except its audit log, and return how many users it had.

    The audit log gets an entry before and after, so that it also shows an interrupted erasure.

    raises  StorageError, ValueError  when a process serves the tenant, or the store fails
    """
    async with opened_tenant(settings) as store:
        if any(one.is_live for one in await store.generations.known()):
            raise StorageError(
                f"tenant {settings.tenant!r} is or was served within the last {LIVE_FOR_S:.0f} s; "
                "restart the services without it, and try again after that time"
            )
        await audit_command(store, settings, "tenant.erase")
        erased = await tenant_erasure.erase_tenant(store, settings.tenant, on_progress)
        await audit_command(store, settings, "tenant.erased", users=erased)
        return erased


async def audit_log(settings: StoreSettings, user_id: str | None = None) -> AsyncIterator[NumberedEntry]:
    """Iterate over the tenant's audit log, or over its entries about one user.

    raises  StorageError, ValueError
    """
    async with opened_tenant(settings) as store:
        mark = None if user_id is None else user_mark(await store.secret(), settings.tenant, user_id)
        after = 0
        while page := await store.audit.entries(settings.tenant, after=after, limit=AUDIT_PAGE):
            for one in page:
                if mark is None or mark in (one.entry.subject, *one.entry.details.values()):
                    yield one
            after = page[-1].number

"""Backing up a store's log, restoring it into an empty store, and repairing a store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from app.serving.model_places import load_model
from app.serving.served_generation import generation_of
from app.serving.store_factory import opened_store
from app.settings import StoreSettings
from storage.folders.place import Place
from storage.maintenance import backup as storage_backup


async def backup(settings: StoreSettings, out: Path, on_progress: Callable[[int], None]) -> int:
    """Write the store's log to a file, and return its number of entries.

    raises  StorageError, ValueError, OSError
    """
    if out.exists():
        raise ValueError(f"'{out}' exists already; choose another name with --out")
    async with opened_store(settings) as store:
        return await storage_backup.backup(store, out, on_progress)


async def restore(
    settings: StoreSettings, file: Path, model: Place, *, resume: bool, on_progress: Callable[[int], None]
) -> int:
    """Fill the store with a back-up, fold it for the model, and return its number of entries.

    raises  ArtifactError, StorageError, ValueError
    """
    loaded = await asyncio.to_thread(load_model, model, settings.cache_dir)
    async with opened_store(settings, generation_of(loaded), is_new=True) as store:
        return await storage_backup.restore(store, file, resume=resume, on_progress=on_progress)


async def repair(settings: StoreSettings, *, accept_loss: bool) -> int:
    """Make again what is damaged, from log and archive, and return for how many users.

    raises  StorageError, ValueError
    """
    async with opened_store(settings) as store:
        return await store.repair(accept_loss=accept_loss)

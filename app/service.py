"""What one running process holds, and how it comes up and goes down."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

from app.catalogue import Catalogue
from app.ingest import Ingest
from app.metrics import Metrics
from app.recommend import Recommender
from app.schemas import ServedModel
from app.settings import Settings
from app.users import Users
from model.artifact import Artifact
from model.engine import Engine
from storage.redis import RedisStore
from storage.sqlite import SQLiteStore
from storage.state import Generation
from storage.store import UserStore


@dataclass(slots=True)
class Service:
    """The parts that endpoints use. `draining` is the only thing that changes."""

    store: UserStore
    catalogue: Catalogue
    ingest: Ingest
    recommender: Recommender
    users: Users
    served_model: ServedModel
    metrics: Metrics
    max_body_bytes: int
    body_timeout_s: float
    draining: bool = False


@asynccontextmanager
async def running(settings: Settings, artifact: Artifact, metrics: Metrics) -> AsyncIterator[Service]:
    """Open the store and the engine; afterwards finish what was accepted and close them."""
    torch.set_num_threads(1)  # processes share the cores, one request does not
    generation = generation_of(artifact)
    catalogue = Catalogue(artifact.items)
    engine = Engine(artifact, settings.device)
    store = await open_store(settings, generation)
    tenant, name = settings.tenant, artifact.name
    # One thread: the engine is called for one batch at a time, off the event loop.
    with ThreadPoolExecutor(1, thread_name_prefix="engine") as engine_thread:
        try:
            yield Service(
                store=store,
                catalogue=catalogue,
                ingest=Ingest(store, tenant, metrics),
                recommender=Recommender(name, generation, catalogue, engine, engine_thread, store, tenant, metrics),
                users=Users(name, generation, catalogue, store, tenant),
                served_model=_served_model(settings, artifact),
                metrics=metrics,
                max_body_bytes=settings.max_body_bytes,
                body_timeout_s=settings.body_timeout_s,
            )
        finally:
            await store.close()


async def open_store(settings: Settings, generation: Generation) -> UserStore:
    """The store that the settings ask for. A Redis that is not there yet is no error: it is waited for while serving.

    raises  StorageError, ValueError  when the store cannot be used as it is
    """
    if settings.redis_url is None:
        return await SQLiteStore.open(settings.data_dir, [generation])
    return await RedisStore.open(
        settings.redis_url_with_password, [generation], prefix=settings.redis_prefix, archive_dir=settings.archive_dir
    )


def generation_of(artifact: Artifact) -> Generation:
    """How the artifact's generation folds events."""
    shape = artifact.config.model
    return Generation(
        tag=bytes.fromhex(artifact.tag),
        decay_rates=shape.decay_rates,
        codewords=shape.history_codewords,
        item_index={item_id: row for row, item_id in enumerate(artifact.items.ids)},
        codes=artifact.history_codes,
        event_weights=artifact.config.event_weights,
    )


def _served_model(settings: Settings, artifact: Artifact) -> ServedModel:
    return ServedModel(
        generation=artifact.name,
        tag=artifact.tag,
        device=settings.device,
        items=len(artifact.items),
        config=artifact.config.model_dump(mode="json"),
        metrics=artifact.metrics,
    )

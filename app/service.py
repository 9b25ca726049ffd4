"""What one running process holds, and how it comes up and goes down."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import torch

from app.experiments import Split
from app.ingest import Ingest
from app.keys import Keyring
from app.live import Live
from app.metrics import Metrics
from app.rates import Rates
from app.recommend import Recommender
from app.schemas import ServedModel
from app.serving import Switch, generation_of
from app.settings import Settings, StoreSettings
from app.shelf import Shelf
from app.stocking import Stocking
from app.trends import Trending
from app.users import Users
from model.artifact import Artifact
from storage.archive import archived_through_s
from storage.errors import StorageError
from storage.protocol import UserStore
from storage.redis import RedisStore
from storage.redis_servers import Copies
from storage.sqlite import SQLiteStore
from storage.state import Generation

SWEEP_EVERY_S = 3600.0
SAMPLE_EVERY_S = 1.0
CANCEL_AGAIN_AFTER_S = 0.1


@dataclass(slots=True)
class Service:
    """The parts that endpoints use, for one tenant. What is served may change; nothing else does."""

    store: UserStore
    switch: Switch
    ingest: Ingest
    stocking: Stocking
    live: Live

    @property
    def catalogue(self) -> Shelf:
        return self.switch.serving.catalogue

    @property
    def trending(self) -> Trending:
        return self.switch.serving.trending

    @property
    def recommender(self) -> Recommender | Split:
        return self.switch.recommender

    @property
    def users(self) -> Users:
        return self.switch.serving.users

    @property
    def served_model(self) -> ServedModel:
        return self.switch.serving.model


@dataclass(slots=True)
class Services:
    """What one process holds: a service for each tenant, and what they share. Only `draining` changes."""

    settings: Settings
    by_tenant: Mapping[str, Service]
    metrics: Metrics
    keyring: Keyring | None  # None: no keys, and whoever comes works for the only tenant
    rates: Rates
    draining: bool = False

    def sample(self) -> None:
        """Note what waits, for whoever reads the metrics."""
        self.metrics.sample(sum(service.store.waiting for service in self.by_tenant.values()))


@asynccontextmanager
async def running(settings: Settings, artifacts: Mapping[str, Artifact], metrics: Metrics) -> AsyncIterator[Services]:
    """Open stores and engines of all tenants; afterwards finish what was accepted and close them.

    raises  KeysFileError, StorageError, ValueError  when keys or store cannot be used
    """
    keyring = None if settings.keys_file is None else Keyring(settings.keys_file, artifacts)
    rates = Rates(None if settings.redis_url is None else settings.redis_url_with_password, settings.redis_prefix)
    torch.set_num_threads(1)  # processes share the cores, one request does not
    async with AsyncExitStack() as stack:
        stack.push_async_callback(rates.close)
        # One thread: the engines are called for one batch at a time, off the event loop.
        engine_thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="engine"))
        by_tenant = {
            tenant: await stack.enter_async_context(_serving(settings.of(tenant), artifact, engine_thread, metrics))
            for tenant, artifact in artifacts.items()
        }
        services = Services(settings, by_tenant, metrics, keyring, rates)
        async with _in_the_background(_sample(services)):
            yield services
        services.sample()  # the last numbers of a worker that ends


@asynccontextmanager
async def _serving(
    settings: Settings, artifact: Artifact, engine_thread: Executor, metrics: Metrics
) -> AsyncIterator[Service]:
    """One tenant, with a store of its own over the same data: what one does takes no turn from another."""
    store = await open_store(settings, generation_of(artifact))
    try:
        live = Live(store, settings.tenant, metrics)
        switch = Switch(settings, artifact, store, engine_thread, metrics, live)
        await switch.look()  # so that a process which joins never serves another model first
        ingest, stocking = Ingest(store, settings, metrics, live), Stocking(store, switch, settings.tenant)
        async with _in_the_background(switch.follow(), live.follow(), _sweep(store)):
            yield Service(store, switch, ingest, stocking, live)
        with suppress(StorageError):
            await live.tell()
    finally:
        await live.close()
        await store.close()


@asynccontextmanager
async def _in_the_background(*work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        pending = set(tasks)
        while pending:  # asyncio.wait_for of Python 3.11 swallows a cancellation that comes together with its result
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_AFTER_S)


async def _sweep(store: UserStore) -> None:
    """Let go of idle users' states, now and then."""
    while True:
        with suppress(StorageError):
            await store.drop_idle_states()
        await asyncio.sleep(SWEEP_EVERY_S)


async def _sample(services: Services) -> None:
    """Again and again, as a worker is rarely the one that is asked for its numbers."""
    archive_dir = services.settings.archive_dir
    while True:
        services.sample()
        through_s = None if archive_dir is None else await asyncio.to_thread(archived_through_s, archive_dir)
        if through_s is not None:
            services.metrics.note_log_lag(time.time() - through_s)
        await asyncio.sleep(SAMPLE_EVERY_S)


async def open_store(settings: StoreSettings, *generations: Generation) -> UserStore:
    """The store that the settings ask for. A Redis that is not there yet is no error: it is waited for while serving.

    raises  StorageError, ValueError  when the store cannot be used as it is
    """
    ttl_days = settings.state_ttl_days
    if settings.redis_url is None:
        return await SQLiteStore.open(settings.data_dir, generations, tenant=settings.tenant, state_ttl_days=ttl_days)
    return await RedisStore.open(
        settings.redis_url_with_password,
        generations,
        tenant=settings.tenant,
        prefix=settings.redis_prefix,
        state_ttl_days=ttl_days,
        archive_dir=settings.archive_dir,
        copies=Copies(
            settings.redis_replicas, settings.redis_replicas_timeout_s, synced=settings.redis_replicas_synced
        ),
    )

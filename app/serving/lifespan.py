"""Startup and shutdown of one tenant's service, and the parts of it that endpoints use."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from app.catalogue.live_catalogue import LiveCatalogue
from app.events.ingest import Ingest
from app.events.live_signals import LiveSignals
from app.events.user_data import UserData
from app.events.vocabulary import Vocabulary
from app.observability.metrics import Metrics
from app.recommendation.executor import EngineThreads
from app.recommendation.state_reader import LogReader
from app.schemas.operations import ServedModel
from app.serving.item_updates import ItemUpdates
from app.serving.scenario_registry import ScenarioRegistry
from app.serving.served_generation import TenantContext, generation_of
from app.serving.store_factory import open_store
from app.serving.switcher import POLL_EVERY_S, GenerationSwitcher
from app.settings import Settings
from model.artifact.model_directory import Artifact
from storage.errors import StorageError
from storage.protocol import UserStore

SYNC_EVERY_S = 5.0
SWEEP_EVERY_S = 3600.0
COLLECT_EVERY_S = 10.0
CANCEL_AGAIN_AFTER_S = 0.1
BEGIN_AGAIN_AFTER_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Service:
    """The parts of one tenant's service that endpoints use. Only the active generations change."""

    store: UserStore
    switcher: GenerationSwitcher
    ingest: Ingest
    item_updates: ItemUpdates
    signals: LiveSignals
    log_reader: LogReader
    scenarios: ScenarioRegistry

    @property
    def catalogue(self) -> LiveCatalogue:
        """The catalogue of the current generation."""
        return self.switcher.current.catalogue

    @property
    def users(self) -> UserData:
        """The users' data, as seen by the current generation."""
        return self.switcher.current.users

    @property
    def served_model(self) -> ServedModel:
        """The description of the current generation's model."""
        return self.switcher.current.model


@asynccontextmanager
async def tenant_service(
    settings: Settings, artifact: Artifact, engine_threads: EngineThreads, metrics: Metrics
) -> AsyncIterator[Service]:
    """Open one tenant's store and engine, and close them afterwards.

    Each tenant has a store of its own over the same data, so that tenants do not wait for each other.
    """
    async with AsyncExitStack() as stack:
        store = await open_store(settings, generation_of(artifact))
        stack.push_async_callback(store.close)
        signals = LiveSignals(store, settings.tenant, metrics)
        log_reader = LogReader(store, settings.tenant, metrics.store, settings.max_seen_events, engine_threads.shared)
        context = TenantContext(settings, store, engine_threads, metrics, signals, log_reader)
        stack.push_async_callback(context.tasks.cancel)
        switcher = GenerationSwitcher(context, artifact)
        await switcher.poll()  # first, so that a joining process never serves another model
        vocabulary = Vocabulary(context.overrides, switcher.catalogues, switcher.refresh_items)
        ingest = Ingest(store, settings, metrics, signals, vocabulary)
        item_updates = ItemUpdates(store, switcher, settings.tenant)
        scenarios = ScenarioRegistry(store.scenarios, settings.tenant, signals.click_through)
        with suppress(StorageError):
            await scenarios.follow()
        async with in_background(
            partial(repeat, switcher.poll, POLL_EVERY_S),
            partial(repeat, scenarios.follow, POLL_EVERY_S),
            partial(repeat, partial(_follow_time, switcher), POLL_EVERY_S),
            partial(repeat, signals.sync, SYNC_EVERY_S),
            partial(repeat, store.drop_idle_states, SWEEP_EVERY_S),
            partial(_free_replaced, switcher),
        ):
            yield Service(store, switcher, ingest, item_updates, signals, log_reader, scenarios)
        with suppress(StorageError):
            await signals.flush()


@asynccontextmanager
async def in_background(*works: Callable[[], Coroutine[None, None, None]]) -> AsyncIterator[None]:
    """Run the functions as tasks, and cancel them afterwards. One that fails is logged, and begins again."""
    tasks = [asyncio.create_task(_again_and_again(work)) for work in works]
    try:
        yield
    finally:
        pending = set(tasks)
        while pending:  # asyncio.wait_for of Python 3.11 loses a cancellation that arrives together with its result
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_AFTER_S)


async def _again_and_again(work: Callable[[], Coroutine[None, None, None]]) -> None:
    while True:
        try:
            return await work()
        except Exception:
            logger.exception("a background task failed, and is restarted")
        await asyncio.sleep(BEGIN_AGAIN_AFTER_S)


async def repeat(work: Callable[[], Awaitable[object]], every_s: float) -> None:
    """Do the work at intervals until cancelled; a failure of the store ends only this turn."""
    while True:
        with suppress(StorageError):
            await work()
        await asyncio.sleep(every_s)


async def _follow_time(switcher: GenerationSwitcher) -> None:
    """Apply the availability dates that have passed, in a task that waits for nothing else.

    This runs in a thread, because it may have to wait until a filter of the whole catalogue is evaluated.
    """
    for catalogue in switcher.catalogues():
        await asyncio.to_thread(catalogue.follow_time)


async def _free_replaced(switcher: GenerationSwitcher) -> None:
    """Free replaced generations, whose parts refer to each other: Python itself lets ten or more of them accumulate."""
    before = switcher.served()
    while True:
        await asyncio.sleep(COLLECT_EVERY_S)
        if before != switcher.served():
            before = switcher.served()
            await asyncio.sleep(COLLECT_EVERY_S)  # until the requests that use a replaced one have ended
            gc.collect()

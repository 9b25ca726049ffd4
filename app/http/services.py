"""The services that the lifespan provides to every request: one per tenant, and the parts that all tenants share."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal
from weakref import WeakValueDictionary

from app.http.auth.key_audit import follow_keys
from app.http.auth.key_turns import KeyTurns
from app.http.auth.keys import Keyring
from app.http.auth.rate_limit import RateLimiter
from app.http.auth.seal_keys import SealKeyring
from app.http.auth.sealed_states import StateSealer
from app.http.connection.idle_connections import IdleConnections
from app.http.connection.tls import server_context
from app.observability.metrics import Metrics
from app.recommendation.executor import EngineThreads
from app.recommendation.fair_thread import FairThread
from app.serving.lifespan import Service, in_background, tenant_service
from app.settings import Settings
from model.artifact.model_directory import Artifact
from model.artifact.signatures import TrustedKeys
from model.inference.captured_batches import SLOTS
from model.training.threads import use_threads
from storage.archive.manifest import archived_through_s
from storage.errors import StorageUnavailable

Kind = Literal["read", "write", "correct"]

SAMPLE_EVERY_S = 1.0
ASK_ARCHIVE_EVERY_S = 10.0  # the archive changes once a minute, and a bucket may take seconds to respond


@dataclass(slots=True)
class Services:
    """One service per tenant, and their shared parts. Only `draining`, locks, turns and idle connections change."""

    settings: Settings
    by_tenant: Mapping[str, Service]
    metrics: Metrics
    keyring: Keyring | None  # None: there are no keys, and every request acts for the only tenant
    rate_limiter: RateLimiter
    shared_thread: FairThread
    sealer: StateSealer | None  # None: there are no seal keys, and visitors cannot keep their states themselves
    tls: ssl.SSLContext | None = None  # None: there is no certificate, and connections have no TLS
    draining: bool = False
    # by key and kind, while a call holds the lock or waits for it
    large_calls: WeakValueDictionary[tuple[str, Kind], asyncio.Lock] = field(default_factory=WeakValueDictionary)
    key_turns: KeyTurns = field(default_factory=KeyTurns)
    idle_connections: IdleConnections = field(default_factory=IdleConnections)  # of this process

    @property
    def store_failure(self) -> StorageUnavailable | None:
        """Why a tenant's store rejects all writes until an operator fixes it; None if there is no such store."""
        stores = (service.store for service in self.by_tenant.values())
        return next((failure for store in stores if (failure := store.failure) is not None), None)

    @property
    def has_lost_device(self) -> bool:
        """Whether a served generation has lost its GPU, which this process cannot use again."""
        generations = (served for service in self.by_tenant.values() for served in service.switcher.served())
        return any(served.engine.is_lost for served in generations)

    def turn_of(self, key_id: str, kind: Kind) -> asyncio.Lock:
        """Return the lock of a key's large calls, of which one of each kind can run at a time.

        Otherwise, the store would process all the writes together with those of other callers, and every response
        would wait for the event loop's work on all of the calls.
        """
        lock = self.large_calls.get((key_id, kind))
        if lock is None:
            lock = self.large_calls[key_id, kind] = asyncio.Lock()
        return lock

    def sample(self) -> None:
        """Write the current queue depths and buffered observations to the metrics."""
        waiting = sum(service.store.waiting for service in self.by_tenant.values())
        self.metrics.sample(waiting, ignores_keys_file=self.keyring is not None and self.keyring.ignores_file)
        self.metrics.store.set_distrusted(self.store_failure is not None)


@asynccontextmanager
async def open_services(
    settings: Settings, artifacts: Mapping[str, Artifact], metrics: Metrics
) -> AsyncIterator[Services]:
    """Open the stores and engines of all tenants; on exit, finish the accepted requests and close them.

    raises  StorageError, ValueError  when keys, certificate or a store cannot be used
    """
    tls = server_context(*settings.tls_files) if settings.tls_files else None
    keyring = None if settings.keys_file is None else Keyring(settings.keys_file, artifacts)
    if settings.model_keys_file is not None:
        TrustedKeys.read(settings.model_keys_file)  # a service that starts without a model would need them only later
    seal_keys = settings.seal_keys_file
    sealer = None if seal_keys is None else StateSealer(SealKeyring(seal_keys), settings.sealed_state_days)
    redis_url = None if settings.redis_url is None else settings.redis_url_with_password
    rate_limiter = RateLimiter(redis_url, settings.redis_prefix)
    use_threads(1)  # the cores are shared among processes, not within a request
    async with AsyncExitStack() as stack:
        stack.push_async_callback(rate_limiter.close)
        # One thread each, since batches run one at a time, off the event loop; on a GPU, SLOTS light batches overlap.
        light_threads = SLOTS if settings.device == "cuda" else 1
        engine_threads = EngineThreads(
            light=stack.enter_context(ThreadPoolExecutor(light_threads, thread_name_prefix="engine")),
            costly=stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="costly")),
            shared=FairThread(stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="shared"))),
        )
        by_tenant = {
            tenant: await stack.enter_async_context(
                tenant_service(settings.for_tenant(tenant), artifact, engine_threads, metrics)
            )
            for tenant, artifact in artifacts.items()
        }
        services = Services(settings, by_tenant, metrics, keyring, rate_limiter, engine_threads.shared, sealer, tls)
        logs = {tenant: service.store.audit for tenant, service in by_tenant.items()}
        following = [] if keyring is None else [partial(follow_keys, keyring, logs)]
        async with in_background(partial(_sample, services), partial(_sample_archive, services), *following):
            yield services
        services.sample()  # the last numbers before this worker ends


async def _sample(services: Services) -> None:
    """Update the metrics regularly, because a scrape reaches one worker but reads the numbers of all."""
    while True:
        services.sample()
        await asyncio.sleep(SAMPLE_EVERY_S)


async def _sample_archive(services: Services) -> None:
    """Update the metric of how far the archive is behind the log."""
    archive = services.settings.archive
    while archive is not None:
        through_s = await asyncio.to_thread(archived_through_s, archive)
        if through_s is not None:
            services.metrics.store.set_log_lag(time.time() - through_s)
        await asyncio.sleep(ASK_ARCHIVE_EVERY_S)

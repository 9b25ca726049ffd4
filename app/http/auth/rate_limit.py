"""The rate limit of each key: counted in the store's Redis for all processes, else in each process."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, RedisClusterStorage, RedisStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from app.errors import TooManyRequests
from app.http.auth.keys import Key
from storage.redis.nodes import node_urls

REDIS_TIMEOUT_S = 0.25  # a Redis that is slower than this must not make every request slower
COUNT_LOCALLY_FOR_S = 5.0
CONNECTIONS = 8
REDIS_ERRORS = RedisError, RedisClusterException, OSError, RuntimeError

logger = logging.getLogger(__name__)


class RateLimiter:
    """Counts the requests of each key that has a limit, over a sliding minute.

    While Redis fails, each process counts its own requests: a failure neither refuses everybody nor lifts the limits.
    A URL with several addresses names a cluster. The address of just one node of a cluster counts as a failure.
    """

    def __init__(self, redis_url: str | None, prefix: str) -> None:
        self._local = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._shared: SlidingWindowCounterRateLimiter | None = None
        self._local_until_s = 0.0
        self._close: Callable[[], Awaitable[None]] | None = None
        if redis_url is not None:
            storage, self._close = _open_storage(redis_url, f"{prefix}:rates")
            self._shared = SlidingWindowCounterRateLimiter(storage)

    async def count(self, key: Key) -> None:
        """Count one request of the key.

        raises  TooManyRequests  when the key has no request left; the error says when it will have one
        """
        if key.requests_per_minute is None:
            return
        limit = RateLimitItemPerMinute(key.requests_per_minute)
        limiter = await self._exceeded_limiter(limit, key.id)
        if limiter is None:
            return
        raise TooManyRequests(
            f"this key may send {key.requests_per_minute:,} requests a minute",
            await self._wait_s(limiter, limit, key.id),
        )

    async def _exceeded_limiter(
        self, limit: RateLimitItemPerMinute, key_id: str
    ) -> SlidingWindowCounterRateLimiter | None:
        """Count the request, and return the limiter whose limit it exceeds; None where it exceeds none."""
        if self._shared is not None and time.monotonic() >= self._local_until_s:
            try:
                async with asyncio.timeout(REDIS_TIMEOUT_S):
                    return None if await self._shared.hit(limit, key_id) else self._shared
            except REDIS_ERRORS as exc:
                logger.warning("counting requests in this process alone for now: %s", type(exc).__name__)
                self._local_until_s = time.monotonic() + COUNT_LOCALLY_FOR_S
        return None if await self._local.hit(limit, key_id) else self._local

    async def _wait_s(
        self, limiter: SlidingWindowCounterRateLimiter, limit: RateLimitItemPerMinute, key_id: str
    ) -> int:
        try:
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                stats = await limiter.get_window_stats(limit, key_id)
        except REDIS_ERRORS:
            return 1
        return min(60, max(1, math.ceil(stats.reset_time - time.time())))

    async def close(self) -> None:
        """Close the connections to Redis."""
        if self._close is not None:
            await self._close()


def _open_storage(url: str, prefix: str) -> tuple[RedisStorage, Callable[[], Awaitable[None]]]:
    """Return a storage, which connects on its first use, and what closes its connections."""
    nodes = node_urls(url)
    options: dict[str, Any] = {
        "socket_connect_timeout": REDIS_TIMEOUT_S,
        "socket_timeout": REDIS_TIMEOUT_S,
        "max_connections": CONNECTIONS,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if len(nodes) == 1:
        pool: Any = BlockingConnectionPool.from_url(url, timeout=REDIS_TIMEOUT_S, **options)
        storage = RedisStorage("async+redis://", implementation="redispy", key_prefix=prefix, connection_pool=pool)
        return storage, pool.disconnect
    first = urlsplit(nodes[0])
    hosts = ",".join(urlsplit(node).netloc.rpartition("@")[2] for node in nodes)
    options |= {"username": unquote(first.username or "default"), "password": unquote(first.password or "")}
    storage = RedisClusterStorage(
        f"async+redis+cluster://{hosts}",
        implementation="redispy",
        key_prefix=prefix,
        ssl=first.scheme == "rediss",
        **options,
    )
    bridge: Any = storage.bridge
    return storage, bridge.get_connection().aclose

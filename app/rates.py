"""How often each key may call: counted in the Redis of the store, for all processes, else in this process."""

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
from app.keys import Key
from storage.redis_servers import urls_of_nodes

COUNT_WITHIN_S = 0.25  # a Redis that is slower than this must not make every request slower
COUNT_ALONE_FOR_S = 5.0
CONNECTIONS = 8
FAILURES = RedisError, RedisClusterException, OSError, RuntimeError

logger = logging.getLogger(__name__)


class Rates:
    """Counts the requests of each key that has a limit, over a sliding minute.

    When Redis fails, each process counts alone for a while: neither is everybody refused, nor does a limit end. So does
    one that was given one node of a cluster; several addresses lead to a cluster.
    """

    def __init__(self, redis_url: str | None, prefix: str) -> None:
        self._alone = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._together: SlidingWindowCounterRateLimiter | None = None
        self._together_again_s = 0.0
        self._close: Callable[[], Awaitable[None]] | None = None
        if redis_url is not None:
            storage, self._close = _storage(redis_url, f"{prefix}:rates")
            self._together = SlidingWindowCounterRateLimiter(storage)

    async def count(self, key: Key) -> None:
        """raises  TooManyRequests  when the key has no request left; it says when there will be one again"""
        if key.requests_per_minute is None:
            return
        limit = RateLimitItemPerMinute(key.requests_per_minute)
        limiter = await self._limiter_that_counted(limit, key.id)
        if limiter is None:
            return
        raise TooManyRequests(
            f"this key may send {key.requests_per_minute:,} requests a minute",
            await self._wait_s(limiter, limit, key.id),
        )

    async def _limiter_that_counted(
        self, limit: RateLimitItemPerMinute, key_id: str
    ) -> SlidingWindowCounterRateLimiter | None:
        """Who says that it is too much; None when it is not."""
        if self._together is not None and time.monotonic() >= self._together_again_s:
            try:
                async with asyncio.timeout(COUNT_WITHIN_S):
                    return None if await self._together.hit(limit, key_id) else self._together
            except FAILURES as exc:
                logger.warning("counting requests in this process alone for now: %s", type(exc).__name__)
                self._together_again_s = time.monotonic() + COUNT_ALONE_FOR_S
        return None if await self._alone.hit(limit, key_id) else self._alone

    async def _wait_s(
        self, limiter: SlidingWindowCounterRateLimiter, limit: RateLimitItemPerMinute, key_id: str
    ) -> int:
        try:
            async with asyncio.timeout(COUNT_WITHIN_S):
                stats = await limiter.get_window_stats(limit, key_id)
        except FAILURES:
            return 1
        return min(60, max(1, math.ceil(stats.reset_time - time.time())))

    async def close(self) -> None:
        if self._close is not None:
            await self._close()


def _storage(url: str, prefix: str) -> tuple[RedisStorage, Callable[[], Awaitable[None]]]:
    """What connects when it is first asked, and how that is ended."""
    nodes = urls_of_nodes(url)
    how: dict[str, Any] = {
        "socket_connect_timeout": COUNT_WITHIN_S,
        "socket_timeout": COUNT_WITHIN_S,
        "max_connections": CONNECTIONS,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if len(nodes) == 1:
        pool: Any = BlockingConnectionPool.from_url(url, timeout=COUNT_WITHIN_S, **how)
        storage = RedisStorage("async+redis://", implementation="redispy", key_prefix=prefix, connection_pool=pool)
        return storage, pool.disconnect
    first = urlsplit(nodes[0])
    hosts = ",".join(urlsplit(node).netloc.rpartition("@")[2] for node in nodes)
    how |= {"username": unquote(first.username or "default"), "password": unquote(first.password or "")}
    storage = RedisClusterStorage(
        f"async+redis+cluster://{hosts}",
        implementation="redispy",
        key_prefix=prefix,
        ssl=first.scheme == "rediss",
        **how,
    )
    bridge: Any = storage.bridge
    return storage, bridge.get_connection().aclose

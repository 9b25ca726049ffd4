"""The limits of keys and tenants, counted for all processes in the store's Redis, or else in each process."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from limits import RateLimitItem, RateLimitItemPerHour, RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, RedisClusterStorage, RedisStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from app.errors import TooManyNewUsers, TooManyNewUsersAtOnce, TooManyRequests
from app.http.auth.keys import Key
from storage.redis.connections.circuit_breaker import CircuitBreaker
from storage.redis.connections.nodes import node_urls
from storage.redis.connections.password_file import split_password_file

REDIS_TIMEOUT_S = 0.25  # a slower Redis must not slow down every request
CONNECTIONS = 8
REDIS_ERRORS = RedisError, RedisClusterException, OSError, RuntimeError

logger = logging.getLogger(__name__)


class RateLimiter:
    """Counts the cost of each key's calls in a sliding minute, and the new users of keys and tenants in a sliding hour.

    While Redis fails, each process counts for itself, so a failure neither rejects every request nor lifts the limits.
    Only the requests that detect the failure wait for Redis.
    A URL with several addresses names a cluster. The address of just one node of a cluster counts as a failure.

    The count of a sliding window is that of the current fixed window and a share of the previous one, as if the latter
    had been used evenly. Whatever the order of requests, no window of that length has more than twice the limit.
    """

    def __init__(self, redis_url: str | None, prefix: str) -> None:
        self._local = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._shared: SlidingWindowCounterRateLimiter | None = None
        self._circuit = CircuitBreaker("Redis, which counts the requests of all processes,", self._probe)
        self._failed: tuple[RateLimitItem, str] | None = None
        self._close: Callable[[], Awaitable[None]] | None = None
        if redis_url is not None:
            storage, self._close = _open_storage(redis_url, f"{prefix}:rates")
            self._shared = SlidingWindowCounterRateLimiter(storage)

    async def count(self, key: Key, cost: int = 1) -> None:
        """Count a request of the key, or the rest of its cost.

        raises  TooManyRequests  when the key exceeds its rate limit; the error has the seconds to wait
        """
        if key.requests_per_minute is None or not cost:
            return
        wait_s = await self._spend(RateLimitItemPerMinute(key.requests_per_minute), cost, key.id)
        if wait_s:
            raise TooManyRequests(
                f"the rate limit of this key is {key.requests_per_minute:,} plain requests per minute; an event is one "
                "and an expensive request several",
                wait_s,
            )

    async def count_new_users(self, key: Key, tenant_quota: int, count: int) -> None:
        """Count the new users in a request of the key against the quotas of the key and of its tenant.

        A page key without its own quota gets half of the tenant's quota. The rest is reserved for the tenant's servers.

        raises  TooManyNewUsersAtOnce  when one request exceeds an hour's quota
                TooManyNewUsers        when the key or the tenant exceeds its quota; the error has the seconds to wait
        """
        own_quota = key.new_users_per_hour
        if own_quota is None and key.is_public:
            own_quota = tenant_quota // 2
        quotas = [("this tenant", tenant_quota, f"new-users-of/{key.tenant}")]
        if own_quota is not None:
            quotas.insert(0, ("this key", own_quota, f"new-users/{key.id}"))
        for whose, quota, name in quotas:
            if count > quota:
                raise TooManyNewUsersAtOnce(
                    f"the quota of {whose} is {quota:,} new users per hour; nothing was applied, split the request"
                )
            if wait_s := await self._spend(RateLimitItemPerHour(quota), count, name):
                raise TooManyNewUsers(
                    f"{whose} has reached its quota of {quota:,} new users per hour; nothing was applied", wait_s
                )

    async def _spend(self, limit: RateLimitItem, cost: int, name: str) -> int:
        """Take the cost from the remaining quota and return 0, or return the seconds until enough is left."""
        if self._shared is not None and self._circuit.allows_call():
            try:
                async with asyncio.timeout(REDIS_TIMEOUT_S):
                    if await self._shared.hit(limit, name, cost=cost):
                        return 0
                return await self._wait_s(self._shared, limit, name)
            except REDIS_ERRORS as exc:
                logger.warning("counting rate limits per process for now: %s", type(exc).__name__)
                self._failed = limit, name
                self._circuit.open()
        return 0 if await self._local.hit(limit, name, cost=cost) else await self._wait_s(self._local, limit, name)

    async def _wait_s(self, limiter: SlidingWindowCounterRateLimiter, limit: RateLimitItem, name: str) -> int:
        try:
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                stats = await limiter.get_window_stats(limit, name)
        except REDIS_ERRORS:
            return 1
        return min(limit.get_expiry(), max(1, math.ceil(stats.reset_time - time.time())))

    async def _probe(self) -> None:
        """Read the count that failed: in a cluster, the node that holds it may be the only one that fails."""
        assert self._shared is not None
        assert self._failed is not None
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            await self._shared.get_window_stats(*self._failed)

    async def close(self) -> None:
        """Close the connections to Redis."""
        await self._circuit.close()
        if self._close is not None:
            await self._close()


def _open_storage(url: str, prefix: str) -> tuple[RedisStorage, Callable[[], Awaitable[None]]]:
    """Return a storage, which connects on its first use, and a function that closes its connections."""
    nodes = node_urls(url)
    bare_url, password_file = split_password_file(nodes[0])
    options: dict[str, Any] = {
        "credential_provider": password_file,
        "socket_connect_timeout": REDIS_TIMEOUT_S,
        "socket_timeout": REDIS_TIMEOUT_S,
        "max_connections": CONNECTIONS,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if len(nodes) == 1:
        pool: Any = BlockingConnectionPool.from_url(bare_url, timeout=REDIS_TIMEOUT_S, **options)
        storage = RedisStorage("async+redis://", implementation="redispy", key_prefix=prefix, connection_pool=pool)
        return storage, pool.disconnect
    hosts = ",".join(urlsplit(node).netloc.rpartition("@")[2] for node in nodes)
    first: Mapping[str, Any] = parse_url(bare_url)
    options |= {name: first[name] for name in first if name in ("username", "password") or name.startswith("ssl_")}
    storage = RedisClusterStorage(
        f"async+redis+cluster://{hosts}",
        implementation="redispy",
        key_prefix=prefix,
        ssl=nodes[0].startswith("rediss://"),
        **options,
    )
    bridge: Any = storage.bridge
    return storage, bridge.get_connection().aclose

"""The limits of keys and tenants, counted for all processes in the store's Redis, or else in each process."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from app.errors import Overloaded, TooManyNewUsers, TooManyNewUsersAtOnce, TooManyRequests
from app.http.auth.keys import Key
from app.http.auth.quota_counters import LocalCounters, Quota, Refusal, SharedCounters
from storage.errors import StorageError
from storage.redis.layout.keys import calls_key, new_users_key

MINUTE_S, HOUR_S = 60, 3_600
ALLOWANCES = 600  # parts of a rate, one of which a process counts ahead: a tenth of a second at the full rate

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Allowance:
    """What a process has counted for a key, and not used yet.

    is_awaited    whether a request is counting more
    is_exhausted  whether the key's rate has had no room for more, nor for a request since then
    """

    left: int = 0
    is_awaited: bool = False
    is_exhausted: bool = False

    def spend(self, cost: int) -> bool:
        """Use it for the cost; return whether it was enough."""
        has_enough = self.left >= cost
        self.left -= cost * has_enough
        return has_enough


class RateLimiter:
    """Counts the cost of each key's calls in a sliding minute, and the new users of keys and tenants in a sliding hour.

    A process counts a 600th of a high rate ahead, so that most requests need no round trip. For each process, a key may
    so get a 600th more or less than its rate.

    While Redis fails, each process counts for itself, so a failure neither rejects every request nor lifts the limits.
    """

    def __init__(self, redis_url: str | None, prefix: str) -> None:
        """Raise ValueError if the URL, or a file that it names, cannot be used."""
        self._prefix = prefix
        self._local = LocalCounters()
        self._allowances: dict[tuple[str, int], Allowance] = {}  # by key and rate
        self._shared = None if redis_url is None else SharedCounters(redis_url)

    async def count(self, key: Key, cost: int = 1) -> None:
        """Count a request of the key, or the rest of its cost.

        raises  TooManyRequests  when the key exceeds its rate limit; the error has the seconds to wait
        """
        rate = key.requests_per_minute
        if rate is None or not cost:
            return
        allowance = self._allowances.get((key.id, rate))
        if allowance is None:
            allowance = self._allowances[key.id, rate] = Allowance()
        if allowance.spend(cost):
            return
        quota = Quota(calls_key(self._prefix, key.id), rate)
        if await self._count_ahead(allowance, quota, cost):
            return
        if refusal := await self._spend([quota], cost, MINUTE_S):
            raise TooManyRequests(
                f"the rate limit of this key is {rate:,} plain requests per minute; an event counts "
                "as one, an expensive call as several",
                refusal.wait_s,
            )
        allowance.is_exhausted = False

    async def _count_ahead(self, allowance: Allowance, quota: Quota, cost: int) -> bool:
        """Count an allowance that covers the cost, unless another request is doing so; return whether it is counted."""
        ahead = quota.limit // ALLOWANCES
        if ahead <= cost or allowance.is_awaited or allowance.is_exhausted:
            return False
        allowance.is_awaited = True
        try:
            allowance.is_exhausted = await self._spend([quota], ahead, MINUTE_S) is not None
        finally:
            allowance.is_awaited = False
        if not allowance.is_exhausted:
            allowance.left += ahead - cost
        return not allowance.is_exhausted

    async def count_new_users(self, key: Key, tenant_quota: int, count: int) -> None:
        """Count the new users in a request of the key against the quotas of the key and of its tenant, or none of them.

        All page keys of a tenant together get half of its quota. The rest is reserved for the tenant's servers.

        raises  TooManyNewUsersAtOnce  when one request exceeds an hour's quota
                TooManyNewUsers        when a quota is exceeded; the error has the seconds to wait
        """
        limits = [("this tenant", tenant_quota, "all")]
        if key.is_public:
            limits.insert(0, ("all page keys of this tenant", tenant_quota // 2, "pages"))
        if key.new_users_per_hour is not None:
            limits.insert(0, ("this key", key.new_users_per_hour, f"key:{key.id}"))
        for whose, limit, _ in limits:
            if count > limit:
                raise TooManyNewUsersAtOnce(
                    f"the quota of {whose} is {limit:,} new users per hour; nothing was applied, split the request"
                )
        quotas = [Quota(new_users_key(self._prefix, key.tenant, part), limit) for _, limit, part in limits]
        if refusal := await self._spend(quotas, count, HOUR_S):
            whose, limit, _ = limits[refusal.place]
            raise TooManyNewUsers(
                f"the quota of {whose} is used up, {limit:,} new users per hour; nothing was applied", refusal.wait_s
            )

    async def _spend(self, quotas: Sequence[Quota], cost: int, window_s: int) -> Refusal | None:
        """Spend the cost from all quotas, or return the first that lacks it."""
        if self._shared is not None:
            try:
                return await self._shared.spend(quotas, cost, window_s)
            except (StorageError, TimeoutError, Overloaded) as exc:
                logger.warning("counting rate limits per process for now: %r", exc)
        return self._local.spend(quotas, cost, window_s)

    async def close(self) -> None:
        """Close the connections to Redis."""
        if self._shared is not None:
            await self._shared.close()

"""Trends of items in Redis: one sorted set for each tenant."""

from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Any

from storage.redis_layout import Argument, Keyspace, Script
from storage.trends import Trends, forgotten_below

# As `added` in storage/trends.py.
ADD_TRENDS = Script("""
-- KEYS  trends
-- ARGV  below which trends are forgotten; of each item: id, trend
for arg = 2, #ARGV, 2 do
    local trend, before = tonumber(ARGV[arg + 1]), redis.call('ZSCORE', KEYS[1], ARGV[arg])
    if before then
        local high, low = math.max(before, trend), math.min(before, trend)
        trend = high + math.log(1 + 2 ^ (low - high)) / math.log(2)
    end
    redis.call('ZADD', KEYS[1], string.format('%.17g', trend), ARGV[arg])
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. ARGV[1])
return 1
""")
AT_ONCE = 500  # some 2 ms in which Redis does nothing else


class RedisTrends:
    """The trends of all tenants in a store, which lends its ways to send a command and to run a script."""

    def __init__(self, call: Callable[..., Awaitable[Any]], run: Callable[..., Awaitable[Any]], keys: Keyspace) -> None:
        self._call = call
        self._run = run
        self._keys = keys

    async def add(self, tenant: str, trends: Trends) -> None:
        key, old = self._keys.trends(tenant), repr(forgotten_below(trends.values()))
        left = iter(trends.items())
        while some := list(islice(left, AT_ONCE)):
            args: Sequence[Argument] = [old, *(part for name, trend in some for part in (name, repr(trend)))]
            await self._run(ADD_TRENDS, [key], args)

    async def best(self, tenant: str, limit: int) -> dict[str, float]:
        found = await self._call("ZRANGE", self._keys.trends(tenant), 0, limit - 1, "REV", "WITHSCORES")
        return {name.decode(): float(trend) for name, trend in zip(found[::2], found[1::2], strict=True)}

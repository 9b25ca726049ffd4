"""Counts of items bought together, in Redis, which decay with time; and the newest entries of a log."""

from collections.abc import Collection, Mapping

from typing_extensions import override

from storage.items.trends import TrendClock
from storage.protocol import OrderStore
from storage.records import MAX_ORDER_COUNTS, counts_with
from storage.redis.connections.nodes import Argument
from storage.redis.corrections.undo_and_merge import RedisCorrections
from storage.redis.log.user_log import UserLog
from storage.redis.scripts.items import ADD_ORDER_COUNTS, TREND_LIMITS
from storage.redis.session.redis_session import RedisSession
from storage.state.event import LogRecord


class RedisOrders(OrderStore):
    """The orders of all tenants. The counts of a tenant share a slot, so each step is one script."""

    def __init__(self, session: RedisSession, log: UserLog, corrections: RedisCorrections) -> None:
        self._session = session
        self._log = log
        self._corrections = corrections

    @override
    async def newest(self, tenant: str, user_id: str, limit: int) -> list[LogRecord]:
        await self._session.require_open()
        user = await self._corrections.resolve(self._session.keys.user(tenant, user_id))
        return [entry.record for entry in await self._log.newest_unarchived(user, limit)]

    @override
    async def add(self, tenant: str, counts: Mapping[str, float]) -> None:
        await self._session.require_open()
        keys = self._session.keys.items(tenant)
        args: list[Argument] = [*TREND_LIMITS, MAX_ORDER_COUNTS]
        for name, count in counts.items():
            args += (name, repr(count))
        await self._session.write(ADD_ORDER_COUNTS, [keys.order_counts, keys.order_clock], args)

    @override
    async def counts(self, tenant: str) -> dict[str, float]:
        await self._session.require_open()
        keys = self._session.keys.items(tenant)
        text = await self._session.call("GET", keys.order_clock)
        if text is None:
            return {}
        clock = TrendClock.parse(text.decode())
        lowest, highest = clock.limits
        command = ("ZRANGE", keys.order_counts, repr(lowest), repr(highest), "BYSCORE", "WITHSCORES")
        found = await self._session.call(*command)
        return {
            name.decode(): clock.count_of(float(trend)) for name, trend in zip(found[::2], found[1::2], strict=True)
        }

    @override
    async def drop_counts(self, tenant: str, item_ids: Collection[str]) -> set[str]:
        await self._session.require_open()
        keys, ids = self._session.keys.items(tenant), [*item_ids]
        trends = await self._session.call("ZMSCORE", keys.trends, *ids)
        await self._session.call("ZREM", keys.trends, *ids)
        await self._session.call("HDEL", keys.visitors, *ids)
        names = [name.decode() for name in await self._session.call("ZRANGE", keys.order_counts, 0, -1)]
        counted, ordered = counts_with(names, ids)
        if counted:
            await self._session.call("ZREM", keys.order_counts, *counted)
        return ordered.union(item_id for item_id, trend in zip(ids, trends, strict=True) if trend is not None)

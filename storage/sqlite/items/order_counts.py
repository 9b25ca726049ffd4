"""Counts of items bought together, in the embedded store; they decay with time. Also the newest entries of a log."""

import sqlite3
import time
from collections.abc import Collection, Mapping
from functools import partial

from typing_extensions import override

from storage.items.trends import TrendClock, sum_of_trends
from storage.protocol import OrderStore
from storage.records import MAX_ORDER_COUNTS, counts_with
from storage.sqlite.batches import execute_in_batches
from storage.sqlite.database import Database
from storage.sqlite.items.tenant_values import ORDER_CLOCK, set_named_value, trend_clock
from storage.sqlite.log import newest_of_user, resolve_alias
from storage.state.event import LogRecord

SELECT_KNOWN = "SELECT name, trend FROM order_counts WHERE tenant = ? AND name IN ({rows})"
SELECT_COUNTS = "SELECT name, trend FROM order_counts WHERE tenant = ? AND trend BETWEEN ? AND ?"
DELETE_DAMAGED = "DELETE FROM order_counts WHERE tenant = ? AND trend NOT BETWEEN ? AND ?"
# In the order in which the Redis store drops them.
DELETE_LOWEST = f"""
DELETE FROM order_counts WHERE tenant = ? AND name IN (
    SELECT name FROM order_counts WHERE tenant = ? ORDER BY trend DESC, name DESC LIMIT -1 OFFSET {MAX_ORDER_COUNTS}
)
"""  # noqa: S608, a constant


class SQLiteOrders(OrderStore):
    """The OrderStore in a SQLite file."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @override
    async def newest(self, tenant: str, user_id: str, limit: int) -> list[LogRecord]:
        return await self._database.read_page(
            lambda db: newest_of_user(db, tenant, resolve_alias(db, tenant, user_id), limit)
        )

    @override
    async def add(self, tenant: str, counts: Mapping[str, float]) -> None:
        await self._database.write(partial(_add, tenant=tenant, counts=counts), size=len(counts))

    @override
    async def counts(self, tenant: str) -> dict[str, float]:
        return await self._database.read(lambda db: _counts(db, tenant))

    @override
    async def drop_counts(self, tenant: str, item_ids: Collection[str]) -> set[str]:
        return await self._database.write(lambda db: _drop_counts(db, tenant, item_ids), size=len(item_ids))


def _add(db: sqlite3.Connection, tenant: str, counts: Mapping[str, float]) -> None:
    now_s = time.time()
    clock = (trend_clock(db, tenant, ORDER_CLOCK) or TrendClock.first(now_s)).moved_to(now_s)
    set_named_value(db, tenant, ORDER_CLOCK, str(clock))
    db.execute(DELETE_DAMAGED, (tenant, *clock.limits))
    known = dict(execute_in_batches(db, SELECT_KNOWN, [(name,) for name in counts], before=[tenant]))
    rows = []
    for name, count in counts.items():
        trend = clock.trend_of(count)
        rows.append((tenant, name, sum_of_trends(known[name], trend) if name in known else trend))
    execute_in_batches(db, "INSERT OR REPLACE INTO order_counts {rows}", rows)
    db.execute(DELETE_LOWEST, (tenant, tenant))


def _drop_counts(db: sqlite3.Connection, tenant: str, item_ids: Collection[str]) -> set[str]:
    own = [(tenant, item_id) for item_id in item_ids]
    delete_trend = "DELETE FROM trends WHERE tenant = ? AND item_id = ?"
    visited = {item_id for _, item_id in own if db.execute(delete_trend, (tenant, item_id)).rowcount}
    db.executemany("DELETE FROM visitors WHERE tenant = ? AND item_id = ?", own)
    names = [name for (name,) in db.execute("SELECT name FROM order_counts WHERE tenant = ?", (tenant,))]
    counted, ordered = counts_with(names, item_ids)
    db.executemany("DELETE FROM order_counts WHERE tenant = ? AND name = ?", [(tenant, name) for name in counted])
    return visited | ordered


def _counts(db: sqlite3.Connection, tenant: str) -> dict[str, float]:
    clock = trend_clock(db, tenant, ORDER_CLOCK)
    if clock is None:
        return {}
    return {name: clock.count_of(trend) for name, trend in db.execute(SELECT_COUNTS, (tenant, *clock.limits))}

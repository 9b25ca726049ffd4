"""The trends of items in the embedded store."""

import math
import sqlite3
import time
from collections.abc import Sequence
from functools import partial
from operator import attrgetter

from storage.items.trends import TrendClock, Visit, sum_of_trends, with_visitor
from storage.sqlite.batches import execute_in_batches, rows_with_blobs
from storage.sqlite.database import Database
from storage.sqlite.items.tenant_values import TREND_CLOCK, set_named_value, trend_clock

VISITS_AT_ONCE = 500  # other writers wait for some 3 ms; and few, compared to the queue
SORTED_AT_ONCE = 4_000  # takes some 2 ms; items that follow each other share pages of the tables
# A trend goes through JSON as a text of 17 digits; as a number it would have 15, and lose a little each time.
SELECT_ITEMS = """
SELECT json_group_array(json_array(
    batch.column1, CASE WHEN trend IS NOT NULL THEN printf('%!.17g', trend) END, length(CAST(recent AS BLOB))
)), CAST(group_concat(recent, '') AS BLOB)
FROM ({rows}) AS batch
LEFT JOIN trends ON trends.tenant = ? AND trends.item_id = batch.column1
LEFT JOIN visitors ON visitors.tenant = ? AND visitors.item_id = batch.column1
"""
SELECT_HIGHEST = """
SELECT item_id, trend FROM trends WHERE tenant = ? AND trend BETWEEN ? AND ? ORDER BY trend DESC, item_id LIMIT ?
"""


async def add_visits(database: Database, tenant: str, visits: Sequence[Visit]) -> None:
    """Add to the items' trends, and delete those that are negligible or damaged."""
    for start in range(0, len(visits), SORTED_AT_ONCE):
        by_item = sorted(visits[start : start + SORTED_AT_ONCE], key=attrgetter("item_id"))
        for place in range(0, len(by_item), VISITS_AT_ONCE):
            some = by_item[place : place + VISITS_AT_ONCE]
            await database.write(partial(_add_visits, tenant=tenant, visits=some), size=len(some))


def _add_visits(db: sqlite3.Connection, tenant: str, visits: Sequence[Visit]) -> None:
    now_s = time.time()
    before = trend_clock(db, tenant, TREND_CLOCK) or TrendClock.first(now_s)
    clock = before.moved_to(now_s)
    set_named_value(db, tenant, TREND_CLOCK, str(clock))
    if math.floor(clock.position) > math.floor(before.position):
        db.execute("DELETE FROM visitors WHERE tenant = ?", (tenant,))
    lowest, highest = clock.limits
    db.execute("DELETE FROM trends WHERE tenant = ? AND trend < ?", (tenant, lowest))
    db.execute("DELETE FROM trends WHERE tenant = ? AND trend > ?", (tenant, highest))
    items = [(item_id,) for item_id in dict.fromkeys(visit.item_id for visit in visits)]
    trends: dict[str, float] = {}
    visitors: dict[str, bytes] = {}
    for item_id, known, recent in rows_with_blobs(execute_in_batches(db, SELECT_ITEMS, items, after=[tenant, tenant])):
        visitors[item_id] = recent or b""
        if known is not None:
            trends[item_id] = float(known)
    changed: dict[str, bytes] = {}
    for item_id, visitor, weight in visits:
        found = with_visitor(visitors[item_id], visitor)
        if found is not None:
            visitors[item_id], count = found
            trend = clock.trend_of(weight * count)
            trends[item_id] = sum_of_trends(trends[item_id], trend) if item_id in trends else trend
            changed[item_id] = visitors[item_id]
    rows = [(tenant, item_id, trends[item_id]) for item_id in changed]
    execute_in_batches(db, "INSERT OR REPLACE INTO trends {rows}", rows)
    execute_in_batches(db, "INSERT OR REPLACE INTO visitors {rows}", [(tenant, *one) for one in changed.items()])


def highest_trends(db: sqlite3.Connection, tenant: str, limit: int) -> dict[str, float]:
    """Return the items with the most visitors now, and how many."""
    clock = trend_clock(db, tenant, TREND_CLOCK)
    if clock is None:
        return {}
    clock = clock.moved_to(time.time())
    rows = db.execute(SELECT_HIGHEST, (tenant, *clock.limits, limit))
    return {item_id: clock.count_of(trend) for item_id, trend in rows}

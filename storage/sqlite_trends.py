"""Trends of items in the embedded store."""

import sqlite3

from storage.sqlite_batches import in_batches, rows_of
from storage.trends import Trends, added, forgotten_below

SELECT_SOME = "SELECT item_id, trend FROM trends WHERE tenant = ? AND item_id IN ({rows})"

SCHEMA = """
CREATE TABLE trends (
    tenant TEXT NOT NULL,
    item_id TEXT NOT NULL,
    trend REAL NOT NULL,
    PRIMARY KEY (tenant, item_id)
) WITHOUT ROWID;
CREATE INDEX trends_by_trend ON trends (tenant, trend);
"""


def add(db: sqlite3.Connection, tenant: str, trends: Trends) -> None:
    before: dict[str, float] = {}
    for batch in in_batches([(item_id,) for item_id in trends], (64, 8, 1)):
        found = db.execute(SELECT_SOME.format(rows=rows_of(batch)), [tenant, *(item_id for (item_id,) in batch)])
        before.update(found.fetchall())
    rows = [
        (tenant, item_id, added(before[item_id], trend) if item_id in before else trend)
        for item_id, trend in trends.items()
    ]
    db.executemany("INSERT OR REPLACE INTO trends VALUES (?, ?, ?)", rows)
    db.execute("DELETE FROM trends WHERE tenant = ? AND trend < ?", (tenant, forgotten_below(trends.values())))


def best(db: sqlite3.Connection, tenant: str, limit: int) -> dict[str, float]:
    asked = "SELECT item_id, trend FROM trends WHERE tenant = ? ORDER BY trend DESC, item_id LIMIT ?"
    return dict(db.execute(asked, (tenant, limit)).fetchall())

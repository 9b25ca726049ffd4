"""The schema of the embedded store, in steps: a file of version n has had the first n.

SQLite stores the text of these statements, comments included, in the file.
"""

import sqlite3
import time
from pathlib import Path

from storage.errors import StorageError
from storage.records import MAIN_TENANT

DAY_S = 86_400

# AUTOINCREMENT never uses a sequence number again: states and readers remember how far they got.
# log_by_user ends in the rowid, which is seq: it also finds a user's newest entry.
FIRST_SCHEMA = """
CREATE TABLE log (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    user_id TEXT NOT NULL,
    event_id TEXT NOT NULL,
    item_id TEXT NOT NULL,
    type TEXT NOT NULL,
    timestamp_us INTEGER NOT NULL,
    id_time_us INTEGER,
    value REAL,
    recommendation_id TEXT
);
CREATE UNIQUE INDEX log_by_event ON log (tenant, user_id, event_id);
CREATE INDEX log_by_user ON log (tenant, user_id);
CREATE TABLE states (
    tenant TEXT NOT NULL,
    user_id TEXT NOT NULL,
    generation BLOB NOT NULL,
    through_seq INTEGER NOT NULL, -- the last log entry that is folded into the value
    value BLOB NOT NULL,
    PRIMARY KEY (tenant, user_id, generation)
);
"""

# written_day is in days, so that the index changes only with the first event of a day. Rows that are older than the
# column count as written today.
GENERATIONS_SCHEMA = f"""
ALTER TABLE states ADD COLUMN written_day INTEGER NOT NULL DEFAULT {int(time.time() // DAY_S)};
CREATE INDEX states_by_day ON states (written_day);

CREATE TABLE generations (
    tag BLOB PRIMARY KEY,
    name TEXT NOT NULL,
    live_until REAL NOT NULL, -- Unix seconds
    is_active INTEGER NOT NULL DEFAULT 0
);

"""

# Which users were erased, and how far the log went then: copies of the log elsewhere, as an archive, erase them too.
ERASURES_SCHEMA = """
CREATE TABLE erasures (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    user BLOB NOT NULL, -- digest of the user's id
    through_seq INTEGER NOT NULL
);
"""

# Before this step every generation belonged to the tenant `main`.
TENANTS_SCHEMA = f"""
CREATE TABLE generations_of_tenants (
    tenant TEXT NOT NULL,
    tag BLOB NOT NULL,
    name TEXT NOT NULL,
    live_until REAL NOT NULL, -- Unix seconds
    is_active INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant, tag)
);
INSERT INTO generations_of_tenants SELECT '{MAIN_TENANT}', tag, name, live_until, is_active FROM generations;
DROP TABLE generations;
ALTER TABLE generations_of_tenants RENAME TO generations;
"""  # noqa: S608, the name is a constant

# A chain of merges is one hop: when a user becomes another one, the aliases that point at the user move along.
ALIASES_SCHEMA = """
CREATE TABLE aliases (
    tenant TEXT NOT NULL,
    user_id TEXT NOT NULL,
    target TEXT NOT NULL, -- whom the user has become
    PRIMARY KEY (tenant, user_id)
) WITHOUT ROWID;
CREATE INDEX aliases_by_target ON aliases (tenant, target);
"""

# A column is NULL until the tenant sets its part.
ITEMS_SCHEMA = """
CREATE TABLE items (
    tenant TEXT NOT NULL,
    item_id TEXT NOT NULL,
    version INTEGER NOT NULL,
    title TEXT,
    categories TEXT, -- a JSON array
    available INTEGER,
    PRIMARY KEY (tenant, item_id)
) WITHOUT ROWID;
CREATE UNIQUE INDEX items_by_version ON items (tenant, version);
"""

TRENDS_SCHEMA = """
CREATE TABLE trends (
    tenant TEXT NOT NULL,
    item_id TEXT NOT NULL,
    trend REAL NOT NULL,
    PRIMARY KEY (tenant, item_id)
) WITHOUT ROWID;
CREATE INDEX trends_by_trend ON trends (tenant, trend);
"""

TALLIES_SCHEMA = """
CREATE TABLE tallies (
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (tenant, name)
) WITHOUT ROWID;
CREATE TABLE notes (
    tenant TEXT NOT NULL, -- empty for what is everybody's
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (tenant, name)
) WITHOUT ROWID;
"""

SCHEMA_STEPS = (
    FIRST_SCHEMA,
    GENERATIONS_SCHEMA,
    ERASURES_SCHEMA,
    TENANTS_SCHEMA,
    ALIASES_SCHEMA,
    ITEMS_SCHEMA,
    TRENDS_SCHEMA,
    TALLIES_SCHEMA,
)
SCHEMA_VERSION = len(SCHEMA_STEPS)


def migrate(db: sqlite3.Connection, path: Path) -> None:
    """Bring the file's schema up to date, in one transaction.

    raises  StorageError  when a newer lisarec has written the file
    """
    db.execute("BEGIN IMMEDIATE")
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise StorageError(
            f"'{path}' was written by a newer lisarec (schema {version}, this one knows {SCHEMA_VERSION}); "
            "run that version, or choose another directory"
        )
    for step in SCHEMA_STEPS[version:]:
        for statement in step.split(";\n"):
            db.execute(statement)
    if version < SCHEMA_VERSION:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.execute("COMMIT")

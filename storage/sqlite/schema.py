"""The schema of the embedded store.

SQLite stores the text of each statement in the file, with the comments inside it. `PRAGMA user_version` is
SCHEMA_VERSION, and `PRAGMA application_id` the number of the newest commit, see connections/open_files.py.
docs/reference/byte-formats.md says what others may rely on.
"""

import sqlite3
from pathlib import Path

from storage.errors import StorageError

SCHEMA = """
-- AUTOINCREMENT never uses a sequence number again: states and readers remember how far they got.
-- log_by_event begins with the id: new UUIDv7 ids are neighbours, so a batch of events changes few pages of it.
-- log_by_user ends in the rowid, which is seq: it also finds a user's newest entry.
CREATE TABLE log (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    kind TEXT NOT NULL, -- event, undo or merge, see storage/state/record_encoding.py
    user_id TEXT NOT NULL,
    event_id TEXT, -- of an undo, that of the event which no longer counts
    item_id TEXT,
    type TEXT,
    timestamp_us INTEGER NOT NULL,
    id_time_us INTEGER,
    value REAL,
    recommendation_id TEXT,
    codes BLOB, -- of an item that a model has not learned
    items TEXT, -- of an impression, a JSON array of ids
    order_id TEXT,
    target TEXT -- whom the user of a merge has become
);
CREATE UNIQUE INDEX log_by_event ON log (tenant, event_id, user_id, kind);
CREATE INDEX log_by_user ON log (tenant, user_id);

-- written_day is the day of the last event, or of a later read that had to fold the log. The index changes only with
-- the first event of a day.
CREATE TABLE states (
    tenant TEXT NOT NULL,
    user_id TEXT NOT NULL,
    generation BLOB NOT NULL,
    through_seq INTEGER NOT NULL, -- the last log entry that is folded into the value
    value BLOB NOT NULL,
    written_day INTEGER NOT NULL,
    PRIMARY KEY (tenant, user_id, generation)
);
CREATE INDEX states_by_day ON states (written_day);

CREATE TABLE generations (
    tenant TEXT NOT NULL,
    tag BLOB NOT NULL,
    name TEXT NOT NULL,
    live_until REAL NOT NULL, -- Unix seconds
    is_active INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant, tag)
);

-- The users who were erased, and the end of the log then. Copies of the log, such as an archive, erase them too.
CREATE TABLE erasures (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    user BLOB NOT NULL, -- digest of the user's id
    through_seq INTEGER NOT NULL
);

-- A chain of merges is one hop: when a user is merged into another one, the aliases that point at the user are moved.
CREATE TABLE aliases (
    tenant TEXT NOT NULL,
    user_id TEXT NOT NULL,
    target TEXT NOT NULL, -- whom the user has become
    PRIMARY KEY (tenant, user_id)
) WITHOUT ROWID;
CREATE INDEX aliases_by_target ON aliases (tenant, target);

-- A column is NULL until the tenant sets its part. The versions of items and of codes are one sequence.
CREATE TABLE items (
    tenant TEXT NOT NULL,
    item_id TEXT NOT NULL,
    version INTEGER NOT NULL,
    title TEXT,
    categories TEXT, -- a JSON array
    available INTEGER,
    properties TEXT, -- a JSON object, see `property_to_json` in storage/records.py
    PRIMARY KEY (tenant, item_id)
) WITHOUT ROWID;
CREATE UNIQUE INDEX items_by_version ON items (tenant, version);
CREATE TABLE item_codes (
    tenant TEXT NOT NULL,
    item_id TEXT NOT NULL,
    generation BLOB NOT NULL,
    version INTEGER NOT NULL,
    evidence INTEGER NOT NULL, -- how many events the codes were made from
    bias REAL NOT NULL,
    history BLOB NOT NULL, -- a byte for each code
    target BLOB NOT NULL,
    PRIMARY KEY (tenant, item_id, generation)
) WITHOUT ROWID;
CREATE UNIQUE INDEX item_codes_by_version ON item_codes (tenant, version);

-- A separate table, so that reading items does not scan vectors of 2 kB.
CREATE TABLE item_vectors (
    tenant TEXT NOT NULL,
    item_id TEXT NOT NULL,
    vector BLOB NOT NULL, -- see storage/items/vectors.py
    PRIMARY KEY (tenant, item_id)
) WITHOUT ROWID;

CREATE TABLE user_properties (
    tenant TEXT NOT NULL,
    user_id TEXT NOT NULL, -- of whom others became by merges, never of those
    properties TEXT NOT NULL, -- as those of items
    PRIMARY KEY (tenant, user_id)
) WITHOUT ROWID;

CREATE TABLE trends (
    tenant TEXT NOT NULL,
    item_id TEXT NOT NULL,
    trend REAL NOT NULL,
    PRIMARY KEY (tenant, item_id)
) WITHOUT ROWID;
CREATE INDEX trends_by_trend ON trends (tenant, trend);
CREATE TABLE visitors (
    tenant TEXT NOT NULL,
    item_id TEXT NOT NULL,
    recent BLOB NOT NULL, -- this half-life's, see with_visitor in storage/items/trends.py
    PRIMARY KEY (tenant, item_id)
) WITHOUT ROWID;

CREATE TABLE order_counts (
    tenant TEXT NOT NULL,
    name TEXT NOT NULL, -- see OrderStore in storage/protocol.py
    trend REAL NOT NULL,
    PRIMARY KEY (tenant, name)
) WITHOUT ROWID;
CREATE INDEX order_counts_by_trend ON order_counts (tenant, trend);

CREATE TABLE tallies (
    tenant TEXT NOT NULL,
    name TEXT NOT NULL, -- a JSON array
    count INTEGER NOT NULL, -- REAL where it is a sum of values
    PRIMARY KEY (tenant, name)
) WITHOUT ROWID;
CREATE TABLE notes (
    tenant TEXT NOT NULL, -- empty for what is everybody's
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (tenant, name)
) WITHOUT ROWID;

CREATE TABLE scenarios (
    number INTEGER PRIMARY KEY AUTOINCREMENT, -- of the version, among those of all scenarios
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    version TEXT NOT NULL
);
CREATE INDEX scenarios_by_name ON scenarios (tenant, name);

-- Triggers prevent changes by mistake. Anyone who can write the file can drop them.
CREATE TABLE audit (
    tenant TEXT NOT NULL,
    number INTEGER NOT NULL, -- of the entry, from 1
    entry TEXT NOT NULL, -- see AuditEntry in storage/items/audit.py
    PRIMARY KEY (tenant, number)
) WITHOUT ROWID;
CREATE TRIGGER audit_unchanged BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'an audit log only grows'); END;
CREATE TRIGGER audit_kept BEFORE DELETE ON audit BEGIN SELECT RAISE(ABORT, 'an audit log only grows'); END;
"""
SCHEMA_VERSION = 17


def create_schema(db: sqlite3.Connection, path: Path) -> None:
    """Create all tables in a new file, in one transaction.

    raises  StorageError  when a newer or an earlier lisarec has written the file
    """
    db.execute("BEGIN IMMEDIATE")
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise StorageError(
            f"'{path}' was written by a newer lisarec (schema {version}, this version supports {SCHEMA_VERSION}); "
            "run that version, or choose another directory"
        )
    if 0 < version < SCHEMA_VERSION:
        raise StorageError(
            f"'{path}' was written by an earlier lisarec (schema {version}, this version supports {SCHEMA_VERSION}); "
            "run 'lisarec backup' with that version, and 'lisarec restore' with this one into another directory"
        )
    if not version:
        for statement in SCHEMA.split(";\n"):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.execute("COMMIT")

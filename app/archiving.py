"""Running the archiver: turn after turn, through failures of the log and of the archive."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from app.settings import StoreSettings
from storage.archive import ArchiveWriter
from storage.archiver import Log, Moved, RedisLog, SQLiteLog, archive
from storage.store import StorageUnavailable

PAUSE_AFTER_FAILURE_S = 5.0


@dataclass(frozen=True)
class Turns:
    """How often to archive (None: once), and how long events stay in Redis and in the archive."""

    every_s: float | None
    keep_tail_s: float
    keep_days: int | None


def run(settings: StoreSettings, turns: Turns, say: Callable[[str], None]) -> None:
    """Archive for ever, or once.

    raises  StorageUnavailable  when the one turn fails; in between turns failures are said and waited out
            StorageError        when log and archive do not belong together
    """
    while True:
        try:
            for moved in _turns(settings, turns):
                say(_summary(moved, settings.archive_dir))
            return
        except StorageUnavailable as exc:
            if turns.every_s is None:
                raise
            say(f"will try again: {exc}")
            time.sleep(PAUSE_AFTER_FAILURE_S)


def _turns(settings: StoreSettings, turns: Turns) -> Iterator[Moved]:
    assert settings.archive_dir is not None
    with ExitStack() as stack:
        log = stack.enter_context(_open_log(settings))
        writer = stack.enter_context(ArchiveWriter.open(settings.archive_dir))
        while True:
            yield archive(log, writer, datetime.now(UTC), keep_tail_s=turns.keep_tail_s, keep_days=turns.keep_days)
            if turns.every_s is None:
                return
            time.sleep(turns.every_s)


def _open_log(settings: StoreSettings) -> AbstractContextManager[Log]:
    if settings.redis_url is None:
        return SQLiteLog.open(settings.data_dir)
    return RedisLog.open(settings.redis_url_with_password, settings.redis_prefix)


def _summary(moved: Moved, directory: Path | None) -> str:
    parts = [f"{moved.archived:,} events archived in {directory}", f"{moved.trimmed:,} removed from Redis"]
    return "; ".join([*parts, *([f"{moved.dropped:,} dropped as too old"] if moved.dropped else [])])

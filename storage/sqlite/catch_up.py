"""Catching up: a separate thread folds states that are far behind their logs, so that no writer waits for them."""

import logging
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from storage.errors import StorageError
from storage.records import FoldedState
from storage.sqlite import states
from storage.sqlite.append import MAX_MISSING_ENTRIES
from storage.sqlite.database import Database
from storage.sqlite.log import log_entries
from storage.state.corrections import LogFold
from storage.state.generation import Generation
from storage.state.switch_interval import short_turns

logger = logging.getLogger(__name__)


class CatchUpThread:
    """A thread that folds the missing entries of states, one user at a time, on its own connection."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection = database.connect()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite-catch-up")
        self._under_way: set[tuple[str, str, bytes]] = set()
        self._closed = False

    def start(self, tenant: str, user_id: str, generation: Generation) -> None:
        """Start folding the missing entries of the user's state, unless that is running. Later reads find it saved."""
        key = (tenant, user_id, generation.tag)
        if key in self._under_way:
            return
        self._under_way.add(key)
        with suppress(RuntimeError):  # closed meanwhile
            self._thread.submit(self._run, key, generation)

    def close(self) -> None:
        """Cancel pending folds; they can run later."""
        self._closed = True
        self._thread.shutdown(cancel_futures=True)
        self._connection.close()

    def _run(self, key: tuple[str, str, bytes], generation: Generation) -> None:
        try:
            with short_turns():
                self._catch_up(key[0], key[1], generation)
        except (sqlite3.Error, StorageError) as exc:
            logger.warning("cannot fold a state from the log, retrying: %s", exc)
        finally:
            self._under_way.discard(key)

    def _catch_up(self, tenant: str, user_id: str, generation: Generation) -> None:
        (stored,) = states.stored_states(self._connection, generation, tenant, [user_id]).values()
        user_id, newest_seq, through_seq = stored.user_id, stored.newest_seq, stored.through_seq
        fold = LogFold(generation, stored.value)
        while through_seq < newest_seq:
            begin_s = time.perf_counter()
            page = log_entries(self._connection, tenant, user_id, through_seq, MAX_MISSING_ENTRIES)
            # entries above newest_seq may belong to a user who was erased and came back
            entries = [entry for entry in page if entry.seq <= newest_seq]
            if self._closed or not entries:  # the log may be gone
                return
            fold.apply([entry.record for entry in entries])
            through_seq = entries[-1].seq
            if fold.must_restart and through_seq == newest_seq:
                fold, through_seq = fold.restarted(), 0
            if through_seq < newest_seq:
                time.sleep(time.perf_counter() - begin_s)  # half of the time is for others
        folded = FoldedState(tenant, user_id, through_seq, fold.value)
        self._database.submit(lambda db: states.save(db, generation, [folded])).result()

"""Moving the log into the archive, from Redis or from SQLite, exactly once.

How far each partition has been taken stands in the archive's own list and nowhere else, so it changes in one step with
the files. Who is killed before that step takes the same entries again, into other files; after it, goes on behind them.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisClusterException, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from storage.archive import ArchiveWriter, Erased, Logged
from storage.errors import StorageError, StorageUnavailable
from storage.redis_layout import ARCHIVED_LAYOUT, KNOWN_LAYOUTS, RAISE_LAYOUT, TRIM, Keyspace, erasure, trim_arguments
from storage.redis_servers import NO_CLUSTER, is_of_cluster, urls_of_nodes
from storage.sqlite import BUSY_TIMEOUT_S, FILE_NAME
from storage.sqlite_log import EVENT_COLUMNS
from storage.state_event import Event, event_hash

CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 30.0
REWRITE_TIMEOUT_S = 600.0
MAX_ROWS = 200_000  # taken in at once; about 200 MB of memory
PAGE = 1_000  # entries read or trimmed in one command, 2 to 5 ms in which Redis does nothing else
PARTITIONS_AT_ONCE = 32

SELECT_LOG = f"""
SELECT seq, tenant, {EVENT_COLUMNS} FROM log WHERE seq > ? ORDER BY seq LIMIT ?
"""  # noqa: S608, the columns are a constant
SELECT_ERASURES = "SELECT id, tenant, user, through_seq FROM erasures WHERE id > ? ORDER BY id"
SELECT_ERASED_AT = "SELECT 1 FROM erasures WHERE through_seq >= ? LIMIT 1"
ERASURES = 1  # a partition of its own in the archive's list of places; the log is partition 0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of one partition that follow each other, and the place of the last one."""

    partition: int
    logged: Sequence[Logged | Erased]
    place: str | None


class Log(Protocol):
    """A log whose entries are taken into an archive."""

    def claim(self, archive_id: str, is_new: bool) -> None:
        """Make sure that this log goes into that archive and no other; StorageError when it goes into another."""
        ...

    def entries(self, place_of: Callable[[int], str | None]) -> Iterator[Entries]:
        """What was logged in each partition after that place, which None says is the beginning.

        raises  StorageError  when the entry at the place is not the one that was there
        """
        ...

    def trim(self, place_of: Callable[[int], str | None], before_ms: int) -> int:
        """Let go of entries logged before that time that stand strictly before that place; returns how many."""
        ...

    def scrub(self) -> None:
        """Let go of what the log's own files still have of users who were erased."""
        ...

    def memory(self) -> Sequence[tuple[str, int, int]]:
        """Of each server in whose memory the log is: its name, the bytes used, and the most, 0 where there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Moved:
    """What a turn of the archiver did, in events."""

    archived: int = 0
    trimmed: int = 0
    dropped: int = 0


def archive(log: Log, writer: ArchiveWriter, now: datetime, *, keep_tail_s: float, keep_days: int | None) -> Moved:
    """One turn: take in what is new, merge files, let go of what is old enough in the log and in the archive.

    keep_tail_s  how long events stay in the hot log at least
    keep_days    how many whole days events stay in the archive; None: for ever
    """
    log.claim(writer.manifest.archive_id, is_new=not writer.manifest.positions)
    archived = _take_in(log, writer)
    writer.compact(today=_day(now))
    dropped = 0 if keep_days is None else writer.drop_before(_day(now - timedelta(days=keep_days)))
    before_ms = int((now.timestamp() - keep_tail_s) * 1000)
    return Moved(archived, log.trim(writer.manifest.positions.get, before_ms), dropped)


def _take_in(log: Log, writer: ArchiveWriter) -> int:
    logged: list[Logged | Erased] = []
    places: dict[int, str] = {}
    archived = 0
    # the places that the iterator asks for are those that it has got to, committed or not yet
    for entries in log.entries(lambda partition: places.get(partition) or writer.manifest.positions.get(partition)):
        logged += entries.logged
        places[entries.partition] = str(entries.place)
        if len(logged) >= MAX_ROWS:
            archived += _commit(log, writer, logged, places)
            logged = []
    return archived + _commit(log, writer, logged, places)


def _commit(log: Log, writer: ArchiveWriter, entries: Sequence[Logged | Erased], places: Mapping[int, str]) -> int:
    erased = sum(isinstance(entry, Erased) for entry in entries)
    if erased:
        log.scrub()  # before the commit: who is killed in between does it once more, and not never
    writer.commit(entries, places)
    return len(entries) - erased


def _day(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d")


class RedisLog:
    """The streams of a Redis store."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._redis = client
        self._prefix = prefix
        self._keys = Keyspace(prefix, 1)
        self._is_marked = False

    @classmethod
    @contextmanager
    def open(cls, url: str, prefix: str = "lisarec") -> Iterator[RedisLog]:
        """raises ValueError for a URL that cannot be used; StorageUnavailable, also later, when the server fails"""
        try:
            with closing(_client(url)) as client:
                yield cls(client, prefix)
        except (RedisError, RedisClusterException) as exc:
            raise StorageUnavailable(f"Redis failed: {exc}") from exc

    def claim(self, archive_id: str, is_new: bool) -> None:
        meta = self._redis.hgetall(self._keys.meta)
        if not {b"layout", b"partitions"} <= meta.keys():
            raise StorageUnavailable(f"no service has used the key prefix '{self._prefix}' yet; is it the right one?")
        if int(meta[b"layout"]) not in KNOWN_LAYOUTS:
            raise StorageError(
                f"'{self._keys.meta}' has layout {int(meta[b'layout'])}, which this lisarec does not know"
            )
        self._keys = Keyspace(self._prefix, int(meta[b"partitions"]))
        claimed = meta.get(b"archive")
        if claimed is None and is_new:
            self._redis.hset(self._keys.meta, "archive", archive_id)
        elif claimed is None or claimed.decode() != archive_id:
            raise StorageError(
                "this archive is not the one that these events are moved to; give the archive directory that was used "
                "before, or, for a Redis that has lost its data, a new one"
            )

    def entries(self, place_of: Callable[[int], str | None]) -> Iterator[Entries]:
        for first in range(0, self._keys.partitions, PARTITIONS_AT_ONCE):
            waiting = list(range(first, min(first + PARTITIONS_AT_ONCE, self._keys.partitions)))
            while waiting:
                pages = self._pages(waiting, place_of)
                yield from [entries for entries, _ in pages if entries.place != place_of(entries.partition)]
                waiting = [entries.partition for entries, is_full in pages if is_full]

    def _pages(self, partitions: Sequence[int], place_of: Callable[[int], str | None]) -> list[tuple[Entries, bool]]:
        """The next entries of each partition, and whether there may be more."""
        with self._redis.pipeline(transaction=False) as pipe:
            for partition in partitions:
                pipe.xrange(self._keys.log(partition), place_of(partition) or "-", "+", PAGE)
            pages = pipe.execute()
        return [
            (self._entries(partition, place_of(partition), page), len(page) == PAGE)
            for partition, page in zip(partitions, pages, strict=True)
        ]

    def _entries(self, partition: int, place: str | None, page: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> Entries:
        """The page without its first entry, which has to be the one that was taken last."""
        if place is not None:
            if not page or page[0][0].decode() != place:
                raise StorageError(
                    f"'{self._keys.log(partition)}' no longer has its entry {place}, which is archived: Redis has lost "
                    "events, or these are other data. docs/operations.md, 'The archive', says what to do"
                )
            page = page[1:]
        return Entries(partition, list(_logged_of(partition, page)), page[-1][0].decode() if page else place)

    def trim(self, place_of: Callable[[int], str | None], before_ms: int) -> int:
        return sum(
            self._trim(partition, place, before_ms)
            for partition in range(self._keys.partitions)
            if (place := place_of(partition)) is not None
        )

    def _trim(self, partition: int, place: str, before_ms: int) -> int:
        """The entry at the place stays: by it the next turn knows that this is still the same log."""
        trimmed = 0
        while True:
            page = self._redis.xrange(self._keys.log(partition), "-", f"({place}", PAGE)
            old = list(takewhile(lambda entry: _seq_and_ms(entry[0])[1] < before_ms, page))
            if not old:
                return trimmed
            self._mark_layout()
            events = [(entry.tenant, entry.event) for entry in _logged_of(partition, old) if isinstance(entry, Logged)]
            keys, args = trim_arguments(self._keys, partition, _seq_and_ms(old[-1][0])[0], events)
            self._redis.eval(TRIM.text, len(keys), *keys, *args)
            trimmed += len(old)
            if len(old) < PAGE:
                return trimmed

    def scrub(self) -> None:
        """Have the append-only files rewritten, if the servers let us; else they do so by themselves one day."""
        for server in self._servers():
            _rewrite(server)

    def memory(self) -> Sequence[tuple[str, int, int]]:
        """Nothing where the servers do not tell."""
        found = []
        for server in self._servers():
            with suppress(NoPermissionError):
                told = server.info("memory")
                address = server.connection_pool.connection_kwargs
                name = f"{address.get('host', address.get('path'))}:{address.get('port', '')}".rstrip(":")
                found.append((name, told["used_memory"], told["maxmemory"]))
        return found

    def _servers(self) -> list[Any]:
        """Also the replicas of a cluster."""
        if not isinstance(self._redis, redis.RedisCluster):
            return [self._redis]
        client: Any = self._redis  # redis-py does not say more of it
        return [client.get_redis_connection(node) for node in client.get_nodes()]

    def _mark_layout(self) -> None:
        """Before the first entry goes, so that no service that knows of no archive can be started over these data."""
        if not self._is_marked:
            self._redis.eval(RAISE_LAYOUT.text, 1, self._keys.meta, ARCHIVED_LAYOUT)
            self._is_marked = True


def _rewrite(server: Any) -> None:
    """Returns when the server has done so, or where it does not let us.

    raises  StorageUnavailable  when it could not, and should be asked again
    """
    with suppress(NoPermissionError):
        _wait_until(lambda: _begins_rewrite(server))
        _wait_until(lambda: not _is_rewriting(server.info("persistence")))
        if server.info("persistence").get("aof_last_bgrewrite_status", "ok") != "ok":
            raise StorageUnavailable("Redis could not rewrite its append-only file; its log says why")


def _begins_rewrite(server: Any) -> bool:
    try:
        server.execute_command("BGREWRITEAOF")
    except NoPermissionError:
        raise
    except ResponseError as exc:
        logger.info("asking again for a rewrite of the append-only file: %s", exc)  # one from before may be under way
        return False
    return True


def _is_rewriting(told: Mapping[str, Any]) -> bool:
    return any(told.get(name) for name in ("aof_rewrite_in_progress", "aof_rewrite_scheduled"))


def _wait_until(is_so: Callable[[], bool]) -> None:
    give_up_at_s = time.monotonic() + REWRITE_TIMEOUT_S
    while not is_so():
        if time.monotonic() > give_up_at_s:
            raise StorageUnavailable("Redis does not rewrite its append-only file; its log says why")
        time.sleep(0.1)


def _client(url: str) -> Any:
    """Of a server, or of the cluster that it belongs to. One thread asks it one thing after the other, for which
    redis-py's own client of clusters does."""
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": SOCKET_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    nodes = urls_of_nodes(url)
    failure: Exception = ValueError("the URL names no server")
    for node in nodes:
        client: Any = redis.Redis.from_url(node, **options)
        try:
            if not is_of_cluster(client.execute_command("HELLO")):
                break
        except (AuthenticationError, RedisConnectionError, RedisTimeoutError) as exc:
            client.close()
            failure = exc
        except ResponseError:  # a server that is too old, or a user who may not ask
            break
        else:
            client.close()
            return redis.RedisCluster.from_url(node, **options)
    else:
        raise failure
    if len(nodes) > 1:
        client.close()
        raise StorageError(NO_CLUSTER)
    return client


def _logged_of(partition: int, page: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> Iterator[Logged | Erased]:
    for entry_id, fields in page:
        seq, logged_ms = _seq_and_ms(entry_id)
        if b"e" in fields:
            tenant, *columns = json.loads(fields[b"e"])
            yield Logged(tenant, partition, seq, logged_ms, Event(*columns))
        elif (erased := erasure(fields[b"x"])) is not None:
            tenant, user = erased
            yield Erased(tenant, partition, seq, user)


def _seq_and_ms(entry_id: bytes) -> tuple[int, int]:
    seq, logged_ms = entry_id.split(b"-")
    return int(seq), int(logged_ms)


class SQLiteLog:
    """The table of an embedded store. It keeps its entries: they are copied."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    @classmethod
    @contextmanager
    def open(cls, data_dir: Path) -> Iterator[SQLiteLog]:
        """raises StorageUnavailable when there is no store in the directory, and when it cannot be read"""
        path = Path(data_dir) / FILE_NAME
        if not path.is_file():
            raise StorageUnavailable(f"there is no '{path}'; give the directory that 'lisarec serve --data-dir' uses")
        try:
            with closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as db:
                yield cls(db)
        except sqlite3.Error as exc:
            raise StorageUnavailable(f"SQLite failed: {exc}") from exc

    def claim(self, archive_id: str, is_new: bool) -> None:
        """Nothing is let go of here, so any number of archives may copy it; the places tell other data."""

    def entries(self, place_of: Callable[[int], str | None]) -> Iterator[Entries]:
        place = place_of(0)
        after = 0 if place is None else self._checked_seq(place)
        while page := self._page(after):
            after = page[-1].seq
            yield Entries(0, page, _place(page[-1]))
        erased = self._db.execute(SELECT_ERASURES, (int(place_of(ERASURES) or 0),)).fetchall()
        if erased:
            users = [Erased(tenant, 0, through_seq + 1, user) for _, tenant, user, through_seq in erased]
            yield Entries(ERASURES, users, str(erased[-1][0]))

    def trim(self, place_of: Callable[[int], str | None], before_ms: int) -> int:
        return 0

    def scrub(self) -> None:
        """Erasing has done so."""

    def memory(self) -> Sequence[tuple[str, int, int]]:
        return []

    def _page(self, after: int, limit: int = PAGE) -> list[Logged]:
        # the table does not say when it got an entry; the archive's days are those of taking it over
        now_ms = time.time_ns() // 1_000_000
        rows = self._db.execute(SELECT_LOG, (after, limit))
        return [Logged(tenant, 0, seq, now_ms, Event(*columns)) for seq, tenant, *columns in rows]

    def _checked_seq(self, place: str) -> int:
        seq = int(place.partition("-")[0])
        found = [_place(entry) for entry in self._page(seq - 1, 1) if entry.seq == seq]
        if found != [place] and (found or not self._db.execute(SELECT_ERASED_AT, (seq,)).fetchall()):
            raise StorageError("the archive holds events of another SQLite file; give another archive directory")
        return seq


def _place(entry: Logged) -> str:
    return f"{entry.seq}-{event_hash(f'{entry.tenant}/{entry.event.user_id}/{entry.event.event_id}'):016x}"

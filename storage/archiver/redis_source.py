"""The log of a Redis store, as the archiver reads and trims it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, TypeAlias

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisClusterException, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from typing_extensions import override

from storage.archive.writer import ErasureEntry, EventEntry
from storage.archiver.source import PAGE, EntryPage, LogSource
from storage.errors import StorageError, StorageUnavailable
from storage.redis.connections.client import NO_CLUSTER
from storage.redis.connections.nodes import DRIVER, Argument, failure_text, is_cluster_mode, is_withheld, node_urls
from storage.redis.connections.password_file import split_password_file
from storage.redis.connections.tls import require_usable
from storage.redis.layout.head import TIME_DIGITS, rounded_up_s
from storage.redis.layout.keys import LAYOUT_VERSION, UNUSED, Keyspace, User, erasing_key
from storage.redis.layout.lost_entries import LOST_FIELD, decode_lost
from storage.redis.layout.stream_entries import parse_erasure
from storage.redis.scripts.corrections import REWRITE_LOG, rewrite_arguments
from storage.redis.scripts.events import TRIM
from storage.state.event import LogRecord, uuid7_time_us
from storage.state.record_encoding import from_json

CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 30.0
REWRITE_TIMEOUT_S = 600.0
PARTITIONS_AT_ONCE = 32

LOST_ARCHIVED = (
    "'{key}' lacks its archived entry {position}: Redis has lost events, or has other data. "
    "See 'When the archiver stops' in docs/how-to/operate/archive.md"
)
NOTED_LOST = (
    "Redis has lost acknowledged events (recorded in '{key}'): nothing is archived until Redis has "
    "its data again, or you accept the loss with 'lisarec repair --accept-loss'"
)
EMPTIED = (
    "Redis has no data under the key prefix '{prefix}', but the archive has: nothing is archived until Redis has its "
    "data again, or you accept the loss with 'lisarec repair --accept-loss'"
)
LOST_READ = "'{key}' has lost its entry {position} since it was read; the entry is not archived"

StreamEntry: TypeAlias = tuple[bytes, dict[bytes, bytes]]

logger = logging.getLogger(__name__)


class RedisSource(LogSource):
    """The streams of a Redis store."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._redis = client
        self._prefix = prefix
        self._keys = Keyspace(prefix, 1)

    @classmethod
    @contextmanager
    def open(cls, url: str, prefix: str = "lisarec") -> Iterator[RedisSource]:
        """Connect to the server, or to the cluster, of that URL.

        raises  ValueError          for a URL that cannot be used
                StorageUnavailable  when the server fails, now or later
        """
        try:
            with closing(_client(url)) as client:
                yield cls(client, prefix)
        except (RedisError, RedisClusterException) as exc:
            raise StorageUnavailable(failure_text(exc)) from exc

    @override
    def attach(self) -> None:
        self._read_meta()

    @override
    def claim(self, archive_id: str, is_new: bool) -> None:
        claimed = self._read_meta(UNUSED if is_new else EMPTIED).get(b"archive")
        if claimed is None and is_new:
            self._redis.hset(self._keys.meta, "archive", archive_id)
        elif claimed is None or claimed.decode() != archive_id:
            raise StorageError(
                "this archive does not belong to this event log; pass the archive directory that was used "
                "before, or a new one if Redis has lost its data"
            )

    def _read_meta(self, if_missing: str = UNUSED) -> dict[bytes, bytes]:
        """Return the hash with the data's metadata, and remember the number of partitions.

        raises  StorageUnavailable  with this message, when there is none
        """
        meta: dict[bytes, bytes] = self._redis.hgetall(self._keys.meta)
        if not {b"layout", b"partitions"} <= meta.keys():
            raise StorageUnavailable(if_missing.format(prefix=self._prefix))
        if int(meta[b"layout"]) != LAYOUT_VERSION:
            raise StorageError(
                f"'{self._keys.meta}' has layout {int(meta[b'layout'])}, which this version of lisarec does not support"
            )
        self._keys = Keyspace(self._prefix, int(meta[b"partitions"]))
        return meta

    @override
    def entries(self, position_of: Callable[[int], str | None]) -> Iterator[EntryPage]:
        for first in range(0, self._keys.partitions, PARTITIONS_AT_ONCE):
            waiting = list(range(first, min(first + PARTITIONS_AT_ONCE, self._keys.partitions)))
            while waiting:
                pages = self._pages(waiting, position_of)
                yield from [page for page, _ in pages if page.position != position_of(page.partition)]
                waiting = [page.partition for page, is_full in pages if is_full]

    def _pages(
        self, partitions: Sequence[int], position_of: Callable[[int], str | None]
    ) -> list[tuple[EntryPage, bool]]:
        """Return the next entries of each partition, and whether there may be more."""
        with self._redis.pipeline(transaction=False) as pipe:
            for partition in partitions:
                pipe.xrange(self._keys.log(partition), position_of(partition) or "-", "+", PAGE)
            pages = pipe.execute()
        return [
            (self._after(partition, position_of(partition), page), len(page) == PAGE)
            for partition, page in zip(partitions, pages, strict=True)
        ]

    def _after(self, partition: int, position: str | None, page: Sequence[StreamEntry]) -> EntryPage:
        """Return the page without its first entry, which must be the one at the position."""
        if position is not None:
            if not page or page[0][0].decode() != position:
                raise StorageError(LOST_ARCHIVED.format(key=self._keys.log(partition), position=position))
            page = page[1:]
        return EntryPage(partition, list(_parsed(partition, page)), page[-1][0].decode() if page else position)

    @override
    def require(self, positions: Mapping[int, str]) -> None:
        meta = self._read_meta()
        if decode_lost(meta.get(LOST_FIELD.encode()), int(meta.get(b"accepted", 0))):
            # unacknowledged entries there have the numbers of lost entries, which may come back
            raise StorageUnavailable(NOTED_LOST.format(key=self._keys.meta), "wrong_store")
        with self._redis.pipeline(transaction=False) as pipe:
            for partition, position in positions.items():
                pipe.xrange(self._keys.log(partition), position, position)
            found = pipe.execute()
        for (partition, position), entries in zip(positions.items(), found, strict=True):
            if not entries:
                raise StorageError(LOST_READ.format(key=self._keys.log(partition), position=position))

    @override
    def trim(self, position_of: Callable[[int], str | None], before_ms: int) -> int:
        return sum(
            self._trim(partition, position, before_ms)
            for partition in range(self._keys.partitions)
            if (position := position_of(partition)) is not None
        )

    def _trim(self, partition: int, position: str, before_ms: int) -> int:
        """Trim one partition. The entry at the position stays: by it the next turn recognises the log.

        Everything before an old entry is old, even what was logged while Redis's clock was ahead. Such entries may fill
        pages, so the search for an old one goes on while the times are later than that of the position.
        """
        _, newest_ms = _seq_and_ms(position.encode())
        trimmed, old_through, start = 0, 0, "-"
        while page := self._redis.xrange(self._keys.log(partition), start, f"({position}", PAGE):
            ids = [_seq_and_ms(entry_id) for entry_id, _ in page]
            old_through = max([old_through, *(seq for seq, logged_ms in ids if logged_ms < before_ms)])
            old = [entry for entry, (seq, _) in zip(page, ids, strict=True) if seq <= old_through]
            if old and start != "-":
                start = "-"
                continue
            if old:
                self._trim_entries(partition, old)
                trimmed += len(old)
            if before_ms <= ids[-1][1] <= newest_ms:
                break
            if not old:
                start = f"({page[-1][0].decode()}"
        return trimmed

    def _trim_entries(self, partition: int, oldest: Sequence[StreamEntry]) -> None:
        events = [(entry.tenant, entry.record) for entry in _parsed(partition, oldest) if isinstance(entry, EventEntry)]
        keys, args = trim_arguments(self._keys, partition, _seq_and_ms(oldest[-1][0])[0], events)
        self._redis.eval(TRIM.text, len(keys), *keys, *args)

    @override
    def scrub(self) -> None:
        for number in range(self._keys.partitions):
            self._finish_erasures(self._keys.partition(number))
        # A server that does not let this user rewrite its append-only file eventually does so by itself.
        for server in self._servers():
            _rewrite(server)

    def _finish_erasures(self, partition: str) -> None:
        """Rewrite the partition's log until it has no content that was erased before this call."""
        awaited = erasures = self._redis.zrange(erasing_key(partition), 0, -1)
        while set(awaited).intersection(erasures):
            keys, args = rewrite_arguments(partition, erasures)
            self._redis.eval(REWRITE_LOG.text, len(keys), *keys, *args)
            erasures = self._redis.zrange(erasing_key(partition), 0, -1)

    @override
    def memory_usage(self) -> Sequence[tuple[str, int, int]]:
        found = []
        for server in self._servers():
            memory = _info(server, "memory")
            if "used_memory" in memory:
                address = server.connection_pool.connection_kwargs
                name = f"{address.get('host', address.get('path'))}:{address.get('port', '')}".rstrip(":")
                found.append((name, memory["used_memory"], memory.get("maxmemory", 0)))
        return found

    def _servers(self) -> list[Any]:
        """Return a client of each server, of a cluster also of its replicas."""
        if not isinstance(self._redis, redis.RedisCluster):
            return [self._redis]
        client: Any = self._redis  # redis-py does not say more of it
        return [client.get_redis_connection(node) for node in client.get_nodes()]


def _rewrite(server: Any) -> None:
    """Let the server rewrite its append-only file, if it has one and this user may do so; wait for the end.

    raises  StorageUnavailable  when the rewrite failed, and should be tried again
    """
    if not _info(server, "persistence").get("aof_enabled", True):
        return
    try:
        _wait_until(lambda: _start_rewrite(server))
        _wait_until(lambda: not _is_rewriting(server.info("persistence")))
        if server.info("persistence").get("aof_last_bgrewrite_status", "ok") != "ok":
            raise StorageUnavailable("Redis failed to rewrite its append-only file; see the log of Redis")
    except ResponseError as exc:
        if not is_withheld(exc):
            raise
        logger.info("erased data stay in Redis's append-only file until it is rewritten: %s", exc)


def _info(server: Any, section: str) -> Any:
    """Return a section of INFO; empty if this user may not read it."""
    try:
        return server.info(section)
    except ResponseError as exc:
        if not is_withheld(exc):
            raise
        return {}


def _start_rewrite(server: Any) -> bool:
    try:
        server.execute_command("BGREWRITEAOF")
    except ResponseError as exc:
        if is_withheld(exc):
            raise
        logger.info("requesting another rewrite of the append-only file: %s", exc)  # an earlier one may be running
        return False
    return True


def _is_rewriting(persistence: Mapping[str, Any]) -> bool:
    return any(persistence.get(name) for name in ("aof_rewrite_in_progress", "aof_rewrite_scheduled"))


def _wait_until(is_so: Callable[[], bool]) -> None:
    give_up_at_s = time.monotonic() + REWRITE_TIMEOUT_S
    while not is_so():
        if time.monotonic() > give_up_at_s:
            raise StorageUnavailable("Redis does not rewrite its append-only file; see the log of Redis")
        time.sleep(0.1)


class _ClusterClient(redis.RedisCluster):
    """A client whose connections end when it is closed. Those of ``from_url`` would last until they are collected."""

    @override
    def close(self) -> None:
        self.disconnect_connection_pools()  # type: ignore[no-untyped-call]
        super().close()


def _client(url: str) -> Any:
    """Return a client of the server, or of the cluster that it belongs to.

    One thread sends one command after another, so redis-py's own cluster client is good enough.
    """
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": SOCKET_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "driver_info": DRIVER,
    }
    nodes = node_urls(url)
    failure: Exception = ValueError("the URL names no server")
    for node in nodes:
        bare_url, options["credential_provider"] = split_password_file(node)
        require_usable(bare_url)
        client: Any = redis.Redis.from_url(bare_url, **options)
        try:
            if not is_cluster_mode(client.execute_command("HELLO")):
                break
        except (AuthenticationError, RedisConnectionError, RedisTimeoutError) as exc:
            client.close()
            failure = exc
        except ResponseError:  # a server that is too old, or a user without the permission
            break
        else:
            client.close()
            return _ClusterClient.from_url(bare_url, **options)
    else:
        raise failure
    if len(nodes) > 1:
        client.close()
        raise StorageError(NO_CLUSTER)
    return client


def _parsed(partition: int, page: Sequence[StreamEntry]) -> Iterator[EventEntry | ErasureEntry]:
    for entry_id, fields in page:
        seq, logged_ms = _seq_and_ms(entry_id)
        if b"e" in fields:
            tenant, record = from_json(json.loads(fields[b"e"]))
            yield EventEntry(tenant, partition, seq, logged_ms, record)
        elif (erased := parse_erasure(fields[b"x"])) is not None:
            tenant, user = erased
            yield ErasureEntry(tenant, partition, seq, user)


def _seq_and_ms(entry_id: bytes) -> tuple[int, int]:
    seq, logged_ms = entry_id.split(b"-")
    return int(seq), int(logged_ms)


def trim_arguments(
    keys: Keyspace, partition: int, through: int, events: Iterable[tuple[str, LogRecord]]
) -> tuple[list[str], list[Argument]]:
    """Return KEYS and ARGV of TRIM for the oldest entries of a partition's log.

    through  SEQ of the last of these entries
    events   their tenants and records
    """
    newest_s: dict[User, int] = {}
    for tenant, event in events:
        user = keys.user(tenant, event.user_id)
        newest_s[user] = max(newest_s.get(user, 0), rounded_up_s(uuid7_time_us(event.entry_id) or 0))
    times: list[Argument] = [f"{time_s:0{TIME_DIGITS}}" for time_s in newest_s.values()]
    return [keys.log(partition), *(key for user in newest_s for key in (user.head, user.id_index))], [
        through,
        through + 1,
        *times,
    ]

"""The Redis store: any number of replicas on one server, Redis 6.2 or later or Valkey.

Events are folded here, in numpy, and committed by compare-and-set: a script changes the log, index and states of a
partition's users in one step, provided that nobody else has appended to them since they were read. A round trip and a
sync cost far more than an event, so whatever arrives during one round is read and committed together in the next.
"""

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from itertools import compress
from pathlib import Path
from typing import Any

from redis.exceptions import AuthenticationError, NoPermissionError, NoScriptError, TryAgainError

from storage.archive_lookups import AsyncArchiveReader
from storage.archive_reader import ArchivedLog, ArchiveSnapshot
from storage.cold import plain_type
from storage.corrections import LogFold, effective_events
from storage.errors import PartlyRead, StorageBusy, StorageError, StorageUnavailable
from storage.fold import compile_fold
from storage.records import (
    MAIN_TENANT,
    AppendResult,
    FoldedState,
    ItemChanges,
    ItemEntry,
    LogEntry,
    LogPage,
    TenantPointers,
)
from storage.redis_corrections import RedisCorrections
from storage.redis_generations import RedisGenerations, named_by
from storage.redis_item_counts import RedisItemCounts
from storage.redis_items import PUT_ITEMS, READ_ITEMS, RedisItems
from storage.redis_layout import (
    ADD_TALLIES,
    APPEND,
    COMMIT,
    ERASE,
    KEEP,
    KNOWN_LAYOUTS,
    LAYOUT_VERSION,
    MARK,
    MOVE,
    RAISE_LAYOUT,
    READ_LOG,
    SEQ_DIGITS,
    Argument,
    Entry,
    Head,
    Keyspace,
    Script,
    User,
    commit_arguments,
    entry_seq,
    erase_arguments,
    keep_arguments,
    log_entries,
    partition_page,
)
from storage.redis_requests import Commit, Part, Read, Request, UserFold, by_partition, fold_new
from storage.redis_servers import MAX_CONNECTIONS, PAUSE_S, Command, Copies, RedisServers, failure_of, script_call
from storage.redis_trends import ADD_TRENDS, RedisTrends
from storage.rounds import GroupCommitByNode
from storage.state import Generation, State, StateError
from storage.state_event import Event
from storage.trends import Trends

OLDEST_SERVER = (6, 2)
OLDEST_WITH_WAITAOF = (7, 2)
SAFE_SETTINGS = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
COVERAGE = "cluster-require-full-coverage"
ONE_COPY = Copies()

PARTITIONS = 256
CONNECT_TIMEOUT_S = 1.0
SOCKET_TIMEOUT_S = 2.0
MAX_WAITING = 8192  # events, or values to read
MAX_ROUND = 512  # a round is folded and encoded in one go, 30 to 160 ms in which the event loop does nothing else
ENDLESS = 2**53
LOG_PAGE = 500
SCAN_TIMEOUT_S = 600.0  # for the archive to read a part of all its files
STREAM_PAGE = 2000  # entries of a partition, some 2 ms in which Redis does nothing else
KEPT_AT_ONCE = 64  # states of a rebuild in one transaction, about 250 kB
FAR_BEHIND = 500  # entries; a state that lacks more of the log is folded apart, so that no round waits for it
DAY_S = 86_400
REGISTERED = "generation:"  # begins a field of PREFIX:meta

logger = logging.getLogger(__name__)


class RedisStore:
    """A UserStore on a Redis server. Make it with `open`; it belongs to the event loop in which it was opened."""

    def __init__(
        self,
        servers: RedisServers,
        keys: Keyspace,
        generations: Sequence[Generation],
        max_waiting: int,
        ttl_s: int,
        archive: AsyncArchiveReader,
        tenant: str,
    ) -> None:
        self.generations = RedisGenerations(self._usable_servers, keys, tenant)
        self._corrections = RedisCorrections(self)
        self._items = RedisItems(self._call, self._run, keys)
        self._trends = RedisTrends(self._call, self._run, keys)
        self._tenant = tenant
        self._servers = servers
        self._keys = keys
        self._serving = tuple(generations)
        self._ttl_s = ttl_s
        self._reads: GroupCommitByNode[Read] = GroupCommitByNode(
            self._read_round, lambda read: servers.node_of(read.keys[0]), max_size=MAX_ROUND, max_waiting=max_waiting
        )
        self._writes: GroupCommitByNode[Part] = GroupCommitByNode(
            self._write_round, lambda part: servers.node_of(part.log), max_size=MAX_ROUND, max_waiting=max_waiting
        )
        # what a missing state costs must not take the connections to its server that everybody's rounds need
        self._folding = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(MAX_CONNECTIONS // 2))
        self._catching_up: dict[str, asyncio.Task[None]] = {}  # states that are far behind, by their keys
        self._max_waiting = max_waiting
        self._archive = archive
        self._looked_up: set[Part] = set()  # what waits for the archive
        self._waiting_apart: set[asyncio.Task[None]] = set()
        self._archive_id = ""
        self._item_counts = RedisItemCounts(self._usable_servers, keys, archive, self._id_of_archive)
        self._registered: set[bytes] = set()
        self._checked = False
        self._closed = False

    @classmethod
    async def open(
        cls,
        url: str,
        generations: Sequence[Generation],
        *,
        tenant: str = MAIN_TENANT,
        prefix: str = "lisarec",
        partitions: int = PARTITIONS,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        socket_timeout_s: float = SOCKET_TIMEOUT_S,
        max_waiting: int = MAX_WAITING,
        state_ttl_days: int | None = None,
        archive_dir: Path | None = None,
        copies: Copies = ONE_COPY,
    ) -> "RedisStore":
        """Open the store at a redis://, rediss:// (TLS) or unix:// URL with the user, password and database in it.

        Of a cluster the URL names a node, or several: redis://HOST:PORT,HOST:PORT. The archive directory is where an
        archiver has moved, or will move, the older part of the log. What is acknowledged has as many copies as asked
        for. Without a generation the store takes no events. A server that cannot be reached now is no error: until it
        is there, every call raises StorageUnavailable.

        raises  ValueError          when the URL or prefix cannot be used
                StorageUnavailable  when the server refuses the user, the password or a command
                StorageError        when the server is too old, or its data have another layout
        """
        servers = RedisServers(
            url, connect_timeout_s=connect_timeout_s, socket_timeout_s=socket_timeout_s, copies=copies
        )
        if generations:
            await asyncio.to_thread(compile_fold, generations[0])
        ttl_s, archive = (state_ttl_days or 0) * DAY_S, AsyncArchiveReader(archive_dir)
        store = cls(servers, Keyspace(prefix, partitions), generations, max_waiting, ttl_s, archive, tenant)
        try:
            await store._check_servers()
        except StorageError as exc:
            refused = isinstance(exc.__cause__, AuthenticationError | NoPermissionError)
            if refused or not isinstance(exc, StorageUnavailable):
                await store.close()
                raise
            logger.warning("the store is not there yet: %s", exc)
        return store

    @property
    def waiting(self) -> int:
        return self._reads.waiting_size + self._writes.waiting_size + sum(part.size for part in self._looked_up)

    def serve_generations(self, generations: Sequence[Generation]) -> None:
        self._serving = tuple(generations)

    async def append(self, tenant: str, events: Sequence[Event]) -> list[AppendResult]:
        if not events:
            return []
        if not self._serving:
            raise ValueError("a store that takes events needs at least one generation")
        if sum(part.size for part in self._looked_up) > self._max_waiting:
            raise StorageBusy("too much waits for the archive; try again later")
        request = Request(len(events))
        self._writes.put(request.parts(self._keys, tenant, events))
        return await request.answer

    async def states(
        self, tenant: str, user_ids: Sequence[str], generation: Generation, *, max_missing: int | None = None
    ) -> list[bytes | None]:
        if not user_ids:
            return []
        users = {user_id: self._keys.user(tenant, user_id) for user_id in user_ids}
        reads = [Read([user.head, user.state(generation)]) for user in users.values()]
        self._reads.put(reads)
        values: dict[str, bytes | None] = {}
        failure: StorageError | None = None
        for (user_id, user), read in zip(users.items(), reads, strict=True):
            try:
                head, state = await read.answer
                values[user_id] = await self._fresh_value(user, generation, head, state, max_missing)
            except StorageError as exc:
                failure = exc
        if failure is None:
            return [values[user_id] for user_id in user_ids]
        if not values:
            raise failure
        raise PartlyRead(str(failure), values) from failure

    async def log(self) -> AsyncIterator[LogPage]:
        self._refuse_when_closed()
        await self._check_servers()
        number = 0
        while number < self._keys.partitions:
            archived = await self._archived_logs(number, self._keys.partitions) if self._archive.is_configured else {}
            for one in archived or [number]:
                async for page in self._log_of_partition(one, archived.get(one)):
                    yield page
                number = one + 1

    async def _log_of_partition(self, number: int, archived: ArchivedLog | None) -> AsyncIterator[LogPage]:
        """What the archive has and then what the stream has behind it; both from the start where that has a gap.

        Of who was erased, the archive may still have entries that go with the archiver's next turn; the stream says so.
        Where archiver and trimming have gone past the place that was read, it may no longer do.
        """
        through = int(await self._call("GET", f"{self._keys.partition(number)}:seq") or 0)
        is_again = False
        while through:
            after = 0
            if archived is not None:
                yield LogPage([], is_complete=False, starts_over=is_again)
                for entries in archived.pages(STREAM_PAGE):
                    yield LogPage(entries, is_complete=False)
                after = archived.through_seq
            async for page, last in self._stream(number, after, through):
                yield page
                if page.is_complete:
                    return
                after = last
            archived = (await self._archived_logs(number, number + 1, at_least=after + 1))[number]
            is_again = True

    async def _stream(self, number: int, after: int, through: int) -> AsyncIterator[tuple[LogPage, int]]:
        """Pages of a partition's stream, and how far each goes; ends early where the next entry was trimmed."""
        while True:
            found = await self._call("XRANGE", self._keys.log(number), after + 1, through, "COUNT", STREAM_PAGE)
            if after < through and (not found or entry_seq(found[0][0]) != after + 1):  # numbers have no gaps
                return
            is_complete = len(found) < STREAM_PAGE
            after = entry_seq(found[-1][0]) if found else after
            yield partition_page(found, is_complete=is_complete), after
            if is_complete:
                return

    async def _archived_logs(self, first: int, end: int, *, at_least: int = 0) -> dict[int, ArchivedLog]:
        """The archived logs of partitions from the first one on, as many as fit; none where nothing is archived."""
        archive_id = await self._id_of_archive()
        if not archive_id and not at_least:
            return {}

        def logs(snapshot: ArchiveSnapshot) -> dict[int, ArchivedLog]:
            snapshot.require(archive_id, first, at_least)
            return snapshot.logs(first, end)

        return await self._archive.read(logs, SCAN_TIMEOUT_S)

    async def save_states(self, generation: Generation, states: Sequence[FoldedState]) -> None:
        self._refuse_when_closed()
        await self._check_servers()
        await self._register([generation])
        for start in range(0, len(states), KEPT_AT_ONCE):
            some = states[start : start + KEPT_AT_ONCE]
            if any(isinstance(reply, NoScriptError) for reply in await self._keep_together(generation, some)):
                await self._load_scripts()
                await self._keep_together(generation, some)

    async def drop_idle_states(self) -> int:
        return 0  # the server does it

    async def seen_items(self, tenant: str, user_id: str, unseen_types: Collection[str] = ()) -> set[str]:
        user = await self._root(tenant, user_id)
        events = effective_events([entry.event async for entry in self._log(user)])
        return {event.item_id for event in events if plain_type(event.type) not in unseen_types}

    async def events(self, tenant: str, user_id: str, *, after: int = 0, limit: int = 100) -> list[LogEntry]:
        user = await self._root(tenant, user_id)
        return [entry async for entry in self._log(user, after=after, limit=limit)]

    async def pointers(self) -> TenantPointers:
        servers = await self._usable_servers()
        read: list[bytes | None] = []
        for values in await servers.values(
            [
                [self._keys.active(self._tenant)],
                [self._keys.items(self._tenant).version],
                [self._keys.experiment(self._tenant)],
            ]
        ):
            if isinstance(values, Exception):
                raise failure_of(values) from values
            read += values
        pointer, version, experiment = read
        return TenantPointers(named_by(pointer), int(version or 0), None if experiment is None else experiment.decode())

    async def put_items(self, tenant: str, entries: Sequence[ItemEntry]) -> None:
        await self._usable_servers()
        await self._items.put(tenant, entries)

    async def item_changes(self, tenant: str, after: int, limit: int) -> ItemChanges:
        await self._usable_servers()
        return await self._items.changes(tenant, after, limit)

    async def item_tenants(self) -> list[str]:
        await self._usable_servers()
        return await self._items.tenants()

    async def item_counts(self, tenant: str, types: Collection[str]) -> dict[str, int]:
        return await self._item_counts(tenant, types)

    async def add_trends(self, tenant: str, trends: Trends) -> None:
        await self._usable_servers()
        if trends:
            await self._trends.add(tenant, trends)

    async def trends(self, tenant: str, limit: int) -> dict[str, float]:
        await self._usable_servers()
        return await self._trends.best(tenant, limit)

    async def add_tallies(self, tenant: str, counts: Mapping[str, int]) -> None:
        args: list[Argument] = [part for name, count in counts.items() for part in (name, count)]
        if args:
            await self._usable_servers()
            await self._run(ADD_TALLIES, [self._keys.tallies(tenant)], args)

    async def tallies(self, tenant: str) -> dict[str, int]:
        found = await (await self._usable_servers()).call("HGETALL", self._keys.tallies(tenant))
        return {name.decode(): int(count) for name, count in found.items()}

    async def secret(self) -> bytes:
        await self._usable_servers()
        await self._call("HSETNX", self._keys.meta, "secret", secrets.token_hex(32))
        return bytes.fromhex((await self._call("HGET", self._keys.meta, "secret")).decode())

    async def undo(self, tenant: str, user_id: str, event_id: str) -> bool:
        user = await self._root(tenant, user_id)
        is_new = await self._corrections.undo(self._keys.user(tenant, user_id), event_id)
        self._fold_apart(user)
        return is_new

    async def merge(self, tenant: str, user_id: str, visitor: str) -> bool:
        user = await self._root(tenant, user_id)
        is_new = await self._corrections.merge(user, self._keys.user(tenant, visitor))
        self._fold_apart(user)
        return is_new

    def _fold_apart(self, user: User) -> None:
        """Fold what was corrected before anybody needs it."""
        for generation in self._serving:
            self._catch_up_apart(user, generation)

    async def erase(self, tenant: str, user_id: str) -> None:
        self._refuse_when_closed()
        await self._check_servers()
        await self._corrections.erase(self._keys.user(tenant, user_id))

    async def _erase(self, user: User) -> None:
        tags = await self._registered_tags()
        await self._run(ERASE, *erase_arguments(user, tags))
        late = await self._registered_tags() - tags  # a generation's first states were written meanwhile
        if late:
            await self._call("DEL", *map(user.state_of_tag, late))

    async def _root(self, tenant: str, user_id: str) -> User:
        self._refuse_when_closed()
        await self._check_servers()
        return await self._corrections.root(self._keys.user(tenant, user_id))

    async def ping(self) -> None:
        self._refuse_when_closed()
        await self._check_servers()
        for reply in await self._servers.everywhere("PING"):
            if isinstance(reply, Exception):
                raise failure_of(reply) from reply

    async def close(self) -> None:
        self._closed = True
        await self._reads.close()
        await self._writes.close()
        while self._waiting_apart:  # who waits for the archive was accepted too
            await asyncio.wait(self._waiting_apart)
            await self._writes.close()
        for task in list(self._catching_up.values()):
            task.cancel()  # nobody waits for it, and what it has not kept can be folded again
            await asyncio.wait([task])
        await self._servers.close()
        self._archive.close()

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise StorageUnavailable("the store is closed")

    # ---- the servers

    async def _call(self, *command: Argument) -> Any:
        return await self._servers.call(*command)

    async def _usable_servers(self) -> RedisServers:
        self._refuse_when_closed()
        await self._check_servers()
        return self._servers

    async def _run(self, script: Script, keys: Sequence[str], args: Sequence[Argument], *, copied: bool = False) -> Any:
        command = script_call(script, keys, args)
        (reply,) = await self._servers.settled([command], copied=copied)
        if isinstance(reply, NoScriptError):
            await self._load_scripts()
            (reply,) = await self._servers.settled([command], copied=copied)
        if isinstance(reply, Exception):
            raise failure_of(reply) from reply
        return reply

    async def _check_servers(self) -> None:
        """Make sure, once the servers can be reached, that they and their data can be used."""
        if self._checked:
            return
        await self._servers.connect()
        await self._check_versions()
        await self._check_layout()
        await self._check_settings()
        await self._load_scripts()
        with suppress(StorageUnavailable):  # a read-only server; before the first state is written it is tried again
            await self._register(self._serving)
        self._checked = True

    async def _check_versions(self) -> None:
        for info in await self._servers.everywhere("INFO", "server", replicas=True):
            if isinstance(info, NoPermissionError):  # a user without dangerous commands: the scripts will tell
                logger.info("Redis does not tell its version")
            elif not isinstance(info, Exception):
                version = str(info["redis_version"])
                if _number_of(version) < OLDEST_SERVER:
                    raise StorageError(f"Redis {version} is too old for lisarec, which needs 6.2 or later")
                if self._servers.copies.synced and _number_of(version) < OLDEST_WITH_WAITAOF:
                    raise StorageError(
                        f"Redis {version} cannot tell what its replicas have synced, 7.2 can; wait for replicas without"
                    )
            elif not self._servers.is_cluster or isinstance(info, AuthenticationError):
                raise failure_of(info) from info

    async def _check_settings(self) -> None:
        """Say what is not set up as docker/redis.conf and, of a cluster, docker/redis-cluster.conf say."""
        for name, safe in SAFE_SETTINGS.items():
            for found in await self._settings(name):
                if found != safe:
                    logger.warning("Redis may lose acknowledged events: its %s is %s, not %s", name, found, safe)
        if self._servers.is_cluster:
            for found in await self._settings(COVERAGE):
                if found != "no":
                    logger.warning("one lost node will stop the whole cluster of Redis: its %s is %s", COVERAGE, found)

    async def _settings(self, name: str) -> set[str]:
        """The values that the servers have; of those that do not tell, none."""
        values = set()
        for reply in await self._servers.everywhere("CONFIG GET", name, replicas=True):
            if isinstance(reply, Exception):  # many managed servers do not tell
                logger.info("Redis does not tell its %s: %s", name, reply)
            elif name in reply:
                values.add(reply[name])
        return values

    async def _load_scripts(self) -> None:
        scripts = [COMMIT, KEEP, READ_LOG, ERASE, APPEND, MOVE, RAISE_LAYOUT, PUT_ITEMS, READ_ITEMS]
        scripts += [ADD_TRENDS, ADD_TALLIES]
        for script in scripts:
            for reply in await self._servers.everywhere("SCRIPT LOAD", script.text):
                if isinstance(reply, Exception) and not self._servers.is_cluster:
                    raise failure_of(reply) from reply

    async def _check_layout(self) -> None:
        wanted = {"layout": LAYOUT_VERSION, "partitions": self._keys.partitions}
        read = ("HMGET", self._keys.meta, *wanted)
        if None in await self._call(*read):
            for name, value in wanted.items():
                await self._call("HSETNX", self._keys.meta, name, value)
        found = dict(zip(wanted, map(int, await self._call(*read)), strict=True))
        if self._serving and not self._archive.is_configured and await self._id_of_archive():
            logger.warning("older parts of the log are in an archive, and no archive directory is given")
        if found["layout"] not in KNOWN_LAYOUTS or found["partitions"] != self._keys.partitions:
            raise StorageError(
                f"'{self._keys.meta}' says {found}, and this lisarec was started for {wanted}; "
                "start it as the data were made, or choose another key prefix"
            )

    async def _register(self, generations: Sequence[Generation]) -> None:
        """Note, before the first state of a generation is written, that there are such states: erasing goes by it."""
        for generation in generations:
            if generation.tag not in self._registered:
                await self._call("HSETNX", self._keys.meta, f"{REGISTERED}{generation.tag.hex()}", 1)
                self._registered.add(generation.tag)

    async def _registered_tags(self) -> set[str]:
        fields = await self._call("HKEYS", self._keys.meta)
        return {field.decode().removeprefix(REGISTERED) for field in fields if field.startswith(REGISTERED.encode())}

    # ---- reading

    async def _read_round(self, reads: "list[Read]") -> "list[Read]":
        await self._check_servers()
        reads = [read for read in reads if not read.is_too_late()]
        if not reads:
            return []
        found = await self._servers.values([read.keys for read in reads])
        for read, values in zip(reads, found, strict=True):
            if isinstance(values, Exception):
                read.fail(values)
            else:
                read.succeed(values)
        return []

    async def _log(
        self, user: User, *, after: int = 0, through: int | str = "+inf", limit: int = ENDLESS
    ) -> AsyncIterator[LogEntry]:
        await self._check_servers()
        while limit > 0:
            page = min(limit, LOG_PAGE)
            async with self._folding[self._servers.node_of(user.head)]:
                found = await self._run(READ_LOG, [user.head, user.index, user.log], [after, through, page])
            if len(found) == 1:
                archived = int(found[0])
                entries = await self._archived_log(user, after, archived, through, limit)
                after, is_last = archived, through != "+inf" and int(through) <= archived
            else:
                entries = list(log_entries(user, found))
                after, is_last = entries[-1].seq if entries else after, len(entries) < page
            for entry in entries:
                yield entry
            if is_last:
                return
            limit -= len(entries)

    async def _archived_log(
        self, user: User, after: int, archived: int, through: int | str, limit: int
    ) -> list[LogEntry]:
        """What the archive has of the user's log up to its entry `archived` and up to `through`."""
        last = archived if through == "+inf" else min(archived, int(through))
        archive_id = await self._id_of_archive()

        def entries(snapshot: ArchiveSnapshot) -> list[LogEntry]:
            snapshot.require(archive_id, user.partition_number, archived)
            return snapshot.entries(user.tenant, user.user_id, after=after, through=last, limit=limit)

        return await self._archive.read(entries)

    async def _id_of_archive(self) -> str:
        """Empty where there is none. It never changes; so who knows it does not need its server."""
        try:
            self._archive_id = (await self._call("HGET", self._keys.meta, "archive") or b"").decode()
        except StorageUnavailable:
            if not self._archive_id:
                raise
        return self._archive_id

    async def _fresh_value(
        self,
        user: User,
        generation: Generation,
        head: bytes | None,
        stored: bytes | None,
        max_missing: int | None = None,
    ) -> bytes | None:
        """The user's state; None without a log, and for now when more entries are missing than `max_missing`."""
        if head is None:
            return None
        if len(head) <= MARK and (value := _fresh(generation, stored, head)) is not None:
            return value  # almost always
        if Head.of(head).move is not None:
            user = await self._corrections.root(user)
            head, stored = await self._stored(user, generation)
            return await self._fresh_value(user, generation, head, stored, max_missing)
        try:
            state, was_fresh = await self._state(user, generation, head, stored, max_missing)
        except _FarBehindError:
            if max_missing is None:
                newest, stored = await self._stored(user, generation)
                if newest == head:
                    raise
                return await self._fresh_value(user, generation, newest, stored)  # the user was erased meanwhile
            self._catch_up_apart(user, generation)
            return None
        value = generation.encode(state)
        if not was_fresh:
            # What cannot be kept, on a server that is full or read-only, can still be served.
            with suppress(StorageUnavailable):
                await self._keep(user, generation, head, value)
        return value

    async def _stored(self, user: User, generation: Generation) -> list[bytes | None]:
        (values,) = await self._servers.values([[user.head, user.state(generation)]])
        if isinstance(values, Exception):
            raise failure_of(values) from values
        return values

    async def _keep(self, user: User, generation: Generation, head: bytes, value: bytes) -> None:
        """Store the state at `head`, unless a newer one is stored; also while others go on appending."""
        await self._register([generation])
        async with self._folding[self._servers.node_of(user.head)]:
            await self._run(KEEP, *keep_arguments(user, generation, Head.of(head).newest, value, self._ttl_s))

    async def _keep_together(self, generation: Generation, states: Sequence[FoldedState]) -> list[Any]:
        commands = [
            script_call(
                KEEP,
                *keep_arguments(
                    self._keys.user(state.tenant, state.user_id),
                    generation,
                    state.through_seq,
                    state.value,
                    self._ttl_s,
                ),
            )
            for state in states
        ]
        replies = await self._servers.settled(commands, together=True)
        for reply in replies:
            if isinstance(reply, Exception) and not isinstance(reply, NoScriptError):
                raise failure_of(reply) from reply
        return replies

    async def _state(
        self,
        user: User,
        generation: Generation,
        head: bytes | None,
        stored: bytes | None,
        max_missing: int | None = None,
    ) -> tuple[State, bool]:
        """The fold of the user's log through the entry `head`, and whether the stored value was that already.

        What the value lacks is folded now: all of it for a new generation or layout, the rest where a process that
        serves another generation has appended.

        raises  _FarBehindError  when it lacks more than `max_missing` entries
        """
        if head is None:
            return generation.empty(), True
        log = Head.of(head)
        through, state = _decoded(generation, stored, newest=log.newest)
        if through == log.newest:
            return state, True
        fold = LogFold(generation, state)
        while True:
            if through < log.archived and max_missing is not None:
                raise _FarBehindError(user)
            limit = ENDLESS if max_missing is None else max_missing
            async for entry in self._log(user, after=through, through=log.newest, limit=limit):
                fold.apply(entry.event)
                through = entry.seq
            if log.archived < log.newest and through < log.newest:  # what is archived may be dropped one day
                raise _FarBehindError(user)
            if not fold.must_restart:
                return fold.state, False
            fold, through = fold.restarted(), 0

    # ---- writing

    async def _write_round(self, parts: "list[Part]") -> "list[Part]":
        """Commit each partition in one step; return what somebody else was faster than."""
        await self._check_servers()
        serving = self._serving
        await self._register(serving)
        parts = [part for part in parts if not (part.is_dropped() or part.is_too_late())]
        folds = await self._read_folds(parts, serving)
        moved = [part for part in parts if part.has_moved(folds)]
        self._readdress_apart(moved)
        parts = [part for part in parts if part not in moved]
        ready: list[list[Part]] = []
        undecided: list[Part] = []
        for together in by_partition(parts):
            try:
                ready.append(await self._decided(together, folds))
            except _UndecidedError as exc:
                self._writes.requeue([part for part in together if part not in exc.parts])
                undecided += exc.parts
            except Exception as exc:  # what is odd in one partition is nothing to the others
                for part in together:
                    part.fail(exc)
        if undecided:
            self._look_up_apart(undecided)
        commits = [_received(together, folds) for together in ready]
        new_folds = [fold for commit in commits for fold in commit.folds.values()]
        if any(fold.is_corrected for fold in new_folds):  # a back-up is being restored
            await self._corrections.raise_layout()
        fold_new(serving, new_folds)
        again: list[Part] = []
        on_the_way: list[Part] = []
        for commit, reply in zip(commits, await self._send(commits), strict=True):
            (on_the_way if isinstance(reply, TryAgainError) else again).extend(commit.settle(reply))
        if on_the_way:
            self._apart(on_the_way, asyncio.sleep(PAUSE_S))
        return again

    async def _read_folds(self, parts: "Sequence[Part]", serving: Sequence[Generation]) -> "dict[User, UserFold]":
        """What is stored of the parts' users; where a commit was refused, also which of their ids are logged."""
        folds = {user: UserFold(user, serving) for part in parts for user in part.users}
        # Before the states, so that little time passes between reading those and committing what they are folded into.
        doubted = [(user, entry) for part in parts if part.refusals for user, entry in part.entries]
        looked_up = [Command.of("ZSCORE", user.index, entry.member) for user, entry in doubted]
        scores = await self._servers.settled(looked_up)
        for (user, entry), score in zip(doubted, scores, strict=True):
            if isinstance(score, Exception):
                folds[user].failure = score
            elif score is not None:
                folds[user].seen.add(entry.id_hash)
        stored = await self._servers.values([[user.head, *user.states(serving)] for user in folds])
        for fold, values in zip(folds.values(), stored, strict=True):
            if isinstance(values, Exception):
                fold.failure = values
            else:
                fold.head, *fold.stored = values
        return folds

    async def _decided(self, parts: "list[Part]", folds: "dict[User, UserFold]") -> "list[Part]":
        """The parts of a partition, now that their users' states are up to date and it is known what is archived."""
        for user in dict.fromkeys(user for part in parts for user in part.users):
            fold = folds[user]
            if fold.failure is not None:
                raise failure_of(fold.failure)
            await self._fold_what_lacks(fold)
        undecided = [part for part in parts if part.is_undecided(folds)]
        if undecided:
            raise _UndecidedError(undecided)
        for part in parts:
            for user, id_hash in part.archived:
                folds[user].seen.add(id_hash)
        return parts

    async def _fold_what_lacks(self, fold: "UserFold") -> None:
        """Bring the user's states up to date, save those that are far behind: a later reader needs them, no event."""
        for generation, stored in zip(fold.serving, fold.stored, strict=True):
            if fold.head is None:
                fold.states[generation.tag] = generation.encoded_empty
            elif (value := _fresh(generation, stored, fold.head)) is not None:
                fold.states[generation.tag] = value
            elif fold.user.state(generation) not in self._catching_up:
                try:
                    state, _ = await self._state(fold.user, generation, fold.head, stored, max_missing=FAR_BEHIND)
                except _FarBehindError:
                    self._catch_up_apart(fold.user, generation)
                else:
                    fold.states[generation.tag] = generation.encode(state)

    def _catch_up_apart(self, user: User, generation: Generation) -> None:
        """Bring a state up to date while everything else goes on."""
        key = user.state(generation)
        if key in self._catching_up or self._closed:
            return

        async def catch_up() -> None:
            try:
                head, stored = await self._stored(user, generation)
                await self._fresh_value(user, generation, head, stored)
            except StorageError as exc:
                logger.warning("a state could not be folded from the log, which will be tried again: %s", exc)
            finally:
                del self._catching_up[key]

        self._catching_up[key] = asyncio.create_task(catch_up())

    def _look_up_apart(self, parts: "list[Part]") -> None:
        """Let the archive say which of the parts' events it holds, and then let them wait again."""
        self._looked_up.update(parts)

        async def look_up() -> None:
            try:
                await self._look_up(parts)
            finally:
                self._looked_up.difference_update(parts)

        self._apart(parts, look_up())

    def _apart(self, parts: list[Part], work: Coroutine[Any, Any, None]) -> None:
        """Let the parts wait again when this is done, or fail with it."""

        async def put_back() -> None:
            try:
                await work
            except Exception as exc:
                for part in parts:
                    part.fail(exc)
            else:
                self._writes.requeue([part for part in parts if not part.is_too_late()])

        self._wait_for(put_back())

    def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        """Before closing."""
        task = asyncio.create_task(work)
        self._waiting_apart.add(task)
        task.add_done_callback(self._waiting_apart.discard)

    def _readdress_apart(self, parts: "list[Part]") -> None:
        """Let events of who has become another user wait again, as that user's."""

        async def readdress(part: Part) -> None:
            try:
                roots = {user: await self._corrections.root(user) for user in set(part.users)}
                self._writes.requeue(part.readdressed(roots))
            except Exception as exc:
                part.fail(exc)

        for part in parts:
            self._wait_for(readdress(part))

    async def _look_up(self, parts: "list[Part]") -> None:
        """All of the parts' events, also those that are decided as things are now."""
        archive_id = await self._id_of_archive()
        entries: defaultdict[str, list[tuple[User, Entry]]] = defaultdict(list)
        for part in parts:
            for user, entry in part.entries:
                entries[user.tenant].append((user, entry))

        def look(snapshot: ArchiveSnapshot) -> None:
            for part in parts:
                snapshot.require(archive_id, part.partition, part.must_look_through)
            found: set[tuple[User, int]] = set()
            for tenant, asked in entries.items():
                held = snapshot.holds(tenant, [(user.user_id, entry.event.event_id) for user, entry in asked])
                found.update((user, entry.id_hash) for user, entry in compress(asked, held))
            for part in parts:
                part.looked_through = snapshot.manifest.seq(part.partition)
                part.archived = found.intersection((user, entry.id_hash) for user, entry in part.entries)

        await self._archive.read(look)

    async def _send(self, commits: Sequence[Commit]) -> list[Any]:
        """Of each commit, what becomes of its changes, or why nothing does."""
        # One without changes only has what was logged before, but perhaps not copied before somebody was told so.
        changes = {commit.partition: commit.changes for commit in commits}
        is_copied = self._servers.copies.are_wanted
        sent = {partition: of_users for partition, of_users in changes.items() if of_users or is_copied}
        # One server does all in one call; in a cluster each partition may be elsewhere.
        calls = [{one: sent[one]} for one in sent] if self._servers.is_cluster else [sent] if sent else []
        commands = [script_call(COMMIT, *commit_arguments(call, self._ttl_s)) for call in calls]
        replies = await self._servers.batch(commands, copied=True)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            await self._load_scripts()
        found: dict[str, list[Any] | Exception] = {}
        for call, reply in zip(calls, replies, strict=True):
            of_changes = iter(reply if isinstance(reply, list) else ())
            for partition, of_users in call.items():
                found[partition] = reply if isinstance(reply, Exception) else [next(of_changes) for _ in of_users]
        return [found.get(commit.partition, []) for commit in commits]


def _received(parts: "list[Part]", folds: "dict[User, UserFold]") -> Commit:
    is_new = [[folds[user].receive(entry) for user, entry in part.entries] for part in parts]
    return Commit(parts, is_new, {user: folds[user] for part in parts for user in part.users})


class _FarBehindError(StorageError):
    """A user's state lacks more of the log than may be folded now."""

    def __init__(self, user: User) -> None:
        super().__init__("the log of a user could not be read to its end")
        self.user = user


class _UndecidedError(StorageError):
    """Only the archive knows whether some events of these parts were logged before."""

    def __init__(self, parts: "list[Part]") -> None:
        super().__init__("the archive has to be asked for events")
        self.parts = parts


def _fresh(generation: Generation, stored: bytes | None, head: bytes) -> bytes | None:
    """The encoded state that is stored, if it holds the log through `head`."""
    if stored is None or stored[:SEQ_DIGITS] != head[:SEQ_DIGITS]:
        return None
    value = stored[SEQ_DIGITS:]
    return value if generation.fits(value) else None


def _decoded(generation: Generation, stored: bytes | None, newest: int) -> tuple[int, State]:
    """The newest entry that a stored state holds, and the state; 0 and the empty one where it cannot be used."""
    if stored is not None:
        try:
            through, state = int(stored[:SEQ_DIGITS]), generation.decode(stored[SEQ_DIGITS:])
        except (StateError, ValueError) as exc:
            logger.warning("folding a state again from the log: %s", exc)
        else:
            if through <= newest:  # else it was left over when the log was lost
                return through, state
    return 0, generation.empty()


def _number_of(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))

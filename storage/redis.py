"""The Redis store: any number of replicas on one server, Redis 6.2 or later or Valkey.

Events are folded here, in numpy, and committed by compare-and-set: a script changes the log, index and states of a
partition's users in one step, provided that nobody else has appended to them since they were read. A round trip and a
sync cost far more than an event, so whatever arrives during one round is read and committed together in the next.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, NoScriptError, RedisError

from storage.archive import ArchivedLog, Snapshot
from storage.archive_lookups import ArchiveLookups
from storage.corrections import LogFold, counted, is_correction, readdressed
from storage.redis_corrections import RedisCorrections
from storage.redis_generations import RedisGenerations
from storage.redis_layout import (
    COMMIT,
    ERASE,
    KEEP,
    KNOWN_LAYOUTS,
    LAYOUT_VERSION,
    MOVE,
    RAISE_LAYOUT,
    READ_LOG,
    SEQ_DIGITS,
    Argument,
    Change,
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
from storage.rounds import Rounds
from storage.state import Effect, Event, Generation, State, StateError
from storage.store import (
    Appended,
    FoldedState,
    LogEntry,
    LogPage,
    PartlyApplied,
    StorageBusy,
    StorageError,
    StorageUnavailable,
)

OLDEST_SERVER = (6, 2)
SAFE_SETTINGS = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}

PARTITIONS = 256
CONNECT_TIMEOUT_S = 1.0
SOCKET_TIMEOUT_S = 2.0
MAX_CONNECTIONS = 16
MAX_WAITING = 8192  # events, or values to read
MAX_ROUND = 512  # a round is folded and encoded in one go, 30 to 160 ms in which the event loop does nothing else
GIVE_UP_AFTER_S = 5.0
ENDLESS = 2**53
LOG_PAGE = 500
SCAN_TIMEOUT_S = 600.0  # for the archive to read a part of all its files
STREAM_PAGE = 2000  # entries of a partition, some 2 ms in which Redis does nothing else
KEPT_AT_ONCE = 64  # states of a rebuild in one transaction, about 250 kB
FAR_BEHIND = 500  # entries; a state that lacks more of the log is folded apart, so that no round waits for it
DAY_S = 86_400
REGISTERED = "generation:"  # begins a field of PREFIX:meta

# RuntimeError is how uvloop says that a connection broke while it was written to; redis-py passes it on.
CONNECTION_ERRORS = (RedisError, OSError, RuntimeError)

logger = logging.getLogger(__name__)


class RedisStore:
    """A UserStore on a Redis server. Make it with `open`; it belongs to the event loop in which it was opened."""

    def __init__(
        self,
        redis: Redis,
        keys: Keyspace,
        generations: Sequence[Generation],
        max_waiting: int,
        ttl_s: int,
        archive: ArchiveLookups,
    ) -> None:
        self.generations = RedisGenerations(self._call_checked, keys)
        self._corrections = RedisCorrections(self)
        self._redis = redis
        self._execute: Callable[..., Awaitable[Any]] = redis.execute_command
        self._keys = keys
        self._serving = tuple(generations)
        self._ttl_s = ttl_s
        self._reads: Rounds[_Read] = Rounds(self._read_round, max_size=MAX_ROUND, max_waiting=max_waiting)
        self._writes: Rounds[_Part] = Rounds(self._write_round, max_size=MAX_ROUND, max_waiting=max_waiting)
        # what a missing state costs must not take the connections that everybody's rounds need
        self._folding = asyncio.Semaphore(MAX_CONNECTIONS // 2)
        self._catching_up: dict[str, asyncio.Task[None]] = {}  # states that are far behind, by their keys
        self._max_waiting = max_waiting
        self._archive = archive
        self._looked_up: set[_Part] = set()  # what waits for the archive
        self._looking_up: set[asyncio.Task[None]] = set()  # also where parts are addressed anew
        self._registered: set[bytes] = set()
        self._checked = False
        self._closed = False

    @classmethod
    async def open(
        cls,
        url: str,
        generations: Sequence[Generation],
        *,
        prefix: str = "lisarec",
        partitions: int = PARTITIONS,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        socket_timeout_s: float = SOCKET_TIMEOUT_S,
        max_waiting: int = MAX_WAITING,
        state_ttl_days: int | None = None,
        archive_dir: Path | None = None,
    ) -> "RedisStore":
        """Open the store at a redis://, rediss:// (TLS) or unix:// URL with the user, password and database in it.

        The archive directory is where an archiver has moved, or will move, the older part of the log. Without a
        generation the store takes no events. A server that cannot be reached now is no error: until it is there,
        every call raises StorageUnavailable.

        raises  ValueError          when the URL or prefix cannot be used
                StorageUnavailable  when the server refuses the user, the password or a command
                StorageError        when the server is too old, or its data have another layout
        """
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=socket_timeout_s,
            socket_connect_timeout=connect_timeout_s,
            socket_timeout=socket_timeout_s,
            retry=Retry(NoBackoff(), 0),  # by itself redis-py sends ten times, also what timed out and may be done
            protocol=2,
        )
        ttl_s, archive = (state_ttl_days or 0) * DAY_S, ArchiveLookups(archive_dir)
        store = cls(Redis.from_pool(pool), Keyspace(prefix, partitions), generations, max_waiting, ttl_s, archive)
        try:
            await store._check_server()
        except StorageError as exc:
            refused = isinstance(exc.__cause__, AuthenticationError | NoPermissionError)
            if refused or not isinstance(exc, StorageUnavailable):
                await store.close()
                raise
            logger.warning("the store is not there yet: %s", exc)
        return store

    def fold_into(self, generations: Sequence[Generation]) -> None:
        self._serving = tuple(generations)

    async def append(self, tenant: str, events: Sequence[Event]) -> list[Appended]:
        if not events:
            return []
        if not self._serving:
            raise ValueError("a store that takes events needs at least one generation")
        if sum(part.size for part in self._looked_up) > self._max_waiting:
            raise StorageBusy("too much waits for the archive; try again later")
        request = _Request(len(events))
        self._writes.put(request.parts(self._keys, tenant, events))
        return await request.answer

    async def states(
        self, tenant: str, user_ids: Sequence[str], generation: Generation, *, at_most: int | None = None
    ) -> list[bytes | None]:
        if not user_ids:
            return []
        users = {user_id: self._keys.user(tenant, user_id) for user_id in user_ids}
        read = _Read([key for user in users.values() for key in (user.head, user.state(generation))])
        self._reads.put([read])
        stored = iter(await read.answer)
        values = {
            user_id: await self._fresh_value(user, generation, next(stored), next(stored), at_most)
            for user_id, user in users.items()
        }
        return [values[user_id] for user_id in user_ids]

    async def log(self) -> AsyncIterator[LogPage]:
        self._refuse_when_closed()
        await self._check_server()
        number = 0
        while number < self._keys.partitions:
            archived = await self._archived_logs(number, self._keys.partitions) if self._archive.is_given else {}
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

        def logs(snapshot: Snapshot) -> dict[int, ArchivedLog]:
            snapshot.require(archive_id, first, at_least)
            return snapshot.logs(first, end)

        return await self._archive.ask(logs, SCAN_TIMEOUT_S)

    async def keep(self, generation: Generation, states: Sequence[FoldedState]) -> None:
        self._refuse_when_closed()
        await self._check_server()
        await self._register([generation])
        for start in range(0, len(states), KEPT_AT_ONCE):
            some = states[start : start + KEPT_AT_ONCE]
            if any(isinstance(reply, NoScriptError) for reply in await self._keep_together(generation, some)):
                await self._load_scripts()
                await self._keep_together(generation, some)

    async def forget_idle(self) -> int:
        return 0  # the server does it

    async def seen_items(self, tenant: str, user_id: str) -> set[str]:
        user = await self._root(tenant, user_id)
        return {event.item_id for event in counted([entry.event async for entry in self._log(user)])}

    async def events(self, tenant: str, user_id: str, *, after: int = 0, limit: int = 100) -> list[LogEntry]:
        user = await self._root(tenant, user_id)
        return [entry async for entry in self._log(user, after=after, limit=limit)]

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
        for user in await self._corrections.names(await self._root(tenant, user_id)):
            await self._erase(user)

    async def _erase(self, user: User) -> None:
        tags = await self._registered_tags()
        await self._run(ERASE, *erase_arguments(user, tags))
        late = await self._registered_tags() - tags  # a generation's first states were written meanwhile
        await self._call("DEL", user.aliases, *map(user.state_of_tag, late))

    async def _root(self, tenant: str, user_id: str) -> User:
        self._refuse_when_closed()
        await self._check_server()
        return await self._corrections.root(self._keys.user(tenant, user_id))

    async def ping(self) -> None:
        self._refuse_when_closed()
        await self._check_server()
        await self._call("PING")

    async def close(self) -> None:
        self._closed = True
        await self._reads.close()
        await self._writes.close()
        while self._looking_up:  # who waits for the archive was accepted too
            await asyncio.wait(self._looking_up)
            await self._writes.close()
        for task in list(self._catching_up.values()):
            task.cancel()  # nobody waits for it, and what it has not kept can be folded again
            await asyncio.wait([task])
        with suppress(*CONNECTION_ERRORS):
            await self._redis.aclose(close_connection_pool=True)
        self._archive.close()

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise StorageUnavailable("the store is closed")

    # ---- the server

    async def _call(self, *command: Argument) -> Any:
        with _translated():
            return await self._execute(*command)

    async def _call_checked(self, *command: Argument) -> Any:
        self._refuse_when_closed()
        await self._check_server()
        return await self._call(*command)

    async def _run(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        with _translated():
            try:
                return await self._execute("EVALSHA", script.sha, len(keys), *keys, *args)
            except NoScriptError:
                await self._load_scripts()
                return await self._execute("EVALSHA", script.sha, len(keys), *keys, *args)

    async def _check_server(self) -> None:
        """Make sure, once the server can be reached, that it and its data can be used."""
        if self._checked:
            return
        await self._check_version()
        await self._check_layout()
        for name, safe in SAFE_SETTINGS.items():
            await self._warn_unless(name, safe)
        await self._load_scripts()
        with suppress(StorageUnavailable):  # a read-only server; before the first state is written it is tried again
            await self._register(self._serving)
        self._checked = True

    async def _check_version(self) -> None:
        try:
            version = str((await self._execute("INFO", "server"))["redis_version"])
        except NoPermissionError:  # a user without dangerous commands: the scripts will tell
            logger.info("Redis does not tell its version")
            return
        except CONNECTION_ERRORS as exc:
            raise _failure(exc) from exc
        if tuple(map(int, version.split(".")[:2])) < OLDEST_SERVER:
            raise StorageError(f"Redis {version} is too old for lisarec, which needs 6.2 or later")

    async def _load_scripts(self) -> None:
        for script in (COMMIT, KEEP, READ_LOG, ERASE, MOVE, RAISE_LAYOUT):
            await self._call("SCRIPT LOAD", script.text)

    async def _check_layout(self) -> None:
        wanted = {"layout": LAYOUT_VERSION, "partitions": self._keys.partitions}
        read = ("HMGET", self._keys.meta, *wanted)
        if None in await self._call(*read):
            for name, value in wanted.items():
                await self._call("HSETNX", self._keys.meta, name, value)
        found = dict(zip(wanted, map(int, await self._call(*read)), strict=True))
        if self._serving and not self._archive.is_given and await self._id_of_archive():
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

    async def _warn_unless(self, name: str, safe: str) -> None:
        try:
            found = (await self._redis.config_get(name)).get(name)
        except CONNECTION_ERRORS as exc:  # many managed servers do not tell
            logger.info("Redis does not tell its %s: %s", name, exc)
        else:
            if found != safe:
                logger.warning("Redis may lose acknowledged events: its %s is %s, not %s", name, found, safe)

    # ---- reading

    async def _read_round(self, reads: "list[_Read]") -> "list[_Read]":
        await self._check_server()
        reads = [read for read in reads if not read.is_too_late()]
        if not reads:
            return []
        values = iter(await self._call("MGET", *(key for read in reads for key in read.keys)))
        for read in reads:
            read.succeed([next(values) for _ in read.keys])
        return []

    async def _log(
        self, user: User, *, after: int = 0, through: int | str = "+inf", limit: int = ENDLESS
    ) -> AsyncIterator[LogEntry]:
        await self._check_server()
        while limit > 0:
            page = min(limit, LOG_PAGE)
            async with self._folding:
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

        def entries(snapshot: Snapshot) -> list[LogEntry]:
            snapshot.require(archive_id, user.partition_number, archived)
            return snapshot.entries(user.tenant, user.user_id, after=after, through=last, limit=limit)

        return await self._archive.ask(entries)

    async def _id_of_archive(self) -> str:
        return (await self._call("HGET", self._keys.meta, "archive") or b"").decode()

    async def _fresh_value(
        self,
        user: User,
        generation: Generation,
        head: bytes | None,
        stored: bytes | None,
        at_most: int | None = None,
    ) -> bytes | None:
        """The user's state; None without a log, and for now when the stored one lacks more entries than `at_most`."""
        if head is None:
            return None
        if Head.of(head).move is not None:
            user = await self._corrections.root(user)
            head, stored = await self._call("MGET", user.head, user.state(generation))
            return await self._fresh_value(user, generation, head, stored, at_most)
        try:
            state, was_fresh = await self._state(user, generation, head, stored, at_most)
        except _FarBehindError:
            if at_most is None:
                raise
            self._catch_up_apart(user, generation)
            return None
        value = generation.encode(state)
        if not was_fresh:
            # What cannot be kept, on a server that is full or read-only, can still be served.
            with suppress(StorageUnavailable):
                await self._keep(user, generation, head, value)
        return value

    async def _keep(self, user: User, generation: Generation, head: bytes, value: bytes) -> None:
        """Store the state at `head`, unless a newer one is stored; also while others go on appending."""
        await self._register([generation])
        async with self._folding:
            await self._run(KEEP, *keep_arguments(user, generation, Head.of(head).newest, value, self._ttl_s))

    async def _keep_together(self, generation: Generation, states: Sequence[FoldedState]) -> list[Any]:
        with _translated():
            async with self._redis.pipeline(transaction=True) as pipe:
                for state in states:
                    user = self._keys.user(state.tenant, state.user_id)
                    keys, args = keep_arguments(user, generation, state.through_seq, state.value, self._ttl_s)
                    pipe.execute_command("EVALSHA", KEEP.sha, len(keys), *keys, *args)
                replies = await pipe.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, Exception) and not isinstance(reply, NoScriptError):
                    raise reply
        return replies

    async def _state(
        self,
        user: User,
        generation: Generation,
        head: bytes | None,
        stored: bytes | None,
        at_most: int | None = None,
    ) -> tuple[State, bool]:
        """The fold of the user's log through the entry `head`, and whether the stored value was that already.

        What the value lacks is folded now: all of it for a new generation or layout, the rest where a process that
        serves another generation has appended.

        raises  _FarBehindError  when it lacks more than `at_most` entries
        """
        if head is None:
            return generation.empty(), True
        log = Head.of(head)
        through, state = _decoded(generation, stored, newest=log.newest)
        if through == log.newest:
            return state, True
        fold = LogFold(generation, state)
        while True:
            if through < log.archived and at_most is not None:
                raise _FarBehindError(user)
            limit = ENDLESS if at_most is None else at_most
            async for entry in self._log(user, after=through, through=log.newest, limit=limit):
                fold.take(entry.event)
                through = entry.seq
            if log.archived < log.newest and through < log.newest:  # what is archived may be dropped one day
                raise _FarBehindError(user)
            if not fold.is_spoiled:
                return fold.state, False
            fold, through = fold.again(), 0

    # ---- writing

    async def _write_round(self, parts: "list[_Part]") -> "list[_Part]":
        """Commit each partition in one step; return what somebody else was faster than."""
        await self._check_server()
        serving = self._serving
        await self._register(serving)
        parts = [part for part in parts if not (part.is_dropped() or part.is_too_late())]
        folds = await self._read_folds(parts, serving)
        moved = [part for part in parts if part.has_moved(folds)]
        self._readdress_apart(moved)
        parts = [part for part in parts if part not in moved]
        commits = []
        undecided: list[_Part] = []
        for together in _by_partition(parts):
            try:
                commits.append(await self._folded(together, folds))
            except StorageUnavailable:
                raise
            except _UndecidedError as exc:
                self._writes.put_back([part for part in together if part not in exc.parts])
                undecided += exc.parts
            except Exception as exc:  # what is odd in one partition is nothing to the others
                for part in together:
                    part.fail(exc)
        if undecided:
            self._look_up_apart(undecided)
        replies = iter(await self._send([commit.changes for commit in commits if commit.changes]))
        return [part for commit in commits for part in commit.settle(next(replies) if commit.changes else 1)]

    async def _read_folds(self, parts: "Sequence[_Part]", serving: Sequence[Generation]) -> "dict[User, _UserFold]":
        """What is stored of the parts' users; where a commit was refused, also which of their ids are logged."""
        folds = {user: _UserFold(user, serving) for part in parts for user in part.users}
        doubted = [(user, entry) for part in parts if part.refusals for user, entry in part.entries]
        if not folds:
            return {}
        with _translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.mget([key for user in folds for key in (user.head, *user.states(serving))])
                for user, entry in doubted:
                    pipe.execute_command("ZSCORE", user.index, entry.member)
                stored, *scores = await pipe.execute()
        values = iter(stored)
        for fold in folds.values():
            fold.head, fold.stored = next(values), [next(values) for _ in serving]
        for (user, entry), score in zip(doubted, scores, strict=True):
            if score is not None:
                folds[user].seen.add(entry.id_hash)
        return folds

    async def _folded(self, parts: "list[_Part]", folds: "dict[User, _UserFold]") -> "_Commit":
        own = [folds[user] for user in dict.fromkeys(user for part in parts for user in part.users)]
        for fold in own:
            await self._fold_what_lacks(fold)
        undecided = [part for part in parts if part.is_undecided(folds)]
        if undecided:
            raise _UndecidedError(undecided)
        for part in parts:
            for user, id_hash in part.archived:
                folds[user].seen.add(id_hash)
        answers = [[folds[user].receive(entry) for user, entry in part.entries] for part in parts]
        return _Commit(parts, answers, [fold.change() for fold in own if fold.new])

    async def _fold_what_lacks(self, fold: "_UserFold") -> None:
        """Bring the user's states up to date, save those that are far behind: a later reader needs them, no event."""
        for generation, stored in zip(fold.serving, fold.stored, strict=True):
            if fold.user.state(generation) in self._catching_up:
                continue
            try:
                state, _ = await self._state(fold.user, generation, fold.head, stored, at_most=FAR_BEHIND)
            except _FarBehindError:
                self._catch_up_apart(fold.user, generation)
            else:
                fold.states[generation.tag] = state
                fold.seen.update(state["recent_event_ids"].tolist())

    def _catch_up_apart(self, user: User, generation: Generation) -> None:
        """Bring a state up to date while everything else goes on."""
        key = user.state(generation)
        if key in self._catching_up or self._closed:
            return

        async def catch_up() -> None:
            try:
                head, stored = await self._call("MGET", user.head, key)
                await self._fresh_value(user, generation, head, stored)
            except StorageError as exc:
                logger.warning("a state could not be folded from the log, which will be tried again: %s", exc)
            finally:
                del self._catching_up[key]

        self._catching_up[key] = asyncio.create_task(catch_up())

    def _look_up_apart(self, parts: "list[_Part]") -> None:
        """Let the archive say which of the parts' events it holds, and then let them wait again."""
        self._looked_up.update(parts)

        async def look_up() -> None:
            try:
                await self._look_up(parts)
            except Exception as exc:
                for part in parts:
                    part.fail(exc)
            else:
                self._writes.put_back([part for part in parts if not part.is_too_late()])
            finally:
                self._looked_up.difference_update(parts)

        task = asyncio.create_task(look_up())
        self._looking_up.add(task)
        task.add_done_callback(self._looking_up.discard)

    def _readdress_apart(self, parts: "list[_Part]") -> None:
        """Let events of who has become another user wait again, as that user's."""

        async def readdress(part: "_Part") -> None:
            try:
                roots = {user: await self._corrections.root(user) for user in set(part.users)}
            except Exception as exc:
                part.fail(exc)
            else:
                self._writes.put_back(part.readdressed(roots))

        for part in parts:
            task = asyncio.create_task(readdress(part))
            self._looking_up.add(task)
            task.add_done_callback(self._looking_up.discard)

    async def _look_up(self, parts: "list[_Part]") -> None:
        """All of the parts' events, also those that are decided as things are now."""
        archive_id = await self._id_of_archive()
        entries: defaultdict[str, list[tuple[User, Entry]]] = defaultdict(list)
        for part in parts:
            for user, entry in part.entries:
                entries[user.tenant].append((user, entry))

        def look(snapshot: Snapshot) -> None:
            for part in parts:
                snapshot.require(archive_id, part.partition, part.must_look_through)
            found: set[tuple[User, int]] = set()
            for tenant, asked in entries.items():
                held = snapshot.holds(tenant, [(user.user_id, entry.event.event_id) for user, entry in asked])
                found.update((user, entry.id_hash) for user, entry in compress(asked, held))
            for part in parts:
                part.looked_through = snapshot.manifest.seq(part.partition)
                part.archived = found.intersection((user, entry.id_hash) for user, entry in part.entries)

        await self._archive.ask(look)

    async def _send(self, commits: Sequence[Sequence[Change]]) -> list[Any]:
        """What the server says to each commit. In a transaction, so that it syncs once for all of them."""
        if not commits:
            return []
        with _translated():
            async with self._redis.pipeline(transaction=len(commits) > 1) as pipe:
                for changes in commits:
                    keys, args = commit_arguments(changes, self._ttl_s)
                    pipe.execute_command("EVALSHA", COMMIT.sha, len(keys), *keys, *args)
                replies = await pipe.execute(raise_on_error=False)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            await self._load_scripts()
        return [0 if isinstance(reply, NoScriptError) else reply for reply in replies]


class _FarBehindError(StorageError):
    """A user's state lacks more of the log than may be folded now."""

    def __init__(self, user: User) -> None:
        super().__init__("the log of a user could not be read to its end")
        self.user = user


class _UndecidedError(StorageError):
    """Only the archive knows whether some events of these parts were logged before."""

    def __init__(self, parts: "list[_Part]") -> None:
        super().__init__("the archive has to be asked for events")
        self.parts = parts


@dataclass(slots=True, eq=False)
class _Read:
    """Keys whose values somebody waits for."""

    keys: list[str]
    answer: "asyncio.Future[list[bytes | None]]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    give_up_at_s: float = field(default_factory=lambda: asyncio.get_running_loop().time() + GIVE_UP_AFTER_S)

    @property
    def size(self) -> int:
        return len(self.keys)

    def is_too_late(self) -> bool:
        """The server is so slow that nobody should wait any longer."""
        late = asyncio.get_running_loop().time() > self.give_up_at_s
        if late:
            self.fail(StorageUnavailable("Redis answers too slowly"))
        return late

    def succeed(self, values: list[bytes | None]) -> None:
        if not self.answer.done():  # else it was cancelled
            self.answer.set_result(values)

    def fail(self, cause: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(_failure(cause))


class _Request:
    """A call of `append`. It falls into parts, one for each partition, and is answered when all are settled."""

    def __init__(self, size: int) -> None:
        self.answer: asyncio.Future[list[Appended]] = asyncio.get_running_loop().create_future()
        self.failure: StorageError | None = None
        self._answers: list[Appended | None] = [None] * size
        self._open_parts: set[_Part] = set()

    def parts(self, keys: Keyspace, tenant: str, events: Sequence[Event]) -> "list[_Part]":
        parts: dict[str, _Part] = {}
        for position, event in enumerate(events):
            user = keys.user(tenant, event.user_id)
            part = parts.setdefault(user.partition, _Part(self))
            part.entries.append((user, Entry.of(tenant, event)))
            part.positions.append(position)
        self._open_parts.update(parts.values())
        return list(parts.values())

    def replace(self, part: "_Part", parts: "Sequence[_Part]") -> None:
        """What the part wanted, others want now."""
        self._open_parts.remove(part)
        self._open_parts.update(parts)

    def settle(self, part: "_Part", answers: Sequence[Appended] | StorageError) -> None:
        """Note what became of a part; of a failed one there are no answers. Once it is settled, it stays so."""
        if part not in self._open_parts:
            return
        self._open_parts.remove(part)
        if isinstance(answers, StorageError):
            self.failure = self.failure or answers
        else:
            for position, answer in zip(part.positions, answers, strict=True):
                self._answers[position] = answer
        if not self._open_parts and not self.answer.done():
            self._reply()

    def _reply(self) -> None:
        applied = [position for position, answer in enumerate(self._answers) if answer is not None]
        if self.failure is None:
            self.answer.set_result([answer for answer in self._answers if answer is not None])
        elif applied:
            self.answer.set_exception(PartlyApplied(str(self.failure), applied))
        else:
            self.answer.set_exception(self.failure)


@dataclass(slots=True, eq=False)
class _Part:
    """What a request wants in one partition: applied as one, or not at all."""

    request: _Request
    entries: list[tuple[User, Entry]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # of the entries, in the request
    refusals: int = 0
    # What the archive has said: which ids it held when it held the partition's log through an entry.
    archived: set[tuple[User, int]] = field(default_factory=set)
    looked_through: int = 0
    must_look_through: int = 0
    give_up_at_s: float = field(default_factory=lambda: asyncio.get_running_loop().time() + GIVE_UP_AFTER_S)

    @property
    def size(self) -> int:
        return len(self.entries)

    @property
    def users(self) -> Iterator[User]:
        return (user for user, _ in self.entries)

    @property
    def partition(self) -> int:
        return self.entries[0][0].partition_number

    def is_dropped(self) -> bool:
        """Nobody waits any more, or the request has failed in another part, which settles this one."""
        if self.request.failure is not None:
            self.request.settle(self, self.request.failure)
            return True
        return self.request.answer.done()

    def is_too_late(self) -> bool:
        """The server is so slow that nobody should wait any longer."""
        late = asyncio.get_running_loop().time() > self.give_up_at_s
        if late:
            self.fail(StorageUnavailable("Redis answers too slowly"))
        return late

    def succeed(self, answers: Sequence[Appended]) -> None:
        self.request.settle(self, answers)

    def fail(self, cause: Exception) -> None:
        self.request.settle(self, _failure(cause))

    def has_moved(self, folds: "dict[User, _UserFold]") -> bool:
        return any(Head.of(folds[user].head).move is not None for user in self.users)

    def readdressed(self, roots: "dict[User, User]") -> "list[_Part]":
        """Parts that want the same, of those whom the users have become."""
        parts: dict[str, _Part] = {}
        for (user, entry), position in zip(self.entries, self.positions, strict=True):
            root = roots[user]
            part = parts.setdefault(root.partition, _Part(self.request, give_up_at_s=self.give_up_at_s))
            moved = entry if root == user else Entry.of(root.tenant, readdressed(entry.event, root.user_id))
            part.entries.append((root, moved))
            part.positions.append(position)
        self.request.replace(self, list(parts.values()))
        return list(parts.values())

    def is_undecided(self, folds: "dict[User, _UserFold]") -> bool:
        """Whether the archive has to say which of the entries were logged, and has not said so yet."""
        self.must_look_through = max((Head.of(folds[user].head).archived for user in self.users), default=0)
        return self.looked_through < self.must_look_through and any(
            Head.of(folds[user].head).may_be_archived(entry.event.event_id) and entry.id_hash not in folds[user].seen
            for user, entry in self.entries
        )

    def may_try_again(self) -> bool:
        self.refusals += 1
        if asyncio.get_running_loop().time() < self.give_up_at_s:
            return True
        self.fail(StorageUnavailable(f"{self.refusals} times others were faster with events of the same users"))
        return False


@dataclass(slots=True)
class _UserFold:
    """A user as stored, and then with new entries folded in."""

    user: User
    serving: Sequence[Generation]
    head: bytes | None = None
    stored: list[bytes | None] = field(default_factory=list)  # a value for each generation
    states: dict[bytes, State] = field(default_factory=dict)  # by generation, without those that are far behind
    seen: set[int] = field(default_factory=set)  # hashes of ids that are certainly logged; the script knows all
    new: list[Entry] = field(default_factory=list)

    def receive(self, entry: Entry) -> Appended:
        if entry.id_hash in self.seen:
            return Appended(duplicate=True)
        self.seen.add(entry.id_hash)
        self.new.append(entry)
        if is_correction(entry.event):
            self.states.clear()  # who next needs them folds them
            return Appended()
        effects = {
            generation.tag: generation.apply(self.states[generation.tag], entry.event)
            for generation in self.serving
            if generation.tag in self.states
        }
        first = self.serving[0]
        return Appended(
            unknown_item=entry.event.item_id not in first.item_index,
            late=effects.get(first.tag) is Effect.STEPPED_LATE,
        )

    def change(self) -> Change:
        states = {
            self.user.state(generation): generation.encode(self.states[generation.tag])
            for generation in self.serving
            if generation.tag in self.states
        }
        return Change(self.user, self.head or b"", self.new, states)


@dataclass(frozen=True, slots=True)
class _Commit:
    """Parts of one partition that are applied together."""

    parts: list[_Part]
    answers: list[list[Appended]]
    changes: list[Change]  # of users with new entries

    def settle(self, reply: Any) -> list[_Part]:
        """Returns the parts that have to wait for the next round."""
        if reply == 0:
            return [part for part in self.parts if part.may_try_again()]
        for part, answers in zip(self.parts, self.answers, strict=True):
            if reply == 1:
                part.succeed(answers)
            else:
                part.fail(reply)
        return []


def _by_partition(parts: Sequence[_Part]) -> list[list[_Part]]:
    together: defaultdict[str, list[_Part]] = defaultdict(list)
    for part in parts:
        together[next(part.users).partition].append(part)
    return list(together.values())


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


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except CONNECTION_ERRORS as exc:
        raise _failure(exc) from exc


def _failure(cause: Exception) -> StorageError:
    """One for each waiter: a raised exception collects the traceback of who waits."""
    failure: StorageError
    if isinstance(cause, CONNECTION_ERRORS):
        failure = StorageUnavailable(f"Redis failed: {cause}")
    elif isinstance(cause, StorageError):
        failure = type(cause)(str(cause))
    else:
        failure = StorageError(f"the request could not be applied: {cause!r}")
    failure.__cause__ = cause
    return failure

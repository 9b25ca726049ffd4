"""The states of a Redis store: reads them in rounds, and folds the log entries that they lack."""

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, TypeAlias

from redis.exceptions import NoScriptError

from storage.errors import PartlyRead, StorageError, StorageUnavailable
from storage.group_commit import GroupCommitByNode
from storage.records import FoldedState
from storage.redis.connections.nodes import Command, storage_error
from storage.redis.corrections.undo_and_merge import RedisCorrections
from storage.redis.layout.head import MERGE_MARK, SEQ_DIGITS, Head
from storage.redis.layout.keys import User
from storage.redis.log.user_log import UserLog
from storage.redis.requests import Read, fresh_state
from storage.redis.scripts.events import SAVE_STATE, save_state_arguments
from storage.redis.session.redis_session import RedisSession
from storage.state.corrections import LogFold
from storage.state.generation import Generation, StateError
from storage.state.layout import idle_times_s

UNOWNED = "none"  # the node of slots that no known node owns
MAX_ROUND = 512  # values
READ_TOGETHER = 64  # users, whose caller waits for all of them anyway
SAVED_AT_ONCE = 64  # states of a rebuild per transaction, about 250 kB
MAX_KNOWN_TARGETS = 10_000
MAX_MISSING_IN_ROUND = 500  # entries; states that lack more are folded in the background, so that no round waits

StoredStates: TypeAlias = tuple[dict[str, tuple[bytes | None, bytes | None]], StorageError | None]
"""The values of heads and states by user, and why those of other users could not be read."""

logger = logging.getLogger(__name__)


class RedisStates:
    """The users' states, of all generations."""

    def __init__(self, session: RedisSession, log: UserLog, corrections: RedisCorrections, *, ttl_s: int) -> None:
        self._session = session
        self._log = log
        self._corrections = corrections
        self._ttl_s = ttl_s
        self._reads: GroupCommitByNode[Read] = GroupCommitByNode(
            self._read_round, session.servers.slots.node_of, max_size=MAX_ROUND
        )
        self._reading_alone = asyncio.Lock()  # by a caller that does not wait for a round
        self._targets: dict[str, User] = {}  # known merge targets of users, by their heads
        self._catching_up: dict[str, asyncio.Task[None]] = {}  # by the keys of the states

    @property
    def waiting(self) -> int:
        """The number of queued reads, in values."""
        return self._reads.waiting_size

    def node_of(self, tenant: str, user_id: str) -> str:
        """Return the node that has the state of the user, or of the user's known merge target."""
        slots = self._session.servers.slots
        if not slots.is_cluster:
            return ""
        user = self._session.keys.user(tenant, user_id)
        return slots.node_of(self._targets.get(user.head, user).head) or UNOWNED

    async def read(
        self, tenant: str, user_ids: Sequence[str], generation: Generation, max_missing: int | None
    ) -> list[bytes | None]:
        """Return the users' encoded states, in order."""
        users = {user_id: self._session.keys.user(tenant, user_id) for user_id in user_ids}
        is_free = self._session.has_single_server and not (self._session.is_closed or self._reading_alone.locked())
        found, failure = await (self._read_alone if is_free else self._read_in_rounds)(users, generation)
        values: dict[str, bytes | None] = {}
        for user_id, (head, stored) in found.items():
            try:
                value = _value_of_whole_log(generation, head, stored)
                if value is None:
                    value = await self._fresh_value(users[user_id], generation, head, stored, max_missing)
                values[user_id] = value
            except StorageError as exc:
                failure = exc
        if failure is None:
            return [values[user_id] for user_id in user_ids]
        if not values:
            raise failure
        raise PartlyRead(failure, values) from failure

    async def _read_alone(self, users: Mapping[str, User], generation: Generation) -> StoredStates:
        """Read heads and states without a round, whose task would cost one caller more than it saves a few."""
        async with self._reading_alone:
            (values,) = await self._session.servers.read([_keys_of(users.values(), generation)])
        if isinstance(values, Exception):
            raise storage_error(values) from values
        return dict(zip(users, zip(values[::2], values[1::2], strict=True), strict=True)), None

    async def _read_in_rounds(self, users: Mapping[str, User], generation: Generation) -> StoredStates:
        """Read heads and states together with other callers."""
        together = READ_TOGETHER if self._session.has_single_server else 1  # otherwise their slots differ
        left = iter(users.items())
        pages = [dict(page) for page in iter(lambda: list(islice(left, together)), [])]
        reads = [Read(_keys_of(page.values(), generation)) for page in pages]
        self._reads.put(reads)
        found: dict[str, tuple[bytes | None, bytes | None]] = {}
        failure: StorageError | None = None
        for page, read in zip(pages, reads, strict=True):
            try:
                values = await read.answer
            except StorageError as exc:
                failure = exc
            else:
                found |= zip(page, zip(values[::2], values[1::2], strict=True), strict=True)
        return found, failure

    async def users_without_log(self, tenant: str, user_ids: Collection[str]) -> set[str]:
        """Return the users that have no head."""
        reads = {user_id: Read([self._session.keys.user(tenant, user_id).head]) for user_id in user_ids}
        self._reads.put(list(reads.values()))
        heads = await asyncio.gather(*(read.answer for read in reads.values()))
        return {user_id for user_id, (head,) in zip(reads, heads, strict=True) if head is None}

    async def _read_round(self, reads: list[Read]) -> list[Read]:
        await self._session.check()
        now_s = asyncio.get_running_loop().time()
        reads = [read for read in reads if not read.expire(now_s)]
        found = await self._session.servers.read([read.keys for read in reads])
        for read, values in zip(reads, found, strict=True):
            read.settle(values)
        return []

    async def _fresh_value(
        self,
        user: User,
        generation: Generation,
        head: bytes | None,
        stored: bytes | None,
        max_missing: int | None = None,
    ) -> bytes | None:
        """Return the state up to the head, after folding the entries that the stored value lacks.

        It is None without a log, and also, for now, if more than `max_missing` entries are missing.
        """
        value = _value_of_whole_log(generation, head, stored)
        if head is None or value is not None:
            return value
        if Head.of(head).merge is not None:
            target = await self._corrections.resolve(user)
            if len(self._targets) >= MAX_KNOWN_TARGETS:
                del self._targets[next(iter(self._targets))]
            self._targets[user.head] = target
            return await self._read_again(target, generation, max_missing)
        if max_missing is not None and user.state(generation) in self._catching_up:
            return None
        try:
            value, is_fresh = await self._fold(user, generation, head, stored, max_missing)
        except _TooFarBehindError:
            if max_missing is not None:
                self._catch_up(user, generation)
                return None
            newest, stored = await self._stored(user, generation)
            if newest == head:
                raise
            return await self._fresh_value(user, generation, newest, stored)  # the user was erased meanwhile
        if not is_fresh:
            # A server that is full or read-only cannot store the state, but this process can still serve it.
            with suppress(StorageUnavailable):
                await self._save(user, generation, head, value)
        return value

    async def _read_again(self, user: User, generation: Generation, max_missing: int | None = None) -> bytes | None:
        head, stored = await self._stored(user, generation)
        return await self._fresh_value(user, generation, head, stored, max_missing)

    async def _stored(self, user: User, generation: Generation) -> list[bytes | None]:
        (values,) = await self._session.servers.read([[user.head, user.state(generation)]])
        if isinstance(values, Exception):
            raise storage_error(values) from values
        return values

    # ---- folding

    async def fold_in_round(
        self, user: User, generation: Generation, head: bytes | None, stored: bytes | None
    ) -> bytes | None:
        """Return the state up to the head; None if it lacks too many entries, and is folded in the background."""
        if user.state(generation) in self._catching_up:
            return None
        try:
            value, _ = await self._fold(user, generation, head, stored, MAX_MISSING_IN_ROUND)
        except _TooFarBehindError:
            self._catch_up(user, generation)
            return None
        return value

    async def _fold(
        self, user: User, generation: Generation, head: bytes | None, stored: bytes | None, max_missing: int | None
    ) -> tuple[bytes, bool]:
        """Return the fold of the user's log up to the head, and whether the stored value was already up to date.

        For a new generation or layout, a value lacks the whole log. Otherwise it lacks the entries appended by
        processes that serve another generation.

        raises  _TooFarBehindError  when the value lacks more than `max_missing` entries
        """
        if head is None:
            return generation.encoded_empty, True
        log = Head.of(head)
        through, value = _decode(generation, stored, newest=log.newest)
        if through == log.newest:
            return value, True
        fold = LogFold(generation, value)
        while True:
            if max_missing is not None:
                if through < log.archived:
                    raise _TooFarBehindError
                if await self._session.call("ZCOUNT", user.id_index, f"({through}", log.newest) > max_missing:
                    raise _TooFarBehindError
            async for page in self._log.pages_of(user, after=through, through=log.newest):
                fold.apply([entry.record for entry in page])
                through = page[-1].seq
            if log.archived < log.newest and through < log.newest:  # the archive may drop its entries one day
                raise _TooFarBehindError
            if not fold.must_restart:
                return fold.value, False
            fold, through = fold.restarted(), 0

    def catch_up(self, user: User, generations: Sequence[Generation]) -> None:
        """Fold the user's states in the background, before a caller needs them."""
        for generation in generations:
            self._catch_up(user, generation)

    def _catch_up(self, user: User, generation: Generation) -> None:
        key = user.state(generation)
        if key in self._catching_up or self._session.is_closed:
            return

        async def fold() -> None:
            try:
                await self._read_again(user, generation)
            except StorageError as exc:
                logger.warning("cannot fold a state from the log, retrying: %s", exc)
            finally:
                del self._catching_up[key]

        self._catching_up[key] = asyncio.create_task(fold())

    # ---- saving

    async def save(self, generation: Generation, states: Sequence[FoldedState]) -> None:
        """Store states of a rebuild, unless newer ones are stored; remove those of users who are idle for too long."""
        await self._session.require_open()
        await self._session.register([generation])
        for start in range(0, len(states), SAVED_AT_ONCE):
            page = states[start : start + SAVED_AT_ONCE]
            if await self._session.reload_lost_scripts(await self._save_page(generation, page)):
                await self._save_page(generation, page)

    async def _save_page(self, generation: Generation, states: Sequence[FoldedState]) -> list[Any]:
        keys = self._session.keys
        commands = [
            _save_command(keys.user(state.tenant, state.user_id), generation, state, ttl_s)
            for state, ttl_s in _with_expiry(generation, states, self._ttl_s)
        ]
        replies = await self._session.servers.execute_all(commands, in_transaction=True)
        for reply in replies:
            if isinstance(reply, Exception) and not isinstance(reply, NoScriptError):
                raise storage_error(reply) from reply
        return replies

    async def _save(self, user: User, generation: Generation, head: bytes, value: bytes) -> None:
        """Store the state up to the head, unless a newer one is stored, while other stores continue to append."""
        await self._session.register([generation])
        arguments = save_state_arguments(user, generation, Head.of(head).newest, value, self._ttl_s)
        async with self._session.background_limit(user.head):
            await self._session.write(SAVE_STATE, *arguments)

    async def close(self) -> None:
        """Answer the accepted reads, and cancel folds that no caller waits for."""
        await self._reads.close()
        async with self._reading_alone:
            pass
        for task in list(self._catching_up.values()):
            task.cancel()  # states that are not saved can be folded again
            await asyncio.wait([task])


class _TooFarBehindError(StorageError):
    """A user's state lacks more of the log than may be folded now."""

    def __init__(self) -> None:
        super().__init__("the log of a user could not be read to its end")


def _keys_of(users: Iterable[User], generation: Generation) -> list[str]:
    """Return the keys of the users' heads and states, in order."""
    return [key for user in users for key in (user.head, user.state(generation))]


def _value_of_whole_log(generation: Generation, head: bytes | None, stored: bytes | None) -> bytes | None:
    """Return the state in a stored value if it is the fold of the user's whole log, as almost always; else None.

    raises  StorageError  when the head is not valid, or belongs to no such value
    """
    Head.check(head, stored)
    return None if head is None or len(head) > MERGE_MARK else fresh_state(generation, stored, head)


def _save_command(user: User, generation: Generation, state: FoldedState, ttl_s: int | None) -> Command:
    """Return the command that stores a state, or removes one that was stored before states expired."""
    if ttl_s is None:
        return Command.of("UNLINK", user.state(generation))
    return SAVE_STATE.command(*save_state_arguments(user, generation, state.through_seq, state.value, ttl_s))


def _with_expiry(
    generation: Generation, states: Sequence[FoldedState], ttl_s: int
) -> Iterator[tuple[FoldedState, int | None]]:
    """Yield each state, and in how many seconds it expires: 0 for never, None if its user's last event is too old."""
    if ttl_s == 0:
        yield from ((state, 0) for state in states)
        return
    idle_s = idle_times_s(generation.decode_many([state.value for state in states]), time.time())
    for state, user_idle_s in zip(states, idle_s, strict=True):
        yield state, ttl_s - user_idle_s if user_idle_s < ttl_s else None


def _decode(generation: Generation, stored: bytes | None, newest: int) -> tuple[int, bytes]:
    """Return the newest entry folded in a stored value, and its state; 0 and the empty state if it is unusable."""
    if stored is not None:
        try:
            through, value = int(stored[:SEQ_DIGITS]), stored[SEQ_DIGITS:]
            generation.decode(value)
        except (StateError, ValueError) as exc:
            logger.warning("folding a state again from the log: %s", exc)
        else:
            if through <= newest:  # otherwise it remained after the log was lost
                return through, value
    return 0, generation.encoded_empty

"""Undo and merge in Redis, where the two users of a merge may lie in different partitions.

A merge is a row of steps, each of them one script in one partition. Who is killed between them leaves a mark in the
visitor's head, and whoever comes across it takes the steps that are left.

  PROPOSED   The head of the visitor names the user; nothing can be appended to the visitor's log any more. Now, and not
             before, the way from the user is followed. Where it leads back to the visitor, the mark goes again: of
             merges that would make a circle, at least the one proposed last sees it.
  DECIDED    The visitor's log has its last entry, "into".
  DONE       The user's aliases have the visitor, for erasing, and copies of the visitor's entries are in the user's
             log: appended in one step, save those that are there.

Nobody reads the visitor meanwhile: who asks for the visitor takes the steps, and gets the user. So all that can be seen
is the user before that one append, or after it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import TYPE_CHECKING

from storage.archive_reader import ArchiveSnapshot
from storage.corrections import INTO, full_id, into, is_already_merged, readdressed, undo
from storage.errors import MergeTooLarge, StorageUnavailable, UnknownEvent
from storage.records import MAX_MERGED
from storage.redis_layout import (
    APPEND,
    COMMIT,
    CORRECTED_LAYOUT,
    MOVE,
    RAISE_LAYOUT,
    Entry,
    Head,
    Move,
    User,
    append_arguments,
    commit_arguments,
    member_of,
    move_arguments,
)
from storage.state_event import Event

if TYPE_CHECKING:
    from storage.redis import RedisStore

TRY_FOR_S = 5.0
PAUSE_S = 0.01


class RedisCorrections:
    """Changes what is counted of whom, in a store."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._layout_is_raised = False

    async def root(self, user: User) -> User:
        """Whom the user has become, themselves if nobody. A merge found unfinished on the way is finished."""
        while True:
            value = await self._head(user)
            head = Head.of(value)
            match head.move:
                case None:
                    return user
                case Move.PROPOSED:
                    await self._decide(user, value)
                case Move.DECIDED:
                    await self._copy(user)
                case Move.DONE:
                    user = self._target(user, head)

    async def undo(self, user: User, event_id: str) -> bool:
        """As `UserStore.undo`."""
        for _ in _attempts():
            root = await self.root(user)
            value = await self._head(root)
            undone = full_id(event_id, user.user_id, root.user_id)
            entry = Entry.of(root.tenant, undo(root.user_id, undone, _now_us()))
            known = await self._known(root, value, [undone, entry.event.event_id])
            if undone not in known:
                raise UnknownEvent("the user's log has no event of this id")
            is_new = entry.event.event_id not in known
            if not is_new or await self._append(root, value, None, [entry]):
                await self._require_copies(root)
                return is_new
            await _pause()
        raise StorageUnavailable("others were always faster with events of the same user; send it again")

    async def merge(self, user: User, visitor: User) -> bool:
        """As `UserStore.merge`."""
        proposed = False
        for _ in _attempts():
            target, visitors_target = await self.root(user), await self.root(visitor)
            if is_already_merged(target.user_id, visitor.user_id, visitors_target.user_id):
                await self._require_copies(visitor)
                return proposed
            value = await self._head(visitor)
            if Head.of(value).move is None:
                await self._require_small(visitor)
                await self.raise_layout()
                proposed = await self._move(visitor, value, Move.PROPOSED, target.user_id)
            if not proposed:
                await _pause()
        raise StorageUnavailable("others were always faster with events of the same users; send it again")

    async def erase(self, user: User) -> None:
        """Forget the user, whom they have become, and everybody else who has become that one.

        What leads from the user to the rest goes last: whoever dies between them, erasing the same user again finds
        what is left.
        """
        way = await self._way(user)
        for name in reversed(way):
            await self._erase(name, way)

    async def _erase(self, user: User, way: Sequence[User]) -> None:
        """Forget the user, and before that everybody who has become them, also meanwhile; not those on the way."""
        while True:
            for alias in await self._members(user):
                if alias not in way and await self._leads(alias, user):
                    await self._erase(alias, way)
            await self._store._erase(user)
            gone = await self._members(user)
            if not any([alias not in way and await self._leads(alias, user) for alias in gone]):
                break
        if gone:
            await self._store._call("SREM", user.aliases, *(alias.user_id for alias in gone))
        await self._require_copies(user)

    async def _way(self, user: User) -> list[User]:
        """From the user to whom they have become; all merges on it are done."""
        way = [user]
        root = await self.root(user)
        while way[-1] != root:
            head = Head.of(await self._head(way[-1]))
            if head.move is not Move.DONE:  # erased meanwhile
                return [*way, root]
            way.append(self._target(way[-1], head))
        return way

    async def _members(self, user: User) -> list[User]:
        """Of the user's aliases."""
        members = sorted(await self._store._call("SMEMBERS", user.aliases))
        return [self._store._keys.user(user.tenant, user_id.decode()) for user_id in members]

    async def _leads(self, alias: User, user: User) -> bool:
        """Whether the alias has become the user."""
        head = Head.of(await self._head(alias))
        return head.move in (Move.DECIDED, Move.DONE) and self._target(alias, head) == user

    async def _decide(self, visitor: User, value: bytes | None) -> None:
        """From PROPOSED on to DECIDED, or back."""
        target = self._target(visitor, Head.of(value))
        if await self._leads_to(target, visitor):
            await self._move(visitor, value, None)
            return
        last = Entry.of(visitor.tenant, into(visitor.user_id, target.user_id, _now_us()))
        await self._move(visitor, value, Move.DECIDED, target.user_id, last)

    async def _leads_to(self, start: User, end: User) -> bool:
        """Whether who asks for the one would get to the other, or would go round in circles."""
        passed: set[User] = set()
        while start != end and start not in passed:
            head = Head.of(await self._head(start))
            if head.move is None:
                return False
            passed.add(start)
            start = self._target(start, head)
        return True

    async def _copy(self, visitor: User) -> None:
        """From DECIDED on to DONE, unless somebody else is faster or the visitor is erased."""
        decided = Head.of(await self._head(visitor))
        if decided.move is not Move.DECIDED:
            return
        direct = self._target(visitor, decided)
        log = [entry.event async for entry in self._store._log(visitor)]
        await self._store._call("SADD", direct.aliases, visitor.user_id)
        for _ in _attempts():
            target = await self.root(direct)
            # In this order: erasing takes the visitor first and then the user. Who is erased until the first look has
            # no mark at the second, or comes back with another one; who is erased later has another head, or the
            # partition another newest entry, when the copies are appended.
            seq, value = await self._store._call("MGET", target.seq, target.head)
            visitors_value = await self._head(visitor)
            head = Head.of(visitors_value)
            if (head.move, head.newest) != (Move.DECIDED, decided.newest):
                if head.move is None:
                    await self._store._call("SREM", direct.aliases, visitor.user_id)
                return
            if await self._append_lacking(target, value, seq, log):
                await self._require_copies(target)  # or a failover would leave a visitor who is done, and nowhere
                await self._move(visitor, visitors_value, Move.DONE, head.target)
                return
            await _pause()
        raise StorageUnavailable("others were always faster with events of the same users; send it again")

    async def _append_lacking(self, target: User, value: bytes | None, seq: bytes | None, log: Sequence[Event]) -> bool:
        """Append copies of the events that the target's log lacks; False when it is not as believed."""
        copies = [readdressed(event, target.user_id) for event in log if event.type != INTO]
        known = await self._known(target, value, [copy.event_id for copy in copies])
        lacking = [Entry.of(target.tenant, copy) for copy in copies if copy.event_id not in known]
        return await self._append(target, value, seq, lacking)

    async def _append(self, user: User, value: bytes | None, seq: bytes | None, entries: Sequence[Entry]) -> bool:
        """Append entries without folding them: who next needs a state folds it. False when the log is another one."""
        if Head.of(value).move is not None:
            return False
        if not entries:
            return True
        await self.raise_layout()
        return bool(await self._store._run(APPEND, *append_arguments(user, value, seq, entries)))

    async def _require_copies(self, user: User) -> None:
        """What was done in the user's partition, by whomever, has as many copies as acknowledging takes."""
        if self._store._servers.copies.are_wanted:
            await self._store._run(COMMIT, *commit_arguments({user.partition: []}, 0), copied=True)

    async def _known(self, user: User, value: bytes | None, event_ids: Sequence[str]) -> set[str]:
        """Which of the ids are logged, if the user's head is that one."""
        if not event_ids:
            return set()
        scores = await self._store._call("ZMSCORE", user.index, *map(member_of, event_ids))
        known = set(compress(event_ids, (score is not None for score in scores)))
        head = Head.of(value)
        rest = [event_id for event_id in event_ids if event_id not in known]
        if not head.archived or not rest:
            return known
        archive_id = await self._store._id_of_archive()

        def archived(snapshot: ArchiveSnapshot) -> list[bool]:
            snapshot.require(archive_id, user.partition_number, head.archived)
            return snapshot.holds(user.tenant, [(user.user_id, event_id) for event_id in rest])

        return known.union(compress(rest, await self._store._archive.read(archived)))

    async def _require_small(self, visitor: User) -> None:
        log = [entry async for entry in self._store._log(visitor, limit=MAX_MERGED + 1)]
        if len(log) > MAX_MERGED:
            raise MergeTooLarge(f"the visitor has more than {MAX_MERGED:,} events; nothing changed")

    async def _move(
        self, user: User, value: bytes | None, move: Move | None, target: str = "", last: Entry | None = None
    ) -> bool:
        mark = "" if move is None else move.value + target
        tags = () if last is None else await self._store._registered_tags()
        return bool(await self._store._run(MOVE, *move_arguments(user, value, mark, last, tags)))

    async def _head(self, user: User) -> bytes | None:
        value: bytes | None = await self._store._call("GET", user.head)
        return value

    def _target(self, user: User, head: Head) -> User:
        return self._store._keys.user(user.tenant, head.target)

    async def raise_layout(self) -> None:
        if not self._layout_is_raised:
            await self._store._run(RAISE_LAYOUT, [self._store._keys.meta], [CORRECTED_LAYOUT])
            self._layout_is_raised = True


def _attempts() -> Iterator[None]:
    give_up_at_s = time.monotonic() + TRY_FOR_S
    while time.monotonic() < give_up_at_s:
        yield


async def _pause() -> None:
    """So that two who hinder each other do not go on in step."""
    await asyncio.sleep(random.uniform(0, PAUSE_S))  # noqa: S311


def _now_us() -> int:
    return time.time_ns() // 1_000

"""Undo and merge in Redis. The two users of a merge may be in different partitions.

A merge is a sequence of steps, each of them one script in one partition. A process that dies between them leaves a mark
in the visitor's head, and the next process that comes across it takes the remaining steps.

  PROPOSED   The head of the visitor names the user; nothing can be appended to the visitor's log any more. Now, and not
             before, the process follows the merges of the user. If they lead back to the visitor, it removes the mark:
             of merges that would form a circle, at least the one proposed last sees it.
  DECIDED    The visitor's log has its last entry, the merge.
  DONE       The user's aliases have the visitor, for erasing, the user has those of the visitor's properties that were
             missing, and copies of the visitor's entries are in the user's log: appended in one step, save those that
             are there.

Nobody reads the visitor meanwhile: a request for the visitor takes the steps, and gets the user. So all that can be
seen is the user before that one append, or after it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress

from storage.archive.async_reader import AsyncArchiveReader
from storage.archive.reader import ArchiveSnapshot
from storage.errors import MergeTooLarge, StorageUnavailable, UnknownEvent
from storage.records import MAX_MERGED
from storage.redis.connections.nodes import Argument
from storage.redis.layout.head import Head, MergeStage
from storage.redis.layout.keys import User
from storage.redis.layout.stream_entries import Entry, index_member
from storage.redis.log.lost_users import LostUsers
from storage.redis.log.user_log import UserLog
from storage.redis.scripts.corrections import APPEND, MARK_MERGE, append_arguments, mark_merge_arguments
from storage.redis.scripts.events import COMMIT, commit_arguments
from storage.redis.scripts.user_properties import PUT_USER_PROPERTIES, put_properties_keys
from storage.redis.session.redis_session import RedisSession
from storage.state.corrections import full_id, is_already_merged, readdressed
from storage.state.event import Event, LogRecord, Merge, Undo

RETRY_FOR_S = 5.0
MAX_PAUSE_S = 0.01
CONTENTION = "concurrent writes changed the same users each time; send it again"


class RedisCorrections:
    """Changes which events count, and for whom."""

    def __init__(self, session: RedisSession, log: UserLog, archive: AsyncArchiveReader, lost_users: LostUsers) -> None:
        self._lost_users = lost_users
        self._session = session
        self._log = log
        self._archive = archive

    async def resolve(self, user: User) -> User:
        """Return the user whom this one was merged into, or this one; finish any merge found unfinished on the way."""
        return (await self.merge_chain(user))[-1]

    async def merge_chain(self, user: User) -> list[User]:
        """Return the users from this one to the one whom they were merged into; finish any merge on the way."""
        chain = [user]
        while True:
            user = chain[-1]
            value = await self._head(user)
            head = Head.of(value)
            match head.merge:
                case None:
                    if value is None and await self._session.call("EXISTS", user.id_index):
                        if await self._head(user) is not None:
                            continue  # the user's first events came meanwhile
                        Head.check(value, b"")
                    return chain
                case MergeStage.PROPOSED:
                    await self._decide(user, value)
                case MergeStage.DECIDED:
                    await self._copy(user)
                case MergeStage.DONE:
                    chain.append(self._target(user, head))

    async def log_length(self, user: User, limit: int) -> int:
        """Return how many entries the log has of the user, or of whom they became; `limit` where some are archived."""
        target = await self.resolve(user)
        if Head.of(await self._head(target)).archived:
            return limit
        return min(limit, int(await self._session.call("ZCARD", target.id_index)))

    async def undo(self, user: User, event_id: str) -> bool:
        """Log the undo of an event; return whether the event counted until now."""
        for _ in _attempts():
            chain = await self.merge_chain(user)
            target = chain[-1]
            value = await self._head(target)
            await self._require_known({target: value})
            undone = full_id(event_id, user.user_id, target.user_id)
            entry = Entry.of(target.tenant, Undo(target.user_id, undone, _now_us()))
            known = await self._logged_ids(target, value, [undone, entry.event.entry_id])
            await self.require_whole(*chain)
            if undone not in known:
                if await self._head(target) != value:  # it has gone to the archive, or to another user, meanwhile
                    continue
                raise UnknownEvent("the user's log has no event of this id")
            is_new = entry.event.entry_id not in known
            if not is_new or await self._append(target, value, None, [entry]):
                await self.wait_for_replicas(target)
                return is_new
            await _pause()
        raise StorageUnavailable(CONTENTION, "contention")

    async def merge(self, user: User, visitor: User) -> bool:
        """Merge the visitor into the user; return False if that was done before."""
        is_proposed = False
        for _ in _attempts():
            chain, visitors_chain = await self.merge_chain(user), await self.merge_chain(visitor)
            await self.require_whole(*chain, *visitors_chain)
            target, visitors_target = chain[-1], visitors_chain[-1]
            if is_already_merged(target.user_id, visitor.user_id, visitors_target.user_id):
                await self.wait_for_replicas(visitor)
                return is_proposed
            value = await self._head(visitor)
            await self._require_known({visitor: value, target: await self._head(target)})
            if Head.of(value).merge is None:
                await self._require_mergeable_size(visitor)
                is_proposed = await self._mark(visitor, value, MergeStage.PROPOSED, target.user_id)
            if not is_proposed:
                await _pause()
        raise StorageUnavailable(CONTENTION, "contention")

    async def append(self, user: User, records: Sequence[Event | Undo]) -> list[bool]:
        """Log records of a user who may have become another one; return for each whether it is new.

        An erasure takes those heads away that lead to others, and then gives the others' partitions new numbers. So
        where the user still leads to the target after the target was read, the target is erased afterwards or the
        append is refused.
        """
        for _ in _attempts():
            chain = await self.merge_chain(user)
            target = chain[-1]
            seq, value = await self._session.call("MGET", target.seq, target.head)
            if await self.merge_chain(user) != chain:
                continue
            await self.require_whole(*chain)
            await self._require_known({target: value})
            own = [readdressed(record, target.user_id) for record in records]
            known = await self._logged_ids(target, value, [record.entry_id for record in own])
            first = {record.entry_id: place for place, record in reversed(list(enumerate(own)))}
            new = {place for entry_id, place in first.items() if entry_id not in known}
            if await self._append(target, value, seq, [Entry.of(target.tenant, own[place]) for place in sorted(new)]):
                await self.wait_for_replicas(target)
                return [place in new for place in range(len(own))]
            await _pause()
        raise StorageUnavailable(CONTENTION)

    # ---- the steps of a merge

    async def _decide(self, visitor: User, value: bytes | None) -> None:
        """Go from PROPOSED on to DECIDED, or back."""
        target = self._target(visitor, Head.of(value))
        if await self._leads_to(target, visitor):
            await self._mark(visitor, value, None)
            return
        last = Entry.of(visitor.tenant, Merge(visitor.user_id, target.user_id, _now_us()))
        await self._mark(visitor, value, MergeStage.DECIDED, target.user_id, last)

    async def _leads_to(self, start: User, end: User) -> bool:
        """Return whether the merges of the one user lead to the other, or round in circles."""
        passed: set[User] = set()
        while start != end and start not in passed:
            head = Head.of(await self._head(start))
            if head.merge is None:
                return False
            passed.add(start)
            start = self._target(start, head)
        return True

    async def _copy(self, visitor: User) -> None:
        """Go from DECIDED on to DONE, unless another process is faster or the visitor is erased."""
        decided = Head.of(await self._head(visitor))
        if decided.merge is not MergeStage.DECIDED:
            return
        direct = self._target(visitor, decided)
        log = [entry.record async for entry in self._log.entries(visitor)]
        properties = await self._session.call("HGET", visitor.properties, visitor.name)
        await self._session.call("SADD", direct.aliases, visitor.user_id)
        for _ in _attempts():
            target = await self.resolve(direct)
            # In this order: erasing takes the visitor first and then the user. A user who is erased before the first
            # read has no mark at the second, or comes back with another one; a user who is erased later has another
            # head, or the partition another newest entry, when the copies are appended.
            seq, value = await self._session.call("MGET", target.seq, target.head)
            visitors_value = await self._head(visitor)
            head = Head.of(visitors_value)
            if (head.merge, head.newest) != (MergeStage.DECIDED, decided.newest):
                if head.merge is None:
                    await self._session.call("SREM", direct.aliases, visitor.user_id)
                return
            if await self._fill_properties(target, value, seq, properties) and await self._append_missing(
                target, value, seq, log
            ):
                # Otherwise a failover could leave a visitor who is done, and no copies of the visitor's entries.
                await self.wait_for_replicas(target)
                await self._mark(visitor, visitors_value, MergeStage.DONE, head.merge_target)
                return
            await _pause()
        raise StorageUnavailable(CONTENTION, "contention")

    async def _fill_properties(
        self, target: User, value: bytes | None, seq: bytes | None, properties: bytes | None
    ) -> bool:
        """Give the target those properties that it lacks; return False when its log is not as believed."""
        if Head.of(value).merge is not None:
            return False
        if properties is None:
            return True
        arguments: list[Argument] = [target.name, properties, 1, b"{}", 0, value or b"", seq or b"0"]
        return bool(await self._session.write(PUT_USER_PROPERTIES, put_properties_keys(target), arguments))

    async def _append_missing(
        self, target: User, value: bytes | None, seq: bytes | None, log: Sequence[LogRecord]
    ) -> bool:
        """Append copies of the events that the target's log lacks; return False when it is not as believed."""
        copies = [readdressed(event, target.user_id) for event in log if not isinstance(event, Merge)]
        known = await self._logged_ids(target, value, [copy.entry_id for copy in copies])
        missing = [Entry.of(target.tenant, copy) for copy in copies if copy.entry_id not in known]
        return await self._append(target, value, seq, missing)

    async def _append(self, user: User, value: bytes | None, seq: bytes | None, entries: Sequence[Entry]) -> bool:
        """Append entries without folding them, which the next reader does; return False when the log has changed."""
        if Head.of(value).merge is not None:
            return False
        if not entries:
            return True
        return bool(await self._session.write(APPEND, *append_arguments(user, value, seq, entries)))

    async def require_whole(self, *users: User) -> None:
        """Raise StorageUnavailable where what was just read of these users may be too little.

        A server that lacks data is not written to, but knows neither the event that an undo is about, nor who was
        merged into whom, or was erased since; and what follows from that may be written to another server.
        """
        for user in users:
            await self._session.trust.require_whole(user.log)

    async def wait_for_replicas(self, user: User) -> None:
        """Return when as many replicas as required have the user's partition, whoever wrote to it."""
        if self._session.servers.acks.are_required:
            arguments = commit_arguments({user.partition: []}, 0)
            await self._session.write(COMMIT, *arguments, wait_for_replicas=True)

    async def _logged_ids(self, user: User, value: bytes | None, entry_ids: Sequence[str]) -> set[str]:
        """Return which of the ids are logged, if the user's head has this value."""
        if not entry_ids:
            return set()
        scores = await self._session.call("ZMSCORE", user.id_index, *map(index_member, entry_ids))
        known = set(compress(entry_ids, (score is not None for score in scores)))
        head = Head.of(value)
        rest = [entry_id for entry_id in entry_ids if entry_id not in known]
        if not head.archived or not rest:
            return known
        archive_id = await self._session.archive_id()

        def archived(snapshot: ArchiveSnapshot) -> list[bool]:
            snapshot.require(archive_id, user.partition_number, head.archived)
            return snapshot.holds(user.tenant, [(user.user_id, entry_id) for entry_id in rest])

        return known.union(compress(rest, await self._archive.read(archived)))

    async def _require_mergeable_size(self, visitor: User) -> None:
        log = [entry async for entry in self._log.entries(visitor, limit=MAX_MERGED + 1)]
        if len(log) > MAX_MERGED:
            raise MergeTooLarge(f"the visitor has more than {MAX_MERGED:,} events; nothing changed")

    async def _mark(
        self, user: User, value: bytes | None, stage: MergeStage | None, target: str = "", last: Entry | None = None
    ) -> bool:
        """Change the merge mark of a user's head; return False when the head is not as believed."""
        mark = "" if stage is None else stage.value + target
        tags = () if last is None else await self._session.registered_tags()
        return bool(await self._session.write(MARK_MERGE, *mark_merge_arguments(user, value, mark, last, tags)))

    async def is_lost(self, user: User) -> bool:
        """Return whether Redis has lost what it had of the user, so that only the archive has events of theirs."""
        return await self._head(user) is None and bool(await self._lost_users.among([user]))

    async def _require_known(self, heads: Mapping[User, bytes | None]) -> None:
        """Raise StorageError where Redis has lost what it had of one of the users."""
        await self._lost_users.require_none(user for user, head in heads.items() if head is None)

    async def _head(self, user: User) -> bytes | None:
        value: bytes | None = await self._session.call("GET", user.head)
        return value

    def _target(self, user: User, head: Head) -> User:
        return self._session.keys.user(user.tenant, head.merge_target)


def _attempts() -> Iterator[None]:
    deadline_s = time.monotonic() + RETRY_FOR_S
    while time.monotonic() < deadline_s:
        yield


async def _pause() -> None:
    """Wait for a random time, so that two processes that hinder each other do not go on in step."""
    await asyncio.sleep(random.uniform(0, MAX_PAUSE_S))  # noqa: S311


def _now_us() -> int:
    return time.time_ns() // 1_000

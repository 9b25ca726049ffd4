"""Undo and merge in Redis. The two users of a merge may be in different partitions.

A merge is a sequence of steps, each of them one script in one partition. A process that dies between them leaves a mark
in the visitor's head, and the next process that finds the mark completes the merge.

  PROPOSED   The visitor's head names the user, and the visitor's log accepts no more entries. Only now the process
             follows the user's merges. If they lead back to the visitor, it removes the mark: if several merges would
             form a circle, at least the one proposed last detects it.
  DECIDED    The visitor's log has its last entry, the merge.
  DONE       The visitor is in the user's aliases, for erasing. The user has those of the visitor's properties that were
             missing. Copies of the visitor's entries are in the user's log, appended in one step, except existing ones.

The visitor is not read meanwhile: a request for the visitor completes the merge, and returns the user. So requests
see the user either before the append or after it.
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
from storage.redis.scripts.corrections import APPEND, MARK_MERGE, NOTE_ALIAS, append_arguments, mark_merge_arguments
from storage.redis.scripts.events import COMMIT, commit_arguments
from storage.redis.scripts.user_properties import PUT_USER_PROPERTIES, put_properties_keys
from storage.redis.session.redis_session import RedisSession
from storage.state.corrections import full_id, is_already_merged, readdressed
from storage.state.event import Event, LogRecord, Merge, Undo

RETRY_FOR_S = 5.0
MAX_PAUSE_S = 0.01
CONTENTION = "concurrent writes changed the same users each time; send it again"


class RedisCorrections:
    """Changes which events count, and for which user."""

    def __init__(self, session: RedisSession, log: UserLog, archive: AsyncArchiveReader, lost_users: LostUsers) -> None:
        self._lost_users = lost_users
        self._session = session
        self._log = log
        self._archive = archive

    async def resolve(self, user: User) -> User:
        """Return the user that this one was merged into, or this one; complete unfinished merges on the way."""
        return (await self.merge_chain(user))[-1]

    async def merge_chain(self, user: User) -> list[User]:
        """Return the users from this one to the final merge target; complete unfinished merges on the way."""
        chain = [user]
        while True:
            user = chain[-1]
            value = await self._head(user)
            head = Head.of(value)
            match head.merge:
                case None:
                    if value is None and await self._session.call("EXISTS", user.id_index):
                        if await self._head(user) is not None:
                            continue  # the user's first events arrived meanwhile
                        Head.check(value, b"")
                    return chain
                case MergeStage.PROPOSED:
                    await self._decide(user, value)
                case MergeStage.DECIDED:
                    await self._copy(user)
                case MergeStage.DONE:
                    chain.append(self._target(user, head))

    async def log_length(self, user: User, limit: int) -> int:
        """Return the number of log entries of the user, after merges; `limit` if some are archived."""
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
                if await self._head(target) != value:  # meanwhile it was archived, or moved to another user
                    continue
                raise UnknownEvent("the user's log has no event of this id")
            is_new = entry.event.entry_id not in known
            if not is_new or await self._append(target, value, None, [entry]):
                await self.wait_for_replicas(target)
                return is_new
            await _pause()
        raise StorageUnavailable(CONTENTION, "contention")

    async def merge(self, user: User, visitor: User) -> bool:
        """Merge the visitor into the user; return False if they were merged before."""
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
                if len([entry async for entry in self._log.entries(visitor, limit=MAX_MERGED + 1)]) > MAX_MERGED:
                    raise MergeTooLarge(f"the visitor has more than {MAX_MERGED:,} events; nothing changed")
                is_proposed = await self._mark(visitor, value, MergeStage.PROPOSED, target.user_id)
            if not is_proposed:
                await _pause()
        raise StorageUnavailable(CONTENTION, "contention")

    async def append(self, user: User, records: Sequence[Event | Undo]) -> list[bool]:
        """Log records of a user that may have been merged into another one; return for each whether it is new.

        An erasure removes the heads that lead to other users, and then advances the numbers of the others' partitions.
        So if the user still leads to the target after the target was read, the target is erased afterwards or the
        append is rejected.
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
        """Advance from PROPOSED to DECIDED, or cancel the merge."""
        target = self._target(visitor, Head.of(value))
        if await self._leads_to(target, visitor):
            await self._mark(visitor, value, None)
            return
        last = Entry.of(visitor.tenant, Merge(visitor.user_id, target.user_id, _now_us()))
        await self._mark(visitor, value, MergeStage.DECIDED, target.user_id, last)

    async def _leads_to(self, start: User, end: User) -> bool:
        """Return whether the user's merges lead to the other user, or form a circle."""
        passed: set[User] = set()
        while start != end and start not in passed:
            head = Head.of(await self._head(start))
            if head.merge is None:
                return False
            passed.add(start)
            start = self._target(start, head)
        return True

    async def _copy(self, visitor: User) -> None:
        """Advance from DECIDED to DONE, unless another process was faster or the visitor was erased."""
        decided = Head.of(await self._head(visitor))
        if decided.merge is not MergeStage.DECIDED:
            return
        direct = self._target(visitor, decided)
        log = [entry.record async for entry in self._log.entries(visitor)]
        properties = await self._session.call("HGET", visitor.properties, visitor.name)
        for _ in _attempts():
            is_noted = await self._note_alias(direct, visitor, decided.newest)
            target = await self.resolve(direct)
            # In this order: an erasure removes the visitor first and then the user. A user erased before the first
            # read has no mark at the second, or a different one. A user erased later has a different head, or the
            # partition a different newest entry, when the copies are appended.
            seq, value = await self._session.call("MGET", target.seq, target.head)
            visitors_value = await self._head(visitor)
            if not _is_decided(visitors_value, decided.newest):
                return
            is_filled = is_noted and await self._fill_properties(target, value, seq, properties)
            if is_filled and await self._append_missing(target, value, seq, log):
                # Otherwise a failover could keep the mark of the completed merge but lose the copied entries.
                await self.wait_for_replicas(target)
                await self._mark(visitor, visitors_value, MergeStage.DONE, decided.merge_target)
                return
            await _pause()
        raise StorageUnavailable(CONTENTION, "contention")

    async def _note_alias(self, user: User, visitor: User, newest: int) -> bool:
        """Note an alias before an erasure of it, which ends with one of the user; return False if that is too late."""
        seq, value = await self._session.call("MGET", user.seq, user.head)
        if not _is_decided(await self._head(visitor), newest):
            return False
        arguments: list[Argument] = [value or b"", seq or b"0", visitor.user_id]
        return bool(await self._session.write(NOTE_ALIAS, [user.seq, user.head, user.aliases], arguments))

    async def _fill_properties(
        self, target: User, value: bytes | None, seq: bytes | None, properties: bytes | None
    ) -> bool:
        """Set the properties that the target lacks; return False if its log has changed."""
        if Head.of(value).merge is not None:
            return False
        if properties is None:
            return True
        arguments: list[Argument] = [target.name, properties, 1, b"{}", 0, value or b"", seq or b"0"]
        return bool(await self._session.write(PUT_USER_PROPERTIES, put_properties_keys(target), arguments))

    async def _append_missing(
        self, target: User, value: bytes | None, seq: bytes | None, log: Sequence[LogRecord]
    ) -> bool:
        """Append copies of the events that the target's log lacks; return False if it has changed."""
        copies = [readdressed(event, target.user_id) for event in log if not isinstance(event, Merge)]
        known = await self._logged_ids(target, value, [copy.entry_id for copy in copies])
        missing = [Entry.of(target.tenant, copy) for copy in copies if copy.entry_id not in known]
        return await self._append(target, value, seq, missing)

    async def _append(self, user: User, value: bytes | None, seq: bytes | None, entries: Sequence[Entry]) -> bool:
        """Append entries without folding them, which the next reader does; return False if the log has changed."""
        if Head.of(value).merge is not None:
            return False
        if not entries:
            return True
        return bool(await self._session.write(APPEND, *append_arguments(user, value, seq, entries)))

    async def require_whole(self, *users: User) -> None:
        """Raise StorageUnavailable if the data just read about these users may be incomplete.

        A server that lacks data is not written to. But it may also lack an event to be undone, a merge or an erasure,
        and decisions based on that could be written to another server.
        """
        for user in users:
            await self._session.trust.require_whole(user.log)

    async def wait_for_replicas(self, user: User) -> None:
        """Return when as many replicas as required have the user's partition, including writes of others."""
        if self._session.servers.acks.are_required:
            arguments = commit_arguments({user.partition: []}, 0)
            await self._session.write(COMMIT, *arguments, wait_for_replicas=True)

    async def _logged_ids(self, user: User, value: bytes | None, entry_ids: Sequence[str]) -> set[str]:
        """Return which of the ids are logged, provided that the user's head has this value."""
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

    async def _mark(
        self, user: User, value: bytes | None, stage: MergeStage | None, target: str = "", last: Entry | None = None
    ) -> bool:
        """Change the merge mark in a user's head; return False if the head has changed."""
        mark = "" if stage is None else stage.value + target
        tags = () if last is None else await self._session.registered_tags()
        return bool(await self._session.write(MARK_MERGE, *mark_merge_arguments(user, value, mark, last, tags)))

    async def is_lost(self, user: User) -> bool:
        """Return whether Redis has lost the user, so that only the archive has the user's events."""
        return await self._head(user) is None and bool(await self._lost_users.among([user]))

    async def _require_known(self, heads: Mapping[User, bytes | None]) -> None:
        """Raise StorageError if Redis has lost one of the users."""
        await self._lost_users.require_none(user for user, head in heads.items() if head is None)

    async def _head(self, user: User) -> bytes | None:
        value: bytes | None = await self._session.call("GET", user.head)
        return value

    def _target(self, user: User, head: Head) -> User:
        return self._session.keys.user(user.tenant, head.merge_target)


def _is_decided(value: bytes | None, newest: int) -> bool:
    """Return whether the head of a visitor still has the merge that was decided with that entry, not completed."""
    head = Head.of(value)
    return (head.merge, head.newest) == (MergeStage.DECIDED, newest)


def _attempts() -> Iterator[None]:
    deadline_s = time.monotonic() + RETRY_FOR_S
    while time.monotonic() < deadline_s:
        yield


async def _pause() -> None:
    """Wait for a random time, so that two processes in conflict do not retry in step."""
    await asyncio.sleep(random.uniform(0, MAX_PAUSE_S))  # noqa: S311


def _now_us() -> int:
    return time.time_ns() // 1_000

"""The log of a Redis store: in Redis and, where it was trimmed, in the archive.

What tells where a user's log is, the head and the index, can be made again from the log of the user's partition.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence

from storage.archive.async_reader import AsyncArchiveReader
from storage.archive.manifest import Manifest
from storage.archive.reader import ArchivedLog, ArchiveSnapshot
from storage.errors import StorageError, StorageUnavailable
from storage.records import LogEntry, LogPage
from storage.redis.layout import (
    MERGE_MARK,
    SEQ_DIGITS,
    TIME_DIGITS,
    Head,
    Keyspace,
    MergeStage,
    User,
    index_member,
    rounded_up_s,
)
from storage.redis.layout.stream_entries import entry_seq, parse_log_entries, parse_stream_page
from storage.redis.scripts.corrections import REPAIR
from storage.redis.scripts.events import READ_LOG
from storage.redis.session import RedisSession
from storage.state.event import Merge, digest, uuid7_time_us

ENDLESS = 2**53
USER_PAGE = 128  # some 0.3 ms of Redis, and 1 ms of the event loop
ARCHIVE_SCAN_TIMEOUT_S = 600.0  # for the archive to read a part of all its files
REPAIR_ATTEMPTS = 20
HEADS_PAGE = 500
STREAM_PAGE = 2000  # entries of a partition, some 2 ms in which Redis does nothing else


class UserLog:
    """The log of one user, or of everybody."""

    def __init__(self, session: RedisSession, archive: AsyncArchiveReader) -> None:
        self._session = session
        self._archive = archive
        self._reading_archive = asyncio.Lock()  # resends of events need the archive's other threads

    async def entries(
        self, user: User, *, after: int = 0, through: int | None = None, limit: int = ENDLESS
    ) -> AsyncIterator[LogEntry]:
        """Yield the first `limit` entries of the user's log between two sequence numbers, in log order."""
        async for page in self.pages_of(user, after=after, through=through, limit=limit):
            for entry in page:
                yield entry

    async def pages_of(
        self, user: User, *, after: int = 0, through: int | None = None, limit: int = ENDLESS
    ) -> AsyncIterator[list[LogEntry]]:
        """Yield the same entries in pages."""
        await self._session.check()
        keys, last = [user.head, user.id_index, user.log], "+inf" if through is None else through
        while limit > 0:
            size = min(limit, USER_PAGE)
            async with self._session.background_limit(user.head):
                found = await self._session.run(READ_LOG, keys, [after, last, size])
            if len(found) == 1:
                archived = int(found[0])
                entries = await self._archived_entries(user, after, archived, through, limit)
                after, is_last = archived, through is not None and through <= archived
            else:
                entries = list(parse_log_entries(found))
                after, is_last = entries[-1].seq if entries else after, len(entries) < size
            for start in range(0, len(entries), USER_PAGE):
                yield entries[start : start + USER_PAGE]
                await asyncio.sleep(0)  # what the archive had may be long, and others work on the event loop too
            if is_last:
                return
            limit -= len(entries)

    async def newest(self, user: User, limit: int) -> AsyncIterator[list[LogEntry]]:
        """Yield the newest `limit` entries of the user's log in pages, newest first."""
        await self._session.check()
        keys, highest = [user.head, user.id_index, user.log], ENDLESS
        while limit > 0:
            page = min(limit, USER_PAGE)
            async with self._session.background_limit(user.head):
                found = await self._session.run(READ_LOG, keys, [0, highest, page, "newest"])
            entries = list(parse_log_entries(found))
            yield entries
            limit -= len(entries)
            highest = entries[-1].seq - 1 if entries else highest
            if len(entries) < page:
                break
        archived = Head.of(await self._session.call("GET", user.head)).archived if limit > 0 else 0
        if archived:
            async with self._reading_archive:
                yield await self._newest_archived(user, archived, highest, limit)

    async def _newest_archived(self, user: User, archived: int, highest: int, limit: int) -> list[LogEntry]:
        """Return the newest entries up to `highest` of the part of the user's log that is in the archive."""
        archive_id = await self._session.archive_id()

        def entries(snapshot: ArchiveSnapshot) -> list[LogEntry]:
            snapshot.require(archive_id, user.partition_number, archived)
            return snapshot.newest_entries(user.tenant, user.user_id, through=min(archived, highest), limit=limit)

        return await self._archive.read(entries)

    async def _archived_entries(
        self, user: User, after: int, archived: int, through: int | None, limit: int
    ) -> list[LogEntry]:
        """Return what the archive has of the user's log up to its entry `archived`, and up to `through`."""
        last = archived if through is None else min(archived, through)
        archive_id = await self._session.archive_id()

        def entries(snapshot: ArchiveSnapshot) -> list[LogEntry]:
            snapshot.require(archive_id, user.partition_number, archived)
            return snapshot.entries(user.tenant, user.user_id, after=after, through=last, limit=limit)

        return await self._archive.read(entries)

    async def pages(self) -> AsyncIterator[LogPage]:
        """Yield the log of every user, one partition after the other."""
        await self._session.require_open()
        partitions = self._session.keys.partitions
        number = 0
        while number < partitions:
            archived = await self.archived_logs(number, partitions) if self._archive.is_configured else {}
            for partition in archived or [number]:
                async for page in self._partition_pages(partition, archived.get(partition)):
                    yield page
                number = partition + 1

    async def _partition_pages(self, number: int, archived: ArchivedLog | None) -> AsyncIterator[LogPage]:
        """Yield the archived part of a partition and then the stream; both again where there is a gap between them.

        A gap is there when archiver and trimming have gone past the position that was read. The archive may still have
        entries of erased users, until the archiver's next run; the stream names those users.
        """
        through = int(await self._session.call("GET", self._session.keys.seq(number)) or 0)
        starts_over = False
        while through:
            after = 0
            if archived is not None:
                yield LogPage([], is_complete=False, starts_over=starts_over)
                for entries in archived.pages(STREAM_PAGE):
                    yield LogPage(entries, is_complete=False)
                after = archived.through_seq
            async for page, last in self._stream_pages(number, after, through):
                yield page
                if page.is_complete:
                    return
                after = last
            archived = (await self.archived_logs(number, number + 1, through_seq=after + 1))[number]
            starts_over = True

    async def _stream_pages(self, number: int, after: int, through: int) -> AsyncIterator[tuple[LogPage, int]]:
        """Yield pages of a partition's stream with their last SEQ; stop early where the next entry was trimmed."""
        key = self._session.keys.log(number)
        while True:
            found = await self._session.call("XRANGE", key, after + 1, through, "COUNT", STREAM_PAGE)
            if after < through and (not found or entry_seq(found[0][0]) != after + 1):  # numbers have no gaps
                return
            is_complete = len(found) < STREAM_PAGE
            after = entry_seq(found[-1][0]) if found else after
            yield parse_stream_page(found, is_complete=is_complete), after
            if is_complete:
                return

    async def archived_logs(self, first: int, end: int, *, through_seq: int = 0) -> dict[int, ArchivedLog]:
        """Return the archived logs of as many partitions as fit, from the first one on; empty without an archive.

        through_seq  how far the archive must go in the first partition
        """
        archive_id = await self._session.archive_id()
        if not archive_id and not through_seq:
            return {}

        def logs(snapshot: ArchiveSnapshot) -> dict[int, ArchivedLog]:
            snapshot.require(archive_id, first, through_seq)
            return snapshot.logs(first, end)

        return await self._archive.read(logs, ARCHIVE_SCAN_TIMEOUT_S)

    async def manifest(self) -> Manifest | None:
        """Return the manifest of the archive; None where no archive is configured."""
        return await self._archive.read(lambda snapshot: snapshot.manifest) if self._archive.is_configured else None


class LogRepair:
    """Makes heads and indexes again that are missing or damaged."""

    def __init__(self, session: RedisSession, log: UserLog) -> None:
        self._session = session
        self._log = log

    async def run(self, *, accept_loss: bool) -> int:
        """Repair all users, and return how many had to be.

        raises  StorageError  when entries are lost, unless that is accepted
        """
        await self._session.require_open()
        if accept_loss:
            await self._join_archive()
        else:
            for partition in range(self._session.keys.partitions):
                await self._session.trust.require(self._session.keys.log(partition))
        repaired = number = 0
        while number < self._session.keys.partitions:
            logs = await self._log.archived_logs(number, self._session.keys.partitions)
            for partition in logs or [number]:
                repaired += await self._repair_partition(partition, logs.get(partition), accept_loss=accept_loss)
                number = partition + 1
        await self._drop_states_without_head()
        return repaired

    async def _join_archive(self) -> None:
        """Let the streams go on behind the archive's newest entries, where they have lost those.

        raises  StorageError  when other entries were logged under the numbers of archived ones
        """
        manifest = await self._log.manifest()
        archive_id = await self._session.archive_id()
        if manifest is None or (archive_id and archive_id != manifest.archive_id):
            return
        for number, position in manifest.positions.items():
            key, seq = self._session.keys.log(number), manifest.seq(number)
            found = await self._session.call("XRANGE", key, seq, "+", "COUNT", 1)
            if found and found[0][0].decode() != position:
                raise StorageError(
                    f"'{key}' and the archive have different entries of the number {seq} and cannot be joined; see "
                    "'When Redis has lost events' in docs/operations.md",
                    "wrong_store",
                )
            if not found:
                await self._session.call("XADD", key, position, "x", "")
            seq_key = self._session.keys.seq(number)
            behind = seq - int(await self._session.call("GET", seq_key) or 0)
            if behind > 0:
                await self._session.call("INCRBY", seq_key, behind)
        await self._session.call("HSET", self._session.keys.meta, "archive", manifest.archive_id)

    async def _repair_partition(self, number: int, archived: ArchivedLog | None, *, accept_loss: bool) -> int:
        repaired = 0
        for _ in range(REPAIR_ATTEMPTS):
            log = await self._read(number, archived)
            if log.lacks and not accept_loss:
                newer = (await self._log.archived_logs(number, number + 1)).get(number)
                if newer is None or (archived is not None and newer.through_seq == archived.through_seq):
                    key = self._session.keys.log(number)
                    raise StorageError(
                        f"'{key}' {log.lacks}; 'lisarec repair --accept-loss' goes on without", "damaged"
                    )
                archived = newer
                continue
            results = await self._repair_users(log)
            repaired += results.count(1)
            if 0 not in results:
                return repaired
        raise StorageUnavailable("others always logged something in the meantime; try again", "contention")

    async def _read(self, number: int, archived: ArchivedLog | None) -> _PartitionLog:
        """Read a partition's log to its end."""
        keys, key, seq_key = self._session.keys, self._session.keys.log(number), self._session.keys.seq(number)
        log = _PartitionLog(keys, 0 if archived is None else archived.through_seq)
        for entries in archived.pages(STREAM_PAGE) if archived is not None else ():
            log.add(entries, is_archived=True)
        log.seq = int(await self._session.call("GET", seq_key) or 0)
        first = await self._session.call("XRANGE", key, "-", "+", "COUNT", 1)
        log.first_id = first[0][0] if first else b""
        after = log.archived
        while found := await self._session.call("XRANGE", key, after + 1, "+", "COUNT", STREAM_PAGE):
            if entry_seq(found[0][0]) != after + 1:
                log.lacks = f"has lost the entries from {after + 1} to {entry_seq(found[0][0]) - 1}"
            page = parse_stream_page(found, is_complete=False)
            log.forget(page.erased)
            log.add(page.entries, is_archived=False)
            after = entry_seq(found[-1][0])
        if after < log.seq:
            log.lacks = log.lacks or f"has lost the entries from {after + 1} to {log.seq}"
        elif (behind := after - int(await self._session.call("GET", seq_key) or 0)) > 0:
            await self._session.call("INCRBY", seq_key, behind)
        log.seq = max(log.seq, after)
        return log

    async def _repair_users(self, log: _PartitionLog) -> list[int]:
        """Repair those who need it; return for each of them 1, or 0 where somebody logged something meanwhile."""
        users, results = list(log.users), []
        tags = await self._session.registered_tags()
        for start in range(0, len(users), HEADS_PAGE):
            page = users[start : start + HEADS_PAGE]
            heads = await self._session.call("MGET", *(user.head for user in page))
            for user, head in zip(page, heads, strict=True):
                found = log.users[user]
                if _is_sound(head, found.newest, log.seq):
                    continue
                keys = [user.seq, user.log, user.head, user.id_index, *map(user.state_of_tag, tags)]
                read = [head or b"", log.seq, log.first_id]
                args = [*read, found.head(log.archived), *found.index]
                results.append(int(await self._session.run(REPAIR, keys, args, wait_for_replicas=True)))
        return results

    async def _drop_states_without_head(self) -> None:
        """Remove states that an erasure or a loss has left; whoever comes back meanwhile has theirs folded again."""
        keys = self._session.keys
        async for states in self._session.servers.scan(keys.all_states_pattern):
            groups = [[_head_of_state(state)] for state in states]
            for state, heads in zip(states, await self._session.servers.read(groups), strict=True):
                if heads == [None]:
                    await self._session.call("UNLINK", state)


class _FoundUser:
    """What the log has of a user.

    newest  SEQ of the newest entry
    index   SEQ and hash of the id of each entry that is not in the archive
    """

    def __init__(self) -> None:
        self.newest = 0
        self.index: list[int | bytes] = []
        self._is_archived = False
        self._id_time_s = 0
        self._merged_into = ""

    def add(self, entry: LogEntry, *, is_archived: bool) -> None:
        self.newest = entry.seq
        self._merged_into = entry.record.target if isinstance(entry.record, Merge) else ""
        if is_archived:
            self._is_archived = True
            self._id_time_s = max(self._id_time_s, rounded_up_s(uuid7_time_us(entry.record.entry_id) or 0))
        else:
            self.index += (entry.seq, index_member(entry.record.entry_id))

    def head(self, archived: int) -> str:
        """Return the value of the user's head. A merge that is done is decided again, which changes nothing."""
        value = f"{self.newest:0{SEQ_DIGITS}}"
        if self._is_archived:
            value += f"{archived:0{SEQ_DIGITS}}{self._id_time_s:0{TIME_DIGITS}}"
        if self._merged_into:
            value = f"{value:0<{MERGE_MARK}}{MergeStage.DECIDED.value}{self._merged_into}"
        return value


class _PartitionLog:
    """A partition's log as it was read.

    archived  SEQ of the newest archived entry
    seq       SEQ of its newest entry
    first_id  of the first entry in the stream; empty without any
    lacks     what is missing in it; empty if nothing is
    """

    def __init__(self, keys: Keyspace, archived: int) -> None:
        self.archived = archived
        self.seq = 0
        self.first_id = b""
        self.lacks = ""
        self.users: defaultdict[User, _FoundUser] = defaultdict(_FoundUser)
        self._keys = keys

    def add(self, entries: Sequence[tuple[str, LogEntry]], *, is_archived: bool) -> None:
        for tenant, entry in entries:
            self.users[self._keys.user(tenant, entry.record.user_id)].add(entry, is_archived=is_archived)

    def forget(self, erased: Sequence[tuple[str, bytes]]) -> None:
        if erased:
            gone = set(erased)
            for user in [user for user in self.users if (user.tenant, digest(user.user_id)) in gone]:
                del self.users[user]


def _head_of_state(key: str) -> str:
    """Return the key of the head of the user whose state has this key."""
    partition, _, rest = key.partition(":state:")
    return f"{partition}:head:{rest.partition(':')[2]}"


def _is_sound(head: bytes | None, newest: int, last: int) -> bool:
    """Return whether a head can be the one of a user with that newest entry, of a log that was read to the last one."""
    try:
        found = Head.of(head).newest
    except StorageError:
        return False
    return found == newest or found > last

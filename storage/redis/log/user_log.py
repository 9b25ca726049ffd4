"""The log of a Redis store: in Redis and, after trimming, in the archive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from storage.archive.async_reader import AsyncArchiveReader
from storage.archive.manifest import Manifest
from storage.archive.reader import ArchivedLog, ArchiveSnapshot
from storage.records import LogEntry, LogPage
from storage.redis.layout.head import Head
from storage.redis.layout.keys import User
from storage.redis.layout.stream_entries import entry_seq, parse_log_entries, parse_seen_entries, parse_stream_page
from storage.redis.scripts.events import READ_LOG
from storage.redis.session.redis_session import RedisSession
from storage.state.corrections import EventFilter, SeenEntry, SeenItems, seen_entry

ENDLESS = 2**53
USER_PAGE = 128  # entries, about 0.3 ms of Redis and at most 1 ms of the event loop
ARCHIVE_SCAN_TIMEOUT_S = 600.0  # for the archive to read a part of all its files
STREAM_PAGE = 2000  # entries of a partition, which block Redis for about 2 ms


class UserLog:
    """The log of one user, or of all users."""

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
                entries = parse_log_entries(found)
                after, is_last = entries[-1].seq if entries else after, len(entries) < size
            for start in range(0, len(entries), USER_PAGE):
                yield entries[start : start + USER_PAGE]
                await asyncio.sleep(0)  # the archived part may be long, so let others use the event loop
            if is_last:
                return
            limit -= len(entries)

    async def archived_files(self, user: User, after: int) -> int:
        """Return the number of archive files that `entries` reads for this user."""
        if Head.of(await self._session.call("GET", user.head)).archived <= after:
            return 0
        return await self._archive.read(lambda snapshot: len(snapshot.files_of(user.tenant, user.user_id)))

    async def _newest_seen(self, user: User, limit: int) -> AsyncIterator[list[SeenEntry]]:
        """Yield the newest `limit` entries of the user's log in pages, newest first."""
        await self._session.check()
        highest, archived = ENDLESS, 0
        while limit > 0:
            page = min(limit, USER_PAGE)
            found, archived = await self._newest_page(user, page, highest)
            entries = parse_seen_entries(found)
            yield entries
            limit -= len(entries)
            highest = int(found[-2]) - 1 if found else highest
            if len(entries) < page:
                break
        if limit > 0 and archived:
            async with self._reading_archive:
                older = await self._newest_archived(user, archived, highest, limit)
            yield [seen_entry(entry.record) for entry in older]

    async def newest_unarchived(self, user: User, limit: int) -> list[LogEntry]:
        """Return the newest `limit` entries, newest first, without those that are only in the archive."""
        return parse_log_entries((await self._newest_page(user, limit, ENDLESS))[0])

    async def _newest_page(self, user: User, limit: int, highest: int) -> tuple[list[bytes], int]:
        """Return the SEQs and the JSON of entries up to `highest`, in turns, as READ_LOG does.

        If there are fewer than `limit`, the second value is the last SEQ that is only in the archive, else 0.
        """
        keys = [user.head, user.id_index, user.log]
        async with self._session.background_limit(user.head):
            found = await self._session.run(READ_LOG, keys, [0, highest, limit, "newest"])
        is_last = len(found) % 2 == 1
        return (found[:-1], int(found[-1] or 0)) if is_last else (found, 0)

    async def seen_items(self, user: User, events: EventFilter, limit: int) -> SeenItems:
        """Return the items of the matching events among the newest `limit` entries of the user's log."""
        seen = SeenItems(events, limit)
        async for page in self._newest_seen(user, limit + 1):
            seen.add(page)
        return seen

    async def _newest_archived(self, user: User, archived: int, highest: int, limit: int) -> list[LogEntry]:
        """Return the newest entries up to `highest` from the archived part of the user's log."""
        archive_id = await self._session.archive_id()

        def entries(snapshot: ArchiveSnapshot) -> list[LogEntry]:
            snapshot.require(archive_id, user.partition_number, archived)
            return snapshot.newest_entries(user.tenant, user.user_id, through=min(archived, highest), limit=limit)

        return await self._archive.read(entries)

    async def _archived_entries(
        self, user: User, after: int, archived: int, through: int | None, limit: int
    ) -> list[LogEntry]:
        """Return the user's archived entries up to `archived` and `through`."""
        last = archived if through is None else min(archived, through)
        archive_id = await self._session.archive_id()

        def entries(snapshot: ArchiveSnapshot) -> list[LogEntry]:
            snapshot.require(archive_id, user.partition_number, archived)
            return snapshot.entries(user.tenant, user.user_id, after=after, through=last, limit=limit)

        return await self._archive.read(entries)

    async def pages(self) -> AsyncIterator[LogPage]:
        """Yield the log of all users, one partition after another."""
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
        """Yield the archived part of a partition and then the stream; repeat both if there is a gap between them.

        A gap appears if archiver and trimming have passed the position that was read. The archive may still have
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
        """Yield pages of a partition's stream with their last SEQ; stop early if the next entry was trimmed."""
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
        """Return the archived logs of as many partitions as fit, starting with the first; empty without an archive.

        through_seq  the SEQ that the archive must contain in the first partition
        """
        archive_id = await self._session.archive_id()
        if not archive_id and not through_seq:
            return {}

        def logs(snapshot: ArchiveSnapshot) -> dict[int, ArchivedLog]:
            snapshot.require(archive_id, first, through_seq)
            return snapshot.logs(first, end)

        return await self._archive.read(logs, ARCHIVE_SCAN_TIMEOUT_S)

    async def manifest(self) -> Manifest | None:
        """Return the manifest of the archive; None if no archive is configured."""
        return await self._archive.read(lambda snapshot: snapshot.manifest) if self._archive.is_configured else None

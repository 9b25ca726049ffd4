"""Stream entries with the numbers of archived entries: they are set aside, and logged again.

They were logged by processes that did not know the archived ones. A stream of such entries has a key of its own from
the moment it leaves the log until all of it is logged again, so that nothing is lost if a process dies meanwhile.
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping

from storage.archive.reader import ArchivedLog
from storage.errors import StorageUnavailable
from storage.redis.corrections.undo_and_merge import RedisCorrections
from storage.redis.layout.keys import ALL_ASIDE, User
from storage.redis.layout.stream_entries import entry_seq
from storage.redis.log.user_log import STREAM_PAGE
from storage.redis.scripts.corrections import SET_ASIDE
from storage.redis.session.redis_session import RedisSession
from storage.state.event import Event, LogRecord, Merge, Undo
from storage.state.record_encoding import from_json

ATTEMPTS = 20
OVERTAKEN = "concurrent writes changed the log each time; try again"


class OverwritingEntries:
    """Sets entries aside, and logs them again."""

    def __init__(self, session: RedisSession, corrections: RedisCorrections) -> None:
        self._session = session
        self._corrections = corrections

    async def set_aside(self, number: int, position: str, archived: ArchivedLog) -> None:
        """Continue a partition's numbers after the archive's position, and set aside entries that use earlier numbers.

        Entries before the first number that log and archive use for different entries are in the archive.
        """
        keys, log, seq = self._session.keys, self._session.keys.log(number), entry_seq(position.encode())
        archived_ids = dict(archived.table.select("seq", "logged_ms").iter_rows())
        for _ in range(ATTEMPTS):
            users: set[User] = set()
            first = last = b""
            async for entry_id, user, _record in self._entries(log):
                last = entry_id
                if not first and (_is_another(entry_id, archived_ids) or entry_seq(entry_id) >= seq):
                    first = entry_id
                users |= {user} if user else set()
            if first:
                await self._forget(users)
            aside = keys.aside(number, secrets.token_hex(8))
            if await self._session.run(SET_ASIDE, [keys.seq(number), log, aside], [last, first, seq]):
                return
        raise StorageUnavailable(OVERTAKEN, "contention")

    async def log_again(self) -> None:
        """Log the entries that were set aside. Merges and erasures are skipped, and can be requested again."""
        async for found in self._session.partition_keys(ALL_ASIDE):
            for aside in found:
                records: defaultdict[User, list[Event | Undo]] = defaultdict(list)
                async for _, user, record in self._entries(aside):
                    if user and record and not isinstance(record, Merge):
                        records[user].append(record)
                for user, own in records.items():
                    await self._corrections.append(user, own)
                await self._session.call("UNLINK", aside)

    async def _forget(self, users: Collection[User]) -> None:
        """Remove heads, indexes and states; the repair restores them for archived entries."""
        tags = await self._session.registered_tags()
        for user in users:
            await self._session.call("UNLINK", user.head, user.id_index, *map(user.state_of_tag, tags))

    async def _entries(self, stream: str) -> AsyncIterator[tuple[bytes, User | None, LogRecord | None]]:
        """Yield the ids of a stream's entries, with user and record where an entry has them."""
        after = "-"
        while found := await self._session.call("XRANGE", stream, after, "+", "COUNT", STREAM_PAGE):
            for entry_id, fields in found:
                if b"e" in fields:
                    tenant, record = from_json(json.loads(fields[b"e"]))
                    yield entry_id, self._session.keys.user(tenant, record.user_id), record
                else:
                    yield entry_id, None, None
            after = f"({found[-1][0].decode()}"


def _is_another(entry_id: bytes, archived_ids: Mapping[int, int]) -> bool:
    """Return whether the archive has a different entry with the number of this one.

    archived_ids  SEQ -> milliseconds, the two parts of an id
    """
    seq, logged_ms = map(int, entry_id.split(b"-"))
    return archived_ids.get(seq, logged_ms) != logged_ms

"""Making again what tells where users' logs are, the head and the index, from the log of their partition."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from storage.archive.reader import ArchivedLog
from storage.errors import StorageError, StorageUnavailable
from storage.records import LogEntry
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
from storage.redis.layout.stream_entries import entry_seq, parse_stream_page
from storage.redis.log import STREAM_PAGE, UserLog
from storage.redis.scripts.corrections import REPAIR
from storage.redis.session import RedisSession
from storage.state.event import Merge, digest, uuid7_time_us

REPAIR_ATTEMPTS = 20
HEADS_PAGE = 500


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

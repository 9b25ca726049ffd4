"""Rebuilds users' heads, indexes and aliases from the log of their partition."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from redis.exceptions import ResponseError

from storage.archive.reader import ArchivedLog
from storage.errors import StorageError, StorageUnavailable
from storage.redis.connections.nodes import Argument, Command, storage_error
from storage.redis.corrections.overwriting_entries import OVERTAKEN, OverwritingEntries
from storage.redis.corrections.partition_log import PartitionLog
from storage.redis.corrections.undo_and_merge import RedisCorrections
from storage.redis.layout.head import SEQ_DIGITS, Head
from storage.redis.layout.keys import ALL_STATES, User, tag_of_state, user_of
from storage.redis.layout.stream_entries import entry_seq, parse_stream_page
from storage.redis.log.user_log import STREAM_PAGE, UserLog
from storage.redis.scripts.corrections import REPAIR
from storage.redis.session.redis_session import RedisSession
from storage.state.layout import TAG_BYTES
from storage.state.packed_state import is_of_layout, is_whole, state_size

REPAIR_ATTEMPTS = 20
HEADS_PAGE = 500
INDEX_PAGE = 200  # ids, which block Redis for about 0.1 ms
CHECKS_AT_ONCE = 100


class LogRepair:
    """Rebuilds missing and damaged heads, indexes and aliases, and removes damaged states."""

    def __init__(self, session: RedisSession, log: UserLog, corrections: RedisCorrections) -> None:
        self._session = session
        self._log = log
        self._overwriting = OverwritingEntries(session, corrections)

    async def run(self) -> int:
        """Repair all users, complete an interrupted `accept_loss`, and return the number of repaired users.

        raises  StorageError  when entries are lost
        """
        await self._session.require_whole()
        repaired = await self._repair_all(accept_loss=False)
        await self._overwriting.log_again()
        return repaired

    async def accept_loss(self) -> int:
        """Repair all users, and accept the loss of entries that log and archive lack; return the number repaired.

        Entries with the numbers of archived ones were logged by processes that did not know those: before the loss of a
        server was detected, or by a service without the archive. They are logged again, after the archived entries.
        """
        await self._session.require_open()
        repaired = 0
        for _ in range(REPAIR_ATTEMPTS):
            positions = await self._continue_archive()
            repaired += await self._repair_all(accept_loss=True)
            if await self._append_positions(positions):
                break
        else:
            raise StorageUnavailable(OVERTAKEN, "contention")
        await self._session.trust.accept_loss()
        await self._overwriting.log_again()
        return repaired

    async def _repair_all(self, *, accept_loss: bool) -> int:
        repaired = number = 0
        while number < self._session.keys.partitions:
            logs = await self._log.archived_logs(number, self._session.keys.partitions)
            for partition in logs or [number]:
                repaired += await self._repair_partition(partition, logs.get(partition), accept_loss=accept_loss)
                number = partition + 1
        return repaired + await self._drop_damaged_states()

    async def _continue_archive(self) -> dict[int, str]:
        """Continue the numbers after those of the archive's newest entries.

        returns  by partition, the newest archived entry that its stream lacks
        """
        positions: dict[int, str] = {}
        manifest = await self._log.manifest()
        archive_id = await self._session.archive_id()
        if manifest is None or (archive_id and archive_id != manifest.archive_id):
            return positions
        await self._session.call("HSET", self._session.keys.meta, "archive", manifest.archive_id)
        number = 0
        while number < self._session.keys.partitions:
            logs = await self._log.archived_logs(number, self._session.keys.partitions)
            for partition, archived in logs.items():
                position = manifest.positions.get(partition)
                if position is not None and not await self._has(partition, position):
                    positions[partition] = position
                    await self._overwriting.set_aside(partition, position, archived)
                number = partition + 1
        return positions

    async def _append_positions(self, positions: Mapping[int, str]) -> bool:
        """Append the archive's newest entries to streams that lack them; return False if another process was faster.

        These entries mark the store as complete for services, so they come last: before, heads would lack entries.
        """
        for number, position in positions.items():
            log = self._session.keys.log(number)
            (reply,) = await self._session.servers.execute_all([Command.of("XADD", log, position, "x", "")])
            if isinstance(reply, ResponseError) and "equal or smaller" in str(reply):
                return False
            if isinstance(reply, Exception):
                raise storage_error(reply) from reply
        return True

    async def _has(self, number: int, position: str) -> bool:
        """Return whether a stream has the archive's newest entry, in which case its numbers continue after it."""
        seq = entry_seq(position.encode())
        found = await self._session.call("XRANGE", self._session.keys.log(number), seq, "+", "COUNT", 1)
        return bool(found) and found[0][0].decode() == position

    async def _repair_partition(self, number: int, archived: ArchivedLog | None, *, accept_loss: bool) -> int:
        repaired = 0
        for _ in range(REPAIR_ATTEMPTS):
            log = await self._read(number, archived)
            if log.lacks and not accept_loss:
                newer = (await self._log.archived_logs(number, number + 1)).get(number)
                if newer is None or (archived is not None and newer.through_seq == archived.through_seq):
                    key = self._session.keys.log(number)
                    raise StorageError(
                        f"'{key}' {log.lacks}; to continue without them, run 'lisarec repair --accept-loss'", "damaged"
                    )
                archived = newer
                continue
            results = await self._repair_users(number, log)
            repaired += results.count(1)
            if 0 not in results:
                return repaired
        raise StorageUnavailable(OVERTAKEN, "contention")

    async def _read(self, number: int, archived: ArchivedLog | None) -> PartitionLog:
        """Read a partition's log to its end."""
        keys, key, seq_key = self._session.keys, self._session.keys.log(number), self._session.keys.seq(number)
        log = PartitionLog(keys, 0 if archived is None else archived.through_seq)
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

    async def _repair_users(self, number: int, log: PartitionLog) -> list[int]:
        """Repair damaged users; return 1 for each of them, or 0 if another process logged something meanwhile."""
        users, results = list(log.users), []
        tags = await self._session.registered_tags()
        for start in range(0, len(users), HEADS_PAGE):
            page = users[start : start + HEADS_PAGE]
            merged = [user for user in page if log.users[user].merged_into]
            await self._change_aliases("SADD", merged, log)  # before their heads show the merge
            for user, head in (await self._damaged(number, log, page)).items():
                found = log.users[user]
                keys = [user.seq, user.log, user.head, user.id_index, *map(user.state_of_tag, tags)]
                args: list[Argument] = [head or b"", log.seq, log.first_id, found.head(log.archived)]
                args += chain.from_iterable(zip(*found.index(log.archived), strict=True))
                results.append(int(await self._session.run(REPAIR, keys, args, wait_for_replicas=True)))
            erased = [user for user, head in (await self._heads(merged)).items() if head is None]
            await self._change_aliases("SREM", erased, log)
        return results

    async def _change_aliases(self, command: str, visitors: Sequence[User], log: PartitionLog) -> None:
        """Add merged visitors to the aliases of their targets, by which an erasure finds them, or remove them."""
        targets = [self._session.keys.user(visitor.tenant, log.users[visitor].merged_into) for visitor in visitors]
        commands = [
            Command.of(command, target.aliases, visitor.user_id)
            for target, visitor in zip(targets, visitors, strict=True)
        ]
        await self._session.servers.call_all(commands, wait_for_replicas=True)

    async def _damaged(self, number: int, log: PartitionLog, users: Sequence[User]) -> dict[User, bytes | None]:
        """Return the users whose head or index does not match the log, with their heads.

        A user whose head changes meanwhile is read again.
        """
        damaged: dict[User, bytes | None] = {}
        for _ in range(REPAIR_ATTEMPTS):
            heads = await self._heads(users)
            sound = {user: Head.of(head) for user, head in heads.items() if log.users[user].fits(head, log.seq)}
            if any(head.archived > log.archived for head in sound.values()):
                manifest = await self._log.manifest()  # the archiver may have continued
                archived = 0 if manifest is None else manifest.seq(number)
                sound = {user: head for user, head in sound.items() if head.archived <= archived}
            unsound = await self._with_damaged_index(sound, log)
            suspects = [user for user in users if user not in sound or user in unsound]
            damaged = {user: head for user, head in heads.items() if user in suspects}
            heads = await self._heads(suspects)
            if heads == damaged:
                break
            users = suspects
        return damaged

    async def _heads(self, users: Sequence[User]) -> dict[User, bytes | None]:
        heads = await self._session.call("MGET", *(user.head for user in users)) if users else []
        return dict(zip(users, heads, strict=True))

    async def _with_damaged_index(self, heads: Mapping[User, Head], log: PartitionLog) -> set[User]:
        """Return users whose index lacks entries after the archived ones, or has additional ones."""
        checks: list[tuple[User, Command, list[int]]] = []
        for user, head in heads.items():
            seqs, members = log.users[user].index(head.archived)
            checks.append((user, Command.of("ZCARD", user.id_index), [len(seqs)]))
            for start in range(0, len(seqs), INDEX_PAGE):
                page = slice(start, start + INDEX_PAGE)
                checks.append((user, Command.of("ZMSCORE", user.id_index, *members[page]), seqs[page]))
        damaged: set[User] = set()
        for start in range(0, len(checks), CHECKS_AT_ONCE):
            some = checks[start : start + CHECKS_AT_ONCE]
            replies = await self._session.servers.execute_all([command for _, command, _ in some])
            for (user, _, expected), reply in zip(some, replies, strict=True):
                if isinstance(reply, Exception) and not _is_of_another_type(reply):
                    raise storage_error(reply) from reply
                has_more = isinstance(reply, int) and reply > expected[0] and heads[user].newest > log.seq
                if reply not in (expected, expected[0]) and not has_more:
                    damaged.add(user)
        return damaged

    async def _drop_damaged_states(self) -> int:
        """Remove states that are damaged, or remain after an erasure or a loss; return the number of users.

        They are folded again on the next read. Only properties visible without the model are checked: type, beginning
        and size; `lisarec rebuild` writes all states anew.
        """
        users: set[str] = set()
        sizes: defaultdict[str, Counter[int]] = defaultdict(Counter)  # by tag
        async for states in self._session.partition_keys(ALL_STATES):
            commands = [
                Command.of("GET", key)
                for state in states  # read the head last, so that a state is never ahead of it
                for key in (state, user_of(state).head)
            ]
            replies = iter(await self._session.servers.execute_all(commands))
            for state, value, head in zip(states, replies, replies, strict=True):
                tag = tag_of_state(state)
                size = None if head is None else _state_size(value, tag, head)
                if size is not None:
                    sizes[tag][size] += 1
                if size is None or size != sizes[tag].most_common(1)[0][0]:
                    await self._session.call("UNLINK", state)
                    users |= set() if head is None else {user_of(state).head}
        return len(users)


def _is_of_another_type(reply: Exception) -> bool:
    return isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply)


def _state_size(value: Any, tag: str, head: bytes) -> int | None:
    """Return the size of the state in a value if it may be the user's state of the generation."""
    if not isinstance(value, bytes) or not value[:SEQ_DIGITS].isdigit():
        return None
    state = value[SEQ_DIGITS:]
    is_own = is_of_layout(state) and state[TAG_BYTES].hex() == tag
    is_reached = int(value[:SEQ_DIGITS]) <= Head.of(head).newest
    return state_size(state) if is_own and is_whole(state) and is_reached else None

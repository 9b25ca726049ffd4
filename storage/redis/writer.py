"""Appends events in Redis in rounds, which read the users' states, fold new events, and commit by partition."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, compress
from typing import Any

from redis.exceptions import TryAgainError

from storage.archive.async_reader import AsyncArchiveReader
from storage.archive.reader import ArchiveSnapshot
from storage.errors import StorageBusy, StorageError
from storage.group_commit import MAX_WAITING, GroupCommitByNode
from storage.records import DUPLICATE, AppendResult
from storage.redis.connections.client import PAUSE_S
from storage.redis.corrections.undo_and_merge import RedisCorrections
from storage.redis.layout.keys import User
from storage.redis.layout.stream_entries import Entry
from storage.redis.log.lost_users import USER_IS_LOST, LostUsers
from storage.redis.requests import Commit, Part, Request, UserFold, commits_of, fold_new_entries
from storage.redis.scripts.events import COMMIT, commit_arguments
from storage.redis.session.data_loss_check import ServerTrust
from storage.redis.session.redis_session import RedisSession
from storage.redis.states import RedisStates
from storage.state.event import Event, Undo
from storage.state.generation import Generation

MAX_CALLS_OF_NODE = 64  # at a time, per node of a cluster, so that a hanging node does not block requests to others
MAX_ROUND = 128  # events; Redis is busy with them for about 5 ms, and then with the sync
MAX_ROUNDS = 3  # of a node at a time, so that Redis commits one while this process prepares the next
MANY_COMMITS = 16  # of a round, whose steps each take a large part of a millisecond: other requests run in between


class EventWriter:
    """Appends events, and keeps the states of the generations that this process serves up to date.

    serving  these generations
    """

    def __init__(
        self,
        session: RedisSession,
        states: RedisStates,
        corrections: RedisCorrections,
        archive: AsyncArchiveReader,
        lost_users: LostUsers,
        *,
        ttl_s: int,
    ) -> None:
        self.serving: tuple[Generation, ...] = ()
        self._session = session
        self._servers = session.servers
        self._waits_for_replicas = session.servers.acks.are_required
        self._states = states
        self._corrections = corrections
        self._archive = archive
        self._lost_users = lost_users
        self._ttl_s = ttl_s
        self._writes: GroupCommitByNode[Part] = GroupCommitByNode(
            self._write_round, session.servers.slots.node_of, max_size=MAX_ROUND, max_groups=MAX_ROUNDS
        )
        self._calls = Counter[str]()  # calls of `append`, by node
        self._awaiting_archive: set[Part] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # tasks that requeue parts

    @property
    def waiting(self) -> int:
        """The number of queued events."""
        return self._writes.waiting_size + sum(part.size for part in self._awaiting_archive)

    def serve(self, generations: Sequence[Generation]) -> None:
        """Keep the states of these generations up to date from now on, instead of the previous ones."""
        self.serving = tuple(generations)

    async def append(self, tenant: str, events: Sequence[Event | Undo]) -> list[AppendResult]:
        """Append the events; return a result for each, in order."""
        if not self.serving:
            raise ValueError("a store that takes events needs at least one generation")
        if sum(part.size for part in self._awaiting_archive) > MAX_WAITING:
            raise StorageBusy("too many operations are queued for the archive; try again later")
        request = Request(len(events))
        parts = await request.split(self._session.keys, tenant, events)
        with self._counted(parts) if self._servers.slots.is_cluster else nullcontext():
            self._writes.put(parts)
            return await request.answer

    @contextmanager
    def _counted(self, parts: Sequence[Part]) -> Iterator[None]:
        """Count a call on each node of the cluster that it needs; raise StorageBusy if one has too many."""
        nodes = {self._servers.slots.node_of(part.partition) or "" for part in parts}
        if any(self._calls[node] >= MAX_CALLS_OF_NODE for node in nodes):
            raise StorageBusy("too many requests are queued for one node of the cluster; try again later")
        self._calls.update(nodes)
        try:
            yield
        finally:
            self._calls.subtract(nodes)

    async def close(self) -> None:
        """Complete and answer all accepted calls."""
        await self._writes.close()
        while self._tasks:  # calls that wait for the archive were accepted too
            await asyncio.wait(self._tasks)
            await self._writes.close()

    # ---- a round

    async def _write_round(self, parts: list[Part]) -> list[Part]:
        """Commit each partition in one step; return the parts whose commits other stores have overtaken."""
        serving = self.serving
        await self._session.prepare_writes(serving)
        now_s = asyncio.get_running_loop().time()
        waiting = [part for part in parts if part.is_waiting(now_s)]
        parts = await trusted_parts(self._session.trust, waiting)
        folds = await self._read_folds(parts, serving)
        unreadable = {user: fold.failure for user, fold in folds.items() if fold.failure is not None}
        parts = [one for part in parts for one in part.without(unreadable)]
        merged_users = {user for user, fold in folds.items() if fold.is_merged}
        merged = [part for part in parts if part.has_any_of(merged_users)]
        if merged:
            self._append_as_others(merged)
            parts = [part for part in parts if part not in merged]
        parts = self._ask_about_unknown_users(parts, folds)
        commits: list[Commit] = []
        undecided: list[Part] = []
        for commit in commits_of(parts, folds):
            try:
                await self._fold_stale_states(commit.folds.values())
                to_look_up = commit.decide()
            except Exception as exc:  # a failure in one partition does not affect the others
                commit.fail(exc)
                continue
            if to_look_up:
                self._writes.requeue([part for part in commit.parts if part not in to_look_up])
                undecided += to_look_up
            else:
                commits.append(commit)
        if undecided:
            self._await_archive(undecided, look_up_in_archive(self._session, self._archive, undecided))
        await _let_others_run(commits)
        fold_new_entries(serving, commits)
        await _let_others_run(commits)
        replies = await trusted_replies(self._session.trust, commits, await self._commit(commits))
        return self._settle(commits, replies)

    async def _read_folds(self, parts: Sequence[Part], serving: Sequence[Generation]) -> dict[User, UserFold]:
        """Read the parts' users."""
        users = dict.fromkeys(user for part in parts for user, _ in part.entries)
        folds = {user: UserFold(user, serving, user.head, user.id_index, user.states(serving)) for user in users}
        values = await self._servers.read([[fold.head_key, *fold.state_keys] for fold in folds.values()])
        for fold, found in zip(folds.values(), values, strict=True):
            fold.load(found)
        return folds

    async def _fold_stale_states(self, folds: Iterable[UserFold]) -> None:
        """Update the users' states; those far behind are folded in the background for later readers."""
        for fold in folds:
            for generation, stored in fold.stale:
                value = await self._states.fold_in_round(fold.user, generation, fold.head, stored)
                if value is not None:
                    fold.states[generation.tag] = value

    async def _commit(self, commits: Sequence[Commit]) -> list[Any]:
        """Send the changes; return for each commit the replies to its changes, or its error."""
        changes = {commit.partition: commit.changes() for commit in commits}
        if not self._waits_for_replicas:  # otherwise also empty ones, because replicas may lack earlier entries
            changes = {partition: of_users for partition, of_users in changes.items() if of_users}
        # A single server commits everything in one call; in a cluster each partition may be on another node.
        is_cluster = self._servers.slots.is_cluster
        calls = [{one: changes[one]} for one in changes] if is_cluster else [changes] if changes else []
        commands = [COMMIT.command(*commit_arguments(call, self._ttl_s)) for call in calls]
        replies = await self._servers.send(commands, wait_for_replicas=True)
        await self._session.reload_lost_scripts(replies)
        by_partition: dict[str, list[Any] | Exception] = {}
        for call, reply in zip(calls, replies, strict=True):
            of_changes = iter(reply if isinstance(reply, list) else ())
            for partition, of_users in call.items():
                by_partition[partition] = (
                    reply if isinstance(reply, Exception) else [next(of_changes) for _ in of_users]
                )
        return [by_partition.get(commit.partition, []) for commit in commits]

    def _settle(self, commits: Sequence[Commit], replies: Sequence[Any]) -> list[Part]:
        retries: list[Part] = []
        moving: list[Part] = []
        for commit, reply in zip(commits, replies, strict=True):
            (moving if isinstance(reply, TryAgainError) else retries).extend(commit.settle(reply))
        if moving:
            self._requeue_after(moving, asyncio.sleep(PAUSE_S))
        return retries

    # ---- parts that leave the round temporarily

    def _append_as_others(self, parts: Sequence[Part]) -> None:
        """Append events of merged users to the logs of their merge targets; the next reader folds them."""

        async def append(part: Part) -> None:
            results = [DUPLICATE] * part.size
            try:
                for user, places in part.places_by_user().items():
                    records = [part.records[place] for place in places]
                    is_new = await self._corrections.append(user, records)
                    for place, record in compress(zip(places, records, strict=True), is_new):
                        results[place] = AppendResult.unfolded(self.serving[0], record)
            except Exception as exc:
                part.fail(exc)
            else:
                part.request.settle(part, results)

        for part in parts:
            self._start(append(part))

    def _ask_about_unknown_users(self, parts: list[Part], folds: Mapping[User, UserFold]) -> list[Part]:
        """Let the archive determine which users without a head are new, and requeue their parts; return the others.

        A user whose keys are lost would start a second log with numbers that the archive already has.
        """
        if not self._lost_users.is_archive_available:
            return parts
        unknown = {part: users for part in parts if (users := part.unknown_users(folds))}

        async def ask() -> None:
            lost = await self._lost_users.among(set(chain.from_iterable(unknown.values())))
            for part, users in unknown.items():
                part.asked_about_users = True
                part.without(dict.fromkeys(lost.intersection(users), StorageError(USER_IS_LOST, "damaged")))

        if unknown:
            self._await_archive(list(unknown), ask())
        return [part for part in parts if part not in unknown]

    def _await_archive(self, parts: Sequence[Part], work: Coroutine[Any, Any, None]) -> None:
        """Requeue the parts when the archive has answered."""
        self._awaiting_archive.update(parts)

        async def answered() -> None:
            try:
                await work
            finally:
                self._awaiting_archive.difference_update(parts)

        self._requeue_after(parts, answered())

    def _requeue_after(self, parts: Sequence[Part], work: Coroutine[Any, Any, None]) -> None:
        """Requeue the parts when the work is done, or fail them if it fails."""

        async def requeue() -> None:
            try:
                await work
            except Exception as exc:
                for part in parts:
                    part.fail(exc)
            else:
                now_s = asyncio.get_running_loop().time()
                self._writes.requeue([part for part in parts if part.entries and not part.expire(now_s)])

        self._start(requeue())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start work that `close` waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _let_others_run(commits: Sequence[Commit]) -> None:
    if len(commits) > MANY_COMMITS:
        await asyncio.sleep(0)


async def look_up_in_archive(session: RedisSession, archive: AsyncArchiveReader, parts: Sequence[Part]) -> None:
    """Look up all of the parts' events in the archive, including those that need no decision now."""
    archive_id = await session.archive_id()
    entries: defaultdict[str, list[tuple[User, Entry]]] = defaultdict(list)
    for part in parts:
        for user, entry in part.entries:
            entries[user.tenant].append((user, entry))

    def look_up(snapshot: ArchiveSnapshot) -> None:
        for part in parts:
            snapshot.require(archive_id, part.number, part.must_search_through)
        found: set[tuple[User, int]] = set()
        for tenant, own in entries.items():
            held = snapshot.holds(tenant, [(user.user_id, entry.event.entry_id) for user, entry in own])
            found.update((user, entry.id_hash) for user, entry in compress(own, held))
        for part in parts:
            part.searched_through = snapshot.manifest.seq(part.number)
            part.archived = found.intersection((user, entry.id_hash) for user, entry in part.entries)

    await archive.read(look_up)


async def trusted_parts(trust: ServerTrust, parts: Sequence[Part]) -> list[Part]:
    """Return the parts on servers that may be written to; fail the others."""
    refused = await trust.refusals({part.partition for part in parts})
    for part in parts:
        if part.partition in refused:
            part.fail(refused[part.partition])
    return [part for part in parts if part.partition not in refused]


async def trusted_replies(trust: ServerTrust, commits: Sequence[Commit], replies: Sequence[Any]) -> list[Any]:
    """Return the replies to the commits, or the error for those of a server that is no longer trusted."""
    by_partition = {commit.partition: reply for commit, reply in zip(commits, replies, strict=True)}
    refused = await trust.acknowledge({partition: _last_entry(reply) for partition, reply in by_partition.items()})
    return list((by_partition | refused).values())


def _last_entry(reply: Any) -> bytes | None:
    """Return the id of the last entry that a commit has logged, if any."""
    return next((one for one in reversed(reply) if isinstance(one, bytes)), None) if isinstance(reply, list) else None

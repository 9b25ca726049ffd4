"""The Redis store: any number of replicas on one server, Redis 6.2 or later or Valkey.

Events are folded here, in numpy, and committed by compare-and-set: a script changes the log, index and states of a
partition's users in one step, provided that no other process has appended to them since they were read. A round trip
and a sync cost far more than an event, so all requests that arrive during one round are read and committed together in
the next.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from redis.exceptions import AuthenticationError
from typing_extensions import override

from storage.archive.async_reader import TIMEOUT_S as ARCHIVE_TIMEOUT_S
from storage.archive.async_reader import AsyncArchiveReader
from storage.errors import StorageError, StorageUnavailable
from storage.folders.folder import Folder
from storage.items.trends import Visit
from storage.protocol import UserStore
from storage.records import (
    DAY_S,
    MAIN_TENANT,
    MAX_SEEN_ENTRIES,
    AppendResult,
    FoldedState,
    ItemChanges,
    ItemCodes,
    ItemEntry,
    LogEntry,
    LogPage,
    Tally,
    TenantPointers,
)
from storage.redis.connections.client import RedisServers
from storage.redis.connections.nodes import ReplicaAcks, is_withheld
from storage.redis.corrections.erasure import RedisErasure
from storage.redis.corrections.repair import LogRepair
from storage.redis.corrections.undo_and_merge import RedisCorrections
from storage.redis.generations import RedisGenerations
from storage.redis.items.audit import RedisAudit
from storage.redis.items.item_writer import ItemWriter
from storage.redis.items.order_counts import RedisOrders
from storage.redis.items.properties import RedisProperties
from storage.redis.items.redis_items import RedisItems
from storage.redis.items.scenarios import RedisScenarios
from storage.redis.items.vectors import RedisVectors
from storage.redis.layout.keys import Keyspace, User
from storage.redis.log.lost_users import LostUsers
from storage.redis.log.user_log import UserLog
from storage.redis.session.redis_session import RedisSession
from storage.redis.states import RedisStates
from storage.redis.writer import EventWriter
from storage.state.compiled_fold import compile_fold
from storage.state.corrections import EVERY_EVENT, EventFilter, SeenItems
from storage.state.event import Event, Undo
from storage.state.generation import Generation

PARTITIONS = 256
NO_ACKS = ReplicaAcks()

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """The store's timeouts, and its conditions for an acknowledgement.

    state_ttl_days  states expire this many days after the last event; None for never
    acks            the replicas that must have an acknowledged write
    must_exist      whether a server that cannot be reached, or that no service has used, is an error
    """

    connect_timeout_s: float = 1.0
    socket_timeout_s: float = 2.0
    archive_timeout_s: float = ARCHIVE_TIMEOUT_S
    state_ttl_days: int | None = None
    acks: ReplicaAcks = NO_ACKS
    must_exist: bool = False


DEFAULT_OPTIONS = RedisOptions()


class RedisStore(UserStore):
    """A store on Redis. Create it with `open`; it belongs to the event loop in which it was opened."""

    def __init__(
        self,
        session: RedisSession,
        archive: AsyncArchiveReader,
        generations: Sequence[Generation],
        tenant: str,
        options: RedisOptions,
    ) -> None:
        ttl_s = (options.state_ttl_days or 0) * DAY_S
        self._session, self._archive, self._log = session, archive, UserLog(session, archive)
        self._lost_users = lost_users = LostUsers(session, archive)
        self._corrections = RedisCorrections(session, self._log, archive, lost_users)
        self._repair = LogRepair(session, self._log, self._corrections)
        self._erasure, self._item_writer = RedisErasure(session, self._corrections), ItemWriter(session)
        self._states = RedisStates(session, self._log, self._corrections, ttl_s=ttl_s)
        self._writer = EventWriter(session, self._states, self._corrections, archive, lost_users, ttl_s=ttl_s)
        self._writer.serve(generations)
        self.orders, self.vectors = RedisOrders(session, self._log, self._corrections), RedisVectors(session)
        self._items, self.properties = RedisItems(session, archive), RedisProperties(session, self._corrections)
        self.scenarios, self.audit = RedisScenarios(session), RedisAudit(session)
        self.generations = RedisGenerations(session, tenant)

    @classmethod
    async def open(
        cls,
        url: str,
        generations: Sequence[Generation],
        *,
        tenant: str = MAIN_TENANT,
        prefix: str = "lisarec",
        partitions: int = PARTITIONS,
        archive_dir: Path | Folder | None = None,
        options: RedisOptions = DEFAULT_OPTIONS,
    ) -> "RedisStore":
        """Open the store at a redis://, rediss:// (TLS) or unix:// URL that contains the user, password and database.

        The URL of a cluster names one node or several: redis://HOST:PORT,HOST:PORT. The archive directory contains the
        older part of the log once an archiver has moved it there. Without a generation the store accepts no events. An
        unreachable server is no error, unless it must exist: until it can be reached, calls raise StorageUnavailable.

        raises  ValueError          when the URL or prefix cannot be used
                StorageUnavailable  when the server rejects the user, the password or a command, or must exist
                StorageError        when the server is too old, or its data have another layout
        """
        connect_s, socket_s = options.connect_timeout_s, options.socket_timeout_s
        servers = RedisServers(url, connect_timeout_s=connect_s, socket_timeout_s=socket_s, acks=options.acks)
        if generations:
            await asyncio.to_thread(compile_fold, generations[0])
        archive = AsyncArchiveReader(archive_dir, options.archive_timeout_s)
        keys, lacks_archive = Keyspace(prefix, partitions), bool(generations) and archive_dir is None
        session = RedisSession(servers, keys, archive, lacks_archive=lacks_archive, must_exist=options.must_exist)
        store = cls(session, archive, generations, tenant, options)
        try:
            await session.check()
            with suppress(StorageUnavailable):  # a read-only server; a later write registers them again
                await session.register(generations)
        except StorageError as exc:
            refused = isinstance(exc.__cause__, AuthenticationError) or is_withheld(exc.__cause__)
            if options.must_exist or refused or not isinstance(exc, StorageUnavailable):
                await store.close()
                raise
            logger.warning("the store is not available yet: %s", exc)
        return store

    @property
    @override
    def waiting(self) -> int:
        return self._states.waiting + self._writer.waiting

    @override
    def node_of(self, tenant: str, user_id: str) -> str:
        return self._states.node_of(tenant, user_id)

    @override
    def serve_generations(self, generations: Sequence[Generation]) -> None:
        self._writer.serve(generations)

    # ---- events and states

    @override
    async def append(self, tenant: str, events: Sequence[Event | Undo]) -> list[AppendResult]:
        return await self._writer.append(tenant, events) if events else []

    @override
    async def states(
        self, tenant: str, user_ids: Sequence[str], generation: Generation, *, max_missing: int | None = None
    ) -> list[bytes | None]:
        return await self._states.read(tenant, user_ids, generation, max_missing) if user_ids else []

    @override
    async def save_states(self, generation: Generation, states: Sequence[FoldedState]) -> None:
        await self._states.save(generation, states)

    @override
    async def drop_idle_states(self) -> int:
        return 0  # Redis expires them

    @override
    def log(self) -> AsyncIterator[LogPage]:
        return self._log.pages()

    @override
    async def events(self, tenant: str, user_id: str, *, after: int = 0, limit: int = 100) -> list[LogEntry]:
        await self._session.require_open()
        chain = await self._corrections.merge_chain(self._session.keys.user(tenant, user_id))
        entries = [entry async for entry in self._log.entries(chain[-1], after=after, limit=limit)]
        await self._corrections.require_whole(*chain)
        return entries

    @override
    async def users_without_log(self, tenant: str, user_ids: Collection[str]) -> set[str]:
        return await self._states.users_without_log(tenant, user_ids)

    @override
    async def log_lengths(self, tenant: str, user_ids: Sequence[str], *, limit: int) -> list[int]:
        await self._session.require_open()
        users = [self._session.keys.user(tenant, user_id) for user_id in user_ids]
        return await asyncio.gather(*(self._corrections.log_length(user, limit) for user in users))

    @override
    async def archived_files(self, tenant: str, user_id: str, *, after: int = 0) -> int:
        return await self._log.archived_files(await self._resolve(tenant, user_id), after)

    @override
    async def erasure_length(self, tenant: str, user_id: str, *, limit: int) -> int:
        return await self._erasure.length(self._session.keys.user(tenant, user_id), limit)

    @override
    async def seen_items(
        self, tenant: str, user_id: str, events: EventFilter = EVERY_EVENT, *, limit: int = MAX_SEEN_ENTRIES
    ) -> SeenItems:
        return await self._log.seen_items(await self._resolve(tenant, user_id), events, limit)

    @override
    async def undo(self, tenant: str, user_id: str, event_id: str) -> bool:
        user = await self._resolve(tenant, user_id)
        is_new = await self._corrections.undo(self._session.keys.user(tenant, user_id), event_id)
        self._states.catch_up(user, self._writer.serving)
        return is_new

    @override
    async def merge(self, tenant: str, user_id: str, visitor: str) -> bool:
        user = await self._resolve(tenant, user_id)
        is_new = await self._corrections.merge(user, self._session.keys.user(tenant, visitor))
        self._states.catch_up(user, self._writer.serving)
        return is_new

    @override
    async def erase(self, tenant: str, user_id: str) -> None:
        await self._erasure.erase(self._session.keys.user(tenant, user_id))

    @override
    async def erase_tenant(self, tenant: str) -> None:
        await self._erasure.erase_tenant(tenant)

    async def _resolve(self, tenant: str, user_id: str) -> User:
        """Return the user, or the user that they were merged into."""
        await self._session.require_open()
        return await self._corrections.resolve(self._session.keys.user(tenant, user_id))

    # ---- items and statistics

    @override
    async def put_items(self, tenant: str, entries: Sequence[ItemEntry]) -> None:
        await self._item_writer.put(tenant, entries)

    @override
    async def put_item_codes(self, tenant: str, codes: Sequence[ItemCodes]) -> None:
        await self._items.put_codes(tenant, codes)

    @override
    async def item_changes(self, tenant: str, after: int, limit: int) -> ItemChanges:
        return await self._items.changes(tenant, after, limit)

    @override
    async def tenants(self) -> list[str]:
        return await self._items.tenants()

    @override
    async def item_counts(self, tenant: str, types: Collection[str]) -> dict[str, int]:
        return await self._items.counts(tenant, types)

    @override
    async def add_visits(self, tenant: str, visits: Sequence[Visit]) -> None:
        await self._items.add_visits(tenant, visits)

    @override
    async def trends(self, tenant: str, limit: int) -> dict[str, float]:
        return await self._items.trends(tenant, limit)

    @override
    async def add_tallies(self, tenant: str, counts: Mapping[Tally, float]) -> None:
        await self._items.add_tallies(tenant, counts)

    @override
    async def tallies(self, tenant: str) -> dict[Tally, float]:
        return await self._items.tallies(tenant)

    # ---- the store itself

    @override
    async def pointers(self) -> TenantPointers:
        pointers = await self.generations.pointers()
        self._session.trust.watch()
        return pointers

    @override
    async def repair(self, *, accept_loss: bool = False) -> int:
        return await (self._repair.accept_loss() if accept_loss else self._repair.run())

    @override
    async def require_whole(self) -> None:
        await self._session.require_whole()

    @override
    async def accept_loss(self) -> None:
        await self._session.require_open()
        await self._session.trust.accept_loss()

    @override
    async def secret(self) -> bytes:
        return await self._session.secret()

    @property
    @override
    def failure(self) -> StorageUnavailable | None:
        return self._session.trust.failure

    @override
    async def ping(self) -> None:
        await self._session.ping()

    @override
    async def close(self) -> None:
        self._session.refuse_calls()
        await self._states.close()
        await self._writer.close()
        await self._lost_users.close()
        await self._session.close()
        self._archive.close()

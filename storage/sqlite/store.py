"""The embedded store: one SQLite file, shared by any number of processes.

Events are logged, folded and acknowledged in one transaction, synced to disk.
"""

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from typing_extensions import override

from storage.archive import item_counts
from storage.archive.async_reader import read_manifest
from storage.errors import MergeRefused, StorageError, StorageUnavailable, UnknownEvent
from storage.folders.folder import Folder
from storage.items.trends import Visit
from storage.protocol import UserStore
from storage.records import (
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
from storage.sqlite import corrections
from storage.sqlite import states as sqlite_states
from storage.sqlite.append import Append
from storage.sqlite.catch_up import CatchUpThread
from storage.sqlite.connections.writer_thread import failure_cause
from storage.sqlite.database import FILE_NAME, Database
from storage.sqlite.generations import SQLiteGenerations, active
from storage.sqlite.items import tenant_values as items
from storage.sqlite.items import trends
from storage.sqlite.items.audit import SQLiteAudit
from storage.sqlite.items.order_counts import SQLiteOrders
from storage.sqlite.items.properties import SQLiteProperties
from storage.sqlite.items.scenarios import SQLiteScenarios
from storage.sqlite.items.vectors import SQLiteVectors
from storage.sqlite.log import (
    holds_archived,
    log_entries,
    log_length,
    log_pages,
    newest_entries,
    resolve_alias,
    users_without_log,
)
from storage.sqlite.states import complete_states, current_states
from storage.state.compiled_fold import compile_fold
from storage.state.corrections import EVERY_EVENT, EventFilter, SeenItems
from storage.state.event import Event, Undo
from storage.state.generation import Generation

SAVED_AT_ONCE = 256  # states of a rebuild in one transaction, about 1 MB
EMPTY_LOG_WITHIN_S = 1.0
ERASE_PAUSE_S = 0.005

ARCHIVE_TIMEOUT_S = 1.0
ARCHIVE_HAS_MORE = (
    "the archive '{archive}' has events that the store lacks, because its file is outdated or another one. Put the "
    "right file back, or accept the loss with 'lisarec repair --accept-loss' and use a new archive directory"
)

logger = logging.getLogger(__name__)


class SQLiteStore(UserStore):
    """A UserStore in one directory. Make it with `open`; it may be used from any event loop."""

    def __init__(
        self,
        database: Database,
        generations: Sequence[Generation],
        state_ttl_days: int | None,
        tenant: str,
        archive_dir: Path | Folder | None,
    ) -> None:
        self._database, self._archive_dir = database, archive_dir
        self._catch_up, self.generations = CatchUpThread(database), SQLiteGenerations(database, tenant)
        self.properties, self.scenarios = SQLiteProperties(database), SQLiteScenarios(database)
        self.orders, self.vectors, self.audit = SQLiteOrders(database), SQLiteVectors(database), SQLiteAudit(database)
        self._served = tuple(generations)
        self._tenant, self._state_ttl_days = tenant, state_ttl_days

    @classmethod
    async def open(
        cls,
        directory: Path,
        generations: Sequence[Generation],
        *,
        tenant: str = MAIN_TENANT,
        state_ttl_days: int | None = None,
        archive_dir: Path | Folder | None = None,
    ) -> "SQLiteStore":
        """Open or create the store in the directory. Without a generation it accepts no events.

        archive_dir  the archive with copies of the log, for `require_whole`

        raises  StorageUnavailable  when the directory or file cannot be used
                StorageError        when a newer or an earlier lisarec has written the file
        """
        path = Path(directory) / FILE_NAME

        def open_database() -> Database:
            try:
                if generations:
                    compile_fold(generations[0])
                return Database(path)
            except (OSError, sqlite3.Error) as exc:
                raise StorageUnavailable(f"cannot open '{path}': {exc}", failure_cause(exc)) from exc

        database = await asyncio.to_thread(open_database)
        with suppress(StorageError):
            await _finish_erasures(database, tenant)  # those that a killed process has begun
        return cls(database, generations, state_ttl_days, tenant, archive_dir)

    @property
    @override
    def waiting(self) -> int:
        return self._database.waiting

    @override
    def node_of(self, tenant: str, user_id: str) -> str:
        return ""

    @override
    def serve_generations(self, generations: Sequence[Generation]) -> None:
        self._served = tuple(generations)

    @override
    async def append(self, tenant: str, events: Sequence[Event | Undo]) -> list[AppendResult]:
        if not events:
            return []
        if not self._served:
            raise ValueError("a store that takes events needs at least one generation")
        results, behind = await self._database.write(Append(self._served, tenant, events), size=len(events))
        for user_id, generation in behind:
            self._catch_up.start(tenant, user_id, generation)
        return results

    @override
    async def states(
        self, tenant: str, user_ids: Sequence[str], generation: Generation, *, max_missing: int | None = None
    ) -> list[bytes | None]:
        complete = partial(complete_states, generation=generation, tenant=tenant, user_ids=user_ids)
        if (values := self._database.read_now(complete)) is not None:
            return values  # almost always
        states = await self._database.read(lambda db: current_states(db, generation, tenant, user_ids, max_missing))
        caught_up = []
        for state in states.values():
            if state.value is None:
                self._catch_up.start(tenant, state.stored.user_id, generation)
            elif state.stored.through_seq < state.stored.newest_seq:
                caught_up.append(FoldedState(tenant, state.stored.user_id, state.stored.newest_seq, state.value))
        with suppress(StorageError):  # a state that cannot be saved, as on a full disk, can still be served
            await _save(self._database, sqlite_states.save, generation, caught_up)
        return [states[user_id].value if states[user_id].stored.newest_seq else None for user_id in user_ids]

    @override
    def log(self) -> AsyncIterator[LogPage]:
        return log_pages(self._database)

    @override
    async def save_states(self, generation: Generation, states: Sequence[FoldedState]) -> None:
        await _save(self._database, sqlite_states.save_rebuilt, generation, states)

    @override
    async def drop_idle_states(self) -> int:
        if self._state_ttl_days is None:
            return 0
        before_day, total = sqlite_states.today() - self._state_ttl_days, 0
        while dropped := await self._database.write(lambda db: sqlite_states.drop_idle(db, before_day)):
            total += dropped
        return total

    @override
    async def events(self, tenant: str, user_id: str, *, after: int = 0, limit: int = 100) -> list[LogEntry]:
        return await self._database.read_page(
            lambda db: list(log_entries(db, tenant, resolve_alias(db, tenant, user_id), after, limit))
        )

    @override
    async def users_without_log(self, tenant: str, user_ids: Collection[str]) -> set[str]:
        return await self._database.read(lambda db: users_without_log(db, tenant, user_ids))

    @override
    async def log_lengths(self, tenant: str, user_ids: Sequence[str], *, limit: int) -> list[int]:
        query = partial(log_length, tenant=tenant, limit=limit)
        return [await self._database.read_page(partial(query, user_id=user_id)) for user_id in user_ids]

    @override
    async def erasure_length(self, tenant: str, user_id: str, *, limit: int) -> int:
        return sum(await self.log_lengths(tenant, [user_id], limit=limit))

    @override
    async def seen_items(
        self, tenant: str, user_id: str, events: EventFilter = EVERY_EVENT, *, limit: int = MAX_SEEN_ENTRIES
    ) -> SeenItems:
        return await sqlite_states.read_seen_items(self._database, tenant, user_id, events, limit)

    @override
    async def undo(self, tenant: str, user_id: str, event_id: str) -> bool:
        counted = await self._database.write(lambda db: corrections.undo_event(db, tenant, user_id, event_id))
        if counted is None:
            raise UnknownEvent("the user's log has no event of this id")
        await self._fold_corrected(tenant, user_id)
        return counted

    @override
    async def merge(self, tenant: str, user_id: str, visitor: str) -> bool:
        outcome = await self._database.write(lambda db: corrections.merge(db, tenant, user_id, visitor))
        if isinstance(outcome, MergeRefused):
            raise outcome
        await self._fold_corrected(tenant, user_id)
        return outcome

    async def _fold_corrected(self, tenant: str, user_id: str) -> None:
        """Start folding a corrected log, before the next read needs its states."""
        target = await self._database.read(lambda db: resolve_alias(db, tenant, user_id))
        for generation in self._served:
            self._catch_up.start(tenant, target, generation)

    @override
    async def erase(self, tenant: str, user_id: str) -> None:
        await _erase(self._database, tenant, user_id)

    @override
    async def erase_tenant(self, tenant: str) -> None:
        while await self._database.write(lambda db: corrections.erase_values(db, tenant)):
            await asyncio.sleep(ERASE_PAUSE_S)
        await _empty_log(self._database)

    @override
    async def put_items(self, tenant: str, entries: Sequence[ItemEntry]) -> None:
        await self._database.write(lambda db: items.put_items(db, tenant, entries), size=len(entries))

    @override
    async def put_item_codes(self, tenant: str, codes: Sequence[ItemCodes]) -> None:
        await self._database.write(lambda db: items.put_item_codes(db, tenant, codes), size=len(codes))

    @override
    async def item_changes(self, tenant: str, after: int, limit: int) -> ItemChanges:
        return await self._database.read(lambda db: items.item_changes(db, tenant, after, limit))

    @override
    async def tenants(self) -> list[str]:
        return await self._database.read(items.tenants)

    @override
    async def item_counts(self, tenant: str, types: Collection[str]) -> dict[str, int]:
        newest = partial(newest_entries, tenant=tenant, limit=item_counts.MAX_NEWEST_ENTRIES)
        return await self._database.read_page(lambda db: item_counts.count_items_of_rows(newest(db), types))

    @override
    async def add_visits(self, tenant: str, visits: Sequence[Visit]) -> None:
        await trends.add_visits(self._database, tenant, visits)

    @override
    async def trends(self, tenant: str, limit: int) -> dict[str, float]:
        return await self._database.read(lambda db: trends.highest_trends(db, tenant, limit))

    @override
    async def add_tallies(self, tenant: str, counts: Mapping[Tally, float]) -> None:
        if counts:
            await self._database.write(lambda db: items.add_tallies(db, tenant, counts), size=len(counts))

    @override
    async def tallies(self, tenant: str) -> dict[Tally, float]:
        return await self._database.read(lambda db: items.tallies(db, tenant))

    @override
    async def pointers(self) -> TenantPointers:
        return await self._database.read(
            lambda db: TenantPointers(
                active(db, self._tenant),
                items.items_version(db, self._tenant),
                items.named_value(db, self._tenant, items.EXPERIMENT),
                items.held_properties(db, self._tenant),
            )
        )

    @override
    async def repair(self, *, accept_loss: bool = False) -> int:
        await (self.accept_loss() if accept_loss else self.require_whole())
        return 0  # there is nothing to rebuild

    @override
    async def require_whole(self) -> None:
        await _require_archived(self._database, self._archive_dir)

    @override
    async def accept_loss(self) -> None:
        if (manifest := await read_manifest(self._archive_dir, ARCHIVE_TIMEOUT_S)) is not None:
            accept = partial(items.set_named_value, tenant="", name=items.ACCEPTED_ARCHIVE, value=manifest.archive_id)
            await self._database.write(accept)

    @override
    async def secret(self) -> bytes:
        return await self._database.write(items.secret)

    @property
    @override
    def failure(self) -> StorageUnavailable | None:
        return self._database.failure

    @override
    async def ping(self) -> None:
        await self._database.read(lambda db: db.execute("SELECT seq FROM log LIMIT 1").fetchone())

    @override
    async def close(self) -> None:
        self._database.refuse_calls()
        await asyncio.to_thread(self._catch_up.close)
        await self._database.close()


async def _save(
    database: Database, save: Callable[..., None], generation: Generation, states: Sequence[FoldedState]
) -> None:
    for start in range(0, len(states), SAVED_AT_ONCE):
        page = states[start : start + SAVED_AT_ONCE]
        await database.write(partial(save, generation=generation, states=page), size=len(page))


async def _require_archived(database: Database, archive_dir: Path | Folder | None) -> None:
    manifest = await read_manifest(archive_dir, ARCHIVE_TIMEOUT_S)
    if manifest is None or 0 not in manifest.positions:
        return

    def is_whole(db: sqlite3.Connection) -> bool:
        accepted = items.named_value(db, "", items.ACCEPTED_ARCHIVE)
        return accepted == manifest.archive_id or holds_archived(db, manifest.positions[0])

    if not await database.read_page(is_whole):
        raise StorageError(ARCHIVE_HAS_MORE.format(archive=archive_dir), "wrong_store")


async def _finish_erasures(database: Database, tenant: str) -> None:
    while await database.write(lambda db: corrections.erase_some(db, tenant)):
        await asyncio.sleep(ERASE_PAUSE_S)  # so that others can write, too


async def _erase(database: Database, tenant: str, user_id: str) -> None:
    def begin(db: sqlite3.Connection) -> bool:
        corrections.begin_erasure(db, tenant, user_id)
        return corrections.erase_some(db, tenant)

    if await database.write(begin):
        await _finish_erasures(database, tenant)
    await _empty_log(database)


async def _empty_log(database: Database) -> None:
    if not await database.empty_log(EMPTY_LOG_WITHIN_S):
        logger.info("a copy of the erased data stays in the write-ahead log while another program reads it")

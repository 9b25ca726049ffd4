"""Checks that the servers of a Redis store still have all acknowledged events, and would keep new ones.

A process remembers the newest entry that it knows in the log of each partition, and notes it in PREFIX:meta once a
second. It uses a plain command, so that the note remains if a restarted server does not load the scripts and
transactions of its log, or if another node of the cluster has lost its data. The archive also remembers the newest
entry that it contains. A server that lacks one of these entries has lost others too: it restarted empty or from older
files, or a replica that was behind has taken over. Nothing is written to it until it has these entries again, or until
an operator accepts the loss with `lisarec repair --accept-loss`. The loss is also noted in the store, for processes
that start later. If a server is empty, so that only the archive can detect a loss, the check waits for the archive.

A server is checked before its first write, once a second, and after every new connection to it, even between a write
and its acknowledgement. Recommendations continue meanwhile. A user's log is not shown from a server that lacks data.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from storage.archive.async_reader import AsyncArchiveReader
from storage.errors import FailureCause, StorageError, StorageUnavailable
from storage.redis.connections.client import RedisServers
from storage.redis.connections.nodes import address
from storage.redis.layout.keys import Keyspace
from storage.redis.layout.lost_entries import EVICTED, LOST_FIELD, META, decode_lost, encode_lost
from storage.redis.layout.stream_entries import entry_seq
from storage.redis.session.archived_positions import ArchivedPositions
from storage.redis.session.newest_entries import NewestEntries
from storage.redis.session.replies import has_entry, is_replica, process_of
from storage.redis.session.server_settings import (
    POLICY,
    REQUIRED_SETTINGS,
    Evictions,
    reported_settings,
    unsafe_setting,
)

EXAMINE_EVERY_S = 1.0
NOTE_TIMEOUT_S = 1.0  # when a process ends
UNSAFE = "Redis at {server} could lose events: {what}; until this is fixed, nothing is written"
LOST = (
    "Redis at {server} has lost acknowledged events: {what}. Nothing is written until it has its data again. "
    "If they are gone, 'lisarec repair --accept-loss' restores what the log and the archive have, and accepts the loss"
)

EMPTY = (
    "Redis at {server} is empty, because it is new or has lost its data; the archive, which shows which, is "
    "unreachable. Nothing is written until the archive is reachable"
)

PARTITION = re.compile(r":\{p(\d+)\}")  # in a key

logger = logging.getLogger(__name__)


class _Reason(NamedTuple):
    """The reason why nothing may be written."""

    text: str
    cause: FailureCause


@dataclass(slots=True)
class _Server:
    """The known facts about a server.

    process     its run and replication ids, if it reports them
    evictions   the evictions since it is watched
    reason      why nothing may be written to it; None if writes are allowed
    """

    connected: int = -1
    examine_at_s: float = 0.0
    process: tuple[str, str] | None = None
    evictions: Evictions = field(default_factory=Evictions)
    reason: _Reason | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ServerTrust:
    """The entries that the servers must have, and the check that they do.

    fields  fields of PREFIX:meta that this process has set, and that a server restored from older files may lack
    """

    def __init__(
        self, servers: RedisServers, keys: Keyspace, archive: AsyncArchiveReader, fields: Mapping[str, str]
    ) -> None:
        self._servers = servers
        self._keys = keys
        self._archived = ArchivedPositions(archive)
        self._fields = fields
        self._known: dict[str, _Server] = {}
        self._newest = NewestEntries()
        self._meta: _Meta | None = None
        self._lost: dict[str, str] = {}  # by partition, an entry that a process has missed, as noted in the store
        self._watching: asyncio.Task[None] | None = None

    @property
    def failure(self) -> StorageUnavailable | None:
        """Why all writes are rejected until an operator fixes it; None while at least one server accepts writes."""
        reasons = [self._known[url].reason if url in self._known else None for url in self._servers.slots.primaries()]
        if not reasons or reasons[0] is None or not all(reasons) or reasons[0].cause == "archive":
            return None
        return StorageUnavailable(*reasons[0])

    async def require(self, key: str) -> None:
        """Raise StorageUnavailable unless the key's server may be written to."""
        reason = await self._reason(key)
        if reason is not None:
            raise StorageUnavailable(*reason)

    async def require_whole(self, key: str) -> None:
        """Raise StorageUnavailable if the key's server lacks data, so that a read from it may be incomplete."""
        reason = await self._reason(key)
        if reason is not None and reason.cause == "wrong_store":
            raise StorageUnavailable(*reason)

    async def _reason(self, key: str) -> _Reason | None:
        url = self._servers.slots.node_of(key)
        return None if url is None else (await self._examined(url)).reason  # a call to no node reports that itself

    async def refusals(self, keys: Iterable[str]) -> dict[str, StorageError]:
        """Return the keys whose server may not be written to, and why."""
        return {key: failure for own, failure in await self._examined_by_node(keys) if failure for key in own}

    async def acknowledge(self, entry_ids: Mapping[str, bytes | None]) -> dict[str, StorageError]:
        """Return the keys whose server's writes may not be acknowledged, and why.

        entry_ids  by key, the id of the last entry logged in the key's partition
        """
        logged = {
            key: (number, entry_id.decode())
            for key, entry_id in entry_ids.items()
            if entry_id is not None and (number := _partition_of(key)) is not None
        }
        for key, entry in logged.items():
            if self._newest.is_ahead_of(*entry) and (url := self._servers.slots.node_of(key)) in self._known:
                # another call was faster, or the log continued after losing entries
                self._known[url].process, self._known[url].examine_at_s = None, 0.0
        refused: dict[str, StorageError] = {}
        for keys, failure in await self._examined_by_node(entry_ids):
            if failure is not None:
                refused.update(dict.fromkeys(keys, failure))
                continue
            for key in logged.keys() & keys:
                self._newest.remember(*logged[key])
        return refused

    async def _examined_by_node(self, keys: Iterable[str]) -> list[tuple[list[str], StorageError | None]]:
        """Return the keys of each node, and why it may not be written to, or None."""
        found: list[tuple[list[str], StorageError | None]] = []
        for url, own in self._servers.slots.keys_by_node(keys).items():
            try:
                reason = None if url is None else (await self._examined(url)).reason
                found.append((own, None if reason is None else StorageUnavailable(*reason)))
            except StorageError as exc:
                found.append((own, exc))
        return found

    async def accept_loss(self) -> None:
        """Accept the loss: all processes treat the current data as everything that was ever acknowledged."""
        meta, now_ms = self._keys.meta, time.time_ns() // 1_000_000
        accepted = int(await self._servers.call("HGET", meta, "accepted") or 0)
        await self._servers.call("HSET", meta, "accepted", max(now_ms, accepted + 1))
        await self._servers.call("HDEL", meta, LOST_FIELD)
        await self._read_meta()
        for server in self._known.values():
            server.examine_at_s = 0.0

    def watch(self) -> None:
        """Check all servers in the background, to detect losses early."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._examine_all())

    async def close(self) -> None:
        """Stop the work in the background, and note the newest entries that this process knows."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        with suppress(TimeoutError):
            async with asyncio.timeout(NOTE_TIMEOUT_S):
                await self._note_newest()

    async def _examine_all(self) -> None:
        urls = self._servers.slots.primaries()
        for failure in await asyncio.gather(*map(self._examined, urls), return_exceptions=True):
            if isinstance(failure, Exception) and not isinstance(failure, StorageError):
                logger.error("a server could not be examined", exc_info=failure)
        await self._note_newest()
        if await self._archived.answers_again():
            for server in self._known.values():
                server.process = None

    async def _note_newest(self) -> None:
        """Note the newest entries for processes that start later; failures are retried after a second."""
        url = self._servers.slots.node_of(self._keys.meta)
        if self._meta is None or url not in self._known or self._known[url].reason is not None:
            return
        if fields := self._newest.to_note(self._meta.accepted_ms):
            with suppress(StorageError):
                await self._servers.call("HSET", self._keys.meta, *chain.from_iterable(fields.items()))

    # ---- one server

    async def _examined(self, url: str) -> _Server:
        server = self._known.get(url) or self._known.setdefault(url, _Server())
        if self._is_due(url, server):
            async with server.lock:
                if self._is_due(url, server):
                    await self._examine(url, server)
        return server

    def _is_due(self, url: str, server: _Server) -> bool:
        is_late = asyncio.get_running_loop().time() >= server.examine_at_s
        return is_late or server.connected != self._servers.connected(url)

    async def _examine(self, url: str, server: _Server) -> None:
        """Check whether the server may be written to; raise StorageUnavailable if it does not answer."""
        connected = self._servers.connected(url)
        asked = (("CONFIG GET", name) for name in REQUIRED_SETTINGS)
        info, *configs = await self._servers.call_node(url, ("INFO",), *asked)
        process = process_of(info, connected)
        if is_replica(info):  # it takes no writes, whatever its data; its name may lead to the new primary already
            await self._servers.reconnect(url)
        else:
            server.evictions.count(info, reported_settings(info, *configs).get(POLICY, ""))
            loss = await self._loss(url, server, process)
            unsafe = unsafe_setting(info, *configs)
            reason = loss if unsafe is None else _Reason(UNSAFE.format(server=address(url), what=unsafe), "unsafe")
            if reason != server.reason:
                logger.warning("%s", f"Redis at {address(url)} takes writes again" if reason is None else reason.text)
            server.reason, server.process = reason, process
        server.connected = connected
        server.examine_at_s = asyncio.get_running_loop().time() + EXAMINE_EVERY_S

    async def _loss(self, url: str, server: _Server, process: tuple[str, str]) -> _Reason | None:
        """Return what the server has lost. Entries are only checked on a server that may have changed."""
        of_meta = await self._read_meta() if self._meta is None or self._is_meta_on(url) else None
        if self._meta and server.evictions.lost and EVICTED not in self._lost:
            await self._note((), {EVICTED: server.evictions.lost}, self._meta.accepted_ms)
        what = (of_meta if self._is_meta_on(url) else None) or self._lost.get(EVICTED) or server.evictions.lost
        if what is not None or process != server.process or server.reason is not None:
            what = await self._missing_data(url) or what
            if what is None and self._may_have_lost_all(url):
                return _Reason(EMPTY.format(server=address(url)), "archive")
        return None if what is None else _Reason(LOST.format(server=address(url), what=what), "wrong_store")

    async def _missing_data(self, url: str) -> str | None:
        """Return a description of missing data; if nothing is missing, remember the newest entries."""
        accepted_ms = self._meta.accepted_ms if self._meta else 0
        archived = await self._archived.entries(self._meta.archive_id, accepted_ms) if self._meta else {}
        if isinstance(archived, str):
            return archived
        for number, entry_id in archived.items():
            self._newest.remember(number, entry_id)
        partitions = self._partitions(url)
        required = [(number, entry_id) for number in partitions for entry_id in self._newest.required(number)]
        missing = await _missing_entries(self._servers, url, self._keys, required)
        await self._note(partitions, {str(number): entry_id for number, entry_id in missing.items()}, accepted_ms)
        if not missing:
            await self._learn(url, partitions)
            return None
        (number, entry_id), *others = missing.items()
        rest = f" and those of {len(others)} other partitions" if others else ""
        return f"entry {entry_id} of partition {number}{rest}"

    async def _learn(self, url: str, partitions: Sequence[int]) -> None:
        """Remember the newest entries of all processes, and restore fields that an older copy may lack."""
        found = await self._servers.call_node(
            url, *(("XREVRANGE", self._keys.log(number), "+", "-", "COUNT", 1) for number in partitions)
        )
        for number, entries in zip(partitions, found, strict=True):
            if isinstance(entries, list) and entries:
                self._newest.remember(number, entries[0][0].decode())
        if self._is_meta_on(url):
            fields = self._fields.items()
            await self._servers.call_node(url, *(("HSETNX", self._keys.meta, name, value) for name, value in fields))

    # ---- what is stored once

    async def _read_meta(self) -> str | None:
        """Read the notes of other processes; return what PREFIX:meta has lost, now or according to them."""
        fields = await self._servers.call("HGETALL", self._keys.meta)
        if b"layout" not in fields:
            return "it has no data of lisarec any more"
        meta = _Meta(fields.get(b"archive", b"").decode(), int(fields.get(b"accepted", 0)))
        if self._meta is not None and meta.accepted_ms > self._meta.accepted_ms:
            logger.warning("a loss of events was accepted, so what Redis has now counts")
            self._newest.forget()
            for server in self._known.values():
                server.process, server.evictions.lost = None, None
        self._meta = meta
        self._newest.read(fields, meta.accepted_ms)
        noted = decode_lost(fields.get(LOST_FIELD.encode()), meta.accepted_ms)
        for number, entry_id in noted.items():
            if number.isdigit() and self._lost.get(number) != entry_id:
                self._newest.remember(int(number), entry_id)
                if (url := self._servers.slots.node_of(self._keys.log(int(number)))) in self._known:
                    self._known[url].process = None
        self._lost = noted
        return f"'{self._keys.meta}'" if META in noted else None

    def _may_have_lost_all(self, url: str) -> bool:
        """Return whether the server has no data that could reveal a loss, and the archive is silent."""
        if self._meta is None or self._meta.archive_id or self._meta.accepted_ms:
            return False
        return self._archived.is_silent and not any(map(self._newest.required, self._partitions(url)))

    def _is_meta_on(self, url: str) -> bool:
        return self._servers.slots.node_of(self._keys.meta) == url

    def _partitions(self, url: str) -> list[int]:
        node_of, log = self._servers.slots.node_of, self._keys.log
        return [number for number in range(self._keys.partitions) if node_of(log(number)) == url]

    async def _note(self, partitions: Sequence[int], missing: Mapping[str, str], accepted_ms: int) -> None:
        """Note the entries that these partitions lack, for processes that do not know them, if that can be written.

        The note is repeated with every check of a server that lacks something, in case two processes write at once.
        """
        own = set(map(str, partitions))
        if not missing and own.isdisjoint(self._lost):
            return
        with suppress(StorageError):
            noted = decode_lost(await self._servers.call("HGET", self._keys.meta, LOST_FIELD), accepted_ms)
            others = {number: entry_id for number, entry_id in noted.items() if number not in own}
            self._lost = {**others, **missing}
            await self._servers.call("HSET", self._keys.meta, LOST_FIELD, encode_lost(self._lost, accepted_ms))


@dataclass(frozen=True, slots=True)
class _Meta:
    """Fields of PREFIX:meta."""

    archive_id: str
    accepted_ms: int


async def _missing_entries(
    servers: RedisServers, url: str, keys: Keyspace, required: Sequence[tuple[int, str]]
) -> dict[int, str]:
    """Return those of the entries, each of a partition, that the server lacks."""
    found = await servers.call_node(
        url,
        *(("XRANGE", keys.log(number), entry_seq(entry_id.encode()), "+", "COUNT", 1) for number, entry_id in required),
    )
    # After a trimmed entry there are later ones, because the newest archived one always stays.
    return {
        number: entry_id
        for (number, entry_id), entries in zip(required, found, strict=True)
        if isinstance(entries, list) and not has_entry(entries, entry_id)
    }


def _partition_of(key: str) -> int | None:
    """Return the number of the partition that contains the key; None if there is none."""
    found = PARTITION.search(key)
    return None if found is None else int(found[1])

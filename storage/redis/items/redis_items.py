"""A tenant's item data in Redis: item overrides, trends, tallies, and counts from the log."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from storage.archive.async_reader import AsyncArchiveReader
from storage.archive.item_counts import (
    MAX_NEWEST_ENTRIES,
    ArchivedItemCounts,
    ItemCounts,
    count_archived_items,
    count_items_of_records,
)
from storage.items.trends import LISTED_VISITORS, VISITOR_BYTES, TrendClock, Visit
from storage.records import MAX_PAGE_BYTES, HeldProperties, ItemChanges, ItemCodes, ItemEntry, Tally
from storage.redis.connections.nodes import Argument, Command
from storage.redis.items.properties import VALUE_BYTES, properties_from_texts, register_tenant
from storage.redis.layout.keys import ITEMS_FIELD
from storage.redis.layout.stream_entries import compact_json, parse_stream_page
from storage.redis.scripts.items import ADD_TALLIES, ADD_VISITS, PUT_ITEM_CODES, READ_ITEMS, TREND_LIMITS
from storage.redis.session.cooperative_loops import in_slices
from storage.redis.session.redis_session import RedisSession
from storage.state.switch_interval import in_thread

ITEMS_PAGE = 1000  # Lua accepts 8,000 of a script's arguments
VISITS_PAGE = 100  # per script, which blocks Redis for about a millisecond
ARCHIVE_TIMEOUT_S = 60.0  # to read three columns of all its files


class RedisItems:
    """The items of all tenants. The keys of a tenant's items share a slot, so each step is one script."""

    def __init__(self, session: RedisSession, archive: AsyncArchiveReader) -> None:
        self._session = session
        self._archive = archive
        self._archived_counts: dict[tuple[str, Collection[str]], ArchivedItemCounts] = {}

    async def put_codes(self, tenant: str, codes: Sequence[ItemCodes]) -> None:
        """Set codes of items in one step."""
        await register_tenant(self._session, tenant)
        args: list[Argument] = []
        for one in codes:
            args += _encode_codes(one)
        keys = self._session.keys.items(tenant)
        of_codes = [keys.version, keys.code_changes, keys.codes]
        await self._session.write(PUT_ITEM_CODES, of_codes, args, wait_for_replicas=True)

    async def changes(self, tenant: str, after: int, limit: int) -> ItemChanges:
        """Return the first changes whose versions are above `after`, at most `limit`."""
        await self._session.require_open()
        keys, limit = self._session.keys.items(tenant), min(limit, ITEMS_PAGE)
        of_items = [keys.changes, keys.code_changes, keys.codes, *keys.parts, keys.property_types]
        stored, *found = await self._session.run(READ_ITEMS, of_items, [after, limit, MAX_PAGE_BYTES])
        held = HeldProperties.parse(stored)
        items, codes = ([(int(version), *values) for version, *values in zip(*part, strict=True)] for part in found)
        changes: list[tuple[int, ItemEntry | ItemCodes]]
        changes = [(version, _decode(held, *values)) async for version, *values in in_slices(items, _size)]
        changes += [(version, _decode_codes(*values)) for version, *values in codes]
        return ItemChanges.of(sorted(changes, key=itemgetter(0))[:limit], after, held)

    async def tenants(self) -> list[str]:
        """Return the registered tenants, see PREFIX:meta in storage/redis/layout/keys.py."""
        await self._session.require_open()
        fields = [field.decode() for field in await self._session.call("HKEYS", self._session.keys.meta)]
        return [field.removeprefix(ITEMS_FIELD) for field in fields if field.startswith(ITEMS_FIELD)]

    # ---- trends and tallies

    async def add_visits(self, tenant: str, visits: Sequence[Visit]) -> None:
        """Add visits to the items' trends. Between two pages, others have Redis for as long as a page takes."""
        await self._session.require_open()
        keys, page_s = self._session.keys.items(tenant), 0.0
        for start in range(0, len(visits), VISITS_PAGE):
            await asyncio.sleep(page_s)
            args: list[Argument] = [*TREND_LIMITS, LISTED_VISITORS * VISITOR_BYTES]
            for visit in visits[start : start + VISITS_PAGE]:
                args += (visit.item_id, visit.visitor, repr(visit.weight))
            begin_s = time.monotonic()
            await self._session.write(ADD_VISITS, [keys.trends, keys.trend_clock, keys.visitors], args)
            page_s = time.monotonic() - begin_s

    async def trends(self, tenant: str, limit: int) -> dict[str, float]:
        """Return the items with the most visitors now, and their numbers of visitors."""
        await self._session.require_open()
        keys = self._session.keys.items(tenant)
        text = await self._session.call("GET", keys.trend_clock)
        if text is None:
            return {}
        clock = TrendClock.parse(text.decode()).moved_to(time.time())
        lowest, highest = clock.limits
        command = ("ZRANGE", keys.trends, repr(highest), repr(lowest), "BYSCORE", "REV", "LIMIT", 0, limit)
        found = await self._session.call(*command, "WITHSCORES")
        pairs = zip(found[::2], found[1::2], strict=True)
        return {item_id.decode(): clock.count_of(float(trend)) for item_id, trend in pairs}

    async def add_tallies(self, tenant: str, counts: Mapping[Tally, float]) -> None:
        """Add to the tenant's counters."""
        args: list[Argument] = [part for tally, count in counts.items() for part in (compact_json(tally), repr(count))]
        if args:
            await self._session.require_open()
            await self._session.write(ADD_TALLIES, [self._session.keys.items(tenant).tallies], args)

    async def tallies(self, tenant: str) -> dict[Tally, float]:
        """Return the tenant's counters by name."""
        await self._session.require_open()
        found = await self._session.call("HGETALL", self._session.keys.items(tenant).tallies)
        return await in_thread(_parse_tallies, found)

    # ---- counts

    async def counts(self, tenant: str, types: Collection[str]) -> ItemCounts:
        """Count each item's events of these types: archived ones, and later ones in the streams.

        raises  StorageUnavailable  when the servers, or an existing archive, cannot be read
        """
        await self._session.require_open()
        archived = await self._counts_of_archive(tenant, frozenset(types))
        commands = [self._newest_entries(number, archived) for number in range(self._session.keys.partitions)]
        replies = await self._session.servers.call_all(commands)
        counts = Counter({} if archived is None else archived.counts)
        counts.update(await in_thread(_counts_of, replies, tenant, types))  # a user in both parts counts twice
        return counts

    async def _counts_of_archive(self, tenant: str, types: frozenset[str]) -> ArchivedItemCounts | None:
        archive_id = await self._session.archive_id()
        if not archive_id or not self._archive.is_configured:
            return None
        known = self._archived_counts.get((tenant, types))
        query = partial(count_archived_items, known=known, archive_id=archive_id, tenant=tenant, types=types)
        found = await self._archive.read(query, ARCHIVE_TIMEOUT_S)
        self._archived_counts[tenant, types] = found
        return found

    def _newest_entries(self, number: int, archived: ArchivedItemCounts | None) -> Command:
        """Return the command that reads a partition's entries that are not archived."""
        after = 0 if archived is None else archived.manifest.seq(number)
        limit = MAX_NEWEST_ENTRIES // self._session.keys.partitions
        return Command.of("XREVRANGE", self._session.keys.log(number), "+", after + 1, "COUNT", limit)


def _counts_of(replies: Sequence[Any], tenant: str, types: Collection[str]) -> ItemCounts:
    """Count each item's events of these types among the tenant's entries in replies of XREVRANGE."""
    pages = (parse_stream_page(reply[::-1], is_complete=True) for reply in replies)
    records = [entry.record for page in pages for owner, entry in page.entries if owner == tenant]
    return count_items_of_records(records, types)


def _parse_tallies(found: Mapping[bytes, bytes]) -> dict[Tally, float]:
    return {tuple(json.loads(name)): float(count) for name, count in found.items()}


def _size(item: tuple[Any, ...]) -> int:
    """Return the size of an item that was read, in values, based on the bytes of its properties."""
    return 1 + len(item[-1] or b"") // VALUE_BYTES


def _decode(held: HeldProperties, item_id: bytes, *parts: bytes | None) -> ItemEntry:
    title, categories, available, properties = parts
    stored = properties_from_texts(properties.decode()) if properties else {}
    return ItemEntry(
        item_id.decode(),
        None if title is None else title.decode(),
        None if categories is None else tuple(json.loads(categories.decode())),
        None if available is None else available == b"1",
        held.by_name("item", stored),
    )


def _encode_codes(codes: ItemCodes) -> tuple[str, str]:
    """Return the arguments of PUT_ITEM_CODES for the codes of an item."""
    of = (codes.item_id, codes.tag.hex())
    return compact_json(of), compact_json((codes.evidence, codes.bias, codes.history.hex(), codes.target.hex()))


def _decode_codes(member: bytes, value: bytes) -> ItemCodes:
    item_id, tag = json.loads(member)
    evidence, bias, history, target = json.loads(value)
    return ItemCodes(item_id, bytes.fromhex(tag), evidence, bias, bytes.fromhex(history), bytes.fromhex(target))

"""Setting values of items in Redis, without blocking it for long."""

import json
from collections.abc import Mapping, Sequence

from storage.errors import PropertyRefused, StorageError, StorageUnavailable, VectorRefused
from storage.records import MAX_PROPERTIES, ItemEntry, PropertyType, PropertyTypes, add_types_to_hold
from storage.redis.connections.nodes import Argument
from storage.redis.items.properties import (
    VALUE_BYTES,
    properties_to_texts,
    register_tenant,
    require_accepted_types,
    with_properties,
)
from storage.redis.items.vectors import require_accepted_vectors
from storage.redis.layout.stream_entries import compact_json
from storage.redis.scripts.items import ITEM_ARGUMENTS, PUT_ITEMS, READ_ITEM_PROPERTIES
from storage.redis.session.cooperative_loops import in_slices
from storage.redis.session.redis_session import RedisSession

FEW_PROPERTIES = 1_000  # that a script merges with the stored ones, which blocks Redis for a millisecond
READ_BYTES = 2 << 20  # of stored properties, which Redis copies within some milliseconds
MERGED_BYTES = 1 << 19  # of properties that a script merges, which blocks Redis for some 10 milliseconds
OVERTAKEN = "concurrent changes of types or vectors reject some of the items; send all of them again"


class ItemWriter:
    """Sets values of items."""

    def __init__(self, session: RedisSession) -> None:
        self._session = session

    async def put(self, tenant: str, entries: Sequence[ItemEntry]) -> None:
        """Set values of items; raise StorageError for text that is not Unicode, or for rejected values.

        They are set in one step, or in several if Redis has to merge many bytes of properties. The first step rejects
        values of any item. If another process changes types or vectors between two steps, the call must be repeated.
        """
        stored = await self._stored_properties(tenant, entries)
        encoded: list[Argument] = []
        async for entry in in_slices(entries, lambda entry: _work(entry, stored)):
            encoded += _encode(entry, stored)
        await register_tenant(self._session, tenant)
        done, step = 0, len(entries)
        while done < len(entries):
            arguments = encoded[done * ITEM_ARGUMENTS : (done + step) * ITEM_ARGUMENTS]
            try:
                taken = await self._put(tenant, await _types(entries[done : done + step]), arguments)
            except (PropertyRefused, VectorRefused) as refused:
                if done:
                    raise StorageUnavailable(OVERTAKEN, "contention") from refused
                raise
            done, step = done + taken, 2 * taken

    async def _put(self, tenant: str, types: PropertyTypes, encoded: Sequence[Argument]) -> int:
        """Set values of the first of these items; return of how many."""
        keys = self._session.keys.items(tenant)
        of_items = [keys.version, keys.changes, *keys.parts, keys.property_types, keys.vectors, keys.vector_bytes]
        args = [compact_json(types), MAX_PROPERTIES, MERGED_BYTES, *encoded]
        reply = await self._session.write(PUT_ITEMS, of_items, args, wait_for_replicas=True)
        require_accepted_vectors(reply)
        require_accepted_types(types, reply)
        return int(reply)

    async def _stored_properties(self, tenant: str, entries: Sequence[ItemEntry]) -> dict[str, bytes]:
        """Return the stored properties of the first items if many are to be set, since Redis is slow to merge."""
        if sum(len(entry.properties) for entry in entries) <= FEW_PROPERTIES:
            return {}
        await self._session.require_open()
        keys = self._session.keys.items(tenant)
        ids = list({entry.item_id: None for entry in entries if entry.properties})
        args: list[Argument] = [READ_BYTES, *map(_utf_8, ids)]
        found: list[bytes] = await self._session.run(READ_ITEM_PROPERTIES, [keys.parts[-1], keys.property_types], args)
        return dict(zip(ids, found, strict=False))


async def _types(entries: Sequence[ItemEntry]) -> PropertyTypes:
    types: dict[str, PropertyType] = {}
    async for entry in in_slices(entries, lambda entry: 1 + len(entry.properties)):
        add_types_to_hold(types, "item", entry.properties)
    return {"item": types}


def _work(entry: ItemEntry, stored: Mapping[str, bytes]) -> int:
    """Return how many small properties take as long to encode as this item."""
    return 1 + len(entry.properties) + len(stored.get(entry.item_id, b"")) // VALUE_BYTES


def _encode(entry: ItemEntry, stored: dict[str, bytes]) -> list[Argument]:
    """Return the arguments of PUT_ITEMS for an item; update its stored properties to those that it will have."""
    texts = (
        entry.item_id,
        "" if entry.title is None else f"={entry.title}",
        "" if entry.categories is None else f"={json.dumps(entry.categories)}",
        "" if entry.available is None else f"={entry.available:d}",
        properties_to_texts(entry.properties) if entry.properties else "{}",
    )
    vector = b"" if entry.vector is None else b"=" + entry.vector
    read = becomes = b""
    if entry.properties and entry.item_id in stored:
        read = stored[entry.item_id]
        becomes = stored[entry.item_id] = _utf_8(with_properties(read, entry.properties))
    return [*map(_utf_8, texts), vector, read, becomes]


def _utf_8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as exc:
        raise StorageError(f"an item cannot be stored: {exc}") from exc

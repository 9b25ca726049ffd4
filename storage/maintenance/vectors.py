"""Removes the vectors of all items of a tenant, so that the shop can put those of another model."""

from storage.items.vectors import NO_VECTOR, VECTORS_PAGE
from storage.protocol import UserStore
from storage.records import ItemEntry


async def drop_vectors(store: UserStore, tenant: str) -> int:
    """Remove the vectors of the tenant's items; return how many there were. It may be repeated.

    Vectors that are put meanwhile are removed, too: each put is the newest change, and this call reads changes up to
    the newest one. Services see each of these items as changed.
    """
    dropped, version = 0, 0
    while (changes := await store.item_changes(tenant, version, VECTORS_PAGE)).version > version:
        version = changes.version
        held = await store.vectors.of_items(tenant, [entry.item_id for entry in changes.entries])
        if held:
            await store.put_items(tenant, [ItemEntry(item_id, vector=NO_VECTOR) for item_id in held])
        dropped += len(held)
    return dropped

"""Takes the vectors of all items of a tenant away, so that the shop may put those of another model."""

from storage.items.vectors import NO_VECTOR, VECTORS_PAGE
from storage.protocol import UserStore
from storage.records import ItemEntry


async def drop_vectors(store: UserStore, tenant: str) -> int:
    """Take the vectors of the tenant's items away; return how many there were. It may be repeated.

    Those that are put meanwhile go, too: each put stands behind all earlier changes, which this goes through to the
    last one. Services read of each such item that it has changed.
    """
    dropped, version = 0, 0
    while (changes := await store.item_changes(tenant, version, VECTORS_PAGE)).version > version:
        version = changes.version
        held = await store.vectors.of_items(tenant, [entry.item_id for entry in changes.entries])
        if held:
            await store.put_items(tenant, [ItemEntry(item_id, vector=NO_VECTOR) for item_id in held])
        dropped += len(held)
    return dropped

"""Vectors of tenants' items in Redis."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from storage.errors import VectorRefused
from storage.items.vectors import NUMBER, VECTORS_PAGE, VectorStore
from storage.redis.session.redis_session import RedisSession

VECTOR_REPLY = 3  # number of elements in the reply of PUT_ITEMS if it rejects a vector


class RedisVectors(VectorStore):
    """The vectors of all tenants' items: one hash per tenant, next to its items."""

    def __init__(self, session: RedisSession) -> None:
        self._session = session

    @override
    async def numbers(self, tenant: str) -> int:
        await self._session.require_open()
        size = await self._session.call("GET", self._session.keys.items(tenant).vector_bytes)
        return 0 if size is None else int(size) // NUMBER.itemsize

    @override
    async def of_items(self, tenant: str, item_ids: Sequence[str]) -> dict[str, bytes]:
        await self._session.require_open()
        key, found = self._session.keys.items(tenant).vectors, dict[str, bytes]()
        for begin in range(0, len(item_ids), VECTORS_PAGE):
            some = item_ids[begin : begin + VECTORS_PAGE]
            values = await self._session.call("HMGET", key, *some)
            found |= {item_id: value for item_id, value in zip(some, values, strict=True) if value is not None}
        return found


def require_accepted_vectors(reply: Any) -> None:
    """Raise VectorRefused if PUT_ITEMS has replied that a vector differs in size from the stored ones."""
    if isinstance(reply, list) and len(reply) == VECTOR_REPLY:
        _, given, held = (int(part or 0) for part in reply)
        raise VectorRefused(given // NUMBER.itemsize, held // NUMBER.itemsize)

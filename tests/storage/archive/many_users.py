"""Users with numbered events, and all that a reader sees of them."""

from __future__ import annotations

from typing import Any

from storage.redis.store import RedisStore
from tests.storage.oracles.random_events import click
from tests.storage.redis.stores import GENERATION

USERS = [f"user-{number}" for number in range(24)]


def ids_of(user_id: str, count: int) -> list[str]:
    return [f"{user_id}-{number}" for number in range(count)]


async def append_all(store: RedisStore, begin: int, end: int) -> int:
    """Append these events of every user; return how many were new."""
    events = [click(f"{user_id}-{number}", user_id) for user_id in USERS for number in range(begin, end)]
    return sum(not result.duplicate for result in await store.append("main", events))


async def seen_of(store: RedisStore) -> dict[str, Any]:
    """Everything that a reader sees of the users."""
    logs = {user_id: [entry.record for entry in await store.events("main", user_id, limit=1000)] for user_id in USERS}
    states = await store.states("main", USERS, GENERATION)
    return {"logs": logs, "states": states}

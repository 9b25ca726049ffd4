"""Every store that keeps the contract, opened by an address: the one place a further store has to join."""

from collections.abc import Sequence
from pathlib import Path

from storage.redis import RedisStore
from storage.sqlite import SQLiteStore
from storage.state import Generation
from storage.store import UserStore
from tests.storage.redis_servers import expected_servers, running_server

STORES = ["sqlite", *expected_servers()]


def new_address(kind: str, directory: Path) -> str:
    """Where a new, empty store of this kind can be opened, also by another process."""
    if kind == "sqlite":
        return f"sqlite:{directory}"
    return f"redis:{running_server(kind).new_address()}"


async def open_store(address: str, generations: Sequence[Generation]) -> UserStore:
    kind, _, place = address.partition(":")
    if kind == "sqlite":
        return await SQLiteStore.open(Path(place), generations)
    url, prefix = place.rsplit(" ", 1)
    return await RedisStore.open(url, generations, prefix=prefix)

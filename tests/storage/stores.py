"""Every store that keeps the contract, opened by an address: the one place a further store has to join."""

from collections.abc import Sequence
from pathlib import Path

from storage.sqlite import SQLiteStore
from storage.state import Generation
from storage.store import UserStore

STORES = ["sqlite"]


def new_address(kind: str, directory: Path) -> str:
    """Where a new, empty store of this kind can be opened, also by another process."""
    return f"{kind}:{directory}"


async def open_store(address: str, generations: Sequence[Generation]) -> UserStore:
    kind, _, place = address.partition(":")
    assert kind in STORES
    return await SQLiteStore.open(Path(place), generations)

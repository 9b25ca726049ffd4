"""A file that is removed or replaced while it is in use takes nothing more, and what was acknowledged is in it."""

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.errors import StorageUnavailable
from storage.sqlite.database import FILE_NAME
from storage.sqlite.store import SQLiteStore
from tests.storage.oracles.random_events import click, make_generation

GENERATION = make_generation()


def remove(directory: Path) -> None:
    directory.joinpath(FILE_NAME).unlink()


def remove_log(directory: Path) -> None:
    directory.joinpath(f"{FILE_NAME}-wal").unlink()


def remove_index(directory: Path) -> None:
    directory.joinpath(f"{FILE_NAME}-shm").unlink()


def replace(directory: Path) -> None:
    """By a copy of itself, as a restored back-up is."""
    copy = directory / "copy"
    shutil.copy(directory / FILE_NAME, copy)
    copy.rename(directory / FILE_NAME)


def move_away(directory: Path) -> None:
    """As where the file system is no longer mounted."""
    directory.rename(directory.with_name("elsewhere"))


DAMAGES = [remove, remove_log, remove_index, replace, move_away]


@pytest.mark.parametrize("damage", DAMAGES)
def test_nothing_is_acknowledged_any_more_and_the_reason_is_known_within_a_second(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    directory = tmp_path / "state"

    async def law() -> None:
        store = await SQLiteStore.open(directory, [GENERATION])
        await store.append("main", [click("before")])
        assert store.failure is None
        damage(directory)
        with pytest.raises(StorageUnavailable, match=r"cannot be found|was replaced"):
            await store.append("main", [click("into the void")])
        async with asyncio.timeout(10):
            while store.failure is None:
                await asyncio.sleep(0.01)
        with pytest.raises(StorageUnavailable):
            await store.states("main", ["u"], GENERATION)
        await store.close()

    asyncio.run(law())


def test_it_is_noticed_without_any_request(tmp_path: Path) -> None:
    async def law() -> None:
        store = await SQLiteStore.open(tmp_path, [GENERATION])
        remove(tmp_path)
        async with asyncio.timeout(10):
            while store.failure is None:
                await asyncio.sleep(0.01)
        await store.close()

    asyncio.run(law())


def test_every_acknowledged_event_is_in_the_file_when_it_is_put_back(tmp_path: Path) -> None:
    """A process goes on posting while its file is taken away, replaced and put back, again and again."""
    directory, elsewhere = tmp_path / "state", tmp_path / "elsewhere"

    async def law() -> None:
        store = await SQLiteStore.open(directory, [GENERATION])
        acknowledged: list[str] = []
        refused = 0

        async def post() -> None:
            nonlocal refused
            for number in range(400):
                try:
                    await store.append("main", [click(f"e{number}")])
                except StorageUnavailable:
                    refused += 1
                else:
                    acknowledged.append(f"e{number}")

        posting = asyncio.ensure_future(post())
        while not posting.done():
            await asyncio.sleep(0.02)
            before = refused
            directory.rename(elsewhere)
            async with asyncio.timeout(30):
                while refused == before and not posting.done():
                    await asyncio.sleep(0.001)
            os.rename(elsewhere, directory)
        await posting
        assert refused
        assert acknowledged
        async with asyncio.timeout(10):
            while store.failure is not None:
                await asyncio.sleep(0.01)
        logged = {entry.record.entry_id for entry in await store.events("main", "u", limit=1000)}
        assert logged.issuperset(acknowledged)
        await store.close()
        again = await SQLiteStore.open(directory, [GENERATION])
        assert {entry.record.entry_id for entry in await again.events("main", "u", limit=1000)} == logged
        await again.close()

    asyncio.run(law())

"""Folders with user data are private to their owner."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from stat import S_IMODE

import pytest

from storage.archive.writer import ArchiveWriter
from storage.folders.object_folder import ObjectFolder
from storage.sqlite.store import SQLiteStore
from tests.storage.redis.stores import GENERATION


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """The usual umask, with which everybody may read."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_store(directory: Path) -> None:
    async def open_and_close() -> None:
        await (await SQLiteStore.open(directory, [GENERATION])).close()

    asyncio.run(open_and_close())


def open_archive(directory: Path) -> None:
    with ArchiveWriter.open(directory):
        pass


@pytest.mark.parametrize("make", [open_store, open_archive])
def test_new_folders_are_private_and_existing_ones_keep_permissions(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "data" / "made")
    assert [S_IMODE(path.stat().st_mode) for path in (tmp_path / "data", tmp_path / "data" / "made")] == [0o755, 0o700]
    (shared := tmp_path / "shared").mkdir(0o750)
    make(shared)
    assert S_IMODE(shared.stat().st_mode) == 0o750


def test_copies_of_bucket_files_are_private(s3: Callable[[], str], tmp_path: Path) -> None:
    bucket = ObjectFolder(s3(), tmp_path / "cache")
    bucket.add("a", b"of users")
    assert bucket.path("a").read_bytes() == b"of users"
    (copies,) = (tmp_path / "cache").iterdir()
    assert S_IMODE(copies.stat().st_mode) == 0o700

"""Reading an archive from an event loop, in separate threads and with a time limit."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from storage.archive.manifest import Manifest
from storage.archive.reader import ArchiveReader, ArchiveSnapshot
from storage.errors import StorageUnavailable
from storage.folders.folder import Folder

THREADS = 2
TIMEOUT_S = 5.0

T = TypeVar("T")

logger = logging.getLogger(__name__)


class AsyncArchiveReader:
    """Reads the archive in a folder, or raises StorageUnavailable if there is no folder."""

    def __init__(self, folder: Path | Folder | None, timeout_s: float = TIMEOUT_S) -> None:
        self._reader = None if folder is None else ArchiveReader(folder)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="archive")
        self._timeout_s = timeout_s

    @property
    def is_configured(self) -> bool:
        """Whether an archive is configured."""
        return self._reader is not None

    async def read(self, query: Callable[[ArchiveSnapshot], T], timeout_s: float | None = None) -> T:
        """Run the query as `ArchiveReader.read` does.

        raises  StorageUnavailable  also without an archive, and when it does not answer in time
        """
        if self._reader is None:
            raise StorageUnavailable("older events are in an archive; pass it as --archive-dir DIR", "archive")
        timeout_s = timeout_s or self._timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._threads, self._reader.read, query)
        except TimeoutError:
            raise StorageUnavailable(f"the archive did not respond within {timeout_s:g} s", "archive") from None

    def close(self) -> None:
        """Cancel pending reads, and stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


async def read_manifest(folder: Path | Folder | None, timeout_s: float) -> Manifest | None:
    """Return the archive's manifest; None if no archive is configured, or if it cannot be read in time (logged)."""
    archive = AsyncArchiveReader(folder, timeout_s)
    try:
        return await archive.read(lambda snapshot: snapshot.manifest) if archive.is_configured else None
    except StorageUnavailable as exc:
        logger.warning("cannot read from the archive what the store must contain: %s", exc)
        return None
    finally:
        archive.close()

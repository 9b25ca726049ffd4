"""An archive as an event loop asks it: in threads of its own, in bounded time."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from storage.archive import Archive, Snapshot
from storage.errors import StorageUnavailable

THREADS = 2
TIMEOUT_S = 5.0

T = TypeVar("T")


class ArchiveLookups:
    """Asks the archive in a directory, or says for everybody that there is none."""

    def __init__(self, directory: Path | None, timeout_s: float = TIMEOUT_S) -> None:
        self._archive = None if directory is None else Archive(directory)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="archive")
        self._timeout_s = timeout_s

    @property
    def is_given(self) -> bool:
        return self._archive is not None

    async def ask(self, question: Callable[[Snapshot], T], timeout_s: float | None = None) -> T:
        """As `Archive.ask`; StorageUnavailable also without an archive, and when it does not answer in time."""
        if self._archive is None:
            raise StorageUnavailable("older parts of the log are in an archive; say where with --archive-dir DIR")
        timeout_s = timeout_s or self._timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._threads, self._archive.ask, question)
        except TimeoutError:
            raise StorageUnavailable(f"the archive did not answer within {timeout_s:g} s") from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

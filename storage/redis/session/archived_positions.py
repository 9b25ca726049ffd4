"""The archive's record of the entries that Redis must contain."""

import asyncio
import logging
from collections.abc import Mapping

from storage.archive.async_reader import AsyncArchiveReader
from storage.archive.manifest import Manifest
from storage.errors import StorageError

TIMEOUT_S = 1.0  # short, because writes do not need the archive
ASK_AGAIN_AFTER_S = 5.0

logger = logging.getLogger(__name__)


class ArchivedPositions:
    """Asks the archive for its manifest, and remembers the last answer.

    is_silent  whether the archive did not respond to the last call, and must be asked again
    """

    def __init__(self, archive: AsyncArchiveReader) -> None:
        self.is_silent = False
        self._archive = archive
        self._manifest: Manifest | None = None
        self._ask_at_s = 0.0

    async def entries(self, archive_id: str, accepted_ms: int) -> Mapping[int, str] | str:
        """Return the newest archived entries by partition, from the last known manifest, or what is wrong with the log.

        archive_id   id of the archive, according to the log
        accepted_ms  when a loss was last accepted
        """
        await self._ask()
        if self._manifest is None:
            return {}
        if archive_id == self._manifest.archive_id:
            return self._manifest.positions
        if not archive_id and self._manifest.positions and not accepted_ms:
            return "the archive has events of this Redis, but this Redis has no record of an archive"
        return {}

    async def answers_again(self) -> bool:
        """Ask an archive that was silent again; return whether it responds now."""
        if not self.is_silent:
            return False
        await self._ask()
        return not self.is_silent

    async def _ask(self) -> None:
        if not self._archive.is_configured or asyncio.get_running_loop().time() < self._ask_at_s:
            return
        try:
            self._manifest = await self._archive.read(lambda snapshot: snapshot.manifest, TIMEOUT_S)
            self.is_silent = False
        except StorageError as exc:
            self.is_silent = not isinstance(exc.__cause__, FileNotFoundError)  # no manifest: no archive yet
            if self.is_silent:
                logger.warning("cannot read from the archive what Redis must contain: %s", exc)
                self._ask_at_s = asyncio.get_running_loop().time() + ASK_AGAIN_AFTER_S

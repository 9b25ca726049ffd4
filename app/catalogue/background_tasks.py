"""Background tasks that no request waits for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextvars import Context

from storage.errors import StorageError

logger = logging.getLogger(__name__)


class BackgroundTasks:
    """Tasks that assign codes to items in the background. Their failures are only logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run the coroutine as a separate task, outside any request's trace."""
        task = asyncio.create_task(_log_failures(work), context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def join(self) -> None:
        """Wait until no task is running."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        await self.join()


async def _log_failures(work: Coroutine[None, None, None]) -> None:
    try:
        await work
    except StorageError as exc:
        logger.debug("cannot save the codes of a new item: %s", exc)
    except Exception:
        logger.exception("failed to learn the codes of a new item")

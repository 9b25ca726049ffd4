"""What happens between two commands of the Redis stores of this process: work of others, or an end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

import pytest

from storage.errors import StorageUnavailable
from storage.redis.connections.client import RedisServers
from storage.redis.connections.nodes import Command


def overtake(monkeypatch: pytest.MonkeyPatch, mark: str, work: Callable[[], Awaitable[object]]) -> None:
    """Undo all patches and do the work, just before a store sends a certain command for the first time.

    mark  the command's name, or the hash of its script
    """
    send = RedisServers.send

    async def send_afterwards(servers: RedisServers, commands: Sequence[Command], **options: Any) -> list[Any]:
        if any(mark in command.args[:2] for command in commands):
            monkeypatch.undo()
            await work()
        return await send(servers, commands, **options)

    monkeypatch.setattr(RedisServers, "send", send_afterwards)


class InterruptedCalls:
    """Within the block, calls of the servers are counted, and one of them is interrupted; true if it was."""

    def __init__(self, call: int) -> None:
        self._left = call
        self._was_interrupted = False
        self._patch = pytest.MonkeyPatch()

    def __bool__(self) -> bool:
        return self._was_interrupted

    async def interrupt(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        send = RedisServers.send

        async def count_and_send(servers: RedisServers, commands: Sequence[Command], **options: Any) -> list[Any]:
            if self._left == 0:
                self._was_interrupted = True
                await self.interrupt()
            self._left -= 1
            return await send(servers, commands, **options)

        self._patch.setattr(RedisServers, "send", count_and_send)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


class DyingAfter(InterruptedCalls):
    """Every call of the servers fails after some."""

    async def interrupt(self) -> None:
        raise StorageUnavailable("killed")


class OvertakenAt(InterruptedCalls):
    """Somebody else's work is done before one call of the servers."""

    def __init__(self, call: int, work: Callable[[], Awaitable[object]]) -> None:
        super().__init__(call)
        self._work = work
        self._working: asyncio.Task[object]

    async def interrupt(self) -> None:
        self._left -= 1  # or the work would interrupt itself
        self._working = asyncio.create_task(self._do())
        # the call may be one of the store's own, in the background, which is given up where it takes too long
        await asyncio.shield(self._working)

    async def _do(self) -> object:
        return await self._work()

    async def end(self) -> None:
        """Return when the work is done."""
        await self._working


class BetweenCalls(InterruptedCalls):
    """Somebody else's work is done before every call of the servers."""

    def __init__(self, work: Callable[[], Awaitable[object]]) -> None:
        super().__init__(0)
        self._work = work

    async def interrupt(self) -> None:
        self._left = -1  # or the work would interrupt itself
        await self._work()
        self._left = 1  # the call that was interrupted is counted down

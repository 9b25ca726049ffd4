"""Interleaving of actions, or of a kill, between two commands of a Redis store in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from operator import attrgetter
from typing import Any, Self

import pytest

from storage.errors import StorageUnavailable
from storage.protocol import UserStore
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


def servers_of(store: UserStore) -> RedisServers:
    """The servers of a Redis store, for tests only."""
    servers: RedisServers = attrgetter("_session.servers")(store)
    return servers


class InterruptedCalls:
    """Counts calls of a store to its servers and interrupts one of them; true if it did.

    Other stores' calls are not, not even those in the background, for which whoever interrupts may have to wait.
    """

    def __init__(self, store: UserStore, call: int) -> None:
        self._servers = servers_of(store)
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
            if servers is self._servers:
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
    """Makes all calls to the servers fail after a number of them."""

    async def interrupt(self) -> None:
        raise StorageUnavailable("killed")


class OvertakenAt(InterruptedCalls):
    """Runs an action of another store before one call to the servers."""

    def __init__(self, store: UserStore, call: int, work: Callable[[], Awaitable[object]]) -> None:
        super().__init__(store, call)
        self._work = work
        self._working: asyncio.Task[object]

    async def interrupt(self) -> None:
        self._left -= 1  # or the store's next call would be interrupted too
        self._working = asyncio.create_task(self._do())
        # the call may be one of the store's own, in the background, which is given up where it takes too long
        await asyncio.shield(self._working)

    async def _do(self) -> object:
        return await self._work()

    async def end(self) -> None:
        """Wait until the action is done."""
        await self._working


class BetweenCalls(InterruptedCalls):
    """Runs an action before every call to the servers."""

    def __init__(self, store: UserStore, work: Callable[[], Awaitable[object]]) -> None:
        super().__init__(store, 0)
        self._work = work

    async def interrupt(self) -> None:
        self._left = -1  # or the store's other calls would be interrupted meanwhile
        await self._work()
        self._left = 1  # the call that was interrupted is counted down

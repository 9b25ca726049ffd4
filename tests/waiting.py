"""Waiting for a condition, with a limit that only a condition that never holds reaches, even on a busy machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

PATIENCE_S = 200.0
POLL_EVERY_S = 0.02

T = TypeVar("T")


def wait_until(condition: Callable[[], T | Literal[False] | None], reason: Callable[[], object] = str) -> T:
    """Return the first true value of the condition; at the time limit, fail with the reason."""
    give_up_at_s = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < give_up_at_s, reason()
        time.sleep(POLL_EVERY_S)
    return value


async def until(condition: Callable[[], object]) -> None:
    """Wait in an event loop for a condition, which may be awaitable."""
    async with asyncio.timeout(PATIENCE_S):
        while not (await value if isinstance(value := condition(), Awaitable) else value):
            await asyncio.sleep(POLL_EVERY_S)

"""Long loops that share the event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

SLICE = 100  # events, items or properties, about half a millisecond

T = TypeVar("T")


async def in_slices(values: Sequence[T], size: Callable[[T], int] = lambda _: 1) -> AsyncIterator[T]:
    """Iterate over the values, yielding to the event loop whenever their sizes add up to a hundred."""
    done = 0
    for value in values:
        if done >= SLICE:
            await asyncio.sleep(0)
            done = 0
        yield value
        done += size(value)

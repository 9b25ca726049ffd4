"""Long loops on the event loop."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

SLICE = 100  # events or items, some half a millisecond

T = TypeVar("T")


async def in_slices(values: Sequence[T]) -> AsyncIterator[T]:
    """Iterate over the values; everybody else on the event loop has a turn after each hundred of them."""
    for number, value in enumerate(values):
        if number and number % SLICE == 0:
            await asyncio.sleep(0)
        yield value

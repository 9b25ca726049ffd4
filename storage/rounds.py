"""Group commit on an event loop: what arrives while a round of work is under way forms the next round."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from storage.store import StorageBusy, StorageUnavailable


class Item(Protocol):
    """Something that waits to be worked on, and for its answer."""

    @property
    def size(self) -> int: ...

    def fail(self, cause: Exception) -> None:
        """Answer whoever waits for the item with the failure."""
        ...


ItemT = TypeVar("ItemT", bound=Item)


class Rounds(Generic[ItemT]):
    """Runs one round after the other, without timers, until nothing waits.

    work          is given a round's items and answers them; it returns those that have to wait for the next round
    max_size      of all items of a round together
    max_waiting   size of all items that may wait
    """

    def __init__(
        self, work: Callable[[list[ItemT]], Awaitable[list[ItemT]]], *, max_size: int, max_waiting: int
    ) -> None:
        self._work = work
        self._max_size = max_size
        self._max_waiting = max_waiting
        self._waiting: deque[ItemT] = deque()
        self._waiting_size = 0
        self._closed = False
        self._running: asyncio.Task[None] | None = None

    def put(self, items: Sequence[ItemT]) -> None:
        """Let the items wait for the next round; StorageBusy where too much waits."""
        if self._closed:
            raise StorageUnavailable("the store is closed")
        size = sum(item.size for item in items)
        if self._waiting and self._waiting_size + size > self._max_waiting:
            raise StorageBusy(f"{self._waiting_size} reads or writes wait for the store; try again later")
        self.put_back(items)

    def put_back(self, items: Sequence[ItemT]) -> None:
        """Let items wait that had been accepted before."""
        self._waiting.extend(items)
        self._waiting_size += sum(item.size for item in items)
        if self._running is None:
            self._running = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Accept nothing more; return when everything accepted is answered."""
        self._closed = True
        if self._running is not None:
            await asyncio.wait([self._running])

    async def _run(self) -> None:
        while self._waiting:
            items = list(self._taken(self._max_size))
            try:
                again = await self._work(items)
            except Exception as exc:
                if isinstance(exc, StorageUnavailable):  # another time-out would not do the others any good
                    items += self._taken(self._waiting_size)
                for item in items:
                    item.fail(exc)
            else:
                self._waiting.extendleft(reversed(again))
                self._waiting_size += sum(item.size for item in again)
        self._running = None

    def _taken(self, room: int) -> Iterator[ItemT]:
        while self._waiting and room > 0:
            item = self._waiting.popleft()
            self._waiting_size -= item.size
            room -= item.size
            yield item

"""Group commit on an event loop: what arrives while a round of work is under way forms the next round."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import Context
from typing import Generic, Protocol, TypeVar

from storage.errors import StorageBusy, StorageUnavailable


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
        self.require_room(items)
        self.put_back(items)

    def require_room(self, items: Sequence[ItemT]) -> None:
        """As `put`, which then succeeds."""
        if self._closed:
            raise StorageUnavailable("the store is closed")
        size = sum(item.size for item in items)
        if self._waiting and self._waiting_size + size > self._max_waiting:
            raise StorageBusy(f"{self._waiting_size} reads or writes wait for the store; try again later")

    def put_back(self, items: Sequence[ItemT]) -> None:
        """Let items wait that had been accepted before."""
        self._waiting.extend(items)
        self._waiting_size += sum(item.size for item in items)
        if self._running is None:
            # in no request's context: it works for all that come
            self._running = asyncio.create_task(self._run(), context=Context())

    @property
    def waiting(self) -> int:
        """Size of all that waits."""
        return self._waiting_size

    @property
    def is_running(self) -> bool:
        return self._running is not None

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


class Lanes(Generic[ItemT]):
    """Rounds side by side: a server that hangs holds up what waits for it, and nobody else.

    work, max_size, max_waiting  of each lane, as of Rounds
    lane_of                      where an item belongs now; that may change while it waits
    """

    def __init__(
        self,
        work: Callable[[list[ItemT]], Awaitable[list[ItemT]]],
        lane_of: Callable[[ItemT], str],
        *,
        max_size: int,
        max_waiting: int,
    ) -> None:
        self._work = work
        self._lane_of = lane_of
        self._max_size = max_size
        self._max_waiting = max_waiting
        self._lanes: dict[str, Rounds[ItemT]] = {}
        self._closed = False

    def put(self, items: Sequence[ItemT]) -> None:
        """Let all of the items wait, or none: StorageBusy where too much waits already."""
        if self._closed:
            raise StorageUnavailable("the store is closed")
        by_lane = self._by_lane(items)
        for name, own in by_lane.items():
            self._lane(name).require_room(own)
        self._put(by_lane)

    @property
    def waiting(self) -> int:
        return sum(rounds.waiting for rounds in self._lanes.values())

    def put_back(self, items: Sequence[ItemT]) -> None:
        """Let items wait that had been accepted before."""
        self._put(self._by_lane(items))

    async def close(self) -> None:
        """Accept nothing more; return when everything accepted is answered."""
        self._closed = True
        # again and again, since one may put back to another
        while running := [rounds for rounds in self._lanes.values() if rounds.is_running]:
            await asyncio.gather(*(rounds.close() for rounds in running))

    def _put(self, by_lane: dict[str, list[ItemT]]) -> None:
        for name, own in by_lane.items():
            self._lane(name).put_back(own)

    def _by_lane(self, items: Sequence[ItemT]) -> dict[str, list[ItemT]]:
        by_lane: defaultdict[str, list[ItemT]] = defaultdict(list)
        for item in items:
            by_lane[self._lane_of(item)].append(item)
        return by_lane

    def _lane(self, name: str) -> Rounds[ItemT]:
        if name not in self._lanes:

            async def work(items: list[ItemT]) -> list[ItemT]:
                again = self._by_lane(await self._work(items))
                mine = again.pop(name, [])
                self._put(again)
                return mine

            self._lanes[name] = Rounds(work, max_size=self._max_size, max_waiting=self._max_waiting)
        return self._lanes[name]

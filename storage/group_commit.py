"""Group commit on an event loop: requests that arrive while groups are processed form the next group."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Generic, Protocol, TypeVar

from storage.errors import StorageBusy, StorageUnavailable

MAX_WAITING = 8192  # the maximum total size of a node's queued requests; an empty queue accepts any


class QueuedRequest(Protocol):
    """A queued request, whose caller waits for the answer."""

    @property
    def size(self) -> int:
        """The size of the request, which counts towards that of its group."""

    @property
    def key(self) -> str:
        """The key that it reads or changes."""

    def fail(self, cause: Exception) -> None:
        """Answer the caller with the failure."""


RequestT = TypeVar("RequestT", bound=QueuedRequest)


class GroupCommit(Generic[RequestT]):
    """Processes requests in groups, without timers, until none is queued.

    Further groups are processed at the same time only if they are full, and have no key in common. They pause when
    requests must be repeated, because processes then compete for the same keys.

    work          processes the requests of a group and answers them; returns those that must wait for another group
    max_size      the size at which a group is full; its last request may exceed it
    max_groups    how many groups are processed at the same time
    waiting_size  the total size of all queued requests
    tasks         each processes one group after another; none while no request is queued or processed
    """

    def __init__(
        self, work: Callable[[list[RequestT]], Awaitable[list[RequestT]]], *, max_size: int, max_groups: int
    ) -> None:
        self._work = work
        self._max_size = max_size
        self._max_groups = max_groups
        self._waiting: deque[RequestT] = deque()
        self._keys: set[str] = set()  # of the groups that are processed
        self._may_overlap = True
        self.waiting_size = 0
        self.tasks: set[asyncio.Task[None]] = set()

    def require_room(self, requests: Sequence[RequestT]) -> None:
        """Raise StorageBusy if the requests do not fit into the queue."""
        size = sum(request.size for request in requests)
        if self._waiting and self.waiting_size + size > MAX_WAITING:
            raise StorageBusy(f"{self.waiting_size} reads or writes are queued for the store; try again later")

    def put(self, requests: Sequence[RequestT]) -> None:
        """Queue the requests for the next groups, without a limit."""
        self._waiting.extend(requests)
        self.waiting_size += sum(request.size for request in requests)
        self._start_task()

    def _start_task(self) -> None:
        """Start a task if none runs, or if a full group may be queued beside those of the others."""
        has_room = len(self.tasks) < self._max_groups and self._may_overlap
        if not self.tasks or (has_room and self.waiting_size >= self._max_size):
            # in an empty context, not the first request's, because the task serves all requests
            self.tasks.add(asyncio.create_task(self._run(), context=Context()))

    async def _run(self) -> None:
        while group := self._next_group():
            keys = {request.key for request in group}
            self._keys |= keys
            self._start_task()
            try:
                again = await self._work(group)
            except Exception as exc:
                if isinstance(exc, StorageUnavailable):  # waiting for another time-out would not help the others
                    group += self._waiting
                    self._waiting.clear()
                    self.waiting_size = 0
                for request in group:
                    request.fail(exc)
            else:
                self._waiting.extendleft(reversed(again))
                self.waiting_size += sum(request.size for request in again)
                self._may_overlap = not again
            self._keys -= keys
        self.tasks.discard(asyncio.current_task())

    def _next_group(self) -> list[RequestT]:
        """Take the next group from the queue; while others are processed, only a full one."""
        is_further = len(self.tasks) > 1
        if is_further and not self._may_overlap:
            return []
        group: list[RequestT] = []
        passed: list[RequestT] = []
        size = 0
        for request in self._waiting:
            if request.key in self._keys:
                passed.append(request)
            else:
                group.append(request)
                size += request.size
            if size >= self._max_size:
                break
        if is_further and size < self._max_size:
            self._may_overlap = False  # until a group is done
            return []
        for _ in range(len(group) + len(passed)):
            self._waiting.popleft()
        self._waiting.extendleft(reversed(passed))
        self.waiting_size -= size
        return group


class GroupCommitByNode(Generic[RequestT]):
    """Keeps a group commit for each node, so that a node that hangs holds up only its own requests.

    work, max_size, max_groups  of each node, as of GroupCommit
    node_of                     returns the node of a key, which may change while a request waits; None if unknown
    """

    def __init__(
        self,
        work: Callable[[list[RequestT]], Awaitable[list[RequestT]]],
        node_of: Callable[[str], str | None],
        *,
        max_size: int,
        max_groups: int = 1,
    ) -> None:
        self._work = work
        self._node_of = node_of
        self._max_size = max_size
        self._max_groups = max_groups
        self._nodes: dict[str, GroupCommit[RequestT]] = {}
        self._closed = False

    def put(self, requests: Sequence[RequestT]) -> None:
        """Queue all of the requests, or none: StorageBusy when the queue of a node is full."""
        if self._closed:
            raise StorageUnavailable("the store is closed", "closed")
        by_node = self._by_node(requests)
        for name, own in by_node.items():
            self._node(name).require_room(own)
        self._requeue(by_node)

    @property
    def waiting_size(self) -> int:
        """Size of all waiting requests together."""
        return sum(commit.waiting_size for commit in self._nodes.values())

    def requeue(self, requests: Sequence[RequestT]) -> None:
        """Queue requests that were accepted before, without a limit."""
        self._requeue(self._by_node(requests))

    async def close(self) -> None:
        """Refuse new requests, and return when every accepted one is answered."""
        self._closed = True
        # more than once, since a node may requeue to another one
        while tasks := [task for commit in self._nodes.values() for task in commit.tasks]:
            await asyncio.wait(tasks)

    def _requeue(self, by_node: dict[str, list[RequestT]]) -> None:
        for name, own in by_node.items():
            self._node(name).put(own)

    def _by_node(self, requests: Sequence[RequestT]) -> dict[str, list[RequestT]]:
        by_node: defaultdict[str, list[RequestT]] = defaultdict(list)
        for request in requests:
            by_node[self._node_of(request.key) or ""].append(request)
        return by_node

    def _node(self, name: str) -> GroupCommit[RequestT]:
        if name not in self._nodes:

            async def work(group: list[RequestT]) -> list[RequestT]:
                again = await self._work(group)
                if not again:
                    return again  # almost always
                by_node = self._by_node(again)
                own = by_node.pop(name, [])
                self._requeue(by_node)
                return own

            self._nodes[name] = GroupCommit(work, max_size=self._max_size, max_groups=self._max_groups)
        return self._nodes[name]

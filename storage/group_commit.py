"""Group commit on an event loop: requests that arrive while a group is processed form the next group."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import Context
from typing import Generic, Protocol, TypeVar

from storage.errors import StorageBusy, StorageUnavailable

MAX_WAITING = 8192  # the maximum total size of a node's queued requests; an empty queue accepts any


class QueuedRequest(Protocol):
    """A queued request, whose caller waits for the answer."""

    @property
    def size(self) -> int:
        """The size of the request, which counts towards that of its group."""

    def fail(self, cause: Exception) -> None:
        """Answer the caller with the failure."""


RequestT = TypeVar("RequestT", bound=QueuedRequest)


class GroupCommit(Generic[RequestT]):
    """Processes one group of requests after another, without timers, until none is queued.

    work          processes the requests of a group and answers them; returns those that must wait for the next group
    max_size      the size at which a group is full; its last request may exceed it
    waiting_size  the total size of all queued requests
    task          processes the groups; None while no request is queued or processed
    """

    def __init__(self, work: Callable[[list[RequestT]], Awaitable[list[RequestT]]], *, max_size: int) -> None:
        self._work = work
        self._max_size = max_size
        self._waiting: deque[RequestT] = deque()
        self.waiting_size = 0
        self.task: asyncio.Task[None] | None = None

    def require_room(self, requests: Sequence[RequestT]) -> None:
        """Raise StorageBusy if the requests do not fit into the queue."""
        size = sum(request.size for request in requests)
        if self._waiting and self.waiting_size + size > MAX_WAITING:
            raise StorageBusy(f"{self.waiting_size} reads or writes are queued for the store; try again later")

    def put(self, requests: Sequence[RequestT]) -> None:
        """Queue the requests for the next group, without a limit."""
        self._waiting.extend(requests)
        self.waiting_size += sum(request.size for request in requests)
        if self.task is None:
            # in an empty context, not the first request's, because the task serves all requests
            self.task = asyncio.create_task(self._run(), context=Context())

    async def _run(self) -> None:
        while self._waiting:
            group = list(self._next_group(self._max_size))
            try:
                again = await self._work(group)
            except Exception as exc:
                if isinstance(exc, StorageUnavailable):  # waiting for another time-out would not help the others
                    group += self._next_group(self.waiting_size)
                for request in group:
                    request.fail(exc)
            else:
                self._waiting.extendleft(reversed(again))
                self.waiting_size += sum(request.size for request in again)
        self.task = None

    def _next_group(self, room: int) -> Iterator[RequestT]:
        while self._waiting and room > 0:
            request = self._waiting.popleft()
            self.waiting_size -= request.size
            room -= request.size
            yield request


class GroupCommitByNode(Generic[RequestT]):
    """Keeps a group commit for each node, so that a node that hangs holds up only its own requests.

    work, max_size  of each node, as of GroupCommit
    node_of         returns the node of a request, which may change while the request waits
    """

    def __init__(
        self,
        work: Callable[[list[RequestT]], Awaitable[list[RequestT]]],
        node_of: Callable[[RequestT], str],
        *,
        max_size: int,
    ) -> None:
        self._work = work
        self._node_of = node_of
        self._max_size = max_size
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
        while tasks := [commit.task for commit in self._nodes.values() if commit.task is not None]:
            await asyncio.wait(tasks)

    def _requeue(self, by_node: dict[str, list[RequestT]]) -> None:
        for name, own in by_node.items():
            self._node(name).put(own)

    def _by_node(self, requests: Sequence[RequestT]) -> dict[str, list[RequestT]]:
        by_node: defaultdict[str, list[RequestT]] = defaultdict(list)
        for request in requests:
            by_node[self._node_of(request)].append(request)
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

            self._nodes[name] = GroupCommit(work, max_size=self._max_size)
        return self._nodes[name]

"""Micro-batching without a timer: requests that arrive while a batch is worked on form the next one.

The store's `GroupCommit` does the same. But it also retries requests, and it does not drop a request whose caller has
gone. So the two share the idea and no code.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Generic, TypeVar

from starlette.requests import ClientDisconnect

from app.errors import Overloaded

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


def never_gone() -> bool:
    """Return False: the caller always waits for its answers."""
    return False


@dataclass(slots=True, eq=False)
class _Caller(Generic[RequestT, AnswerT]):
    """A caller and its requests, all of which are answered together."""

    requests: Sequence[RequestT]
    is_gone: Callable[[], bool]
    answers: "asyncio.Future[list[AnswerT]]"


class MicroBatcher(Generic[RequestT, AnswerT]):
    """Puts the requests of several callers into one batch, and works on one batch at a time.

    work         returns the answers to a batch, one for each request, in order
    max_batch    the most requests of a batch, except that the requests of one caller stay together
    max_waiting  the most requests that may wait
    max_callers  the most callers that may wait or be worked for
    """

    def __init__(
        self,
        work: Callable[[list[RequestT]], Awaitable[list[AnswerT]]],
        *,
        max_batch: int,
        max_waiting: int,
        max_callers: float = inf,
    ) -> None:
        self._work = work
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._max_callers = max_callers
        self._served = 0  # callers that are worked for
        self._waiting: deque[_Caller[RequestT, AnswerT]] = deque()
        self._waiting_size = 0
        self._running: asyncio.Task[None] | None = None

    def submit(
        self, requests: Sequence[RequestT], is_gone: Callable[[], bool] = never_gone
    ) -> "asyncio.Future[list[AnswerT]]":
        """Return the answers to come, in order, from one batch. If the batch fails, each caller in it gets the failure.

        is_gone  whether the caller no longer takes answers; called before the requests are worked on
        raises   Overloaded        when too many requests wait already
                 ClientDisconnect  when the caller was gone
        """
        self.require_room(requests)
        caller = _Caller[RequestT, AnswerT](requests, is_gone, asyncio.get_running_loop().create_future())
        self._waiting.append(caller)
        self._waiting_size += len(requests)
        if self._running is None:
            self._running = asyncio.create_task(self._run(), context=Context())  # not the context of one request
        return caller.answers

    def require_room(self, requests: Sequence[RequestT]) -> None:
        """Raise Overloaded where `submit` would."""
        is_full = self._waiting and self._waiting_size + len(requests) > self._max_waiting
        if is_full or len(self._waiting) + self._served >= self._max_callers:
            raise Overloaded

    async def _run(self) -> None:
        while self._waiting:
            batch = self._next_batch()
            self._served = len(batch)
            if not batch:  # nobody waits any more
                continue
            try:
                answers = iter(await self._work([request for caller in batch for request in caller.requests]))
            except Exception as exc:
                for caller in batch:
                    if not caller.answers.done():
                        caller.answers.set_exception(exc)
            else:
                for caller in batch:
                    own = list(islice(answers, len(caller.requests)))
                    if not caller.answers.done():  # else the caller was cancelled
                        caller.answers.set_result(own)
        self._served, self._running = 0, None

    def _next_batch(self) -> list[_Caller[RequestT, AnswerT]]:
        batch, room = [], self._max_batch
        while self._waiting and room > 0:
            caller = self._waiting.popleft()
            self._waiting_size -= len(caller.requests)
            if caller.answers.done():
                continue
            if caller.is_gone():
                caller.answers.set_exception(ClientDisconnect())
                continue
            room -= len(caller.requests)
            batch.append(caller)
        return batch


class MicroBatcherByNode(Generic[RequestT, AnswerT]):
    """Keeps a micro-batcher for each node of the store, so that a node that hangs holds up only its own requests.

    work, max_batch, max_waiting  of each node, as of MicroBatcher; `work` is called for several nodes at the same time
    node_of                       returns the node that a request needs, "" where it needs none or there is only one
    max_callers                   of each node that has a name: one that hangs leaves room for requests that need others
    """

    def __init__(
        self,
        work: Callable[[list[RequestT]], Awaitable[list[AnswerT]]],
        node_of: Callable[[RequestT], str],
        *,
        max_batch: int,
        max_waiting: int,
        max_callers: int,
    ) -> None:
        self._work = work
        self._node_of = node_of
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._max_callers = max_callers
        self._nodes: dict[str, MicroBatcher[RequestT, AnswerT]] = {}

    def submit(
        self, requests: Sequence[RequestT], is_gone: Callable[[], bool] = never_gone
    ) -> "asyncio.Future[list[AnswerT]]":
        """Return the answers to come, as `MicroBatcher.submit`: of each node from one batch, or none when one fails."""
        nodes = [self._node_of(request) for request in requests]
        if len(names := set(nodes)) == 1:
            return self._batcher(nodes[0]).submit(requests, is_gone)  # almost always
        own = {name: [one for one, node in zip(requests, nodes, strict=True) if node == name] for name in names}
        for name, of_node in own.items():
            self._batcher(name).require_room(of_node)
        submitted = asyncio.gather(*(self._batcher(name).submit(of_node, is_gone) for name, of_node in own.items()))

        async def in_order() -> list[AnswerT]:
            by_node = dict(zip(own, map(iter, await submitted), strict=True))
            return [next(by_node[node]) for node in nodes]

        return asyncio.ensure_future(in_order())

    def _batcher(self, name: str) -> MicroBatcher[RequestT, AnswerT]:
        if name not in self._nodes:
            max_callers = self._max_callers if name else inf
            self._nodes[name] = MicroBatcher(
                self._work, max_batch=self._max_batch, max_waiting=self._max_waiting, max_callers=max_callers
            )
        return self._nodes[name]

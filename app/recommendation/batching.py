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
    """

    def __init__(
        self, work: Callable[[list[RequestT]], Awaitable[list[AnswerT]]], *, max_batch: int, max_waiting: int
    ) -> None:
        self._work = work
        self._max_batch = max_batch
        self._max_waiting = max_waiting
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
        if self._waiting and self._waiting_size + len(requests) > self._max_waiting:
            raise Overloaded
        caller = _Caller[RequestT, AnswerT](requests, is_gone, asyncio.get_running_loop().create_future())
        self._waiting.append(caller)
        self._waiting_size += len(requests)
        if self._running is None:
            self._running = asyncio.create_task(self._run(), context=Context())  # not the context of one request
        return caller.answers

    async def _run(self) -> None:
        while self._waiting:
            batch = self._next_batch()
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
        self._running = None

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

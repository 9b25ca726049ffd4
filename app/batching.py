"""Batches without a timer: what arrives while one is worked on forms the next."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Generic, TypeVar

from starlette.requests import ClientDisconnect

from app.errors import Overloaded

AskT = TypeVar("AskT")
AnswerT = TypeVar("AnswerT")


def never() -> bool:
    return False


@dataclass(slots=True, eq=False)
class _Waiter(Generic[AskT, AnswerT]):
    """Who asked, and waits for all of the answers."""

    asks: Sequence[AskT]
    is_gone: Callable[[], bool]
    answers: "asyncio.Future[list[AnswerT]]"


class Batching(Generic[AskT, AnswerT]):
    """Puts together what several callers ask at the same time.

    work     answers a batch, one answer for each ask, in order; one batch at a time
    at_once  asks of a batch, save those of one caller, which stay together
    at_most  asks that may wait
    """

    def __init__(self, work: Callable[[list[AskT]], Awaitable[list[AnswerT]]], *, at_once: int, at_most: int) -> None:
        self._work = work
        self._at_once = at_once
        self._at_most = at_most
        self._waiting: deque[_Waiter[AskT, AnswerT]] = deque()
        self._asks_waiting = 0
        self._running: asyncio.Task[None] | None = None

    async def answers(self, asks: Sequence[AskT], is_gone: Callable[[], bool] = never) -> list[AnswerT]:
        """The answers, in order, from one batch; of a failed batch everybody gets the failure.

        is_gone  whether nobody would take the answers any more, asked before they are worked on
        raises   Overloaded        where too much waits already
                 ClientDisconnect  for who was gone
        """
        if self._waiting and self._asks_waiting + len(asks) > self._at_most:
            raise Overloaded
        waiter = _Waiter[AskT, AnswerT](asks, is_gone, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._asks_waiting += len(asks)
        if self._running is None:
            self._running = asyncio.create_task(self._run(), context=Context())  # no one's request
        return await waiter.answers

    async def _run(self) -> None:
        while batch := list(self._next_batch()):
            try:
                answers = iter(await self._work([ask for waiter in batch for ask in waiter.asks]))
            except Exception as exc:
                for waiter in batch:
                    if not waiter.answers.done():
                        waiter.answers.set_exception(exc)
            else:
                for waiter in batch:
                    own = [next(answers) for _ in waiter.asks]
                    if not waiter.answers.done():  # else whoever waited was cancelled
                        waiter.answers.set_result(own)
        self._running = None

    def _next_batch(self) -> Iterator[_Waiter[AskT, AnswerT]]:
        room = self._at_once
        while self._waiting and room > 0:
            waiter = self._waiting.popleft()
            self._asks_waiting -= len(waiter.asks)
            if waiter.answers.done():
                continue
            if waiter.is_gone():
                waiter.answers.set_exception(ClientDisconnect())
                continue
            room -= len(waiter.asks)
            yield waiter

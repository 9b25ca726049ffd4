"""Micro-batching without a timer: requests that arrive while a batch is processed form the next batch.

A batch begins when a turn of the event loop has brought no further request, or when requests of several keys wait.

Where batches can overlap, for example copying to a GPU and computing on it, several batches run at the same time.

Callers share the batches fairly, by the cost of their requests. The requests of one key queue behind each other. They
delay the requests of other keys by at most one batch and their share of the next one.

The store's `GroupCommit` shares the idea, but no code: it retries requests, and keeps those whose caller has gone.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush, heapreplace
from itertools import count
from math import inf
from typing import Generic, NamedTuple, Protocol, TypeVar

from starlette.requests import ClientDisconnect

from app.errors import Overloaded

FEW_BETWEEN = 1024  # requests of one flow between two of others, for which flows still share batches
MAX_TURNS = 16  # of the event loop, for which a batch waits for requests that arrive at the same time

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
LaneT = TypeVar("LaneT", bound=Hashable)


def never_disconnected() -> bool:
    """Return False: the caller always waits for its answers."""
    return False


class Requester(NamedTuple):
    """The sender of requests.

    is_disconnected  returns whether nobody waits for the answers any more
    flow             the name of the flow that the requests share turns in: a key
    """

    is_disconnected: Callable[[], bool] = never_disconnected
    flow: str = ""


ANYBODY = Requester()


class Waiter(Protocol[AnswerT]):
    """Receives the answers of a call, as a future does."""

    def done(self) -> bool:
        """Return whether it has received the answers or an exception, or was cancelled."""

    def set_result(self, answers: list[AnswerT], /) -> None:
        """Receive the answers, in order."""

    def set_exception(self, failure: Exception, /) -> None:
        """Receive the exception that replaces them."""


class Limits(NamedTuple):
    """The capacity of a batcher. When the queue is full, each flow may still use its equal share of it.

    max_batch    the largest total cost of a batch with more than one request
    max_waiting  the largest number of waiting requests
    max_callers  the largest number of callers that wait or are being served
    max_running  the largest number of batches that run at the same time
    short_batch  returns the largest total cost of a batch while several flows have requests
    """

    max_batch: float
    max_waiting: int
    max_callers: float = inf
    max_running: int = 1
    short_batch: Callable[[], float] = lambda: inf


class Shares:
    """How much of a shared capacity each flow uses."""

    def __init__(self) -> None:
        self.total = 0
        self._by_flow: dict[str, int] = {}

    def has_room(self, flow: str, more: int, most: float) -> bool:
        """Return whether the flow may use `more`: while the total is at most `most`, and then up to its equal share."""
        if self.total + more <= most:
            return True
        flows = len(self._by_flow) + (flow not in self._by_flow)
        return self._by_flow.get(flow, 0) + more <= most / flows

    def change(self, flow: str, by: int) -> None:
        """Add a number, which may be negative, to the flow's count."""
        self.total += by
        of_flow = self._by_flow.get(flow, 0) + by
        if of_flow:
            self._by_flow[flow] = of_flow
        else:
            self._by_flow.pop(flow, None)


@dataclass(slots=True, eq=False)
class _Call(Generic[RequestT, AnswerT]):
    """A call and its requests, which may run in several batches and are answered together."""

    requests: Sequence[RequestT]
    requester: Requester
    waiter: Waiter[AnswerT]
    taken: int = 0
    answers: dict[int, AnswerT] = field(default_factory=dict)  # by position: batches may finish out of order

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for the answers."""
        if self.waiter.done():
            return True
        if is_gone := self.requester.is_disconnected():
            self.waiter.set_exception(ClientDisconnect())
        return is_gone

    def add(self, place: int, answer: AnswerT | Exception) -> None:
        """Add the answer to the request at that position; the last answer, or an exception, completes the call."""
        if isinstance(answer, Exception):
            self.fail(answer)
            return
        self.answers[place] = answer
        if len(self.answers) == len(self.requests) and not self.waiter.done():  # else it was cancelled
            self.waiter.set_result([self.answers[place] for place in range(len(self.requests))])

    def fail(self, failure: Exception) -> None:
        """Complete the call with an exception."""
        if not self.waiter.done():
            self.waiter.set_exception(failure)


class FairQueue(Generic[RequestT, AnswerT]):
    """Waiting calls, grouped into flows that take turns weighted by the cost of their requests.

    Start-time fair queueing (Goyal, Vin and Cheng, 1996): the flow that has received the least so far goes first. A
    flow that begins to wait, for the first time or again, starts with as much as the flow whose turn it is.

    cost  returns the cost of one request
    """

    def __init__(self, cost: Callable[[RequestT], float]) -> None:
        self._cost = cost
        self._flows: dict[str, deque[_Call[RequestT, AnswerT]]] = {}
        self._turns: list[tuple[float, int, str]] = []  # a heap: what each flow has received, and a tie breaker
        self._got = 0.0  # what the flow of the last turn had received
        self._numbers = count()
        self._last_flow: str | None = None
        self._in_a_row = FEW_BETWEEN  # requests of the last flow
        self.requests = Shares()

    def __bool__(self) -> bool:
        """Return whether any requests are waiting."""
        return bool(self._turns)

    @property
    def has_several_flows(self) -> bool:
        """Return whether requests of more than one flow are waiting."""
        return len(self._turns) > 1

    @property
    def is_shared(self) -> bool:
        """Return whether requests of more than one flow are waiting, or were taken lately."""
        return self.has_several_flows or self._in_a_row < FEW_BETWEEN

    def put(self, call: _Call[RequestT, AnswerT]) -> None:
        """Add a call behind the other calls of its flow."""
        flow = call.requester.flow
        waiting = self._flows.get(flow)
        if waiting is None:
            waiting = self._flows[flow] = deque()
            heappush(self._turns, (self._got, next(self._numbers), flow))
        waiting.append(call)
        self.requests.change(flow, len(call.requests))

    def take(self, most: float) -> list[tuple[_Call[RequestT, AnswerT], int]]:
        """Take (call, position) pairs: one, more while they cost at most `most`; none if all callers are gone."""
        taken: list[tuple[_Call[RequestT, AnswerT], int]] = []
        while self._turns:
            got, _, flow = self._turns[0]
            waiting = self._flows[flow]
            call = waiting[0]
            if call.is_over:
                self.requests.change(flow, call.taken - len(call.requests))
                waiting.popleft()
                self._end_turn(flow, got)
                continue
            cost = self._cost(call.requests[call.taken])
            if taken and cost > most:
                break
            most -= cost
            self._got = got
            self._note(flow)
            taken.append((call, call.taken))
            call.taken += 1
            self.requests.change(flow, -1)
            if call.taken == len(call.requests):
                waiting.popleft()
            self._end_turn(flow, got + cost)
        return taken

    def _note(self, flow: str) -> None:
        if flow == self._last_flow:
            self._in_a_row += 1
        elif self._last_flow is not None:
            self._in_a_row = 0
        self._last_flow = flow

    def _end_turn(self, flow: str, got: float) -> None:
        if self._flows[flow]:
            heapreplace(self._turns, (got, next(self._numbers), flow))
        else:
            heappop(self._turns)
            del self._flows[flow]


def _hand_over(waiter: Waiter[AnswerT], answers: "asyncio.Future[list[AnswerT]]") -> None:
    if not (answers.cancelled() or waiter.done()):
        if isinstance(failure := answers.exception(), Exception):
            waiter.set_exception(failure)
        else:
            waiter.set_result(answers.result())


class MicroBatcher(Generic[RequestT, AnswerT]):
    """Combines the requests of several callers into batches, and runs one or a few batches at a time.

    work    returns the answers to a batch, one for each request, in order; an exception in the place of an answer fails
            only the caller with that request
    cost    returns the cost of one request
    limits  the limits on batches and on the queue
    """

    def __init__(
        self,
        work: Callable[[list[RequestT]], Awaitable[Sequence[AnswerT | Exception]]],
        cost: Callable[[RequestT], float],
        limits: Limits,
    ) -> None:
        self._work = work
        self._limits = limits
        self._waiting: FairQueue[RequestT, AnswerT] = FairQueue(cost)
        self._callers = Shares()  # counted only if they are limited
        self._running = 0
        self._has_company = True  # whether the last batch had several requests, or others came meanwhile
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop keeps only weak references to tasks

    def submit(self, requests: Sequence[RequestT], requester: Requester = ANYBODY) -> "asyncio.Future[list[AnswerT]]":
        """Return a future of the answers, in order. If a batch fails, every caller with a request in it gets the error.

        raises   Overloaded        when the queue is full
                 ClientDisconnect  when the caller has disconnected
        """
        self.require_room(requests, requester)
        waiter: asyncio.Future[list[AnswerT]] = asyncio.get_running_loop().create_future()
        if self._limits.max_callers < inf:
            self._callers.change(requester.flow, 1)
            waiter.add_done_callback(lambda _: self._callers.change(requester.flow, -1))
        self._put(_Call(requests, requester, waiter))
        return waiter

    def submit_one(self, request: RequestT, requester: Requester, waiter: Waiter[AnswerT]) -> None:
        """Submit one request, as `submit` does, whose answer the waiter receives without an event loop's turn."""
        if self._limits.max_callers < inf:
            self.submit([request], requester).add_done_callback(partial(_hand_over, waiter))
            return
        self.require_room([request], requester)
        self._put(_Call([request], requester, waiter))

    def _put(self, call: _Call[RequestT, AnswerT]) -> None:
        self._waiting.put(call)
        if self._running < self._limits.max_running:
            self._running += 1
            self._begin()

    async def answer_one(self, request: RequestT, requester: Requester = ANYBODY) -> AnswerT:
        """Return the answer to one request, as `submit` does; without creating a task when the batcher is idle."""
        if self._running or self._waiting or self._limits.max_callers < inf:
            return (await self.submit([request], requester))[0]
        self._running += 1
        try:
            (answer,) = await self._work([request])
            if isinstance(answer, Exception):
                raise answer
            return answer
        finally:
            if self._waiting:  # requests arrived meanwhile
                self._begin()
            else:
                self._running -= 1

    def require_room(self, requests: Sequence[RequestT], requester: Requester) -> None:
        """Raise Overloaded if `submit` would."""
        waiting, most = self._waiting.requests, self._limits.max_callers
        is_full = waiting.total > 0 and not waiting.has_room(requester.flow, len(requests), self._limits.max_waiting)
        if is_full or (most < inf and not self._callers.has_room(requester.flow, 1, most)):
            raise Overloaded

    def _begin(self) -> None:
        task = asyncio.create_task(self._run(), context=Context())  # not the context of one request
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        try:
            while self._waiting:
                most = min(self._limits.max_batch, self._limits.short_batch() if self._waiting.is_shared else inf)
                await self._let_others_arrive(most)
                batch = self._waiting.take(most)  # empty if all callers have gone
                try:
                    answers = await self._work([call.requests[place] for call, place in batch]) if batch else ()
                    for (call, place), answer in zip(batch, answers, strict=True):
                        call.add(place, answer)
                except (Exception, asyncio.CancelledError) as exc:
                    for call, _ in batch:
                        call.fail(exc if isinstance(exc, Exception) else RuntimeError("the work was cancelled"))
                    if (task := asyncio.current_task()) and task.cancelling():
                        raise
                self._has_company = len(batch) > 1 or bool(self._waiting)
        finally:
            self._running -= 1

    async def _let_others_arrive(self, most: float) -> None:
        """Wait as long as each turn of the event loop brings further requests, and the next batch has room for them.

        Clients that get their answers at the same time ask again at almost the same time; an only client does not wait.
        No flow waits for clients of another one longer than a turn, in which others run even if the work never awaits.
        """
        waiting, before = self._waiting.requests, 0
        for _ in range(MAX_TURNS if self._has_company else 0):
            if before == waiting.total or before >= most:
                return
            if before and self._waiting.has_several_flows:
                return
            before = waiting.total
            await asyncio.sleep(0)


class MicroBatcherByLane(Generic[LaneT, RequestT, AnswerT]):
    """Keeps one micro-batcher per lane, so that requests of one lane do not wait for those of another.

    work       answers a batch of requests of one lane; it runs for several lanes at the same time
    cost       returns the cost of one request
    lane_of    returns the lane of a request
    limits_of  returns the limits of a lane
    """

    def __init__(
        self,
        work: Callable[[list[RequestT]], Awaitable[Sequence[AnswerT | Exception]]],
        cost: Callable[[RequestT], float],
        lane_of: Callable[[RequestT], LaneT],
        limits_of: Callable[[LaneT], Limits],
    ) -> None:
        self._work = work
        self._cost = cost
        self._lane_of = lane_of
        self._limits_of = limits_of
        self._batchers: dict[LaneT, MicroBatcher[RequestT, AnswerT]] = {}

    def submit(self, requests: Sequence[RequestT], requester: Requester = ANYBODY) -> "asyncio.Future[list[AnswerT]]":
        """Return a future of the answers, in order, as `MicroBatcher.submit` does: all, or none if a batch fails."""
        if len(requests) == 1:
            return self._batcher(self._lane_of(requests[0])).submit(requests, requester)
        lanes = [self._lane_of(request) for request in requests]
        if len(names := set(lanes)) == 1:
            return self._batcher(lanes[0]).submit(requests, requester)  # the common case
        own = {name: [one for one, lane in zip(requests, lanes, strict=True) if lane == name] for name in names}
        for name, of_lane in own.items():
            self._batcher(name).require_room(of_lane, requester)
        submitted = asyncio.gather(*(self._batcher(name).submit(of_lane, requester) for name, of_lane in own.items()))

        async def in_order() -> list[AnswerT]:
            by_lane = dict(zip(own, map(iter, await submitted), strict=True))
            return [next(by_lane[lane]) for lane in lanes]

        return asyncio.ensure_future(in_order())

    def submit_one(self, request: RequestT, requester: Requester, waiter: Waiter[AnswerT]) -> None:
        """Submit one request, as `MicroBatcher.submit_one` does."""
        self._batcher(self._lane_of(request)).submit_one(request, requester, waiter)

    async def answer_one(self, request: RequestT, requester: Requester = ANYBODY) -> AnswerT:
        """Return the answer to one request, as `MicroBatcher.answer_one` does."""
        return await self._batcher(self._lane_of(request)).answer_one(request, requester)

    def _batcher(self, lane: LaneT) -> MicroBatcher[RequestT, AnswerT]:
        if lane not in self._batchers:
            self._batchers[lane] = MicroBatcher(self._work, self._cost, self._limits_of(lane))
        return self._batchers[lane]

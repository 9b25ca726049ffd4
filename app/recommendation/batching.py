"""Micro-batching without a timer: requests that arrive while a batch is worked on form the next one.

Where batches overlap, as copies to a GPU and its computations do, a few are worked on at the same time.

Callers share the batches fairly, by what their requests cost: those of one key wait for each other, and hold the
requests of other keys up by at most a batch and their share of the next one.

The store's `GroupCommit` does the same. But it also retries requests, and it does not drop a request whose caller has
gone. So the two share the idea and no code.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count
from math import inf
from typing import Generic, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect

from app.errors import Overloaded

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
LaneT = TypeVar("LaneT", bound=Hashable)


def never_disconnected() -> bool:
    """Return False: the caller always waits for its answers."""
    return False


class Requester(NamedTuple):
    """Who sends requests.

    is_disconnected  whether nobody takes the answers any more
    flow             what shares one turn with all that has the same name: a key
    """

    is_disconnected: Callable[[], bool] = never_disconnected
    flow: str = ""


ANYBODY = Requester()


class Limits(NamedTuple):
    """How much a batcher works on, and how much may wait for it; each flow may have its share of what may wait.

    max_batch    the most that the requests of a batch cost together, if there is more than one
    max_waiting  the most requests that may wait
    max_callers  the most callers that may wait or be worked for
    max_running  the most batches that are worked on at the same time
    """

    max_batch: float
    max_waiting: int
    max_callers: float = inf
    max_running: int = 1


class Shares:
    """How much each flow has of what all may have together."""

    def __init__(self) -> None:
        self.total = 0
        self._by_flow: dict[str, int] = {}

    def has_room(self, flow: str, more: int, most: float) -> bool:
        """Return whether the flow may have more: `most` in all, and then its equal share of them."""
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
    """A call and its requests, which may be worked on in several batches and are answered together."""

    requests: Sequence[RequestT]
    requester: Requester
    waiter: "asyncio.Future[list[AnswerT]]"
    taken: int = 0
    answers: dict[int, AnswerT] = field(default_factory=dict)  # by place: batches may end in another order

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for the answers."""
        if not self.waiter.done() and self.requester.is_disconnected():
            self.waiter.set_exception(ClientDisconnect())
        return self.waiter.done()

    def add(self, place: int, answer: AnswerT) -> None:
        """Add the answer to the request at that place; the last one ends the waiting."""
        self.answers[place] = answer
        if len(self.answers) == len(self.requests) and not self.waiter.done():  # else it was cancelled
            self.waiter.set_result([self.answers[place] for place in range(len(self.requests))])

    def fail(self, failure: Exception) -> None:
        """End the waiting without answers."""
        if not self.waiter.done():
            self.waiter.set_exception(failure)


class FairQueue(Generic[RequestT, AnswerT]):
    """Waiting calls in flows, which take turns weighted by the cost of their requests.

    Start-time fair queueing (Goyal, Vin and Cheng, 1996): the request of the flow that has got least so far goes first.
    A flow that begins to wait begins with as much as the one whose turn it is.

    cost  what one request costs
    """

    def __init__(self, cost: Callable[[RequestT], float]) -> None:
        self._cost = cost
        self._flows: dict[str, deque[_Call[RequestT, AnswerT]]] = {}
        self._turns: list[tuple[float, int, str]] = []  # a heap: what a flow has got, and a number for ties
        self._got = 0.0  # by the flow whose turn was last
        self._numbers = count()
        self.requests = Shares()

    def __bool__(self) -> bool:
        """Return whether any request waits."""
        return bool(self._turns)

    def put(self, call: _Call[RequestT, AnswerT]) -> None:
        """Add a call behind those of its flow."""
        flow = call.requester.flow
        waiting = self._flows.get(flow)
        if waiting is None:
            waiting = self._flows[flow] = deque()
            heappush(self._turns, (self._got, next(self._numbers), flow))
        waiting.append(call)
        self.requests.change(flow, len(call.requests))

    def take(self, most: float) -> list[tuple[_Call[RequestT, AnswerT], int]]:
        """Take the requests whose turn it is: one, and more as long as all cost at most `most`.

        Each is its call, and its place among the requests of the call.
        """
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
            taken.append((call, call.taken))
            call.taken += 1
            self.requests.change(flow, -1)
            if call.taken == len(call.requests):
                waiting.popleft()
            self._end_turn(flow, got + cost)
        return taken

    def _end_turn(self, flow: str, got: float) -> None:
        if self._flows[flow]:
            heapreplace(self._turns, (got, next(self._numbers), flow))
        else:
            heappop(self._turns)
            del self._flows[flow]


class MicroBatcher(Generic[RequestT, AnswerT]):
    """Puts the requests of several callers into one batch, and works on one batch at a time, or on a few.

    work    returns the answers to a batch, one for each request, in order
    cost    what one request costs
    limits  of batches and of what waits
    """

    def __init__(
        self,
        work: Callable[[list[RequestT]], Awaitable[list[AnswerT]]],
        cost: Callable[[RequestT], float],
        limits: Limits,
    ) -> None:
        self._work = work
        self._limits = limits
        self._waiting: FairQueue[RequestT, AnswerT] = FairQueue(cost)
        self._callers = Shares()  # counted only where they have a limit
        self._running = 0
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop itself would let them go

    def submit(self, requests: Sequence[RequestT], requester: Requester = ANYBODY) -> "asyncio.Future[list[AnswerT]]":
        """Return the answers to come, in order. If a batch fails, each caller with a request in it gets the failure.

        raises   Overloaded        when too many requests wait already
                 ClientDisconnect  when the caller was gone
        """
        self.require_room(requests, requester)
        call = _Call[RequestT, AnswerT](requests, requester, asyncio.get_running_loop().create_future())
        self._waiting.put(call)
        if self._limits.max_callers < inf:
            self._callers.change(requester.flow, 1)
            call.waiter.add_done_callback(lambda _: self._callers.change(requester.flow, -1))
        if self._running < self._limits.max_running:
            self._running += 1
            self._begin()
        return call.waiter

    async def answer_one(self, request: RequestT, requester: Requester = ANYBODY) -> AnswerT:
        """Return the answer to one request, as `submit` does; where nothing is at work, without a task of its own."""
        if self._running or self._waiting or self._limits.max_callers < inf:
            return (await self.submit([request], requester))[0]
        self._running += 1
        try:
            return (await self._work([request]))[0]
        finally:
            if self._waiting:  # others have come meanwhile
                self._begin()
            else:
                self._running -= 1

    def require_room(self, requests: Sequence[RequestT], requester: Requester) -> None:
        """Raise Overloaded where `submit` would."""
        is_full = self._waiting and not self._waiting.requests.has_room(
            requester.flow, len(requests), self._limits.max_waiting
        )
        if is_full or not self._callers.has_room(requester.flow, 1, self._limits.max_callers):
            raise Overloaded

    def _begin(self) -> None:
        task = asyncio.create_task(self._run(), context=Context())  # not the context of one request
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        while self._waiting:
            batch = self._waiting.take(self._limits.max_batch)
            if not batch:  # nobody waits any more
                continue
            try:
                answers = await self._work([call.requests[place] for call, place in batch])
            except Exception as exc:
                for call, _ in batch:
                    call.fail(exc)
            else:
                for (call, place), answer in zip(batch, answers, strict=True):
                    call.add(place, answer)
            if self._waiting:
                await asyncio.sleep(0)  # work that never waits must not hold everybody else up
        self._running -= 1


class MicroBatcherByLane(Generic[LaneT, RequestT, AnswerT]):
    """Keeps a micro-batcher for each lane, so that requests of one lane do not wait for those of another.

    work       answers a batch, whose requests are of one lane; it is called for several lanes at the same time
    cost       what one request costs
    lane_of    returns the lane of a request
    limits_of  returns the limits of a lane
    """

    def __init__(
        self,
        work: Callable[[list[RequestT]], Awaitable[list[AnswerT]]],
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
        """Return the answers to come, in order, as `MicroBatcher.submit`: all of them, or none when a batch fails."""
        lanes = [self._lane_of(request) for request in requests]
        if len(names := set(lanes)) == 1:
            return self._batcher(lanes[0]).submit(requests, requester)  # almost always
        own = {name: [one for one, lane in zip(requests, lanes, strict=True) if lane == name] for name in names}
        for name, of_lane in own.items():
            self._batcher(name).require_room(of_lane, requester)
        submitted = asyncio.gather(*(self._batcher(name).submit(of_lane, requester) for name, of_lane in own.items()))

        async def in_order() -> list[AnswerT]:
            by_lane = dict(zip(own, map(iter, await submitted), strict=True))
            return [next(by_lane[lane]) for lane in lanes]

        return asyncio.ensure_future(in_order())

    async def answer_one(self, request: RequestT, requester: Requester = ANYBODY) -> AnswerT:
        """Return the answer to one request, as `MicroBatcher.answer_one`."""
        return await self._batcher(self._lane_of(request)).answer_one(request, requester)

    def _batcher(self, lane: LaneT) -> MicroBatcher[RequestT, AnswerT]:
        if lane not in self._batchers:
            self._batchers[lane] = MicroBatcher(self._work, self._cost, self._limits_of(lane))
        return self._batchers[lane]

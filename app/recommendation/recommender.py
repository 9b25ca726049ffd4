"""Answers recommendation requests in batches: reads the users' states, and ranks the catalogue for each user."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from math import inf
from operator import attrgetter
from typing import NamedTuple, Self

from typing_extensions import override

from app.errors import ItemNotFound
from app.events.click_through import ClickThrough
from app.observability import tracing
from app.observability.metrics import Metrics
from app.recommendation.batching import ANYBODY, Limits, MicroBatcherByLane, Requester, Waiter
from app.recommendation.cost import (
    FEW_CATEGORIES,
    LIGHT,
    PLAIN_FIELDS,
    SHORT_LOG,
    cost_of,
    cost_of_length,
    cost_of_log,
    filtered_categories,
    is_light,
)
from app.recommendation.executor import AdaptiveExecutor, EngineThreads
from app.recommendation.filters import EVERYTHING, Selection, Selector
from app.recommendation.ranking.batch_ranker import BatchRanker, RankerInput
from app.recommendation.ranking.generation_context import GenerationContext
from app.recommendation.ranking.stored_users import NOTHING_SEEN, SeenRows
from app.recommendation.state_reader import LogQuery, LogReader, StateReader, carried_rows, needs_events
from app.recommendation.user_properties import UserPropertyReader
from app.schemas.recommendations import PersonalSearch, RecommendationRequest, Recommendations
from model.inference.captured_batches import SLOTS
from storage.errors import StorageError

MAX_BATCH = 64.0  # total cost of one read and one engine run; in a larger batch all requests would wait longer
MAX_COSTLY_BATCH = 16.0
MAX_CALLERS_OF_NODE = 32  # requests that may wait for one node of a cluster
MAX_WAITING = 1024  # requests; with ten million items some 2 s of work

logger = logging.getLogger(__name__)


class Lane(NamedTuple):
    """What the requests of a batch share: the node that stores their states, and whether they are costly."""

    node: str
    is_costly: bool


def limits_of(lane: Lane, short_batch: Callable[[], float], max_running: int = 1) -> Limits:
    """Return the limits of a lane. They ensure that a hanging node of a cluster does not block requests to other nodes.

    short_batch  returns the largest total cost of a light batch while several keys have requests
    max_running  the largest number of light batches that run at a time
    """
    max_callers = MAX_CALLERS_OF_NODE if lane.node else inf
    if lane.is_costly:
        return Limits(MAX_COSTLY_BATCH, MAX_WAITING, max_callers)
    return Limits(MAX_BATCH, MAX_WAITING, max_callers, max_running, short_batch)


class BatchEntry(NamedTuple):
    """A request of a batch, with its trace, lane and cost.

    selection    the items and scores that its expressions select
    seen         what was read from its user's log; None if it is needed and cannot be read now
    submitted_s  the time at which it was submitted, by ``time.perf_counter``
    """

    request: RecommendationRequest
    selection: Selection
    trace: tracing.Trace | None
    seen: SeenRows | None
    lane: Lane
    cost: float
    submitted_s: float

    @classmethod
    def of(
        cls, request: RecommendationRequest, selection: Selection, seen: SeenRows | None, states: StateReader
    ) -> Self:
        """Return the entry of a request that is submitted now."""
        node = "" if request.user_id is None else states.node_of(request.user_id)
        cost = cost_of(request)
        if cost >= LIGHT and seen is not None and seen.size <= SHORT_LOG:
            cost -= cost_of_log(request)  # the log is already read, so the request may join a batch of light ones
        lane = Lane(node, not is_light(request, cost))
        return cls(request, selection, tracing.current.get(), seen, lane, cost, time.perf_counter())


class Readers(NamedTuple):
    """The readers of users' states, logs and properties."""

    states: StateReader
    logs: LogReader
    properties: UserPropertyReader


class BaseRecommender(ABC):
    """Answers recommendation requests."""

    @abstractmethod
    def recommend(
        self, requests: Sequence[RecommendationRequest], requester: Requester = ANYBODY
    ) -> Awaitable[list[Recommendations]]:
        """Return one answer for each request, in order.

        raises   Overloaded, ClientDisconnect
        """

    @abstractmethod
    def recommend_plain(
        self, request: RecommendationRequest, cost: float, waiter: Waiter[Recommendations], requester: Requester
    ) -> None:
        """Send the answer to a plain, light request for a user to the waiter.

        raises   Overloaded
        """

    @abstractmethod
    async def similar(
        self, item_id: str, request: RecommendationRequest, requester: Requester = ANYBODY
    ) -> Recommendations:
        """Return the items most similar to this item, among those that the request, which has no user, allows.

        raises  ItemNotFound, and as `recommend`
        """


class Recommender(BaseRecommender):
    """Answers recommendation requests from one generation, whose catalogue it ranks with `ranker`."""

    def __init__(
        self,
        context: GenerationContext,
        readers: Readers,
        threads: EngineThreads,
        metrics: Metrics,
        clicks: ClickThrough,
        experiment: str = "",
    ) -> None:
        self._context = context
        self._readers = readers
        self.ranker = BatchRanker(context, clicks.ids, experiment)
        self._selector = Selector(context.catalogue, readers.properties, threads.shared)
        max_running = SLOTS if context.engine.has_graphs else 1
        self._executor = AdaptiveExecutor(self.ranker.rank, threads, len(context.catalogue), max_running)
        self._metrics = metrics
        self._clicks = clicks
        self._preparing_similarity = asyncio.Lock()
        self._batcher: MicroBatcherByLane[Lane, BatchEntry, Recommendations] = MicroBatcherByLane(
            self._answer_each,
            attrgetter("cost"),
            attrgetter("lane"),
            partial(limits_of, short_batch=self._executor.short_batch, max_running=max_running),
        )

    @override
    def recommend(
        self, requests: Sequence[RecommendationRequest], requester: Requester = ANYBODY
    ) -> Awaitable[list[Recommendations]]:
        # Unknown users get popular items. So do users whose long history is not yet folded for this generation, and all
        # users whom the store cannot read now.
        engine = self._context.engine
        if any(request.model_fields_set - PLAIN_FIELDS for request in requests):
            has_because = any(request.because is not None for request in requests)
            if has_because and not (engine.has_similarity or engine.is_lost):
                return self._prepare_similarity_and_recommend(requests, requester)
            if any(map(_needs_reading, requests)) or not self._context.catalogue.is_complete:
                return self._read_and_recommend(requests, requester)
        states = self._readers.states
        return self._batcher.submit(
            [BatchEntry.of(request, EVERYTHING, NOTHING_SEEN, states) for request in requests], requester
        )

    @override
    def recommend_plain(
        self, request: RecommendationRequest, cost: float, waiter: Waiter[Recommendations], requester: Requester
    ) -> None:
        lane = Lane(self._readers.states.node_of(str(request.user_id)), is_costly=False)
        trace, submitted_s = tracing.current.get(), time.perf_counter()
        entry = BatchEntry(request, EVERYTHING, trace, NOTHING_SEEN, lane, cost, submitted_s)
        self._batcher.submit_one(entry, requester, waiter)

    async def _read_and_recommend(
        self, requests: Sequence[RecommendationRequest], requester: Requester
    ) -> list[Recommendations]:
        """Evaluate expressions and read long logs before the requests join batches, so that no other request waits."""
        begin_s = time.perf_counter()
        selections = await self._selector.select(requests, requester)
        select_end_s = time.perf_counter()
        seen: Mapping[LogQuery, SeenRows] = {}
        queries = [LogQuery.of(request) for request in requests]
        if logs := [query for query in dict.fromkeys(queries) if query is not None]:
            seen = await self._readers.logs.read(logs, self._context, requester)
        if (request_trace := tracing.current.get()) is not None:
            request_trace.add({"expressions": select_end_s - begin_s})
            if logs:
                request_trace.add({"log": time.perf_counter() - select_end_s})
        entries = [
            BatchEntry.of(
                request, selection, self._carried(request) if log is None else seen.get(log), self._readers.states
            )
            for request, selection, log in zip(requests, selections, queries, strict=True)
        ]
        return await self._batcher.submit(entries, requester)

    def _carried(self, request: RecommendationRequest) -> SeenRows:
        """Return the events that a request without a log refers to: those in its visitor's state."""
        if request.state is None or not needs_events(request):
            return NOTHING_SEEN
        return carried_rows(request, self._context.generation, self._context.catalogue)

    async def _prepare_similarity_and_recommend(
        self, requests: Sequence[RecommendationRequest], requester: Requester
    ) -> list[Recommendations]:
        engine = self._context.engine
        async with self._preparing_similarity:  # slow, and done only once
            if not engine.has_similarity:
                try:
                    await asyncio.to_thread(engine.prepare_similarity)
                except RuntimeError:
                    if not engine.has_lost_device():
                        raise
        return await self.recommend(requests, requester)

    @override
    async def similar(
        self, item_id: str, request: RecommendationRequest, requester: Requester = ANYBODY
    ) -> Recommendations:
        if item_id not in self._context.catalogue.row_of or not len(self._context.generation.codes):
            raise ItemNotFound("this item is in no model; check its id, or show popular items until it has codes")
        of_item = request.model_copy(update={"because": item_id, "current_item": item_id})
        (answer,) = await self.recommend([of_item], requester)
        return answer

    async def _answer_each(self, batch: Sequence[BatchEntry]) -> Sequence[Recommendations | Exception]:
        """Answer a batch; if that fails unexpectedly, answer each request alone, so that only the cause of it fails."""
        try:
            return await self._answer_batch(batch)
        except Exception as exc:
            if len(batch) == 1 or isinstance(exc, StorageError):
                raise
            logger.exception("cannot answer %d requests together; answering each alone", len(batch))
        answers: list[Recommendations | Exception] = []
        for entry in batch:
            try:
                answers += await self._answer_batch([entry])
            except Exception as exc:  # its caller gets it
                answers.append(exc)
        return answers

    async def _answer_batch(self, batch: Sequence[BatchEntry]) -> list[Recommendations]:
        """Read the users' states, compute the answers, and record the duration of each stage and the waiting times."""
        begin_s = time.perf_counter()
        requests, selections, traces, seen, _, costs, submitted_s = zip(*batch, strict=True)
        waits_s, cost = [begin_s - one_s for one_s in submitted_s], sum(costs)
        users = await self._readers.states.read(requests, seen)
        read_end_s = time.perf_counter()
        self._metrics.engine.in_progress += 1
        try:
            if batch[0].lane.is_costly:
                cost += sum(cost_of_length(one.size) for one in seen if one is not None)
                if any(filtered_categories(request) > FEW_CATEGORIES for request in requests):
                    cost = inf  # never runs on the event loop
                ranked = await self._executor.run_costly(requests, RankerInput(users, selections), cost)
            else:
                ranked = await self._executor.run_light(requests, RankerInput(users, selections), cost)
        finally:
            self._metrics.engine.in_progress -= 1
        self._metrics.engine.observe_waits(waits_s, ranked.begin_s - read_end_s)
        timings = {}
        if users.read_s:
            timings["store"] = users.read_s
            self._metrics.store.observe("states", users.read_s, is_failed=users.is_failed)
        if ranked.ranked:
            timings |= ranked.stages_s
            self._metrics.engine.observe_batch(ranked.ranked, ranked.stages_s)
        for trace in traces:
            if trace is not None:
                trace.add(timings)
        for request, answer in zip(requests, ranked.answers, strict=True):
            # no click can refer to search results or to a preview, whose scenario has no name
            if not isinstance(request, PersonalSearch) and request.scenario != "":
                self._metrics.recommendations.count(answer["source"])
                self._clicks.show(self._context.name, answer, is_continued=bool(request.cursor))
        return ranked.answers


def _needs_reading(request: RecommendationRequest) -> bool:
    """Return whether the request needs reads or evaluations before it can join a batch."""
    has_filters = bool(request.filters) or request.fallback is not None
    has_expressions = has_filters or isinstance(request.boost, tuple) or isinstance(request, PersonalSearch)
    return has_expressions or needs_events(request) or bool(request.max_per) or request.objective is not None

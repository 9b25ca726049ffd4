"""Answers batches of recommendation requests: reads the users' states and ranks the catalogue for each user."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import NamedTuple, Self

import numpy as np
from typing_extensions import override

from app.catalogue.trained_catalogue import NO_ROWS, Rows
from app.errors import ItemNotFound
from app.events.click_through import ClickThrough
from app.events.recommendation_ids import hash_of
from app.observability import tracing
from app.observability.metrics import Metrics
from app.recommendation import rank_fusion
from app.recommendation.batching import ANYBODY, Asker, Limits, MicroBatcherByLane
from app.recommendation.cost import LIGHT, cost_of
from app.recommendation.executor import AdaptiveExecutor, EngineThreads
from app.recommendation.explanations import ExplainedQuery, Explainer
from app.recommendation.generation_context import GenerationContext
from app.recommendation.query_builder import CatalogueQuery, QueryBuilder
from app.recommendation.ranking import PersonalRanking, PopularRanking, Ranked, Ranking, Scores
from app.recommendation.reranking import RerankingRules
from app.recommendation.state_reader import LogReader, SeenRows, StateReader, StoredUsers, users_who_exclude_all
from app.schemas.cursor import MAX_ITEMS as MAX_SHOWN
from app.schemas.cursor import cursor_after
from app.schemas.recommendations import RecommendationRequest, Recommendations, SimilarQuery, Source
from app.schemas.scored_items import Explanation, ScoredItem
from model.inference.diversity import compile_loops
from model.inference.engine import Queries

MAX_BATCH = 64.0  # plain requests answered by one read and one engine run; in a larger batch all would wait longer
MAX_COSTLY_BATCH = 16.0
MAX_CALLERS_OF_NODE = 32  # requests that may wait for one node of a cluster
MAX_WAITING = 1024  # requests; with ten million items some 2 s of work
ITEM_ID = itemgetter("item_id")
NOBODY_SEEN: Mapping[str, SeenRows] = MappingProxyType({})


class Lane(NamedTuple):
    """What requests of one batch have in common: the node that has their states, and whether they are costly."""

    node: str
    is_costly: bool


def limits_of(lane: Lane) -> Limits:
    """Return the limits of a lane. A node that has a name and hangs leaves room for requests that need others."""
    max_batch = MAX_COSTLY_BATCH if lane.is_costly else MAX_BATCH
    return Limits(max_batch, MAX_WAITING, MAX_CALLERS_OF_NODE if lane.node else inf)


class RankedItems(NamedTuple):
    """The best items for one query, at least its depth if there are as many; -1 is no item.

    vectors   the query vectors of the batch
    position  the position of this query's vector among them
    """

    rows: Rows
    scores: Scores
    vectors: Queries
    position: int


class Asked(NamedTuple):
    """A request of a batch, its trace, lane and cost, and what its user has seen, if needed and readable."""

    request: RecommendationRequest
    trace: tracing.Trace | None
    seen: SeenRows | None
    lane: Lane
    cost: float

    @classmethod
    def of(cls, request: RecommendationRequest, seen: Mapping[str, SeenRows], states: StateReader) -> Self:
        """Return the request as it is asked now; `seen` is what was read of users' logs."""
        seen_by_user = seen.get(str(request.user_id)) if request.exclude_seen == "all" else None
        node, cost = states.node_of(request), cost_of(request)
        return cls(request, tracing.current.get(), seen_by_user, Lane(node, cost >= LIGHT), cost)


class Readers(NamedTuple):
    """What reads users from the store: their states, and their logs."""

    states: StateReader
    logs: LogReader


@dataclass(frozen=True, slots=True)
class ComputedBatch:
    """The answers to a batch, how many of them the engine has ranked, and how long each of its stages took."""

    answers: list[Recommendations]
    ranked: int
    stages_s: Mapping[str, float]


class BaseRecommender(ABC):
    """Answers recommendation requests."""

    @abstractmethod
    def recommend(
        self, requests: Sequence[RecommendationRequest], asker: Asker = ANYBODY
    ) -> Awaitable[list[Recommendations]]:
        """Return one answer for each request, in order.

        raises   Overloaded, ClientDisconnect
        """

    @abstractmethod
    async def similar(self, item_id: str, query: SimilarQuery, asker: Asker = ANYBODY) -> Recommendations:
        """Return the items that are most similar to the item.

        raises  ItemNotFound, and as `recommend`
        """


class Recommender(BaseRecommender):
    """Answers recommendation requests from one generation."""

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
        self._catalogue = context.catalogue
        self._engine = context.engine
        self._trending = context.trending
        self._readers = readers
        self._builder = QueryBuilder(context)
        self._executor = AdaptiveExecutor(self.compute, threads)
        self._explainer = Explainer(context.generation, context.catalogue, context.engine)
        compile_loops()
        self._metrics = metrics
        self._clicks = clicks
        self._experiment = experiment
        self._experiment_hash = hash_of(experiment)
        self._batcher: MicroBatcherByLane[Lane, Asked, Recommendations] = MicroBatcherByLane(
            self._answer_batch,
            attrgetter("cost"),
            attrgetter("lane"),
            limits_of,
        )

    @override
    def recommend(
        self, requests: Sequence[RecommendationRequest], asker: Asker = ANYBODY
    ) -> Awaitable[list[Recommendations]]:
        # Unknown users get popular items; so do users whose long history is still to be folded for this generation,
        # and all users whom the store cannot read now.
        if any(request.because is not None for request in requests) and not self._engine.has_distances:
            return self._prepare_distances_and_recommend(requests, asker)
        if user_ids := users_who_exclude_all(requests):
            return self._read_logs_and_recommend(requests, user_ids, asker)
        return self._submit(requests, NOBODY_SEEN, asker)

    def _submit(
        self, requests: Sequence[RecommendationRequest], seen: Mapping[str, SeenRows], asker: Asker
    ) -> Awaitable[list[Recommendations]]:
        states = self._readers.states
        return self._batcher.submit([Asked.of(request, seen, states) for request in requests], asker)

    async def _read_logs_and_recommend(
        self, requests: Sequence[RecommendationRequest], user_ids: Sequence[str], asker: Asker
    ) -> list[Recommendations]:
        """Read long logs outside of batches, which nobody else has to wait for."""
        begin_s = time.perf_counter()
        seen = await self._readers.logs.read(user_ids, self._context.generation, self._catalogue, asker)
        if (request_trace := tracing.current.get()) is not None:
            request_trace.spans["log"] = time.perf_counter() - begin_s
        return await self._submit(requests, seen, asker)

    async def _prepare_distances_and_recommend(
        self, requests: Sequence[RecommendationRequest], asker: Asker
    ) -> list[Recommendations]:
        await asyncio.to_thread(self._engine.prepare_distances)  # slow, and only done once
        return await self.recommend(requests, asker)

    @override
    async def similar(self, item_id: str, query: SimilarQuery, asker: Asker = ANYBODY) -> Recommendations:
        if item_id not in self._catalogue.row_of or not len(self._context.generation.codes):
            raise ItemNotFound("no model has learned this item, so nothing is known to be like it")
        request = RecommendationRequest(history=[], because=item_id, exclude_seen="none", **query.model_dump())
        (answer,) = await self.recommend([request], asker)
        return answer

    async def _answer_batch(self, batch: Sequence[Asked]) -> list[Recommendations]:
        """Read the users' states, compute the answers, and record how long each stage took."""
        requests = [asked.request for asked in batch]
        seen = {str(asked.request.user_id): asked.seen for asked in batch if asked.seen is not None}
        cost = sum(asked.cost for asked in batch)
        users = await self._readers.states.read(requests, seen)
        self._metrics.engine.in_progress += 1
        try:
            if batch[0].lane.is_costly:
                computed = await self._executor.run_costly(requests, users)
            else:
                computed = await self._executor.run_light(requests, users, cost)
        finally:
            self._metrics.engine.in_progress -= 1
        timings = {"store": users.read_s} if users.read_s else {}
        if computed.ranked:
            timings |= computed.stages_s
            self._metrics.engine.observe_batch(computed.ranked, computed.stages_s["step"], computed.stages_s["scan"])
        for asked in batch:
            if asked.trace is not None:
                asked.trace.spans.update(timings)
        for answer in computed.answers:
            self._metrics.recommendations.count(answer["source"])
            self._clicks.show(self._context.name, self._experiment, len(answer["items"]))
        return computed.answers

    def compute(self, requests: Sequence[RecommendationRequest], users: StoredUsers) -> ComputedBatch:
        """Answer requests from the stored states of their users: everything but input and output."""
        queries = self._builder.build(requests, users)
        similar = [query for query in queries if query.similar_to is not None]
        personal = [query for query in queries if query.similar_to is None and query.history.model_input]
        ranked: dict[CatalogueQuery, RankedItems] = {}
        stages_s = {"step": 0.0, "scan": 0.0}
        if personal:
            ranked |= self._rank(personal, self._user_vectors, stages_s)
        if similar:
            ranked |= self._rank(similar, self._item_vectors, stages_s)
        return ComputedBatch([self._answer(query, ranked.get(query)) for query in queries], len(ranked), stages_s)

    def _user_vectors(self, queries: Sequence[CatalogueQuery]) -> Queries:
        inputs = [query.history.model_input for query in queries if query.history.model_input]
        return self._engine.step(
            [one.histogram for one in inputs], [one.last_item for one in inputs], [one.recent_items for one in inputs]
        )

    def _item_vectors(self, queries: Sequence[CatalogueQuery]) -> Queries:
        return self._engine.neighbours_of([query.similar_to for query in queries if query.similar_to is not None])

    def _rank(
        self,
        queries: Sequence[CatalogueQuery],
        vectorise: Callable[[Sequence[CatalogueQuery]], Queries],
        stages_s: dict[str, float],
    ) -> Mapping[CatalogueQuery, RankedItems]:
        """Return the best items of each query.

        vectorise  makes one vector for each query
        stages_s   gets the time of both stages added: step makes the vectors, scan ranks the catalogue
        """
        by_depth: dict[int, list[int]] = {}  # positions of the queries: short rankings do not wait for long ones
        individual: list[int] = []  # boosts and candidates belong to one request
        for position, query in enumerate(queries):
            if query.boosts is None and query.candidates is None:
                by_depth.setdefault(query.depth, []).append(position)
            else:
                individual.append(position)
        begin_s = time.perf_counter()
        excluded = {depth: np.stack([queries[n].excluded for n in positions]) for depth, positions in by_depth.items()}
        step_begin_s = time.perf_counter()
        vectors = vectorise(queries)
        step_s = time.perf_counter() - step_begin_s
        if len(by_depth) + len(individual) > 1:
            self._engine.products(vectors)  # once, and not for each part of the batch
        ranked: dict[CatalogueQuery, RankedItems] = {}
        for depth, positions in by_depth.items():
            group = vectors if len(positions) == len(queries) else vectors[positions]
            rows, scores = self._engine.top_k(group, depth, excluded[depth])
            ranked |= {queries[at]: RankedItems(rows[n], scores[n], vectors, at) for n, at in enumerate(positions)}
        for position in individual:
            query = queries[position]
            ranking = PersonalRanking(self._engine, vectors.one(position), query.boosts, query.candidates)
            ranked[query] = RankedItems(*ranking.best(query.depth, query.excluded), vectors, position)
        stages_s["step"] += step_s
        stages_s["scan"] += time.perf_counter() - begin_s - step_s
        return ranked

    def _answer(self, query: CatalogueQuery, ranked: RankedItems | None) -> Recommendations:
        """Build the answer to a query from its ranked items, or from popular items where the engine ranked none."""
        source: Source = "personalised" if query.similar_to is None else "similar"
        cursor = None
        if ranked is None:
            source = "popular"
            items, cursor = self._popular_items(query)
        elif query.is_blended and query.history.model_input:
            source = "blended"
            personal, trending = ranked.rows[ranked.rows >= 0], self._trending.top_rows(query.depth, query.excluded)
            fused, weights = rank_fusion.fuse(personal, trending, query.history.model_input.events, query.request.k)
            items = self._catalogue.scored_items(fused, weights.tolist())
        else:
            if query.rules is None:
                shown = slice(min(query.request.k, int(np.count_nonzero(ranked.rows >= 0))))
                rows = ranked.rows[shown]
                items = self._catalogue.scored_items(rows, ranked.scores[shown].tolist())
            else:
                ranking = PersonalRanking(
                    self._engine, ranked.vectors.one(ranked.position), query.boosts, query.candidates
                )
                rows, items, cursor = self._rerank(query, query.rules, ranking, ranked[:2])
            if query.request.explain:
                for item, explanation in zip(items, self._explanations(query, ranked, rows), strict=True):
                    item["explanation"] = explanation
        answer: Recommendations = {
            "recommendation_id": self._clicks.ids.make(
                self._context.generation.tag, self._experiment_hash, list(map(ITEM_ID, items))
            ),
            "user_id": query.request.user_id,
            "generation": self._context.name,
            "source": source,
            "items": items,
        }
        if query.request.cursor is not None:
            answer["cursor"] = cursor
        if query.request.exclude_seen == "all" and query.history.newest is not None:
            answer["seen_of_newest"] = query.history.newest
        if self._experiment:
            answer["experiment"] = self._experiment
        if query.similar_to is not None:
            (answer["because"],) = self._catalogue.named_items(np.array([query.similar_to]))
        return answer

    def _popular_items(self, query: CatalogueQuery) -> tuple[list[ScoredItem], str | None]:
        """Return popular items, and the cursor of the next page if there is one."""
        if query.rules is None:
            candidates = query.candidates
            excluded = query.excluded if candidates is None else ~self._catalogue.bitmap_of(candidates)
            return self._trending.popular_items(query.request.k, excluded), None
        ranking = PopularRanking(self._engine, self._trending, query.boosts, query.candidates)
        _, items, cursor = self._rerank(query, query.rules, ranking, ranking.best(query.depth, query.excluded))
        return items, cursor

    def _rerank(
        self, query: CatalogueQuery, rules: RerankingRules, ranking: Ranking, best: Ranked
    ) -> tuple[Rows, list[ScoredItem], str | None]:
        """Apply the rules to a ranking; return the page's rows and items, and the cursor of the next page.

        best  the first items of the ranking
        """
        page = rules.page(ranking, best, query.excluded)
        items = self._catalogue.scored_items(page.rows, page.scores.tolist())
        for place in page.pinned:
            items[place]["pinned"] = True
        cursor = None
        if query.request.cursor is not None and page.has_next:
            shown = [*rules.shown, *(item["item_id"] for item in items)]
            cursor = cursor_after(shown) if len(shown) < MAX_SHOWN else None
        return page.rows, items, cursor

    def _explanations(self, query: CatalogueQuery, ranked: RankedItems, rows: Rows) -> list[Explanation]:
        vector, history = ranked.vectors.one(ranked.position), query.history
        if query.similar_to is not None or history.model_input is None:
            explained = ExplainedQuery(vector, NO_ROWS, np.array([query.similar_to]), None, query.boosts)
        else:
            model_input = history.model_input
            explained = ExplainedQuery(
                vector, model_input.recent_items, history.recent, model_input.histogram, query.boosts
            )
        return self._explainer.explain(explained, rows)

"""Computes the answers to a batch of requests from the stored states of their users."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, cast

import numpy as np
import orjson

from app.catalogue.trained_catalogue import NO_ROWS, Rows
from app.events.recommendation_ids import RecommendationIds, hash_of, scenario_hash_of
from app.recommendation.ranking import rank_fusion
from app.recommendation.ranking.explanations import ExplainedQuery, Explainer
from app.recommendation.ranking.generation_context import GenerationContext
from app.recommendation.ranking.query_builder import CatalogueQuery, QueryBuilder
from app.recommendation.ranking.rankings import PersonalRanking, PopularRanking, Ranked, Ranking, Scores
from app.recommendation.ranking.removals import RemovalCounter, short
from app.recommendation.ranking.reranking import RerankingRules
from app.recommendation.ranking.stored_users import StoredUsers
from app.recommendation.selection import Selection
from app.schemas.cursor import MAX_ITEMS as MAX_SHOWN
from app.schemas.cursor import cursor_after
from app.schemas.recommendations import RecommendationRequest, Recommendations, Source
from app.schemas.scored_items import Explanation, ScoredItem
from model.inference.diversity import compile_loops
from model.inference.engine import Queries

ITEM_ID = itemgetter("item_id")


class RankerInput(NamedTuple):
    """What was read for the requests of a batch: their users, and what each request's expressions select."""

    users: StoredUsers
    selections: Sequence[Selection]


class RankedItems(NamedTuple):
    """The best items for one query, at least its depth if there are as many; -1 is no item.

    vectors   the query vectors of the batch
    position  the position of this query's vector among them
    """

    rows: Rows
    scores: Scores
    vectors: Queries
    position: int


@dataclass(frozen=True, slots=True)
class RankedBatch:
    """The answers to a batch, how many of them the engine has ranked, and how long each of its stages took."""

    answers: list[Recommendations]
    ranked: int
    stages_s: Mapping[str, float]


class BatchRanker:
    """Ranks the catalogue of one generation for the requests of a batch."""

    def __init__(self, context: GenerationContext, ids: RecommendationIds, experiment: str = "") -> None:
        self._context = context
        self._catalogue = context.catalogue
        self._engine = context.engine
        self._trending = context.trending
        self._ids = ids
        self._experiment = experiment
        self._builder = QueryBuilder(context)
        self._removals = RemovalCounter(context.catalogue)
        self._explainer = Explainer(context.generation, context.catalogue, context.engine)
        compile_loops()

    def rank(self, requests: Sequence[RecommendationRequest], read: RankerInput) -> RankedBatch:
        """Return the answers to requests, in order."""
        queries = self._builder.build(requests, read.users, read.selections)
        similar = [query for query in queries if query.similar_to is not None]
        personal = [query for query in queries if query.similar_to is None and query.history.model_input]
        ranked: dict[CatalogueQuery, RankedItems] = {}
        stages_s = {"step": 0.0, "scan": 0.0}
        if personal:
            ranked |= self._rank(personal, self._user_vectors, stages_s)
        if similar:
            ranked |= self._rank(similar, self._item_vectors, stages_s)
        return RankedBatch([self._build_answer(query, ranked.get(query)) for query in queries], len(ranked), stages_s)

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

    def _build_answer(self, query: CatalogueQuery, ranked: RankedItems | None) -> Recommendations:
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
                    # in JSON from here on: the garbage collector stops everybody while it goes through 60,000 dicts
                    item["explanation"] = cast(Explanation, orjson.Fragment(orjson.dumps(explanation)))
        request, scenario = query.request, query.request.scenario or ""
        experiment = self._experiment or (request.experiment if scenario else "")
        answer: Recommendations = {
            "recommendation_id": self._ids.make(
                self._context.generation.tag,
                hash_of(experiment),
                list(map(ITEM_ID, items)),
                scenario_hash_of(scenario),
            ),
            "user_id": query.request.user_id,
            "generation": self._context.name,
            "source": source,
            "items": items,
        }
        if query.request.cursor is not None:
            answer["cursor"] = cursor
        if query.request.exclude_seen == "all" and query.history.newest is not None:
            answer["seen_events_limit"] = query.history.newest
        if scenario:
            answer["scenario"] = scenario
        if experiment:
            answer["experiment"] = experiment
        if query.similar_to is not None:
            (answer["because"],) = self._catalogue.named_items(np.array([query.similar_to]))
        if len(items) < query.request.k or query.request.debug:
            removals = self._removals.count(query, list(map(ITEM_ID, items)))
            if len(items) < query.request.k:
                answer["short"] = short(removals, query.request.k)
            if query.request.debug:
                answer["debug"] = removals
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

"""Computes the answers to a batch of requests from the stored states of their users."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from app.catalogue.trained_catalogue import NO_ROWS, EncodedItems, Rows
from app.events.recommendation_ids import RecommendationIds, hash_of, scenario_hash_of
from app.recommendation.filters import Selection
from app.recommendation.ranking.explanations import ExplainedQuery, Explainer
from app.recommendation.ranking.generation_context import GenerationContext
from app.recommendation.ranking.plain_ranking import PlainRanker
from app.recommendation.ranking.query_builder import CatalogueQuery, QueryBuilder
from app.recommendation.ranking.rankings import (
    ListedRanking,
    PersonalRanking,
    PopularRanking,
    Ranked,
    Ranking,
    Scores,
    blend,
    scores_in,
    without_padding,
)
from app.recommendation.ranking.removals import count_removals, short
from app.recommendation.ranking.reranking import RerankingRules, boosts_of
from app.recommendation.ranking.rotation import RotatedRanking
from app.recommendation.ranking.stored_users import StoredUsers
from app.recommendation.ranking.together import NO_LIFT
from app.schemas.cursor import MAX_ITEMS as MAX_SHOWN
from app.schemas.cursor import cursor_after
from app.schemas.recommendations import RecommendationRequest, Recommendations, Source
from app.schemas.scored_items import Repeat
from model.inference.captured_batches import States
from model.inference.diversity import compile_loops
from model.inference.query_products import Queries
from model.lisa.item_intervals import DueItems


class RankerInput(NamedTuple):
    """The data read for the requests of a batch: their users, and the selection of each request."""

    users: StoredUsers
    selections: Sequence[Selection]


class RankedItems(NamedTuple):
    """The best items for one query: at least its depth, if there are as many; -1 pads the rest.

    vectors   the query vectors of the batch
    position  the position of this query's vector in them
    """

    rows: Rows
    scores: Scores
    vectors: Queries
    position: int


class Listed(NamedTuple):
    """The rows and items of a page, and the cursor of the next page, if any; popular items have no rows."""

    rows: Rows
    items: EncodedItems
    cursor: str | None


@dataclass(frozen=True, slots=True)
class RankedBatch:
    """The answers to a batch.

    ranked    the number of queries that the engine has ranked
    begin_s   the time at which ranking began, by ``time.perf_counter``
    stages_s  the duration of each stage of the engine
    """

    answers: list[Recommendations]
    ranked: int
    begin_s: float
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
        self._plain = PlainRanker(context, ids, experiment)
        self._builder = QueryBuilder(context)
        self._explainer = Explainer(context.generation, context.catalogue, context.engine)
        compile_loops()

    def rank(self, requests: Sequence[RecommendationRequest], read: RankerInput) -> RankedBatch:
        """Return the answers to the requests, in order; popular items if the engine has lost its device."""
        begin_s = time.perf_counter()
        stages_s = {"step": 0.0, "scan": 0.0}
        if not self._engine.is_lost:
            try:
                found = self._plain.rank(requests, read.users.states, stages_s)
                if len(found) == len(requests):
                    return RankedBatch([*found.values()], len(found), begin_s, stages_s)
                others = [place for place in range(len(requests)) if place not in found]
                queries = self._builder.build(*_of_places(others, requests, read)) if others else []
                ranked = self._rank_all(queries, stages_s)
                for place, query in zip(others, queries, strict=True):
                    found[place] = self._build_answer(query, ranked.get(query))
                answers, count = [found[place] for place in range(len(requests))], len(found) - len(others)
                return RankedBatch(answers, count + len(ranked), begin_s, stages_s)
            except RuntimeError:
                if not self._engine.has_lost_device():
                    raise
        queries = self._builder.build(requests, read.users, read.selections)
        return RankedBatch([self._build_answer(query, None) for query in queries], 0, begin_s, stages_s)

    def _rank_all(
        self, queries: Sequence[CatalogueQuery], stages_s: dict[str, float]
    ) -> Mapping[CatalogueQuery, RankedItems]:
        """Return the best items of each query that the engine can rank."""
        similar = [query for query in queries if query.similar_to is not None]
        personal = [query for query in queries if _is_personal(query)]
        ranked: dict[CatalogueQuery, RankedItems] = {}
        if personal:
            if self._is_at_once(personal):
                ranked |= self._rank_at_once(personal, stages_s)
            else:
                ranked |= self._rank(personal, self._user_vectors, stages_s)
        if similar:
            ranked |= self._rank(similar, self._item_vectors, stages_s)
        return ranked

    def _is_at_once(self, queries: Sequence[CatalogueQuery]) -> bool:
        """Return whether one call of the engine can rank them: a single query, or a captured batch of one depth."""
        if any(one.candidates is not None or one.basket is not None for one in queries):
            return False
        depth = queries[0].depth
        return len(queries) == 1 or (
            self._engine.captures(depth) and all(one.depth == depth and one.boosts is None for one in queries)
        )

    def _rank_at_once(
        self, queries: Sequence[CatalogueQuery], stages_s: dict[str, float]
    ) -> Mapping[CatalogueQuery, RankedItems]:
        """Return the best items of each query as `_rank` does; the time of a captured batch is recorded as `scan`.

        The stage `device` is the time in which the device worked. The rest is work and waiting in this process.
        """
        begin_s, first = time.perf_counter(), queries[0]
        excluded = [query.excluded for query in queries] if len(queries) > 1 else first.excluded[None]
        found = self._engine.rank_states(_states_of(queries), first.depth, excluded, first.boosts)
        vectors, (rows, scores), step_s, device_s = found
        stages_s["step"] += step_s
        stages_s["scan"] += time.perf_counter() - begin_s - step_s
        if device_s is not None:
            stages_s["device"] = stages_s.get("device", 0.0) + sum(device_s)
        return {query: RankedItems(rows[at], scores[at], vectors, at) for at, query in enumerate(queries)}

    def _user_vectors(self, queries: Sequence[CatalogueQuery]) -> Queries:
        vectors = self._engine.step(*_states_of(queries))
        if any(query.basket is not None for query in queries):
            self._engine.lift(vectors, [NO_LIFT if one.basket is None else one.basket.lifted for one in queries])
        return vectors

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
        stages_s   receives the times of both stages: `step` makes the vectors, `scan` ranks the catalogue
        """
        by_depth: dict[int, list[int]] = {}  # positions of the queries: short rankings do not wait for long ones
        individual: list[int] = []  # boosts and candidates belong to one request
        for position, query in enumerate(queries):
            if query.boosts is None and query.candidates is None and len(queries) > 1:
                by_depth.setdefault(query.depth, []).append(position)
            else:
                individual.append(position)
        begin_s = time.perf_counter()
        excluded = {depth: np.array([queries[n].excluded for n in positions]) for depth, positions in by_depth.items()}
        step_begin_s = time.perf_counter()
        vectors = vectorise(queries)
        step_s = time.perf_counter() - step_begin_s
        if len(by_depth) + len(individual) > 1:
            self._engine.products(vectors)  # once for the whole batch, not for each part
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
        """Build the answer to a query from its ranked items, or from popular items if the engine ranked none."""
        request, scenario = query.request, query.request.scenario or ""
        source = _source(query, ranked)
        rows, items, cursor = listed = self._list(query, ranked)
        if query.selection.fallback is not None and cursor is None:
            rows, items, cursor = self._fill(query, ranked, listed)
        if request.explain and ranked is not None:
            for place, explanation in enumerate(self._explanations(query, ranked, rows)):
                items.add_field(place, b"explanation", explanation)
        if query.due is not None:
            for place, repeat in _repeats(query.due, rows).items():
                items.add_field(place, b"repeat", orjson.dumps(repeat))
        item_ids = items.item_ids
        experiment = self._experiment or (request.experiment if scenario else "")
        answer: Recommendations = {
            "recommendation_id": self._ids.make(
                self._context.generation.tag, hash_of(experiment), item_ids, scenario_hash_of(scenario)
            ),
            "user_id": request.user_id,
            "generation": self._context.name,
            "source": source,
            "items": items,
        }
        if request.cursor is not None:
            answer["cursor"] = cursor
        if query.history.log.newest is not None:
            answer["seen_events_limit"] = query.history.log.newest
        if scenario:
            answer["scenario"] = scenario
        if experiment:
            answer["experiment"] = experiment
        if query.similar_to is not None:
            (answer["because"],) = self._catalogue.named_items(np.array([query.similar_to]))
        if len(item_ids) < request.k:
            removals = count_removals(self._catalogue, self._builder.with_fallback(query), item_ids)
            answer["short"] = short(removals, request.k, query.selection.current_item)
        if request.debug:
            allowed = [item["item_id"] for item in items if "fallback" not in item]
            answer["debug"] = count_removals(self._catalogue, query, allowed)
        return answer

    def _list(self, query: CatalogueQuery, ranked: RankedItems | None) -> Listed:
        if query.rules is not None:
            ranking = self._ranking(query, ranked)
            best = ranking.best(query.depth, query.excluded) if ranked is None else without_padding(ranked[:2])
            if (rotation := query.history.rotation) is not None:
                best, ranking = rotation.first(ranking, best, query.rules.depth), RotatedRanking(ranking, rotation)
            return self._rerank(query, query.rules, ranking, best)
        if query.is_together or query.due is not None:
            rows, scores = self._ranking(query, ranked).best(query.depth, query.excluded)
            return Listed(rows, self._catalogue.encoded_items(rows, scores.tolist()), None)
        if ranked is None:
            candidates = query.candidates
            excluded = query.excluded if candidates is None else ~self._catalogue.bitmap_of(candidates)
            return Listed(NO_ROWS, EncodedItems.of(self._trending.popular_items(query.request.k, excluded)), None)
        if query.is_blended and query.history.model_input:
            personal, trending = ranked.rows[ranked.rows >= 0], self._trending.top_rows(query.depth, query.excluded)
            rows, weights = blend(personal, trending, query.history.model_input.events, query.request.k)
            return Listed(rows, self._catalogue.encoded_items(rows, weights.tolist()), None)
        shown = slice(query.request.k)
        rows, scores = without_padding((ranked.rows[shown], ranked.scores[shown]))
        return Listed(rows, self._catalogue.encoded_items(rows, scores.tolist()), None)

    def _ranking(self, query: CatalogueQuery, ranked: RankedItems | None) -> Ranking:
        if query.due is not None:
            return ListedRanking(self._engine, query.due[:2], query.boosts, query.candidates)
        if query.is_together and query.basket is not None:
            listed = query.basket.complements, query.basket.scores
            return ListedRanking(self._engine, listed, query.boosts, query.candidates)
        if ranked is None:
            return PopularRanking(self._engine, self._trending, query.boosts, query.candidates)
        return PersonalRanking(self._engine, ranked.vectors.one(ranked.position), query.boosts, query.candidates)

    def _fill(self, query: CatalogueQuery, ranked: RankedItems | None, listed: Listed) -> Listed:
        """Append the items that the fallback allows, as the next page; a list without a cursor ends after k items."""
        if len(listed.items) == query.request.k and query.request.cursor is None:
            return listed
        rest = self._builder.rest(query, listed.items.item_ids)
        if ranked is not None:
            rows, scores = self._ranking(rest, ranked).best(rest.depth, rest.excluded)
            ranked = ranked._replace(rows=rows, scores=scores)
        rows, items, cursor = self._list(rest, ranked)
        for place in range(len(items)):
            items.add_field(place, b"fallback", b"true")
        both = EncodedItems(listed.items.item_ids + items.item_ids, listed.items.texts + items.texts)
        return Listed(np.concatenate([listed.rows, rows]), both, cursor)

    def _rerank(self, query: CatalogueQuery, rules: RerankingRules, ranking: Ranking, best: Ranked) -> Listed:
        """Apply the rules to a ranking whose first items are `best`."""
        page = rules.page(ranking, best, query.excluded)
        items = self._catalogue.encoded_items(page.rows, page.scores.tolist())
        for place in page.pinned:
            items.add_field(place, b"pinned", b"true")
        cursor = None
        if query.request.cursor is not None and page.has_next:
            shown = [*rules.shown, *items.item_ids]
            cursor = cursor_after(shown) if len(shown) < MAX_SHOWN else None
        return Listed(page.rows, items, cursor)

    def _explanations(self, query: CatalogueQuery, ranked: RankedItems, rows: Rows) -> list[bytes]:
        """Return the JSON of the explanation of each item, in order."""
        vector, history, worth = ranked.vectors.one(ranked.position), query.history, query.selection.worth
        boosts, gains = query.boosts, dict[bytes, NDArray[np.floating]]()
        if worth is not None:
            boosts = boosts_of(query.request, query.selection._replace(worth=None), self._catalogue)
        if query.similar_to is not None or history.model_input is None:
            explained = ExplainedQuery(vector, NO_ROWS, np.array([query.similar_to]), None)
        else:
            model_input = history.model_input
            explained = ExplainedQuery(vector, model_input.recent_items, history.recent, model_input.histogram)
        if boosts is not None:
            gains[b"boost"] = boosts.of(rows)
        if worth is not None:
            gains[b"objective"] = worth[rows]
        if history.rotation is not None:
            gains[b"rotation"] = scores_in(history.rotation, rows)
        if query.basket is not None and query.similar_to is None:
            gains[b"basket"] = scores_in(query.basket.lifted, rows)
        return self._explainer.explain(explained, rows, gains)


def _of_places(
    places: Sequence[int], requests: Sequence[RecommendationRequest], read: RankerInput
) -> tuple[Sequence[RecommendationRequest], StoredUsers, Sequence[Selection]]:
    """Return the requests at some positions, and what was read for them."""
    if len(places) == len(requests):
        return requests, *read
    chosen = [requests[place] for place in places]
    known = read.users.states
    states = {user: known[user] for one in chosen if (user := one.user_id) is not None and user in known}
    users = replace(read.users, states=states, seen=[read.users.seen[place] for place in places])
    return chosen, users, [read.selections[place] for place in places]


def _states_of(queries: Sequence[CatalogueQuery]) -> States:
    inputs = [query.history.model_input for query in queries if query.history.model_input]
    return States(
        [one.histogram for one in inputs], [one.last_item for one in inputs], [one.recent_items for one in inputs]
    )


def _repeats(due: DueItems, rows: Rows) -> dict[int, Repeat]:
    """Return why each item of a list is due, by its place; not for a pinned item that may not be due."""
    places = np.flatnonzero(np.isin(rows, due.items))
    at = np.searchsorted(due.items, rows[places])
    parts = places, due.times[at], due.age_days[at].round(2), due.interval_days[at].round(2)
    return {
        place: {"times": times, "last_days": last_days, "interval_days": interval_days}
        for place, times, last_days, interval_days in zip(*(part.tolist() for part in parts), strict=True)
    }


def _is_personal(query: CatalogueQuery) -> bool:
    is_listed = query.is_together or query.due is not None
    return query.similar_to is None and not is_listed and query.history.model_input is not None


def _source(query: CatalogueQuery, ranked: RankedItems | None) -> Source:
    if query.due is not None:
        return "repeat"
    if query.is_together:
        return "together"
    if ranked is None:
        return "popular"
    if query.is_blended:
        return "blended"
    return "personalised" if query.similar_to is None else "similar"

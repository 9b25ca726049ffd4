"""Turns requests into queries in rows of the catalogue."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.catalogue.model_inputs import ModelInput, model_inputs
from app.catalogue.trained_catalogue import NO_ROWS, Rows
from app.recommendation import rank_fusion
from app.recommendation.generation_context import GenerationContext
from app.recommendation.reranking import Rules, rules_of
from app.recommendation.state_reader import StoredUsers
from app.schemas.recommendations import RecommendationRequest
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.scan import Boosts
from model.lisa.histogram import history_histogram
from storage.state.generation import ITEM_RING, recent_items


@dataclass(frozen=True, slots=True)
class History:
    """What one user did: the model's input, and the rows of recent and of all seen items, which requests leave out."""

    model_input: ModelInput | None
    recent: Rows
    seen: Rows


NO_HISTORY = History(None, recent=NO_ROWS, seen=NO_ROWS)


@dataclass(frozen=True, slots=True, eq=False)
class CatalogueQuery:
    """One request in rows of the catalogue.

    like        the item that the best items are to be like; None: what the user is to like
    rules       what the request wants of its list beyond the best items; None where nothing
    boosts      what the request adds to scores
    excluded    items that may not be shown
    candidates  the only items that may be shown; None for every item
    is_blended  whether the list is blended with what is trending
    depth       how many of the best items are looked for at first
    """

    request: RecommendationRequest
    history: History
    like: int | None
    rules: Rules | None
    boosts: Boosts | None
    excluded: Bitmap
    candidates: Rows | None
    is_blended: bool
    depth: int


class QueryBuilder:
    """Builds the queries of one generation."""

    def __init__(self, context: GenerationContext) -> None:
        self._generation = context.generation
        self._catalogue = context.catalogue
        self._engine = context.engine
        self._trending = context.trending
        self._has_model = len(context.generation.codes) > 0

    def build(self, requests: Sequence[RecommendationRequest], users: StoredUsers) -> list[CatalogueQuery]:
        """Return one query for each request, in order."""
        states = self._generation.decode_many(list(users.states.values()))
        newest = list(map(recent_items, states))
        inputs = model_inputs(states, self._catalogue)
        recents = map(self._catalogue.known_in_state, newest)
        histories = {}
        for user_id, model_input, recent in zip(users.states, inputs, recents, strict=True):
            seen = self._catalogue.rows(users.seen[user_id]) if user_id in users.seen else NO_ROWS
            histories[user_id] = History(model_input, recent, seen)
        return [
            self._query(
                request,
                histories.get(str(request.user_id), NO_HISTORY)
                if request.history is None
                else self._given_history(request.history),
            )
            for request in requests
        ]

    def _given_history(self, item_ids: Sequence[str]) -> History:
        """Treat each of the known items, oldest first, as an event of weight 1."""
        rows = self._catalogue.rows(item_ids)
        if not len(rows):
            return NO_HISTORY
        if not self._has_model:
            return History(None, recent=rows[-ITEM_RING:], seen=rows)
        counts = self._engine.history_counts[rows]
        histogram = history_histogram(counts, self._generation.decay_rates, self._generation.codewords)
        window = np.full(self._engine.window, -1)
        newest_first = rows[::-1][: self._engine.window]
        window[: len(newest_first)] = newest_first
        return History(ModelInput(len(rows), histogram, rows[-1], window), recent=rows[-ITEM_RING:], seen=rows)

    def _query(self, request: RecommendationRequest, history: History) -> CatalogueQuery:
        excluded, like = self._filtered(request), self._like(request, history.model_input)
        if like is not None:
            bitmap.add(excluded, np.array([like]))
        rules, boosts, is_blended, depth = None, None, False, request.k
        if _has_rules(request):
            rules = rules_of(request, self._catalogue, excluded)
            boosts, depth = rules.boosts, rules.depth
        elif like is None and self._is_blended(request, history.model_input):
            is_blended, depth = True, request.k + rank_fusion.DEEPER
        bitmap.add(excluded, {"none": NO_ROWS, "recent": history.recent, "all": history.seen}[request.exclude_seen])
        if rules is not None and len(rules.elsewhere):
            bitmap.add(excluded, rules.elsewhere)
        candidates = None
        if request.candidates is not None:
            rows = self._catalogue.rows(request.candidates)
            candidates = rows[~bitmap.has(excluded, rows)]
        return CatalogueQuery(request, history, like, rules, boosts, excluded, candidates, is_blended, depth)

    def _is_blended(self, request: RecommendationRequest, model_input: ModelInput | None) -> bool:
        if model_input is None or model_input.events > rank_fusion.EVENTS:
            return False
        return request.candidates is None and not request.explain and self._trending.are_known

    def _like(self, request: RecommendationRequest, model_input: ModelInput | None) -> int | None:
        """Return the item that heads the list, if the request wants one and there is one."""
        if request.because is None or not self._has_model:
            return None
        if request.because:
            return self._catalogue.row_of.get(request.because)
        return int(model_input.last_item) if model_input else None

    def _filtered(self, request: RecommendationRequest) -> Bitmap:
        """Return what the request's filters leave out."""
        catalogue = self._catalogue
        excluded = catalogue.unavailable.copy()
        if request.exclude:
            bitmap.add(excluded, catalogue.rows(request.exclude))
        if request.categories:
            excluded |= ~catalogue.in_categories(request.categories)
        for category in request.categories_all:
            excluded |= ~catalogue.in_category(category)
        if request.categories_none:
            excluded |= catalogue.in_categories(request.categories_none)
        return excluded


def _has_rules(request: RecommendationRequest) -> bool:
    """Tell whether the request wants anything of its list beyond the best items."""
    return (
        any(request.boost.values())
        or bool(request.pin or request.diversity or request.max_per_category)
        or request.cursor is not None
    )

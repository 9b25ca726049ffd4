"""Turns requests into catalogue queries, whose items are rows of the catalogue."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.model_inputs import ModelInput, ModelInputs, model_input_of
from app.catalogue.trained_catalogue import NO_ROWS, Rows
from app.recommendation.cost import is_plain
from app.recommendation.filters import Selection, filter_out
from app.recommendation.ranking.generation_context import GenerationContext
from app.recommendation.ranking.rankings import EXTRA_DEPTH, MAX_BLENDED_EVENTS
from app.recommendation.ranking.reranking import RerankingRules, reranking_rules
from app.recommendation.ranking.rotation import Rotation
from app.recommendation.ranking.stored_users import NOTHING_SEEN, SeenRows, StoredUsers
from app.recommendation.ranking.together import Basket
from app.schemas.recommendations import RecommendationRequest
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.scan import Boosts
from model.lisa.histogram import history_histogram
from model.lisa.item_intervals import NO_PURCHASES, DueItems, due_items
from model.lisa.seen_items import newest_seen
from storage.state.generation import Generation
from storage.state.layout import recent_items


@dataclass(slots=True)  # not frozen, because every request creates one and freezing takes five times as long
class History:
    """A request's history: the model's input, rows of recent items, data read from the log, and the rotation."""

    model_input: ModelInput | None
    recent: Rows
    log: SeenRows = NOTHING_SEEN
    rotation: Rotation | None = None


NO_HISTORY = History(None, NO_ROWS)


class DecodedStates:
    """The states of a batch's users, by user."""

    def __init__(self, states: Mapping[str, bytes], generation: Generation, catalogue: LiveCatalogue) -> None:
        self._places = dict(zip(states, range(len(states)), strict=True))
        self._states = generation.decode_many(list(states.values()))
        self._inputs = ModelInputs.of(self._states, catalogue)
        self._catalogue = catalogue

    def history(self, request: RecommendationRequest, log: SeenRows) -> History:
        """Return the history of the request's user; its recent items are newest first if the request explains them."""
        place = self._places.get(str(request.user_id))
        if place is None:
            return History(None, NO_ROWS, log)
        model_input, recent = self._inputs.of_user(place), self._inputs.seen_items[place]
        if request.explain:
            recent = self._catalogue.rows_of_state_items(recent_items(self._states[place]))
        rotation = Rotation.of(request, self._states[place], self._catalogue) if request.rotation else None
        return History(model_input, recent[recent >= 0].astype(np.int64), log, rotation)


@dataclass(slots=True, eq=False)
class CatalogueQuery:
    """A request in rows of the catalogue.

    selection   the items and scores that its expressions select
    similar_to  the item whose similar items are requested; None for personal recommendations
    rules       the pins, diversity and paging of the request; None if it has none
    boosts      the request's additions to scores
    excluded    items that may not be recommended
    candidates  the only items that may be recommended; None for all items
    is_blended  whether the ranking is blended with trending items
    depth       the number of items in the first ranking
    basket      the items in the cart; None for none
    is_together whether only complements of the basket are requested
    due         the items that the user may buy again, if only those are requested
    """

    request: RecommendationRequest
    selection: Selection
    history: History
    similar_to: int | None
    rules: RerankingRules | None
    boosts: Boosts | None
    excluded: Bitmap
    candidates: Rows | None
    is_blended: bool
    depth: int
    basket: Basket | None = None
    is_together: bool = False
    due: DueItems | None = None


class QueryBuilder:
    """Builds the queries of one generation."""

    def __init__(self, context: GenerationContext) -> None:
        self._generation = context.generation
        self._catalogue = context.catalogue
        self._engine = context.engine
        self._trending = context.trending
        self._complements, self._live_complements = context.complements, context.live_complements
        self._intervals = context.intervals
        self._has_model = len(context.generation.codes) > 0
        self._complements.of(NO_ROWS)  # compile before the first request

    def build(
        self, requests: Sequence[RecommendationRequest], users: StoredUsers, selections: Sequence[Selection]
    ) -> list[CatalogueQuery]:
        """Return one query for each request, in order."""
        states = DecodedStates(users.states, self._generation, self._catalogue)
        queries = []
        for request, selection, seen in zip(requests, selections, users.seen, strict=True):
            if is_plain(request):
                queries.append(self._plain_query(request, selection, states.history(request, NOTHING_SEEN)))
            else:
                history = self._with_basket(request, self._history(request, states, seen or NOTHING_SEEN))
                queries.append(self._query(request, selection, history))
        return queries

    def rest(self, query: CatalogueQuery, shown: Sequence[str]) -> CatalogueQuery:
        """Return the query for the items that the fallback adds to a list: its next page under another filter.

        shown  ids of the items on this page so far
        """
        cursor, left = [*(query.request.cursor or ()), *shown], query.request.k - len(shown)
        request = query.request.model_copy(update={"cursor": cursor, "k": left})
        selection = query.selection._replace(allowed=query.selection.fallback, conditions=())
        return self._query(request, selection, query.history)

    def with_fallback(self, query: CatalogueQuery) -> CatalogueQuery:
        """Return the query for all items that the filter or the fallback allows, from the beginning of the list."""
        allowed, fallback = query.selection.allowed, query.selection.fallback
        if allowed is None or fallback is None:
            return query
        selection = query.selection._replace(allowed=allowed | fallback, conditions=())
        return self._query(query.request, selection, query.history)

    def _history(self, request: RecommendationRequest, states: DecodedStates, seen: SeenRows) -> History:
        """Return the history of the request: from its items, its visitor's state, or its user's state."""
        if request.history is not None:
            return self._history_of_items(request.history)
        if request.state is None or request.state.opened is None:
            return states.history(request, seen)
        state = request.state.opened.state_in(self._generation)
        model_input = model_input_of(state, self._catalogue)
        return History(model_input, self._catalogue.known_rows_of_state_items(recent_items(state)), seen)

    def _with_basket(self, request: RecommendationRequest, history: History) -> History:
        """Return the history of the request; if it has no model input, the basket becomes the model input."""
        if not request.basket or history.model_input is not None:
            return history
        return replace(history, model_input=self._history_of_items(request.basket).model_input)

    def _history_of_items(self, item_ids: Sequence[str]) -> History:
        """Return a history in which each known item, oldest first, is an event of weight 1."""
        rows = self._catalogue.rows(item_ids)
        if not len(rows):
            return NO_HISTORY
        recent, log = newest_seen(rows), SeenRows(rows, NO_ROWS, None)
        if not self._has_model:
            return History(None, recent, log)
        counts = self._engine.history_counts[rows]
        histogram = history_histogram(counts, self._generation.decay_rates, self._generation.codewords)
        window = np.full(self._engine.window, -1)
        newest_first = rows[::-1][: self._engine.window]
        window[: len(newest_first)] = newest_first
        return History(ModelInput(len(rows), histogram, rows[-1], window), recent, log)

    def _plain_query(self, request: RecommendationRequest, selection: Selection, history: History) -> CatalogueQuery:
        """Return the same as `_query` for a plain request, without checking optional fields."""
        excluded, depth = self._catalogue.unavailable.copy(), request.k
        bitmap.add(excluded, history.recent)
        if is_blended := self._is_blended(request, history.model_input):
            depth += EXTRA_DEPTH
        return CatalogueQuery(request, selection, history, None, None, None, excluded, None, is_blended, depth)

    def _query(self, request: RecommendationRequest, selection: Selection, history: History) -> CatalogueQuery:
        excluded, similar_to = self._catalogue.unavailable.copy(), self._similar_to(request, history.model_input)
        basket = None
        if request.basket:
            basket = Basket.of(request, self._catalogue, self._complements, self._live_complements)
        in_cart = NO_ROWS if basket is None else basket.rows
        for _ in filter_out(excluded, request, selection, self._catalogue, history.log.left_out, in_cart):
            pass
        if similar_to is not None:
            bitmap.add(excluded, np.array([similar_to]))
        rules, boosts, is_blended, depth = None, None, False, request.k
        if history.rotation is not None or _has_rules(request, selection):
            rules = reranking_rules(request, selection, self._catalogue, excluded)
            boosts, depth = rules.boosts, rules.depth
            depth += 0 if history.rotation is None else len(history.rotation.rows)
        elif similar_to is None and self._is_blended(request, history.model_input):
            is_blended, depth = True, request.k + EXTRA_DEPTH
        bitmap.add(excluded, seen_rows(request, history))
        if request.current_item is not None:
            bitmap.add(excluded, page_rows(request, self._catalogue))
        if rules is not None and len(rules.reserved):
            bitmap.add(excluded, rules.reserved)
        candidates = None
        if request.candidates is not None:
            rows = self._catalogue.rows(request.candidates)
            candidates = rows[~bitmap.has(excluded, rows)]
        return CatalogueQuery(
            *(request, selection, history, similar_to, rules, boosts, excluded, candidates, is_blended, depth),
            basket=basket,
            is_together=basket is not None and request.basket_only and similar_to is None,
            due=due_items(history.log.bought or NO_PURCHASES, self._intervals) if request.mode == "repeat" else None,
        )

    def _is_blended(self, request: RecommendationRequest, model_input: ModelInput | None) -> bool:
        if model_input is None or model_input.events > MAX_BLENDED_EVENTS:
            return False
        if request.candidates is not None or request.explain or request.basket or request.mode == "repeat":
            return False
        return self._trending.has_enough_events

    def _similar_to(self, request: RecommendationRequest, model_input: ModelInput | None) -> int | None:
        """Return the item whose similar items are requested, if it is known."""
        if request.because is None or not self._has_model:
            return None
        if request.because:
            return self._catalogue.row_of.get(request.because)
        return int(model_input.last_item) if model_input else None


def seen_rows(request: RecommendationRequest, history: History) -> Rows:
    """Return the seen items that the request excludes."""
    return {"none": NO_ROWS, "recent": history.recent, "all": history.log.seen}[request.seen_rule]


def page_rows(request: RecommendationRequest, catalogue: LiveCatalogue) -> Rows:
    """Return the row of the current item, which its own page must not list; none without a known one."""
    return NO_ROWS if request.current_item is None else catalogue.rows([request.current_item])


def _has_rules(request: RecommendationRequest, selection: Selection) -> bool:
    """Return whether the request has boosts, an objective, pins, diversity, limits or paging."""
    return (
        selection.gains is not None
        or selection.worth is not None
        or (isinstance(request.boost, dict) and any(request.boost.values()))
        or bool(request.pin or request.diversity or request.max_per_category or selection.caps)
        or request.cursor is not None
    )

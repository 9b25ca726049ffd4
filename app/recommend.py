"""The second use case: what is known of those who ask becomes their best items, for any number of them at once."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextvars import copy_context
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from app import blending, trace
from app.batching import MicroBatcher, never
from app.catalogue import NO_ROWS, Rows
from app.clicks import ClickThrough
from app.cursor import MAX_ITEMS as MAX_SHOWN
from app.cursor import cursor_after
from app.errors import InvalidRequest, ItemNotFound, details_of
from app.explaining import Asker, Explainer
from app.metrics import Metrics
from app.ranking import Personal, Popular, Ranked, Ranking, Scores, found_of
from app.recommendation_ids import hash_of
from app.rules import Rules, rules_of
from app.schemas.recommendations import (
    RecommendationBatch,
    RecommendationRequest,
    RecommendationResults,
    Recommendations,
    SimilarQuery,
    Source,
)
from app.schemas.scored_items import Explanation, ScoredItem
from app.shelf import LiveCatalogue
from app.trends import Trending
from model import bitmap
from model.bitmap import Bitmap
from model.engine import Engine, Queries
from model.histogram import history_histogram
from model.scan import Boosts
from model.variety import compile_loops
from storage.errors import PartlyRead, StorageError
from storage.protocol import UserStore
from storage.state import ITEM_RING, Generation, recent_items

logger = logging.getLogger(__name__)

# Entries of the log that a request folds if a state lacks them, some 10 ms; who lacks more gets popular items for now.
FOLD_AT_ONCE = 500
BATCH = 64  # requests that one read and one turn of the engine answer; more gain nothing, and all wait for the last one
AT_ONCE_S = 0.005  # the interpreter's switch interval: another thread that computes holds up the event loop as long
REMEMBERED = 8  # of the batches that were timed
TIMED = 4  # to ask for a thread's time is a call of the system, so only one in so many batches is timed
LIGHT_FIELDS, LIGHT_K = {"user_id", "k", "exclude_seen", "explain", "diversity", "max_per_category"}, 50
LIGHT_FIELDS |= {"categories", "categories_all", "categories_none", "exclude", "boost", "pin", "cursor", "because"}
LIGHT_IDS = 100  # of items that are excluded or pinned or were on earlier pages
MAX_WAITING = 1024  # requests; with ten million items some 2 s of work


@dataclass(frozen=True, slots=True)
class Stored:
    """What the store said about the users of some requests.

    states  encoded, by user; who has no event, or whose state is still being folded, is missing
    logged  item ids of the whole log, by user, for those whose request wants them left out
    """

    states: Mapping[str, bytes]
    logged: Mapping[str, set[str]]


@dataclass(frozen=True, slots=True)
class Steps:
    """What the model makes its query from.

    events     how many
    histogram  (R, B, W)  float32, the scale of each row is free
    last       row of the last item
    recent     (K,)       rows of the newest
    """

    events: int
    histogram: NDArray[np.float32]
    last: int
    recent: NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Past:
    """What one asker did; `recent` and `logged` are the rows that the two seen rules leave out."""

    steps: Steps | None
    recent: Rows
    logged: Rows


NOBODY = Past(None, recent=NO_ROWS, logged=NO_ROWS)


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One request in rows of the catalogue.

    like        of what the best items are to be like; None: what the user is to like
    rules       what is wanted of the list beyond the best; None where nothing is
    excluded    what may not be shown
    candidates  only allowed ones; None for every item
    is_blended  with what is used just now
    """

    request: RecommendationRequest
    past: Past
    like: int | None
    rules: Rules | None
    excluded: Bitmap
    candidates: Rows | None
    is_blended: bool

    @property
    def depth(self) -> int:
        """How many of the best items are looked for at first."""
        if self.rules is not None:
            return self.rules.depth
        return self.request.k + blending.DEEPER if self.is_blended else self.request.k

    @property
    def boosts(self) -> Boosts | None:
        return None if self.rules is None else self.rules.boosts


class Found(NamedTuple):
    """The best items of one ask, at least as many as it wants if they are there; -1 is no item.

    place  of the ask's query among the queries
    """

    rows: Rows
    scores: Scores
    queries: Queries
    place: int


def validated(body: object) -> RecommendationRequest | RecommendationBatch:
    """The parsed body of ``POST /v1/recommendations``; InvalidRequest says what is wrong with it."""
    schema = RecommendationBatch if isinstance(body, dict) and "requests" in body else RecommendationRequest
    try:
        return schema.model_validate(body)
    except ValidationError as exc:
        raise InvalidRequest("the body is not a valid request", details_of(exc)) from None


class Recommending(ABC):
    """Whoever answers recommendation requests."""

    @abstractmethod
    async def recommend(
        self, requests: Sequence[RecommendationRequest], is_gone: Callable[[], bool] = never
    ) -> list[Recommendations]:
        """One answer for each request, in order.

        is_gone  whether nobody waits for the answers any more
        raises   Overloaded, ClientDisconnect
        """

    async def answer(
        self, asked: RecommendationRequest | RecommendationBatch, is_gone: Callable[[], bool] = never
    ) -> Recommendations | RecommendationResults:
        """As `recommend`, for what `validated` found in a body."""
        if isinstance(asked, RecommendationBatch):
            return {"results": await self.recommend(asked.requests, is_gone)}
        (answer,) = await self.recommend([asked], is_gone)
        return answer


class Recommender(Recommending):
    """Answers recommendation requests from one generation."""

    def __init__(
        self,
        name: str,
        generation: Generation,
        catalogue: LiveCatalogue,
        engine: Engine,
        trending: Trending,
        engine_thread: Executor,
        store: UserStore,
        tenant: str,
        metrics: Metrics,
        clicks: ClickThrough,
        experiment: str = "",
    ) -> None:
        self._name = name
        self._generation = generation
        self._catalogue = catalogue
        self._engine = engine
        self._trending = trending
        self._window = engine.window
        compile_loops()
        self._explainer = Explainer(generation, catalogue, engine)
        self._engine_thread = engine_thread
        self._store = store
        self._tenant = tenant
        self._metrics = metrics
        self._clicks = clicks
        self._experiment = experiment
        self._experiment_hash = hash_of(experiment)
        self._light_batches = 0
        self._light_s = AT_ONCE_S  # computing that a light request takes, as far as is known
        self._batcher = MicroBatcher(self._answers, max_batch=BATCH, max_waiting=MAX_WAITING)

    async def recommend(
        self, requests: Sequence[RecommendationRequest], is_gone: Callable[[], bool] = never
    ) -> list[Recommendations]:
        """One answer for each request, in order, from one read of the states and one turn of the engine.

        Who is unknown gets popular items; so does who has a long history that is still to be folded for this
        generation, and every user of whom the store cannot be read.

        is_gone  whether nobody waits for the answers any more
        raises   Overloaded, ClientDisconnect
        """
        if not self._engine.has_measured and any(request.because is not None for request in requests):
            await asyncio.to_thread(self._engine.measure)  # the first time that takes a while
        spans = trace.spans.get()
        return await self._batcher.submit([(request, spans) for request in requests], is_gone)

    async def _answers(
        self, asked: Sequence[tuple[RecommendationRequest, trace.Spans | None]]
    ) -> list[Recommendations]:
        """Of a batch; where its time went is noted for everybody in it."""
        requests = [request for request, _ in asked]
        of_batch: trace.Spans = {}
        trace.spans.set(of_batch)
        stored = await self._read(requests)
        self._metrics.engine.in_progress += 1
        try:
            answers = await self._computed(requests, stored)
        finally:
            self._metrics.engine.in_progress -= 1
        for _, spans in asked:
            if spans is not None:
                spans.update(of_batch)
        for answer in answers:
            self._metrics.recommendations.count(answer["source"])
            self._clicks.show(self._name, self._experiment, len(answer["items"]))
        return answers

    async def similar(self, item_id: str, query: SimilarQuery) -> Recommendations:
        """What is most like the item.

        raises  ItemNotFound, and as `recommend`
        """
        if item_id not in self._catalogue.row_of or not len(self._generation.codes):
            raise ItemNotFound("no model has learned this item, so nothing is known to be like it")
        request = RecommendationRequest(history=[], because=item_id, exclude_seen="none", **query.model_dump())
        (answer,) = await self.recommend([request])
        return answer

    async def _read(self, requests: Sequence[RecommendationRequest]) -> Stored:
        user_ids = _distinct(request.user_id for request in requests)
        leaving_out_all = _distinct(request.user_id for request in requests if request.exclude_seen == "all")
        if not user_ids:
            return Stored({}, {})
        failures: list[StorageError] = []
        begin_s = time.perf_counter()
        states = await self._states(user_ids, failures.append)
        logs = await self._logs(leaving_out_all, failures.append) if leaving_out_all else {}
        trace.add_span("store", time.perf_counter() - begin_s)
        if failures:
            logger.warning("answering with popular items, as the store cannot be read: %s", failures[0])
            self._metrics.store.count_failed_read()
        unread = {user_id for user_id in leaving_out_all if user_id not in logs}
        known = {user_id: state for user_id, state in states.items() if state is not None and user_id not in unread}
        return Stored(known, logs)

    async def _states(
        self, user_ids: Sequence[str], note: Callable[[StorageError], None]
    ) -> Mapping[str, bytes | None]:
        """Of those that can be read."""
        try:
            with self._metrics.store.timed("states"):
                states = await self._store.states(self._tenant, user_ids, self._generation, max_missing=FOLD_AT_ONCE)
        except StorageError as exc:
            note(exc)
            return exc.values if isinstance(exc, PartlyRead) else {}
        return dict(zip(user_ids, states, strict=True))

    async def _logs(self, user_ids: Sequence[str], note: Callable[[StorageError], None]) -> dict[str, set[str]]:
        """The items of the users' logs, of those that can be read."""

        async def items(user_id: str) -> set[str] | None:
            try:
                with self._metrics.store.timed("log"):
                    return await self._store.seen_items(self._tenant, user_id, self._generation.unseen_types)
            except StorageError as exc:
                note(exc)
                return None

        found = await asyncio.gather(*map(items, user_ids))
        return {user_id: seen for user_id, seen in zip(user_ids, found, strict=True) if seen is not None}

    async def _computed(self, requests: Sequence[RecommendationRequest], stored: Stored) -> list[Recommendations]:
        """The answers: at once where that is over soon, else from the engine's thread.

        Two threads that run Python hold each other up at every call that lets go of the interpreter, which costs more
        than a short wait of all others.
        """
        are_light = all(map(_is_light, requests))
        self._light_batches += are_light
        is_timed = are_light and self._light_batches % TIMED == 0
        answer = self._timed if is_timed else self._answer
        if are_light and len(requests) * self._light_s <= AT_ONCE_S:
            return answer(requests, stored)
        in_context = copy_context().run  # what is noted in the thread is this batch's
        return await asyncio.get_running_loop().run_in_executor(
            self._engine_thread, in_context, answer, requests, stored
        )

    def _timed(self, requests: Sequence[RecommendationRequest], stored: Stored) -> list[Recommendations]:
        """As `_answer`, for light requests: says how much of a processor one of them takes."""
        begin_s = time.thread_time()
        answers = self._answer(requests, stored)
        taken_s = (time.thread_time() - begin_s) / len(requests)
        self._light_s += (taken_s - self._light_s) / REMEMBERED
        return answers

    def _answer(self, requests: Sequence[RecommendationRequest], stored: Stored) -> list[Recommendations]:
        """All that computes."""
        users = self._pasts(stored)
        asks = [self._ask(request, users) for request in requests]
        found = self._rank(asks)
        return [self._best(ask, found[ask]) if ask in found else self._popular(ask) for ask in asks]

    def _pasts(self, stored: Stored) -> dict[str, Past]:
        """The pasts of the known users."""
        states = self._generation.decode_many(list(stored.states.values()))
        return {
            user_id: Past(
                steps=steps,
                recent=self._catalogue.known_in_state(recent_items(state)),
                logged=self._catalogue.rows(stored.logged[user_id]) if user_id in stored.logged else NO_ROWS,
            )
            for user_id, state, steps in zip(stored.states, states, steps_of(states, self._catalogue), strict=True)
        }

    def _past_of_history(self, item_ids: Sequence[str]) -> Past:
        """As if each of the known items, oldest first, had been an event of weight 1."""
        rows = self._catalogue.rows(item_ids)
        if not len(rows):
            return NOBODY
        if not len(self._generation.codes):  # there is no model yet, just what is popular
            return Past(None, recent=rows[-ITEM_RING:], logged=rows)
        counts = self._engine.history_counts[rows]
        histogram = history_histogram(counts, self._generation.decay_rates, self._generation.codewords)
        window = np.full(self._window, -1)
        newest_first = rows[::-1][: self._window]
        window[: len(newest_first)] = newest_first
        return Past(Steps(len(rows), histogram, rows[-1], window), recent=rows[-ITEM_RING:], logged=rows)

    def _ask(self, request: RecommendationRequest, users: Mapping[str, Past]) -> Ask:
        if request.history is not None:
            past = self._past_of_history(request.history)
        else:
            past = users.get(str(request.user_id), NOBODY)
        excluded, like = self._filtered(request), self._like(request, past)
        if like is not None:
            bitmap.add(excluded, np.array([like]))
        rules = rules_of(request, self._catalogue, excluded)
        bitmap.add(excluded, {"none": NO_ROWS, "recent": past.recent, "all": past.logged}[request.exclude_seen])
        if rules is not None and len(rules.elsewhere):
            bitmap.add(excluded, rules.elsewhere)
        candidates = None
        if request.candidates is not None:
            rows = self._catalogue.rows(request.candidates)
            candidates = rows[~bitmap.has(excluded, rows)]
        is_plain = candidates is None and like is None and rules is None and not request.explain
        return Ask(request, past, like, rules, excluded, candidates, is_plain and self._is_blended(past))

    def _is_blended(self, past: Past) -> bool:
        return past.steps is not None and past.steps.events <= blending.EVENTS and self._trending.are_known

    def _like(self, request: RecommendationRequest, past: Past) -> int | None:
        """The item that heads the list, if it is to have one and there is one."""
        if request.because is None or not len(self._generation.codes):
            return None
        if request.because:
            return self._catalogue.row_of.get(request.because)
        return int(past.steps.last) if past.steps else None

    def _filtered(self, request: RecommendationRequest) -> Bitmap:
        """What the request's filters leave out."""
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

    def _rank(self, asks: Sequence[Ask]) -> dict[Ask, Found]:
        """What is found for those who have stepped, or want what is like an item."""
        similar = [ask for ask in asks if ask.like is not None]
        personal = [ask for ask in asks if ask.like is None and ask.past.steps]
        if not similar and not personal:
            return {}
        begin_s = time.perf_counter()
        queries = [
            (group, ask_engine(group))
            for group, ask_engine in ((personal, self._stepped), (similar, self._neighbours))
            if group
        ]
        stepped_s = time.perf_counter()
        found = {ask: one for group, asked in queries for ask, one in self._scan(group, asked).items()}
        self._note_stages(len(found), stepped_s - begin_s, time.perf_counter() - stepped_s)
        return found

    def _stepped(self, asks: Sequence[Ask]) -> Queries:
        return self._engine.step(*stacked([ask.past.steps for ask in asks if ask.past.steps]))

    def _neighbours(self, asks: Sequence[Ask]) -> Queries:
        return self._engine.neighbours_of([ask.like for ask in asks if ask.like is not None])

    def _scan(self, asks: Sequence[Ask], queries: Queries) -> dict[Ask, Found]:
        """What is found for each of the asks, which have a query each."""
        self._engine.asked(queries)  # once for all
        found: dict[Ask, Found] = {}
        alike = [ask.depth if ask.boosts is None and ask.candidates is None else None for ask in asks]
        # who wants few items does not wait for a longer ranking, and boosts are one request's
        for depth in set(alike):
            places = [place for place, its_depth in enumerate(alike) if its_depth == depth]
            if depth is not None:
                theirs = queries if len(places) == len(asks) else queries[places]
                rows, scores = self._engine.top_k(theirs, depth, np.stack([asks[place].excluded for place in places]))
                found |= {asks[place]: Found(rows[n], scores[n], theirs, n) for n, place in enumerate(places)}
                continue
            for place in places:
                ask, query = asks[place], queries.one(place)
                best = Personal(self._engine, query, ask.boosts, ask.candidates).best(ask.depth, ask.excluded)
                found[ask] = Found(*best, query, 0)
        return found

    def _note_stages(self, queries: int, step_s: float, scan_s: float) -> None:
        self._metrics.engine.observe_batch(queries, step_s, scan_s)
        trace.add_span("step", step_s)
        trace.add_span("scan", scan_s)

    def _best(self, ask: Ask, found: Found) -> Recommendations:
        """The answer of what was found."""
        if ask.is_blended and ask.past.steps:
            return self._blended(ask, found.rows[found.rows >= 0], ask.past.steps.events)
        source: Source = "personalised" if ask.like is None else "similar"
        if ask.rules is None:
            rows, cursor = found.rows[: ask.request.k], None
            items = self._scored(rows, found.scores[: ask.request.k])
        else:
            query = found.queries.one(found.place)
            ranking = Personal(self._engine, query, ask.boosts, ask.candidates)
            rows, items, cursor = self._listed(ask, ask.rules, ranking, found[:2])
        if ask.request.explain:
            for item, explanation in zip(items, self._explain(ask, found, rows[: len(items)]), strict=True):
                item["explanation"] = explanation
        return self._recommendations(ask, source, items, cursor)

    def _scored(self, rows: Rows, scores: Scores) -> list[ScoredItem]:
        found, their_scores = found_of((rows, scores))
        return self._catalogue.scored_items(found, their_scores.tolist())

    def _listed(
        self, ask: Ask, rules: Rules, ranking: Ranking, best: Ranked
    ) -> tuple[Rows, list[ScoredItem], str | None]:
        """The list that the rules make of a ranking, of which the best are known; and where it goes on."""
        listed = rules.applied(ranking, best, ask.excluded)
        items = self._scored(listed.rows, listed.scores)
        for place in listed.pinned:
            items[place]["pinned"] = True
        cursor = None
        if ask.request.cursor is not None and listed.goes_on:
            shown = [*rules.shown, *(item["item_id"] for item in items)]
            cursor = cursor_after(shown) if len(shown) < MAX_SHOWN else None
        return listed.rows, items, cursor

    def _blended(self, ask: Ask, own: Rows, events: int) -> Recommendations:
        now = self._trending.first(ask.depth, ask.excluded)
        rows, scores = blending.blended(own, now, events, ask.request.k)
        return self._recommendations(ask, "blended", self._catalogue.scored_items(rows, scores.tolist()))

    def _explain(self, ask: Ask, found: Found, rows: Rows) -> list[Explanation]:
        query, past = found.queries.one(found.place), ask.past
        if ask.like is not None or past.steps is None:
            asker = Asker(query, NO_ROWS, np.array([ask.like]), None, ask.boosts)
        else:
            asker = Asker(query, past.steps.recent, past.recent, past.steps.histogram, ask.boosts)
        return self._explainer.explain(asker, rows)

    def _popular(self, ask: Ask) -> Recommendations:
        excluded = ask.excluded if ask.candidates is None else ~self._catalogue.bitmap_of(ask.candidates)
        if ask.rules is None:
            return self._recommendations(ask, "popular", self._trending.popular(ask.request.k, excluded))
        ranking = Popular(self._engine, self._trending, ask.boosts, ask.candidates)
        best = ranking.best(ask.depth, ask.excluded)
        _, items, cursor = self._listed(ask, ask.rules, ranking, best)
        return self._recommendations(ask, "popular", items, cursor)

    def _recommendations(
        self, ask: Ask, source: Source, items: list[ScoredItem], cursor: str | None = None
    ) -> Recommendations:
        answer: Recommendations = {
            "recommendation_id": self._clicks.ids.make(
                self._generation.tag, self._experiment_hash, [item["item_id"] for item in items]
            ),
            "user_id": ask.request.user_id,
            "generation": self._name,
            "source": source,
            "items": items,
        }
        if ask.request.cursor is not None:
            answer["cursor"] = cursor
        if self._experiment:
            answer["experiment"] = self._experiment
        if ask.like is not None:
            (answer["because"],) = self._catalogue.named_items(np.array([ask.like]))
        return answer


def _is_light(request: RecommendationRequest) -> bool:
    """Whether it asks for no more than most do, so that the time of one tells that of the next."""
    return (
        request.model_fields_set <= LIGHT_FIELDS
        and request.k <= LIGHT_K
        and request.exclude_seen != "all"
        and len(request.exclude) + len(request.pin) + len(request.cursor or ()) <= LIGHT_IDS
    )


def steps_of(states: NDArray[np.void], catalogue: LiveCatalogue) -> list[Steps | None]:
    """What the model makes its queries from; None for who has not stepped, or only with items that are not known here.

    states  (Q,) decoded
    """
    windows, lasts = states["stepped_items"], states["last_item"]
    known = catalogue.in_state(windows)
    if known is not windows:  # the last item is one of them
        windows, lasts = known, catalogue.in_state(lasts)
    found: list[Steps | None] = []
    for state, window, last in zip(states, windows, lasts, strict=True):
        if last < 0:  # also where another process has just given codes to an item
            last = next((row for row in window if row >= 0), -1)
        # the bins as they are: the scale of a row is free
        found.append(Steps(int(state["n"]), state["bins"], last, window) if last >= 0 else None)
    return found


def stacked(steps: Sequence[Steps]) -> tuple[NDArray[np.float32], NDArray[np.integer], NDArray[np.integer]]:
    """As the engine takes them."""
    return (
        np.stack([step.histogram for step in steps]),
        np.array([step.last for step in steps]),
        np.stack([step.recent for step in steps]),
    )


def _distinct(user_ids: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(user_id for user_id in user_ids if user_id is not None))

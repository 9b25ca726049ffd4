"""Learns codes of cold items, which no model has learned, from the users who choose them.

Each process watches the events on such items, and assigns codes once there are enough. This affects when codes are
assigned, but no state. Several processes may assign codes to the same item; the codes made from the most events are
kept.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from app.catalogue.background_tasks import BackgroundTasks
from app.catalogue.cold_item_codes import ColdItemCodes, item_codes
from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.model_inputs import MAX_MISSING_EVENTS, ModelInput, model_input_of
from model.artifact.model_directory import Artifact
from model.cold_items import (
    CONTEXT_ITEMS,
    FIT_AT_USERS,
    SAMPLED_QUERIES,
    ColdItemEvent,
    SampledQuery,
    likeliest_codes,
    sampled_query,
)
from model.inference.engine import Engine
from model.inference.query_products import Queries
from storage.errors import StorageError
from storage.protocol import ItemStore, StateStore
from storage.records import AppendResult, ItemCodes
from storage.state.event import Event
from storage.state.fold import fold_event
from storage.state.generation import Generation
from storage.state.layout import State

MAX_WATCHED = 10_000  # items
MAX_OBSERVATIONS = 20_000  # for all watched items together, about 15 MB
MAX_STATES_READ = 32  # per request
EVENTS_PER_SAMPLE = 150  # events per sampled query
MIN_SAMPLE_INTERVAL_S = 0.5  # a sample takes about 10 ms with a large catalogue

logger = logging.getLogger(__name__)


@dataclass
class WatchedItem:
    """A new item for which observed events are collected.

    first_event   this process's event count at the item's first event
    observations  by user, the first event on the item that follows a known history: no user counts twice
    """

    first_event: int
    observations: dict[str, ColdItemEvent] = field(default_factory=dict)


Observations = Mapping[int, ColdItemEvent]
"""The users' contexts before some events, by the positions of the events in the request."""

NO_OBSERVATIONS: Observations = {}


class LearnerStore(StateStore, ItemStore, Protocol):
    """The part of a store that a learner uses: it reads states and stores codes."""


class ColdItemLearner:
    """Learns codes of new items from events, for one generation.

    codes  codes of the items that the served catalogue adds to the model's; events on these items are logged with them
    """

    def __init__(
        self,
        trained: Artifact,
        generation: Generation,
        item_codes: ColdItemCodes,
        engine_thread: Executor,
        store: LearnerStore,
        tenant: str,
        tasks: BackgroundTasks,
    ) -> None:
        self.codes: Mapping[str, ItemCodes] = {}
        self._trained = trained
        self._generation = generation
        self._item_codes = item_codes
        self._engine_thread = engine_thread
        self._store = store
        self._tenant = tenant
        self._tasks = tasks
        self._watched: dict[str, WatchedItem] = {}  # least recently used first
        self._observation_count = 0
        self._events = 0
        self._sample: dict[str, SampledQuery] = {}  # the newest query of each user; oldest first
        self._sampled_at_s = 0.0
        self._one_at_a_time = asyncio.Lock()

    def set_catalogue(self, catalogue: LiveCatalogue, engine: Engine, codes: Mapping[str, ItemCodes]) -> None:
        """Replace the catalogue, the engine and the codes."""
        self._catalogue, self._engine = catalogue, engine
        self.codes = codes or {}  # looked up for every event, at no cost if empty

    async def observe_before(self, events: Sequence[Event]) -> Observations:
        """Return the contexts of events on watched items before they are logged. There are usually none.

        A failure is logged, and costs only the contexts.
        """
        watched = self._watched
        if not watched or self._engine.is_lost or not any(event.item_id in watched for event in events):
            return NO_OBSERVATIONS
        try:
            return await self._observations(events)
        except Exception:
            if not await asyncio.to_thread(self._engine.has_lost_device):  # which is logged once
                logger.exception("cannot learn from events on new items")
            return NO_OBSERVATIONS

    async def _observations(self, events: Sequence[Event]) -> Observations:
        """Return the contexts of those events that are on watched items."""
        watched = self._watched
        user_ids = [event.user_id for event in events if event.item_id in watched and self._has_weight(event)]
        states = await self._states(list(dict.fromkeys(user_ids))[:MAX_STATES_READ])
        inputs: dict[int, ModelInput] = {}
        for position, event in enumerate(events):
            state = states.get(event.user_id)
            if state is None:
                continue
            if event.item_id in watched and self._has_weight(event):
                model_input = model_input_of(state, self._catalogue)
                inputs |= {} if model_input is None else {position: model_input}
            fold_event(self._generation, state, event)
        if not inputs:
            return NO_OBSERVATIONS
        return await asyncio.get_running_loop().run_in_executor(self._engine_thread, self._compute_observations, inputs)

    def observe_after(
        self, events: Sequence[Event], results: Sequence[AppendResult], observations: Observations
    ) -> None:
        """Learn from events that have been logged. Duplicates are ignored."""
        before = self._events
        self._events += sum(not result.duplicate for result in results)
        for position, observation in observations.items():
            if not results[position].duplicate:
                self._add_observation(events[position], observation)
        for event in self._events_to_watch(events, results):
            self._watch(event.item_id)
        if before // EVENTS_PER_SAMPLE < self._events // EVENTS_PER_SAMPLE:
            self._start_sampling(events[-1].user_id)

    def _events_to_watch(self, events: Sequence[Event], results: Sequence[AppendResult]) -> Iterator[Event]:
        """Yield the events on new items whose codes are missing or made from few events."""
        if self.codes or any(result.unknown_item for result in results):
            for event, result in zip(events, results, strict=True):
                known = self.codes.get(event.item_id)
                is_new = result.unknown_item if known is None else known.evidence < FIT_AT_USERS[-1]
                if is_new and event.item_id not in self._generation.item_index and self._has_weight(event):
                    yield event

    def _has_weight(self, event: Event) -> bool:
        return self._generation.event_weights.get(event.type, 0.0) > 0

    def _watch(self, item_id: str) -> None:
        self._watched[item_id] = self._watched.pop(item_id, WatchedItem(self._events))
        while len(self._watched) > MAX_WATCHED or self._observation_count > MAX_OBSERVATIONS:
            self._observation_count -= len(self._watched.pop(next(iter(self._watched))).observations)

    def _add_observation(self, event: Event, observation: ColdItemEvent) -> None:
        """Add an observed event to its item, and assign codes when the item has enough users."""
        item_id, watched = event.item_id, self._watched.get(event.item_id)
        if watched is None or event.user_id in watched.observations:
            return
        watched.observations[event.user_id] = observation
        self._observation_count += 1
        if len(watched.observations) in FIT_AT_USERS and self._sample:
            known = self._item_codes.of(self._generation.tag).get(item_id)
            if known is None or known.evidence < len(watched.observations):
                observations = list(watched.observations.values())
                self._tasks.start(self._assign(item_id, observations, self._events - watched.first_event))
        if len(watched.observations) == FIT_AT_USERS[-1]:
            del self._watched[item_id]
            self._observation_count -= len(watched.observations)

    async def _assign(self, item_id: str, observations: Sequence[ColdItemEvent], events: int) -> None:
        async with self._one_at_a_time:
            codes = await asyncio.to_thread(
                likeliest_codes, self._trained, observations, list(self._sample.values()), events
            )
        assignment = item_codes(item_id, self._generation.tag, len(observations), codes)
        await self._store.put_item_codes(self._tenant, [assignment])

    def _start_sampling(self, user_id: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._sampled_at_s + MIN_SAMPLE_INTERVAL_S and not self._engine.is_lost:
            self._sampled_at_s = now_s
            self._tasks.start(self._sample_query(user_id))

    async def _sample_query(self, user_id: str) -> None:
        """Add the user's query to the sample that represents all users."""
        for state in (await self._states([user_id])).values():
            model_input = model_input_of(state, self._catalogue)
            if model_input is not None:
                loop = asyncio.get_running_loop()
                query = await loop.run_in_executor(self._engine_thread, self._compute_sampled_query, model_input)
                self._sample.pop(user_id, None)
                self._sample[user_id] = query
                if len(self._sample) > SAMPLED_QUERIES:
                    del self._sample[next(iter(self._sample))]

    def _compute_sampled_query(self, model_input: ModelInput) -> SampledQuery:
        query = self._engine.step([model_input.histogram], [model_input.last_item], [model_input.recent_items])
        nobody = np.full((1, self._engine.window), -1)  # no item is lifted
        scores = self._engine.scores(Queries(query.vectors, nobody))
        return sampled_query(self._trained, query.vectors_on_cpu[0], scores[0].cpu())

    async def _states(self, user_ids: Sequence[str]) -> dict[str, State]:
        """Return the users' states, empty for users without events; no users at all if the store fails."""
        try:
            values = await self._store.states(self._tenant, user_ids, self._generation, max_missing=MAX_MISSING_EVENTS)
        except StorageError as exc:
            logger.debug("cannot read the users of new items: %s", exc)
            return {}
        generation = self._generation
        return {
            user_id: generation.empty() if value is None else generation.decode(value)
            for user_id, value in zip(user_ids, values, strict=True)
        }

    def _compute_observations(self, inputs: Mapping[int, ModelInput]) -> Observations:
        """Return the observations of users who used learned items before their event."""
        rows = list(inputs.values())
        queries = self._engine.step(
            [one.histogram for one in rows], [one.last_item for one in rows], [one.recent_items for one in rows]
        ).vectors_on_cpu
        learned = len(self._trained.items)
        observations = {}
        for query, (position, model_input) in zip(queries, inputs.items(), strict=True):
            recent = model_input.recent_items
            before = recent[(recent >= 0) & (recent < learned)][:CONTEXT_ITEMS]
            if len(before):
                observations[position] = ColdItemEvent(tuple(before.tolist()), query)
        return observations


async def prepare_events(
    events: Sequence[Event], learners: Sequence[ColdItemLearner]
) -> tuple[Sequence[Event], Sequence[Observations]]:
    """Return the events in the form in which they are logged, and each learner's observations.

    Events on new items are logged with the items' codes in each generation.
    """
    events = with_codes(events, learners)
    return events, [await learner.observe_before(events) for learner in learners]


def with_codes(events: Sequence[Event], learners: Sequence[ColdItemLearner]) -> Sequence[Event]:
    """Return the events with the codes of new items."""
    encoders = [learner for learner in learners if learner.codes]
    if encoders and any(event.item_id in learner.codes for learner in encoders for event in events):
        return [_with_codes(event, encoders) for event in events]
    return events


def _with_codes(event: Event, learners: Sequence[ColdItemLearner]) -> Event:
    own = [one.codes[event.item_id] for one in learners if event.item_id in one.codes]
    if not own:
        return event
    return replace(event, codes=tuple((one.tag, one.history) for one in own))

"""Codes for items that no model has learned, from the users who choose them.

Each process watches the events on such items, and assigns codes once there are enough. That decides only when codes are
assigned, and not what any state is. So several processes may assign codes to the same item, and the codes made from
most events stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from app.catalogue.background_tasks import BackgroundTasks
from app.catalogue.cold_item_codes import CodeAssignment, ColdItemCodes, entry_of
from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.model_inputs import MAX_MISSING_EVENTS, ModelInput, model_inputs
from model.artifact.model_directory import Artifact
from model.cold_items import (
    CONTEXT_ITEMS,
    FIT_AT_EVENTS,
    SAMPLED_QUERIES,
    FirstEvent,
    SampledQuery,
    likeliest_codes,
    sampled_query,
)
from model.inference.engine import Engine, Queries
from storage.errors import StorageError
from storage.protocol import UserStore
from storage.records import AppendResult
from storage.state.cold_codes import plain_type, with_codes
from storage.state.event import Event
from storage.state.fold import fold_event
from storage.state.generation import Generation
from storage.state.layout import State

MAX_WATCHED = 10_000  # items
MAX_CHOSEN = 20_000  # events on them in all, some 15 MB
MAX_READ = 32  # users of one request whose states are read
SAMPLED_EVERY = 150  # events
SAMPLED_AFTER_S = 0.5  # at the earliest, since a large catalogue takes some 10 ms

logger = logging.getLogger(__name__)


@dataclass
class WatchedItem:
    """The number of its first event among all events, and what its users had done before each event on it."""

    since: int
    chosen: list[FirstEvent] = field(default_factory=list)


Observations = Mapping[int, FirstEvent]
"""What the users of some events had done before, by the events' places."""

NOTHING: Observations = {}


class ColdItemLearner:
    """Learns codes of new items from events, for one generation.

    codes  of the items that the served catalogue has beyond the model's: events on them are logged with these
    """

    def __init__(
        self,
        trained: Artifact,
        generation: Generation,
        item_codes: ColdItemCodes,
        engine_thread: Executor,
        store: UserStore,
        tenant: str,
        tasks: BackgroundTasks,
    ) -> None:
        self.codes: Mapping[str, CodeAssignment] = {}
        self._trained = trained
        self._generation = generation
        self._item_codes = item_codes
        self._engine_thread = engine_thread
        self._store = store
        self._tenant = tenant
        self._tasks = tasks
        self._watched: dict[str, WatchedItem] = {}  # in order of their last use
        self._chosen = 0
        self._events = 0
        self._sample: deque[SampledQuery] = deque(maxlen=SAMPLED_QUERIES)
        self._sampled_at_s = 0.0
        self._one_at_a_time = asyncio.Lock()

    def use(self, catalogue: LiveCatalogue, engine: Engine, codes: Mapping[str, CodeAssignment]) -> None:
        """Work with this catalogue, this engine and these codes from now on."""
        self._catalogue, self._engine, self.codes = catalogue, engine, codes

    async def observe_before(self, events: Sequence[Event]) -> Observations:
        """Return what the users of events on watched items have done, before these are logged; mostly nothing."""
        watched = self._watched
        if not watched or not any(event.item_id in watched for event in events):
            return NOTHING
        choosing = [event.user_id for event in events if event.item_id in watched and self._weighs(event)]
        states = await self._states(list(dict.fromkeys(choosing))[:MAX_READ])
        steps: dict[int, ModelInput] = {}
        for place, event in enumerate(events):
            state = states.get(event.user_id)
            if state is None:
                continue
            if event.item_id in watched and self._weighs(event):
                (own,) = model_inputs(np.array([state]), self._catalogue)
                steps |= {} if own is None else {place: own}
            fold_event(self._generation, state, event)
        if not steps:
            return NOTHING
        return await asyncio.get_running_loop().run_in_executor(self._engine_thread, self._observed, steps)

    def observe_after(
        self, events: Sequence[Event], results: Sequence[AppendResult], observations: Observations
    ) -> None:
        """Learn from these events, which are logged now; duplicates teach nothing."""
        before = self._events
        self._events += sum(not result.duplicate for result in results)
        for place, chosen in observations.items():
            if not results[place].duplicate:
                self._add(events[place].item_id, chosen)
        for event in self._events_to_watch(events, results):
            self._watch(event.item_id)
        if before // SAMPLED_EVERY < self._events // SAMPLED_EVERY:
            self._start_sampling(events[-1].user_id)

    def _events_to_watch(self, events: Sequence[Event], results: Sequence[AppendResult]) -> Iterator[Event]:
        """Yield the events on items that have no codes yet, or codes made from few events."""
        if self.codes or any(result.unknown_item for result in results):
            for event, result in zip(events, results, strict=True):
                known = self.codes.get(event.item_id)
                is_new = result.unknown_item if known is None else known.evidence < FIT_AT_EVENTS[-1]
                if is_new and event.item_id not in self._generation.item_index and self._weighs(event):
                    yield event

    def _weighs(self, event: Event) -> bool:
        return self._generation.event_weights.get(plain_type(event.type), 0.0) > 0

    def _watch(self, item_id: str) -> None:
        self._watched[item_id] = self._watched.pop(item_id, WatchedItem(self._events))
        while len(self._watched) > MAX_WATCHED or self._chosen > MAX_CHOSEN:
            self._chosen -= len(self._watched.pop(next(iter(self._watched))).chosen)

    def _add(self, item_id: str, chosen: FirstEvent) -> None:
        """Add what is known of one event to its item, and begin to assign codes when that is enough."""
        watched = self._watched.get(item_id)
        if watched is None:
            return
        watched.chosen.append(chosen)
        self._chosen += 1
        if len(watched.chosen) in FIT_AT_EVENTS and self._sample:
            known = self._item_codes.of(self._generation.tag).get(item_id)
            if known is None or known.evidence < len(watched.chosen):
                self._tasks.start(self._assign(item_id, list(watched.chosen), self._events - watched.since))
        if len(watched.chosen) == FIT_AT_EVENTS[-1]:
            del self._watched[item_id]
            self._chosen -= len(watched.chosen)

    async def _assign(self, item_id: str, chosen: Sequence[FirstEvent], events: int) -> None:
        async with self._one_at_a_time:
            codes = await asyncio.to_thread(likeliest_codes, self._trained, chosen, list(self._sample), events)
        assignment = CodeAssignment(item_id, self._generation.tag, codes, len(chosen))
        await self._store.put_items(self._tenant, [entry_of(assignment)])

    def _start_sampling(self, user_id: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._sampled_at_s + SAMPLED_AFTER_S:
            self._sampled_at_s = now_s
            self._tasks.start(self._sample_query(user_id))

    async def _sample_query(self, user_id: str) -> None:
        """Add the user's query to the sample, which stands for all users."""
        for state in (await self._states([user_id])).values():
            (own,) = model_inputs(np.array([state]), self._catalogue)
            if own is not None:
                loop = asyncio.get_running_loop()
                self._sample.append(await loop.run_in_executor(self._engine_thread, self._asked, own))

    def _asked(self, own: ModelInput) -> SampledQuery:
        query = self._engine.step([own.histogram], [own.last_item], [own.recent_items]).vectors
        scores = self._engine.scores(Queries(query, torch.full((1, self._engine.window), -1)))  # nothing is lifted
        return sampled_query(self._trained, query[0].cpu(), scores[0].cpu())

    async def _states(self, user_ids: Sequence[str]) -> dict[str, State]:
        """Return the users' states, empty ones for users without events; nothing when they cannot be read now."""
        try:
            values = await self._store.states(self._tenant, user_ids, self._generation, max_missing=MAX_MISSING_EVENTS)
        except StorageError as exc:
            logger.debug("users of new items cannot be looked at: %s", exc)
            return {}
        generation = self._generation
        return {
            user_id: generation.empty() if value is None else generation.decode(value)
            for user_id, value in zip(user_ids, values, strict=True)
        }

    def _observed(self, steps: Mapping[int, ModelInput]) -> Observations:
        """Return the queries of those who used learned items before."""
        inputs = list(steps.values())
        queries = self._engine.step(
            [one.histogram for one in inputs], [one.last_item for one in inputs], [one.recent_items for one in inputs]
        ).vectors.cpu()
        learned = len(self._trained.items)
        found = {}
        for query, (place, own) in zip(queries, steps.items(), strict=True):
            before = own.recent_items[(own.recent_items >= 0) & (own.recent_items < learned)][:CONTEXT_ITEMS]
            if len(before):
                found[place] = FirstEvent(tuple(before.tolist()), query)
        return found


async def prepare_events(
    events: Sequence[Event], learners: Sequence[ColdItemLearner]
) -> tuple[Sequence[Event], Sequence[Observations]]:
    """Return the events as they are logged, and what each learner observes before that.

    Events on new items are logged with the codes that these have in each generation.
    """
    coding = [learner for learner in learners if learner.codes]
    if coding and any(event.item_id in learner.codes for learner in coding for event in events):
        events = [_with_codes(event, coding) for event in events]
    return events, [await learner.observe_before(events) for learner in learners]


def _with_codes(event: Event, learners: Sequence[ColdItemLearner]) -> Event:
    own = [one.codes[event.item_id] for one in learners if event.item_id in one.codes]
    if not own:
        return event
    return replace(event, type=with_codes(event.type, [(one.tag, one.codes.history) for one in own]))

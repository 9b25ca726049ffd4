"""Items that the served model has not learned: codes from their categories, and from who chooses them.

What is in some category can be recommended at once; who chooses an item is watched until that says more. Each process
watches for itself. That only decides when codes are assigned, and not what any state is; so several processes may
assign to the same item, and the codes made from most events stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypeVar

import numpy as np
import torch

from app.assigned import CodeAssignment, ColdItemCodes, entry_of
from app.catalogue import NO_ROWS, Rows
from app.recommend import FOLD_AT_ONCE, Steps, stacked, steps_of
from app.said import ItemOverrides
from app.shelf import LiveCatalogue
from model import bitmap
from model.artifact import Artifact
from model.cold import (
    AUDIENCE,
    CONTEXT,
    EVIDENCE,
    SAMPLE,
    VOTERS,
    Asked,
    Audience,
    Chosen,
    asked,
    audience,
    likeliest,
    typical,
)
from model.engine import Engine, Queries
from model.histogram import history_histogram
from storage.cold import plain_type, with_codes
from storage.errors import StorageError
from storage.protocol import UserStore
from storage.records import AppendResult, ItemEntry
from storage.state import Generation, State
from storage.state_event import Event
from storage.state_fold import fold_event

MAX_WATCHED = 10_000  # items
MAX_CHOSEN = 20_000  # events of theirs in all, some 15 MB
INTRODUCED_AT_ONCE = 1000
MAX_READ = 32  # users of one request who are looked at
SAMPLED_EVERY = 150  # events
SAMPLED_AFTER_S = 0.5  # at the earliest, since a large catalogue takes some 10 ms

logger = logging.getLogger(__name__)
AskT = TypeVar("AskT")
AnswerT = TypeVar("AnswerT")


@dataclass
class WatchedItem:
    """An item's first event, as a number of events, and what came before each of its events."""

    since: int
    chosen: list[Chosen] = field(default_factory=list)


Observations = Mapping[int, Chosen]
"""What was known of the users of some events before these were logged, by the events' places."""

NOTHING: Observations = {}


class ColdItemLearner:
    """Of one generation, as one process serves it.

    codes  of the items that the served catalogue has beyond the model's: events on them are logged with these
    """

    def __init__(
        self,
        trained: Artifact,
        generation: Generation,
        assigned: ColdItemCodes,
        engine_thread: Executor,
        store: UserStore,
        tenant: str,
    ) -> None:
        self.codes: Mapping[str, CodeAssignment] = {}
        self._trained = trained
        self._generation = generation
        self._assigned = assigned
        self._engine_thread = engine_thread
        self._store = store
        self._tenant = tenant
        self._watched: dict[str, WatchedItem] = {}  # whatever was used last stands last
        self._chosen = 0
        self._events = 0
        self._sample: deque[Asked] = deque(maxlen=SAMPLE)
        self._sampled_at_s = 0.0
        self._audience: Audience | None = None
        self._introduced = 0  # of what the shop has said of items, what was looked at
        self._is_introducing = False
        self._at_work: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()

    def serve(self, catalogue: LiveCatalogue, engine: Engine, codes: Mapping[str, CodeAssignment]) -> None:
        """From now on, work with these."""
        self._catalogue, self._engine, self.codes = catalogue, engine, codes

    def introduce(self, said: ItemOverrides) -> None:
        """Begin to give codes to items that were put into categories, while nobody who chose them tells more."""
        if self._introduced != said.mark and not self._is_introducing:
            self._is_introducing = True
            self._start(self._introduce(said))

    async def witness(self, events: Sequence[Event]) -> Observations:
        """Look at the users of events on watched items, before these are logged; rarely there are any."""
        watched = self._watched
        if not watched or not any(event.item_id in watched for event in events):
            return NOTHING
        choosing = [event.user_id for event in events if event.item_id in watched and self._weighs(event)]
        states = await self._states(list(dict.fromkeys(choosing))[:MAX_READ])
        steps: dict[int, Steps] = {}
        for place, event in enumerate(events):
            state = states.get(event.user_id)
            if state is None:
                continue
            if event.item_id in watched and self._weighs(event):
                (own,) = steps_of(np.array([state]), self._catalogue)
                steps |= {} if own is None else {place: own}
            fold_event(self._generation, state, event)
        return await self._in_engine(self._chosen_by, steps) if steps else NOTHING

    def learn(self, events: Sequence[Event], appended: Sequence[AppendResult], witnessed: Observations) -> None:
        """Note what was new of these events, which are logged now."""
        before = self._events
        self._events += sum(not one.duplicate for one in appended)
        for place, chosen in witnessed.items():
            if not appended[place].duplicate:
                self._note(events[place].item_id, chosen)
        for event in self._to_be_watched(events, appended):
            self._watch(event.item_id)
        if before // SAMPLED_EVERY < self._events // SAMPLED_EVERY:
            self._start_sampling(events[-1].user_id)

    async def close(self) -> None:
        for task in list(self._at_work):
            task.cancel()
        if self._at_work:
            await asyncio.wait(self._at_work)

    def _to_be_watched(self, events: Sequence[Event], appended: Sequence[AppendResult]) -> Iterator[Event]:
        """Events on items that have no codes yet, or ones made from few events."""
        if self.codes or any(one.unknown_item for one in appended):
            for event, one in zip(events, appended, strict=True):
                known = self.codes.get(event.item_id)
                is_new = one.unknown_item if known is None else known.evidence < EVIDENCE[-1]
                if is_new and event.item_id not in self._generation.item_index and self._weighs(event):
                    yield event

    def _weighs(self, event: Event) -> bool:
        return self._generation.event_weights.get(plain_type(event.type), 0.0) > 0

    def _watch(self, item_id: str) -> None:
        self._watched[item_id] = self._watched.pop(item_id, WatchedItem(self._events))
        while len(self._watched) > MAX_WATCHED or self._chosen > MAX_CHOSEN:
            self._chosen -= len(self._watched.pop(next(iter(self._watched))).chosen)

    def _note(self, item_id: str, chosen: Chosen) -> None:
        watched = self._watched.get(item_id)
        if watched is None:
            return
        watched.chosen.append(chosen)
        self._chosen += 1
        if len(watched.chosen) in EVIDENCE and self._sample:
            known = self._assigned.of(self._generation.tag).get(item_id)
            if known is None or known.evidence < len(watched.chosen):
                self._start(self._assign(item_id, watched, list(watched.chosen), self._events - watched.since))
        if len(watched.chosen) == EVIDENCE[-1]:
            del self._watched[item_id]
            self._chosen -= len(watched.chosen)

    async def _assign(self, item_id: str, watched: WatchedItem, chosen: Sequence[Chosen], events: int) -> None:
        async with self._one_at_a_time:
            codes = await asyncio.to_thread(likeliest, self._trained, chosen, list(self._sample), events)
        assignment = CodeAssignment(item_id, self._generation.tag, codes, len(chosen))
        await self._store.put_items(self._tenant, [entry_of(assignment)])

    async def _introduce(self, said: ItemOverrides) -> None:
        try:
            entries, mark = said.since(self._introduced), said.mark
            known = self._assigned.of(self._generation.tag)
            nobody = [entry for entry in entries if self._is_unproven(entry, known.get(entry.item_id))]
            if nobody and self._audience is None:
                self._audience = await self._in_engine(self._ask_for_all, self._trained)
            for begin in range(0, len(nobody), INTRODUCED_AT_ONCE):
                part = nobody[begin : begin + INTRODUCED_AT_ONCE]
                if codes := await asyncio.to_thread(self._of_categories, part, known):
                    await self._store.put_items(self._tenant, [entry_of(one) for one in codes])
            self._introduced = mark
        finally:
            self._is_introducing = False

    def _of_categories(self, entries: Sequence[ItemEntry], known: Mapping[str, CodeAssignment]) -> list[CodeAssignment]:
        """Those that are not known already."""
        found = []
        alike, everybody = cache(self._alike), self._audience
        for entry in entries:
            rows = alike(frozenset(entry.categories or ()))
            if len(rows) and everybody is not None:
                # not the same ones for each of many new items, which would all stand side by side in every list
                chance = np.random.default_rng(list(entry.item_id.encode()))
                rows = chance.choice(rows, min(VOTERS, len(rows)), replace=False)
                codes, before = typical(self._trained, rows, everybody), known.get(entry.item_id)
                one = CodeAssignment(entry.item_id, self._generation.tag, codes, evidence=0)
                if before is None or entry_of(before) != entry_of(one):
                    found.append(one)
        return found

    def _is_unproven(self, entry: ItemEntry, known: CodeAssignment | None) -> bool:
        """Whether its categories are all that is known of it."""
        is_chosen = known is not None and known.evidence > 0
        return bool(entry.categories) and not is_chosen and entry.item_id not in self._trained.items.rows

    def _ask_for_all(self, trained: Artifact) -> Audience:
        """What users of one event would ask, as no user of this service may be known yet."""
        rows = np.random.default_rng(0).permutation(len(trained.items))[:AUDIENCE]
        shape, counts = trained.config.model, trained.history_counts[rows]
        histograms = [history_histogram(own[None], shape.decay_rates, shape.history_codewords) for own in counts]
        recent = np.full((len(rows), shape.recent_items), -1)
        recent[:, :1] = rows[:, None]
        return audience(trained, self._engine.step(np.stack(histograms), rows, recent).vectors.cpu())

    def _alike(self, categories: frozenset[str]) -> Rows:
        """Rows of learned items that have most of the categories, if there are any."""
        shared = np.zeros(len(self._trained.items), np.uint16)
        for category in categories:
            shared += bitmap.to_mask(self._catalogue.in_categories([category]), len(shared))
        most = shared.max(initial=0)
        return np.flatnonzero(shared == most) if most else NO_ROWS

    def _start_sampling(self, user_id: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._sampled_at_s + SAMPLED_AFTER_S:
            self._sampled_at_s = now_s
            self._start(self._take_sample(user_id))

    async def _take_sample(self, user_id: str) -> None:
        for state in (await self._states([user_id])).values():
            (own,) = steps_of(np.array([state]), self._catalogue)
            if own is not None:
                self._sample.append(await self._in_engine(self._asked, own))

    def _asked(self, own: Steps) -> Asked:
        query = self._engine.step(*stacked([own])).vectors
        scores = self._engine.scores(Queries(query, torch.full((1, self._engine.window), -1)))  # nothing is lifted
        return asked(self._trained, query[0].cpu(), scores[0].cpu())

    async def _states(self, user_ids: Sequence[str]) -> dict[str, State]:
        """Of the users; empty ones where nothing can be read, or not now."""
        try:
            values = await self._store.states(self._tenant, user_ids, self._generation, max_missing=FOLD_AT_ONCE)
        except StorageError as exc:
            logger.debug("users of new items cannot be looked at: %s", exc)
            return {}
        generation = self._generation
        return {
            user_id: generation.empty() if value is None else generation.decode(value)
            for user_id, value in zip(user_ids, values, strict=True)
        }

    def _chosen_by(self, steps: Mapping[int, Steps]) -> Observations:
        """Of those that have known items behind them."""
        queries = self._engine.step(*stacked(list(steps.values()))).vectors.cpu()
        learned = len(self._trained.items)
        found = {}
        for query, (place, own) in zip(queries, steps.items(), strict=True):
            before = own.recent[(own.recent >= 0) & (own.recent < learned)][:CONTEXT]
            if len(before):
                found[place] = Chosen(tuple(before.tolist()), query)
        return found

    async def _in_engine(self, work: Callable[[AskT], AnswerT], ask: AskT) -> AnswerT:
        return await asyncio.get_running_loop().run_in_executor(self._engine_thread, work, ask)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(self._tried(work), context=Context())  # no one's request
        self._at_work.add(task)
        task.add_done_callback(self._at_work.discard)

    async def _tried(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except StorageError as exc:
            logger.debug("codes of a new item could not be noted: %s", exc)
        except Exception:
            logger.exception("learning of a new item failed")


def with_codes_of(newcomers: Sequence[ColdItemLearner], events: Sequence[Event]) -> Sequence[Event]:
    """The events as they are logged: those on items that models lack, with the codes these have in each generation."""
    coded = [one for one in newcomers if one.codes]
    if not coded or not any(event.item_id in one.codes for one in coded for event in events):
        return events
    return [_with_codes(event, coded) for event in events]


def _with_codes(event: Event, coded: Sequence[ColdItemLearner]) -> Event:
    own = [one.codes[event.item_id] for one in coded if event.item_id in one.codes]
    if not own:
        return event
    return replace(event, type=with_codes(event.type, [(one.tag, one.codes.history) for one in own]))

"""Codes for items that no model has learned, from their categories, until events on them give better ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import cache

import numpy as np

from app.catalogue.background_tasks import BackgroundTasks
from app.catalogue.cold_item_codes import CodeAssignment, ColdItemCodes, entry_of
from app.catalogue.item_overrides import ItemOverrides
from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.trained_catalogue import NO_ROWS, Rows
from model.artifact.model_directory import Artifact
from model.cold_items import MAX_SIMILAR_ITEMS, POOLED_QUERIES, QuerySample, codes_of_similar_items, query_sample
from model.inference import bitmap
from model.inference.engine import Engine
from model.lisa.histogram import history_histogram
from storage.protocol import ItemStore
from storage.records import ItemEntry

ITEMS_AT_ONCE = 1000


class CategoryCodes:
    """Assigns to new items the codes that are typical of learned items in the same categories, for one generation."""

    def __init__(
        self,
        trained: Artifact,
        item_codes: ColdItemCodes,
        engine_thread: Executor,
        store: ItemStore,
        tenant: str,
        tasks: BackgroundTasks,
    ) -> None:
        self._trained = trained
        self._tag = bytes.fromhex(trained.tag)
        self._item_codes = item_codes
        self._engine_thread = engine_thread
        self._store = store
        self._tenant = tenant
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None
        self._mark = 0  # of the overrides that were looked at
        self._audience: QuerySample | None = None

    def use(self, catalogue: LiveCatalogue, engine: Engine) -> None:
        """Work with this catalogue and engine from now on."""
        self._catalogue, self._engine = catalogue, engine

    def start(self, overrides: ItemOverrides) -> None:
        """Begin to assign codes to items whose categories were set since the last time, unless that is under way."""
        if self._mark != overrides.mark and (self._task is None or self._task.done()):
            self._task = self._tasks.start(self._assign(overrides))

    async def _assign(self, overrides: ItemOverrides) -> None:
        entries, mark = overrides.since(self._mark), overrides.mark
        known = self._item_codes.of(self._tag)
        new = [entry for entry in entries if self._has_categories_alone(entry, known.get(entry.item_id))]
        if new and self._audience is None:
            in_engine_thread = asyncio.get_running_loop().run_in_executor
            self._audience = await in_engine_thread(self._engine_thread, self._sample_audience)
        for begin in range(0, len(new), ITEMS_AT_ONCE):
            part = new[begin : begin + ITEMS_AT_ONCE]
            if changed := await asyncio.to_thread(self._assignments, part, known):
                await self._store.put_items(self._tenant, [entry_of(one) for one in changed])
        self._mark = mark

    def _has_categories_alone(self, entry: ItemEntry, known: CodeAssignment | None) -> bool:
        """Return whether an item has categories, and neither a model nor events have taught its codes."""
        is_learned = entry.item_id in self._trained.items.rows or (known is not None and known.evidence > 0)
        return bool(entry.categories) and not is_learned

    def _assignments(self, entries: Sequence[ItemEntry], known: Mapping[str, CodeAssignment]) -> list[CodeAssignment]:
        """Return those that differ from what is known."""
        changed = []
        alike: Callable[[frozenset[str]], Rows] = cache(self._rows_with_most)
        everybody = self._audience
        for entry in entries:
            rows = alike(frozenset(entry.categories or ()))
            if len(rows) and everybody is not None:
                # not the same ones for each of many new items, which would all stand side by side in every list
                chance = np.random.default_rng(list(entry.item_id.encode()))
                rows = chance.choice(rows, min(MAX_SIMILAR_ITEMS, len(rows)), replace=False)
                codes, before = codes_of_similar_items(self._trained, rows, everybody), known.get(entry.item_id)
                one = CodeAssignment(entry.item_id, self._tag, codes, evidence=0)
                if before is None or entry_of(before) != entry_of(one):
                    changed.append(one)
        return changed

    def _sample_audience(self) -> QuerySample:
        """Return the queries of users with one event each, as no user of this service may be known yet."""
        trained = self._trained
        rows = np.random.default_rng(0).permutation(len(trained.items))[:POOLED_QUERIES]
        shape, counts = trained.config.model, trained.history_counts[rows]
        histograms = [history_histogram(own[None], shape.decay_rates, shape.history_codewords) for own in counts]
        recent = np.full((len(rows), shape.recent_items), -1)
        recent[:, :1] = rows[:, None]
        return query_sample(trained, self._engine.step(np.stack(histograms), rows, recent).vectors.cpu())

    def _rows_with_most(self, categories: frozenset[str]) -> Rows:
        """Return the learned items that have most of the categories; none where no item has any."""
        shared = np.zeros(len(self._trained.items), np.uint16)
        for category in categories:
            shared += bitmap.to_mask(self._catalogue.in_categories([category]), len(shared))
        most = shared.max(initial=0)
        return np.flatnonzero(shared == most) if most else NO_ROWS

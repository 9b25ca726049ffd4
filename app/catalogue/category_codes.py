"""Assigns codes to items that no model has learned, from their categories, until events on them give better ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import cache

import numpy as np

from app.catalogue.background_tasks import BackgroundTasks
from app.catalogue.cold_item_codes import CodeAssignment, ColdItemCodes
from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.overrides.item_overrides import Categorised, ItemOverrides
from app.catalogue.trained_catalogue import NO_ROWS, Rows
from model.artifact.model_directory import Artifact
from model.cold_items import MAX_SIMILAR_ITEMS, POOLED_QUERIES, QuerySample, codes_of_similar_items, query_sample
from model.inference import bitmap
from model.inference.engine import Engine
from model.lisa.histogram import history_histogram
from storage.protocol import ItemStore


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
        self._processed_changes = 0  # of the overrides
        self._audience: QuerySample | None = None

    def set_catalogue(self, catalogue: LiveCatalogue, engine: Engine) -> None:
        """Replace the catalogue and the engine that this works with."""
        self._catalogue, self._engine = catalogue, engine

    def start_assignment(self, overrides: ItemOverrides) -> None:
        """Start to assign codes to items whose categories have changed, unless a task is still doing so."""
        if self._processed_changes != overrides.change_count and (self._task is None or self._task.done()):
            self._task = self._tasks.start(self._assign(overrides))

    async def _assign(self, overrides: ItemOverrides) -> None:
        change_count, known = overrides.change_count, self._item_codes.of(self._tag)
        pages = overrides.categories_changed_since(self._processed_changes)
        while (page := await asyncio.to_thread(next, pages, None)) is not None:
            new = await asyncio.to_thread(self._needing_codes, page, known)
            if new and self._audience is None:
                loop = asyncio.get_running_loop()
                self._audience = await loop.run_in_executor(self._engine_thread, self._sample_audience)
            if changed := await asyncio.to_thread(self._changed_assignments, new, known):
                await self._store.put_item_codes(self._tenant, [one.record() for one in changed])
        self._processed_changes = change_count

    def _needing_codes(self, items: Sequence[Categorised], known: Mapping[str, CodeAssignment]) -> list[Categorised]:
        """Return the items whose codes come neither from a model nor from events."""

        def is_learned(item_id: str) -> bool:
            assignment = known.get(item_id)
            return item_id in self._trained.items.rows or (assignment is not None and assignment.evidence > 0)

        return [item for item in items if not is_learned(item[0])]

    def _changed_assignments(
        self, items: Sequence[Categorised], known: Mapping[str, CodeAssignment]
    ) -> list[CodeAssignment]:
        """Assign codes to the items; return the assignments that differ from the known ones."""
        changed = []
        similar_rows: Callable[[frozenset[str]], Rows] = cache(self._rows_sharing_most)
        audience = self._audience
        for item_id, categories in items:
            rows = similar_rows(frozenset(categories))
            if len(rows) and audience is not None:
                # a random choice: if many new items had the same codes, they would stand side by side in every list
                rng = np.random.default_rng(list(item_id.encode()))
                rows = rng.choice(rows, min(MAX_SIMILAR_ITEMS, len(rows)), replace=False)
                codes, before = codes_of_similar_items(self._trained, rows, audience), known.get(item_id)
                assignment = CodeAssignment(item_id, self._tag, codes, evidence=0)
                if before is None or before.record() != assignment.record():
                    changed.append(assignment)
        return changed

    def _sample_audience(self) -> QuerySample:
        """Sample the queries of made-up users with one event each, since the service may not have users yet."""
        trained = self._trained
        rows = np.random.default_rng(0).permutation(len(trained.items))[:POOLED_QUERIES]
        shape, counts = trained.config.model, trained.history_counts[rows]
        histograms = [history_histogram(own[None], shape.decay_rates, shape.history_codewords) for own in counts]
        recent = np.full((len(rows), shape.recent_items), -1)
        recent[:, :1] = rows[:, None]
        return query_sample(trained, self._engine.step(np.stack(histograms), rows, recent).vectors.cpu())

    def _rows_sharing_most(self, categories: frozenset[str]) -> Rows:
        """Return the learned items that share the most of these categories; none where no item has any."""
        shared = np.zeros(len(self._trained.items), np.uint16)
        for category in categories:
            shared += bitmap.to_mask(self._catalogue.in_categories([category]), len(shared))
        most = shared.max(initial=0)
        return np.flatnonzero(shared == most) if most else NO_ROWS

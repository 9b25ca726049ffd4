"""Assigns codes to unlearned items from their descriptions, until events on them yield better codes.

Training learns how the shop's vectors, titles and categories predict codes (`model.content`). An item's vector takes
precedence over its title and categories. If a model has no such map, or knows nothing in an item's title, the codes
come from the learned items that share the most of its categories. A vector is read from the store when codes are
assigned, and not kept. Items that are switched off, or past their dates, need no codes before they return.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import cache, cached_property, partial
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from app.catalogue.background_tasks import BackgroundTasks
from app.catalogue.cold_item_codes import ColdItemCodes, item_codes
from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.overrides.item_overrides import DescribedItem, ItemOverrides
from app.catalogue.trained_catalogue import NO_ROWS, Rows
from model.artifact.model_directory import Artifact
from model.cold_items import (
    MAX_SIMILAR_ITEMS,
    NEAREST_ITEMS,
    POOLED_QUERIES,
    ColdCodes,
    Neighbours,
    QuerySample,
    codes_of_nearest_items,
    codes_of_similar_items,
    drawn,
    query_sample,
)
from model.content.text_features import Description
from model.inference import bitmap
from model.inference.engine import Engine
from model.lisa.histogram import history_histogram
from storage.items.vectors import VectorStore, decode, numbers_in
from storage.protocol import ItemStore
from storage.records import ItemCodes


class DescribedItemStore(ItemStore, Protocol):
    """A store of the items' vectors and of assigned codes."""

    vectors: VectorStore


class DescriptionCodes:
    """Assigns codes to new items that are typical of similar learned items, for one generation."""

    def __init__(
        self,
        trained: Artifact,
        item_codes: ColdItemCodes,
        engine_thread: Executor,
        store: DescribedItemStore,
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
        self._processed_changes = 0  # number of overrides that are processed
        self._audience: QuerySample | None = None

    def set_catalogue(self, catalogue: LiveCatalogue, engine: Engine) -> None:
        """Replace the catalogue and the engine."""
        self._catalogue, self._engine = catalogue, engine

    def start_assignment(self, overrides: ItemOverrides) -> None:
        """Start assigning codes to items whose description has changed, unless a task is still doing so."""
        if self._processed_changes != overrides.change_count and (self._task is None or self._task.done()):
            self._task = self._tasks.start(self._assign(overrides))

    async def _assign(self, overrides: ItemOverrides) -> None:
        newest = overrides.change_count
        pages = overrides.changed_since(self._processed_changes)
        while (page := await asyncio.to_thread(next, pages, None)) is not None:
            await self._assign_to(page, overrides)
            if overrides.change_count != newest:  # what has changed meanwhile does not wait for the rest
                pages, newest = chain(overrides.changed_since(newest), pages), overrides.change_count
        self._processed_changes = newest

    async def _assign_to(self, item_ids: Sequence[str], overrides: ItemOverrides) -> None:
        known = self._item_codes.of(self._tag)
        new = await asyncio.to_thread(self._needing_codes, item_ids, known, overrides)
        if not new:
            return
        if self._audience is None:
            loop = asyncio.get_running_loop()
            sample = partial(sample_audience, self._trained, self._engine)
            self._audience = await loop.run_in_executor(self._engine_thread, sample)
        vectors: Mapping[str, bytes] = {}
        if self._trained.content.numbers:
            vectors = await self._store.vectors.of_items(self._tenant, [item.item_id for item in new])
        if changed := await asyncio.to_thread(self._changed_assignments, new, vectors, known):
            await self._store.put_item_codes(self._tenant, changed)

    def _needing_codes(
        self, item_ids: Sequence[str], known: Mapping[str, ItemCodes], overrides: ItemOverrides
    ) -> list[DescribedItem]:
        """Return the items that may be recommended, and whose codes come from neither a model nor events."""

        def is_learned(item_id: str) -> bool:
            assignment = known.get(item_id)
            return item_id in self._trained.items.rows or (assignment is not None and assignment.evidence > 0)

        return overrides.described([item_id for item_id in item_ids if not is_learned(item_id)])

    def _changed_assignments(
        self, items: Sequence[DescribedItem], vectors: Mapping[str, bytes], known: Mapping[str, ItemCodes]
    ) -> list[ItemCodes]:
        """Assign codes to the items; return the assignments that differ from the known ones."""
        changed = []
        if self._audience is not None:
            found = self._codes_of(items, vectors, self._audience)
            for (item_id, _, _), codes in zip(items, found, strict=True):
                if codes is not None:
                    assignment = item_codes(item_id, self._tag, 0, codes)
                    if known.get(item_id) != assignment:
                        changed.append(assignment)
        return changed

    def _codes_of(
        self, items: Sequence[DescribedItem], vectors: Mapping[str, bytes], audience: QuerySample
    ) -> Iterator[ColdCodes | None]:
        """Yield the codes of each item; None if nothing predicts them."""
        sharing_most: Callable[[frozenset[str]], Rows] = cache(self._rows_sharing_most)
        predicted, is_known = self._predicted(items, vectors)
        for item, vector, knows in zip(items, predicted, is_known.tolist(), strict=True):
            if knows:
                nearest = self._neighbours.nearest(vector, NEAREST_ITEMS)
                yield codes_of_nearest_items(self._trained, nearest, audience)
            else:
                rows = drawn(sharing_most(frozenset(item.categories)), MAX_SIMILAR_ITEMS, item.item_id)
                yield codes_of_similar_items(self._trained, rows, audience) if len(rows) else None

    def _predicted(
        self, items: Sequence[DescribedItem], vectors: Mapping[str, bytes]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Predict vectors in the model's space (n, D), and return for which items anything is known (n,)."""
        content = self._trained.content
        predicted, is_known = content.of_descriptions([Description(*item[1:]) for item in items])
        lengths = np.array([numbers_in(vectors.get(item.item_id, b"")) for item in items], np.int64)
        has_vector = (lengths > 0) & (lengths == content.numbers)
        if has_vector.any():
            own = decode([vectors[items[place].item_id] for place in np.flatnonzero(has_vector).tolist()])
            predicted[has_vector] = content.of_shop_vectors(own)
        has_title = np.array([bool(item.title) for item in items], bool)
        return predicted, (is_known & has_title) | has_vector

    @cached_property
    def _neighbours(self) -> Neighbours:
        return Neighbours(self._trained)

    def _rows_sharing_most(self, categories: frozenset[str]) -> Rows:
        """Return the learned items that share the most of these categories; none if no item has any."""
        shared = np.zeros(len(self._trained.items), np.uint16)
        for category in categories:
            shared += bitmap.to_mask(self._catalogue.in_categories([category]), len(shared))
        most = shared.max(initial=0)
        return np.flatnonzero(shared == most) if most else NO_ROWS


def sample_audience(trained: Artifact, engine: Engine) -> QuerySample:
    """Sample queries of synthetic users with one event each, because a new service has no users yet."""
    rows = np.random.default_rng(0).permutation(len(trained.items))[:POOLED_QUERIES]
    shape, counts = trained.config.model, trained.history_counts[rows]
    histograms = [history_histogram(own[None], shape.decay_rates, shape.history_codewords) for own in counts]
    recent = np.full((len(rows), shape.recent_items), -1)
    recent[:, :1] = rows[:, None]
    return query_sample(trained, engine.step(np.stack(histograms), rows, recent).vectors_on_cpu)

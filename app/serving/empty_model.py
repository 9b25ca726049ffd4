"""The empty model, which is served until the first trained one exists.

It has no items of its own, so every request returns popular items, counted from the log at intervals. Events are logged
and folded as with any other generation. The first trained generation replaces the empty one in the usual way.
"""

import asyncio
import heapq
from collections.abc import Mapping

import numpy as np
import torch

from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.overrides.item_overrides import ItemOverrides
from model.artifact.item_table import ItemTable
from model.artifact.model_directory import Artifact
from model.config import EVENT_WEIGHTS, Config, ModelConfig
from model.lisa.lisa_mini import LisaMini
from storage.protocol import StatisticsStore

NAME = "none"
TAG = b"no model"
# the most popular items: enough for popular recommendations, and fast to build
MAX_ITEMS = 10_000
COUNTED_TYPES = frozenset(kind for kind, weight in EVENT_WEIGHTS.items() if weight > 0)
# as many target codebooks as in the default preset, so that the scan is compiled before the first model arrives
EMPTY_CONFIG = ModelConfig(
    preset=NAME,
    width=1,
    decay_rates=(0.0,),
    history_codebooks=1,
    history_codewords=2,
    target_codewords=2,
    ffn_multiple=1,
    hops=0,
    recent_items=1,
    followers=0,
)


def artifact() -> Artifact:
    """Return a model without items."""
    history_codes, target_codes = (
        torch.zeros((0, books), dtype=torch.uint8)
        for books in (EMPTY_CONFIG.history_codebooks, EMPTY_CONFIG.target_codebooks)
    )
    model = LisaMini(EMPTY_CONFIG, history_codes, target_codes).eval()
    model.fold_norms_and_round()
    with torch.no_grad():
        tables = model.tables()
    return Artifact(NAME, TAG.hex(), Config(model=EMPTY_CONFIG), _items({}), model, tables, {})


async def popular_catalogue(
    store: StatisticsStore, tenant: str, overrides: ItemOverrides, before: LiveCatalogue
) -> LiveCatalogue:
    """Return a catalogue of the items with the most events in the log, which is the one before if it has them.

    raises  StorageError  when the log cannot be read
    """
    counts = await store.item_counts(tenant, COUNTED_TYPES)
    return await asyncio.to_thread(_catalogue_of, counts, overrides, before)


def _catalogue_of(counts: Mapping[str, int], overrides: ItemOverrides, before: LiveCatalogue) -> LiveCatalogue:
    items = _items(counts)
    if np.array_equal(items.counts, before.counts) and [*items.ids] == [*before.item_ids]:
        return before
    return LiveCatalogue(items, overrides)


def _items(counts: Mapping[str, int]) -> ItemTable:
    """Return the items by count, then by id, so that the order is the same in every process."""
    top = heapq.nsmallest(MAX_ITEMS, counts.items(), key=lambda item: (-item[1], item[0]))
    ids = [item_id for item_id, _ in top]
    return ItemTable(ids, [""] * len(ids), [()] * len(ids), np.array([count for _, count in top], np.int64))

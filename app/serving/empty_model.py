"""The generation that is served before the first model exists.

It knows no item, so no event steps and no answer is personal. Otherwise it is a generation like any other: events are
logged and folded, in some hundred bytes of state. Every answer has popular items, from a catalogue that is counted from
the log again and again. The first trained generation replaces it as every later one replaces the one before.
"""

import asyncio
import heapq
from collections.abc import Mapping

import numpy as np
import torch

from app.catalogue.item_overrides import ItemOverrides
from app.catalogue.live_catalogue import LiveCatalogue
from model.artifact.item_table import Items
from model.artifact.model_directory import Artifact
from model.config import EVENT_WEIGHTS, Config, ModelConfig
from model.lisa.lisa_mini import LisaMini
from storage.protocol import StatisticsStore

NAME = "none"
TAG = b"no model"
# a catalogue of the most popular items is enough to answer with, and quickly made
MAX_ITEMS = 10_000
COUNTED_TYPES = frozenset(kind for kind, weight in EVENT_WEIGHTS.items() if weight > 0)
# as many target codebooks as the default preset: what is compiled for a scan is ready when the first model comes
SMALLEST = ModelConfig(
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
    """Make a model of no items."""
    history_codes, target_codes = (
        torch.zeros((0, books), dtype=torch.uint8) for books in (SMALLEST.history_codebooks, SMALLEST.target_codebooks)
    )
    model = LisaMini(SMALLEST, history_codes, target_codes).eval()
    model.fold_norms_and_round()
    with torch.no_grad():
        tables = model.tables()
    return Artifact(NAME, TAG.hex(), Config(model=SMALLEST), _items({}), model, tables, {})


async def popular_catalogue(store: StatisticsStore, tenant: str, overrides: ItemOverrides) -> LiveCatalogue:
    """Make a catalogue of the items that the log has most often now; StorageError when it cannot be read."""
    counts = await store.item_counts(tenant, COUNTED_TYPES)
    return await asyncio.to_thread(lambda: LiveCatalogue(_items(counts), overrides))


def _items(counts: Mapping[str, int]) -> Items:
    """Order items by count, then by id, which is the same in every process."""
    most = heapq.nsmallest(MAX_ITEMS, counts.items(), key=lambda item: (-item[1], item[0]))
    ids = [item_id for item_id, _ in most]
    return Items(ids, [""] * len(ids), [()] * len(ids), np.array([count for _, count in most], np.int64))

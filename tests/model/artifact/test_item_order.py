"""Items sorted by their codes; everything about an item moves with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from numpy.typing import NDArray

from model import config
from model.artifact import model_directory
from model.artifact.item_order import ordered_by_codes
from model.artifact.item_statistics import NO_STATISTICS, ItemStatistics
from model.artifact.model_directory import tensors_of
from model.inference.engine import Engine
from model.lisa.item_complements import Complements
from model.lisa.item_intervals import Intervals
from model.lisa.lisa_mini import LisaMini

SHAPE = config.ModelConfig(
    width=8,
    decay_rates=(0.1, 1.0),
    history_codebooks=2,
    history_codewords=4,
    target_codebooks=3,
    target_codewords=4,
    followers=2,
    recent_items=3,
    dropout=0.0,
)
ITEMS = 50
FRAME = pl.DataFrame(
    {
        "item_id": [f"item-{row}" for row in range(ITEMS)],
        "title": [f"Item {row}" for row in range(ITEMS)],
        "categories": [[f"shelf-{row % 3}"] for row in range(ITEMS)],
        "count": np.arange(ITEMS),
    },
    schema_overrides={"count": pl.Int64},
)


@pytest.fixture(scope="module")
def statistics() -> ItemStatistics:
    rng = np.random.default_rng(1)
    complements = Complements(rng.integers(-1, ITEMS, (ITEMS, 2), np.int32), rng.random((ITEMS, 2), np.float32))
    days, spread, share = rng.random((3, ITEMS + 1), np.float32)
    return ItemStatistics(complements, Intervals(days, spread, share, False))


@pytest.fixture(scope="module")
def model(random_model: Callable[..., LisaMini]) -> LisaMini:
    model = random_model(SHAPE, ITEMS)
    rng = np.random.default_rng(2)
    model.target_codes = torch.from_numpy(rng.integers(0, 4, (ITEMS, 3), np.uint8))
    model.followers = torch.from_numpy(rng.integers(-1, ITEMS, (ITEMS, 2), np.int32))
    model.lift = torch.from_numpy(rng.random((ITEMS, 2), np.float32))
    with torch.no_grad():
        for book, scale in enumerate((1.0, 3.0, 2.0)):
            model.target_codebooks[book] *= scale / model.target_codebooks[book].norm()
    return model


def named(ids: list[str], rows: NDArray[np.int32]) -> list[list[str | None]]:
    return [[ids[row] if row >= 0 else None for row in of_item] for of_item in rows.tolist()]


def test_items_are_sorted_by_the_codes_of_the_widest_codebook_first(model: LisaMini) -> None:
    tensors, _, _ = ordered_by_codes(tensors_of(model), FRAME, NO_STATISTICS)
    bias = tensors["weights.bias"].tolist()
    keys = [(codes[1], codes[2], codes[0], -bias[row]) for row, codes in enumerate(tensors["codes.target"].tolist())]
    assert keys == sorted(keys)


def test_all_data_of_an_item_move_with_it(model: LisaMini, statistics: ItemStatistics) -> None:
    before = tensors_of(model)
    tensors, frame, moved = ordered_by_codes(before, FRAME, statistics)
    assert tensors.keys() == before.keys()
    ids, old_ids = frame["item_id"].to_list(), FRAME["item_id"].to_list()
    assert ids != old_ids
    old_rows = [old_ids.index(item_id) for item_id in ids]
    assert frame.equals(FRAME[old_rows])
    for name in ("codes.history", "codes.target", "weights.bias", "weights.lift"):
        assert torch.equal(tensors[name], before[name].detach()[old_rows])
    followers = named(old_ids, before["weights.followers"].numpy())
    assert named(ids, tensors["weights.followers"].numpy()) == [followers[row] for row in old_rows]
    complements = named(old_ids, statistics.complements.items)
    assert named(ids, moved.complements.items) == [complements[row] for row in old_rows]
    assert moved.complements.scores.tolist() == statistics.complements.scores[old_rows].tolist()
    for own, of_old in zip(moved.intervals[:3], statistics.intervals[:3], strict=True):
        assert own.tolist() == [*of_old[old_rows], of_old[ITEMS]]
    for name in before.keys() - model_directory.ITEM_DTYPES.keys():
        assert torch.equal(tensors[name], before[name])


def test_reordering_changes_no_lists(model: LisaMini, tmp_path: Path) -> None:
    parts = tensors_of(model), FRAME, NO_STATISTICS
    lists = []
    for name, (tensors, frame, statistics) in {"as it was": parts, "ordered": ordered_by_codes(*parts)}.items():
        model_directory.write(tmp_path / name, tensors, config.Config(model=SHAPE), frame, {}, statistics)
        artifact = model_directory.load(tmp_path / name)
        engine, ids = Engine(artifact), list(artifact.items.ids)
        last = np.array([ids.index(f"item-{row}") for row in range(ITEMS)])
        histograms = np.random.default_rng(3).random((ITEMS, 2, 2, 4), np.float32)
        found, scores = engine.top_k(engine.step(histograms, last, last[:, None]), 5)
        lists.append(([[ids[row] for row in of_user] for of_user in found.tolist()], scores.tolist()))
    assert lists[0] == lists[1]


def test_the_items_of_an_earlier_model_keep_their_rows(model: LisaMini, statistics: ItemStatistics) -> None:
    tensors, frame, _ = ordered_by_codes(tensors_of(model), FRAME, statistics, kept=20)
    assert frame["item_id"].to_list()[:20] == FRAME["item_id"].to_list()[:20]
    keys = [(codes[1], codes[2], codes[0]) for codes in tensors["codes.target"].tolist()]
    assert keys[20:] == sorted(keys[20:])
    assert keys[:20] != sorted(keys[:20])

"""Statistics of items beside the weights round-trip, and invalid ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from model import config
from model.artifact import model_directory
from model.artifact.item_statistics import CONTENT, NO_STATISTICS, ItemStatistics
from model.artifact.item_table import ItemTable
from model.content.content_map import learned_content
from model.content.text_features import BUCKETS, Description
from model.lisa.lisa_mini import LisaMini

SHAPE = config.ModelConfig(width=8, history_codewords=4, target_codewords=8, followers=1)
RNG = np.random.default_rng(0)
LEARNED = learned_content(
    RNG.normal(size=(3, SHAPE.width)).astype(np.float32),
    np.ones(3, int),
    [Description("Green tea"), Description("", ("a",)), Description("Cup")],
    RNG.normal(size=(3, 2)),
)


def test_content_round_trips_and_does_not_change_the_generation(
    tmp_path: Path, random_model: Callable[..., LisaMini]
) -> None:
    model, items = random_model(SHAPE, 2), ItemTable(["x", "y"], ["", ""], [(), ()], np.zeros(2, np.int64))
    served = config.Config(model=SHAPE)
    model_directory.save(tmp_path, model, served, items, {}, ItemStatistics(content=LEARNED))
    before = model_directory.load(tmp_path)
    for part, expected in zip(before.content, LEARNED, strict=True):
        np.testing.assert_array_equal(part, expected)
    assert (before.content.exists, before.content.reads_texts, before.content.numbers) == (True, True, 2)
    model_directory.save(tmp_path, model, served, items, {})
    after = model_directory.load(tmp_path)
    assert not (tmp_path / CONTENT).exists()
    assert (after.tag, after.content.exists) == (before.tag, False)


@pytest.mark.parametrize(
    "changed",
    [
        {"mean": torch.zeros(SHAPE.width + 1)},
        {"mean": torch.full((SHAPE.width,), torch.nan)},
        {"mean": torch.tensor(0.0)},
        {"rarity": torch.ones(BUCKETS - 1)},
        {"rarity": -torch.ones(BUCKETS)},
        {"of_texts": torch.ones((BUCKETS, SHAPE.width))},
        {"of_texts": torch.ones((BUCKETS, 1), dtype=torch.float16)},
        {"centre": torch.zeros(3)},
        {"of_vectors": torch.full((2, SHAPE.width), torch.inf, dtype=torch.float16)},
    ],
)
def test_content_of_the_wrong_shape_is_refused(changed: dict[str, torch.Tensor]) -> None:
    parts = ItemStatistics(content=LEARNED).to_tensors()[CONTENT]
    assert NO_STATISTICS.with_file(CONTENT, parts, 2, SHAPE.width).content.exists
    with pytest.raises((ValueError, TypeError), match="content map"):
        NO_STATISTICS.with_file(CONTENT, {**parts, **changed}, 2, SHAPE.width)
    with pytest.raises(KeyError):
        NO_STATISTICS.with_file(CONTENT, {name: part for name, part in parts.items() if name != "mean"}, 2, SHAPE.width)

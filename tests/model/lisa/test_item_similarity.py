"""Item similarity against sums of codewords in numpy, on every device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from model.artifact.model_directory import Artifact
from model.config import ModelConfig
from model.inference.engine import Engine
from model.lisa.lisa_mini import LisaMini
from tests.model.inference.bitmaps import from_mask
from tests.model.inference.scan_cases import sorted_best
from tests.model.lisa.naive_similarity import similarities

SHAPE = ModelConfig(
    width=16,
    decay_rates=(0.0, 0.7),
    history_codebooks=3,
    history_codewords=6,
    target_codebooks=2,
    target_codewords=4,
)
ITEMS = 60
Make = Callable[..., LisaMini]
Wrap = Callable[[LisaMini], Artifact]


@pytest.mark.parametrize("codewords", [{}, {"target_codewords": 9}], ids=["fewer targets", "more targets"])
@pytest.mark.parametrize("k", [1, 7, ITEMS])
def test_neighbours_equal_brute_force(
    random_model: Make, in_memory: Wrap, device: str, k: int, codewords: dict[str, int]
) -> None:
    model = random_model(SHAPE.model_copy(update=codewords), ITEMS)
    expected = similarities(model)
    engine = Engine(in_memory(model), device)
    wanted = [0, 17, 17, ITEMS - 1]
    excluded = np.random.default_rng(k).random((len(wanted), ITEMS)) < 0.3
    items, scores = engine.top_k(engine.neighbours_of(wanted), k, from_mask(excluded))
    every_score = engine.scores(engine.neighbours_of(wanted)).cpu().numpy()
    for row, item in enumerate(wanted):
        np.testing.assert_allclose(every_score[row], expected[item], atol=1e-5)
        assert (items[row].tolist(), scores[row].tolist()) == sorted_best(every_score[row], excluded[row], k)


def test_a_batch_equals_single_items(random_model: Make, in_memory: Wrap, device: str) -> None:
    engine = Engine(in_memory(random_model(SHAPE, ITEMS)), device)
    together = engine.scores(engine.neighbours_of(range(ITEMS))).cpu().numpy()
    for item in range(ITEMS):
        assert engine.scores(engine.neighbours_of([item])).cpu().numpy().tolist() == together[[item]].tolist()


def test_only_candidates_are_ranked(random_model: Make, in_memory: Wrap, device: str) -> None:
    engine = Engine(in_memory(random_model(SHAPE, ITEMS)), device)
    candidates = np.array([9, 3, 5])
    (every_score,) = engine.scores(engine.neighbours_of([3])).cpu().numpy()
    ((items, scores),) = engine.rank_candidates(engine.neighbours_of([3]), [candidates], 3)
    assert items.tolist() == sorted(candidates, key=lambda item: -every_score[item])
    assert scores.tolist() == every_score[items].tolist()


def test_identical_items_are_equally_similar(random_model: Make, in_memory: Wrap, device: str) -> None:
    model = random_model(SHAPE, ITEMS)
    model.target_codes[:], model.history_codes[:] = 1, 2
    alike = Engine(in_memory(model), device)
    items, scores = alike.top_k(alike.neighbours_of([5]), ITEMS)
    assert items[0].tolist() == list(range(ITEMS))
    assert np.ptp(scores) == 0

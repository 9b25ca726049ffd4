"""Neural baselines: properties of their inputs, and that they learn sequential order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from model.data.interactions import Histories
from model.evaluation import neural_baselines
from model.evaluation.baselines import Popularity
from model.evaluation.neural_baselines import Gru4Rec, NeuralBaseline, SasRec, network_scorer
from model.holdout_ranks import Scorer
from model.training.batches import padding
from model.training.batches.padding import padded_batches, segments
from tests.model.data.histories import packed

ITEMS = 30
SMALL = {"width": 16, "window": 8, "epochs": 2, "dropout": 0.2, "sparse_dropout": 0.2}
BOTH = [SasRec(**SMALL), Gru4Rec(**SMALL)]  # type: ignore[arg-type]
Items = list[list[int]]


def chains(seed: int, users: int = 150) -> Items:
    """Random triples A -> B -> C of neighbouring items."""
    rng = np.random.default_rng(seed)
    return [
        [3 * triple + place for triple in rng.integers(0, ITEMS // 3, rng.integers(2, 9)) for place in range(3)]
        for _ in range(users)
    ]


def prefers(best: int, epochs: int) -> Callable[[Scorer], float]:
    """Evaluates one epoch per call, and prefers one of them."""
    qualities = iter([float(epoch == best) for epoch in range(epochs)])
    return lambda _: next(qualities)


@pytest.mark.parametrize("neural", BOTH, ids=lambda neural: type(neural).__name__)
class TestBoth:
    def test_score_a_prefix_independently_of_its_batch(self, neural: NeuralBaseline) -> None:
        scorer = neural.fit(packed(chains(0)), ITEMS)
        prefixes = [[5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [7, 7], [0, 1, 2, 3, 4, 5, 6, 7]]
        together = scorer(packed(prefixes))
        assert (together.shape, together.dtype) == ((4, ITEMS), np.dtype(np.float32))
        for prefix, expected in zip(prefixes, together, strict=True):
            np.testing.assert_allclose(scorer(packed([prefix]))[0], expected, rtol=1e-4, atol=1e-5)

    def test_read_the_newest_events_within_the_window(self, neural: NeuralBaseline) -> None:
        scorer = neural.fit(packed(chains(0)), ITEMS)
        long = list(range(20))
        scores = scorer(packed([long, long[-8:], long[-7:]]))
        np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4, atol=1e-5)
        assert np.abs(scores[0] - scores[2]).max() > 1e-3

    def test_are_causal(self, neural: NeuralBaseline) -> None:
        torch.manual_seed(0)
        network = neural.network(ITEMS, 0.0).eval()
        items = torch.arange(8)[None]
        changed = items.clone()
        changed[0, 5] = 20
        with torch.inference_mode():
            before, after = network(items)[0], network(changed)[0]
        torch.testing.assert_close(before[:5], after[:5])
        assert ((before[5:] - after[5:]).abs().amax(dim=1) > 1e-4).all()

    def test_are_deterministic_by_seed(self, neural: NeuralBaseline) -> None:
        histories, prefixes = packed(chains(0)), packed([[1, 2], [4]])
        other = type(neural)(**{**SMALL, "seed": 1})  # type: ignore[arg-type]
        first = neural.fit(histories, ITEMS)(prefixes)
        torch.rand(3)
        assert np.array_equal(neural.fit(histories, ITEMS)(prefixes), first)
        assert not np.allclose(other.fit(histories, ITEMS)(prefixes), first)

    def test_keep_the_best_epoch(self, neural: NeuralBaseline) -> None:
        histories, prefixes = packed(chains(0)), packed([[1, 2], [5]])
        longer = replace(neural, epochs=3)
        after_each = [
            network_scorer(network, longer.window)(prefixes) for network, _ in longer.training(histories, ITEMS)
        ]
        for best in range(3):
            scores = longer.fit(histories, ITEMS, validate=prefers(best, epochs=3))(prefixes)
            np.testing.assert_array_equal(scores, after_each[best])

    def test_report_quality_only_of_evaluated_epochs(self, neural: NeuralBaseline) -> None:
        lines = list[str]()
        for validate in (None, lambda _: 0.25):
            replace(neural, epochs=1).fit(packed(chains(0)), ITEMS, lines.append, validate)
        assert ["validation NDCG@10 0.2500" in line for line in lines] == [False, True]
        assert "NDCG" not in lines[0]

    def test_leave_the_global_random_generator_unchanged(self, neural: NeuralBaseline) -> None:
        before = torch.random.get_rng_state()
        neural.fit(packed(chains(0, users=5)), ITEMS)
        assert torch.equal(torch.random.get_rng_state(), before)

    @pytest.mark.parametrize("sampled", [False, True])
    def test_learn_sequential_order(
        self, neural: NeuralBaseline, sampled: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if sampled:
            monkeypatch.setattr(neural_baselines, "FULL_SOFTMAX_ITEMS", ITEMS - 1)
            monkeypatch.setattr(neural_baselines, "SAMPLED_NEGATIVES", ITEMS // 2)
        histories, messages = packed(chains(0)), list[str]()
        learner = type(neural)(**{**SMALL, "width": 32, "epochs": 15, "learning_rate": 0.01, "dropout": 0.0})  # type: ignore[arg-type]
        scorer = learner.fit(histories, ITEMS, messages.append)
        prefixes = [history[:end] for history in chains(1, users=40) for end in range(1, len(history)) if end % 3]
        nexts = np.array([prefix[-1] + 1 for prefix in prefixes])
        hits = np.mean(scorer(packed(prefixes)).argmax(axis=1) == nexts)
        popular = np.mean(Popularity().fit(histories, ITEMS)(packed(prefixes)).argmax(axis=1) == nexts)
        assert hits > 0.97 > 0.2 > popular
        losses = [float(line.split("loss ")[1].split(",")[0]) for line in messages]
        assert len(losses) == 15
        assert losses[-1] < 0.6 * losses[0]

    def test_ignore_histories_without_a_next_item(self, neural: NeuralBaseline) -> None:
        assert np.isfinite(neural.fit(packed([[1], [], [2]]), ITEMS)(packed([[3, 4]]))).all()


@pytest.mark.parametrize("smallest", [1, 20, 100_000])
def test_an_epoch_has_every_position_once(smallest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "SMALLEST_BATCH", smallest)
    monkeypatch.setattr(padding, "POSITIONS_PER_BATCH", smallest)
    # every event has its own item, so that a pair tells the position
    lengths = np.array([0, 1, 2, 8, 9, 10, 17, 40, 0])
    histories = Histories(np.arange(87, dtype=np.int32), np.ones(87, np.float32), np.r_[0, np.cumsum(lengths)])
    found: Counter[Any] = Counter()
    for batch in padded_batches(histories, 8, np.random.default_rng(0)):
        assert batch.items.shape == batch.real.shape
        assert batch.items.shape[1] <= 8
        found.update(zip(batch.items[batch.real].tolist(), batch.targets.tolist(), strict=True))
    ends = set((histories.starts[1:] - 1).tolist())
    assert found == Counter({(item, item + 1): 1 for item in range(87) if item not in ends})


def test_a_long_history_is_cropped_at_random_positions() -> None:
    histories, rng = packed([list(range(25))]), np.random.default_rng(0)
    begins = {tuple(segments(histories, 8, rng)[0].tolist()) for _ in range(50)}
    assert len(begins) == 8


def test_sparse_data_gets_more_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    neural = SasRec(width=8, epochs=0, dropout=0.25, sparse_dropout=0.75)
    network = SasRec.network

    def network_with_its_rate(self: SasRec, items: int, rate: float) -> torch.nn.Module:
        rates.append(rate)
        return network(self, items, rate)

    monkeypatch.setattr(SasRec, "network", network_with_its_rate)
    for length in (29, 30):
        list(neural.training(packed([[1] * length, []]), ITEMS))
    assert rates == [0.75, 0.25]

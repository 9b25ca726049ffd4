"""Batches of an epoch: every position once, or each user's newest and a rotating stretch of the others."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from model.config import ModelConfig, TrainConfig
from model.data.interactions import Histories
from model.lisa.histogram import history_histogram
from model.training.batches import positions
from model.training.batches.positions import BatchMaker, Bound


class TestBatches:
    SHAPE = ModelConfig(
        width=4, decay_rates=(0.0, 0.5), history_codebooks=2, history_codewords=5, target_codewords=8, recent_items=3
    )
    ITEMS = 30

    def histories(self, seed: int = 0) -> Histories:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(0, 12, 25)
        item = rng.integers(0, self.ITEMS, lengths.sum()).astype(np.int32)
        weights = rng.choice(np.array([0.5, 1, 2], np.float32), len(item))
        return Histories(item, weights, np.cumsum([0, *lengths]))

    def expected(self, histories: Histories, codes: Any) -> Counter[Any]:
        """Every position with a successor, with its prefix of the history."""
        positions: Counter[Any] = Counter()
        for begin, end in zip(histories.starts[:-1], histories.starts[1:], strict=True):
            for now in range(begin + 1, end):
                past = slice(begin, now)
                histogram = history_histogram(
                    codes[histories.item[past]], self.SHAPE.decay_rates, 5, histories.weights[past]
                )
                newest = [*histories.item[past][::-1].tolist(), -1, -1, -1][:3]
                positions[np.round(histogram, 3).tobytes(), newest[0], tuple(newest), int(histories.item[now])] += 1
        return positions

    @pytest.mark.parametrize("pool_positions", [1, 10, 32_768])
    @pytest.mark.parametrize("batch_size", [1, 7, 10_000])
    def test_every_position_of_an_epoch_appears_exactly_once(
        self, monkeypatch: pytest.MonkeyPatch, pool_positions: int, batch_size: int
    ) -> None:
        monkeypatch.setattr(positions, "POOL_POSITIONS", pool_positions)
        histories = self.histories()
        codes = np.random.default_rng(1).integers(0, 5, (self.ITEMS, 2)).astype(np.uint8)
        found: Counter[Any] = Counter()
        for batch in BatchMaker(histories, codes, self.SHAPE, batch_size).batches(seed=0):
            for histogram, last, recent, target in zip(*batch, strict=True):
                found[np.round(histogram.numpy(), 3).tobytes(), int(last), tuple(recent.tolist()), int(target)] += 1
        assert found == self.expected(histories, codes)
        assert found.total() == histories.positions

    def test_the_seed_determines_the_order(self) -> None:
        codes = np.zeros((self.ITEMS, 2), np.uint8)
        orders = [
            torch.cat(
                [batch.targets for batch in BatchMaker(self.histories(), codes, self.SHAPE, 8).batches(seed)]
            ).tolist()
            for seed in (1, 1, 2)
        ]
        assert orders[0] == orders[1] != orders[2]
        assert sorted(orders[0]) == sorted(orders[2])

    @pytest.mark.parametrize("processes", [2, 3, 40])
    def test_processes_partition_positions_and_users_of_a_batch(
        self, monkeypatch: pytest.MonkeyPatch, processes: int
    ) -> None:
        monkeypatch.setattr(positions, "POOL_POSITIONS", 30)
        codes = np.random.default_rng(1).integers(0, 5, (self.ITEMS, 2)).astype(np.uint8)
        maker = BatchMaker(self.histories(), codes, self.SHAPE, 7)
        shards = [list(maker.shards(3, rank, processes)) for rank in range(processes)]
        for whole, *parts in zip(maker.batches(3), *shards, strict=True):
            assert {part.whole for part in parts} == {len(whole.targets)}
            rows = torch.cat([part.rows for part in parts])
            assert sorted(rows.tolist()) == list(range(len(whole.targets)))
            for expected, *found in zip(whole, *(part.batch for part in parts), strict=True):
                assert torch.equal(torch.cat(found)[rows.argsort()], expected)

    @pytest.mark.parametrize("most", [2, 3, 6, 50])
    def test_a_bounded_epoch_has_the_newest_positions_and_a_rotating_stretch(self, most: int) -> None:
        starts = np.array([0, 1, 3, 12, 40])
        draws = [Bound(most).keeps(starts, np.random.default_rng(seed)) for seed in range(400)]
        found = [each for each in draws if each is not None]
        assert len(found) == 400
        for begin, end in pairwise(starts.tolist()):
            count, newest = end - begin - 1, most - most // 2
            own = np.array([kept[begin : end - 1] for kept in found])
            assert (own.sum(axis=1) == min(count, most)).all()
            assert own[:, max(count - newest, 0) :].all()
            if count > most:
                earlier = own[:, : count - newest]
                assert earlier.any(axis=0).all(), "every earlier position has its turn"
                assert (np.abs(np.diff(earlier.astype(int), axis=1)).sum(axis=1) <= 2).all(), "in one stretch"

    @pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
    def test_the_share_of_an_epoch_lowers_the_bound(self, share: float) -> None:
        histories = self.histories()
        bound = Bound.of(histories, TrainConfig(epoch_share=share))
        assert bound.most is not None
        wanted = share * histories.positions
        assert bound.positions(histories) <= wanted or bound.most == 1
        assert Bound(bound.most + 1).positions(histories) > wanted
        assert Bound.of(histories, TrainConfig(epoch_share=share, events_per_user=2)).most == min(bound.most, 2)
        assert Bound.of(histories, TrainConfig(events_per_user=5)) == Bound(5)

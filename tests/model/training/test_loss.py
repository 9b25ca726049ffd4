"""The losses against plain log-probabilities and each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from model.config import ModelConfig
from model.lisa.lisa_mini import LisaMini
from model.training.loss import (
    Negatives,
    full_softmax_loss,
    negative_shares,
    popular_negatives,
    sampled_softmax_loss,
    uniform_negatives,
)

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def model(random_model: Make) -> LisaMini:
    shape = ModelConfig(width=8, history_codebooks=2, history_codewords=4, target_codebooks=2, target_codewords=8)
    made: LisaMini = random_model(shape, TestLosses.ITEMS)
    return made


class TestLosses:
    ITEMS = 50

    def test_the_full_loss_is_the_mean_negative_log_probability(self, model: LisaMini) -> None:
        queries, targets = torch.randn(6, 8), torch.randint(self.ITEMS, (6,))
        with torch.no_grad():
            loss = full_softmax_loss(queries, model.item_vectors(), model.bias, targets, torch.float32)
            scores = (queries @ model.item_vectors().T + model.bias).double().numpy()
        expected = [
            math.log(np.exp(row).sum()) - row[target] for row, target in zip(scores, targets.tolist(), strict=True)
        ]
        assert float(loss) == pytest.approx(np.mean(expected), rel=1e-5)

    def test_the_sampled_loss_with_all_negatives_equals_the_full_one(self, model: LisaMini) -> None:
        queries, targets = torch.randn(300, 8, requires_grad=True), torch.randint(self.ITEMS, (300,))
        gradients = []
        for loss in (
            sampled_softmax_loss(
                queries, model.item_vectors, model.bias, targets, self.uniform(self.ITEMS), torch.float32
            ),
            full_softmax_loss(queries, model.item_vectors(), model.bias, targets, torch.float32),
        ):
            model.zero_grad()
            queries.grad = None
            loss.backward()
            gradients.append((loss.detach(), queries.grad, model.target_codebooks.grad, model.bias.grad))
        for sampled, full in zip(*gradients, strict=True):
            torch.testing.assert_close(sampled, full, rtol=0, atol=1e-5)

    def uniform(self, count: int) -> Negatives:
        return uniform_negatives(torch.randperm(self.ITEMS)[:count], self.ITEMS)

    @pytest.mark.parametrize("negatives", [5, 25])
    @pytest.mark.parametrize("by_popularity", [False, True])
    def test_the_sampled_sum_estimates_that_of_the_catalogue(
        self, model: LisaMini, negatives: int, by_popularity: bool
    ) -> None:
        torch.manual_seed(0)
        # drawn without replacement a share is no exact chance, so that the shares are not too far apart
        shares = negative_shares(torch.arange(self.ITEMS) + 100)
        draw = partial(popular_negatives, shares) if by_popularity else self.uniform
        query, target = torch.randn(1, 8), torch.tensor([3])
        with torch.no_grad():
            full = full_softmax_loss(query, model.item_vectors(), model.bias, target, torch.float32).exp()
            sampled = [
                sampled_softmax_loss(
                    query, model.item_vectors, model.bias, target, draw(negatives), torch.float32
                ).exp()
                for _ in range(2000)
            ]
        # the loss is the log of a sum divided by the target's term: unbiased before the log
        assert float(torch.stack(sampled).mean()) == pytest.approx(float(full), rel=0.03)

    def test_bfloat16_products_change_the_loss_little(self, model: LisaMini) -> None:
        queries, targets = torch.randn(20, 8), torch.randint(self.ITEMS, (20,))
        with torch.no_grad():
            exact = full_softmax_loss(queries, model.item_vectors(), model.bias, targets, torch.float32)
            rough = full_softmax_loss(queries, model.item_vectors(), model.bias, targets, torch.bfloat16)
        assert rough.dtype == torch.float32
        assert float(rough) == pytest.approx(float(exact), rel=0.01)

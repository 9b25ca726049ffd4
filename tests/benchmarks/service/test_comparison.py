"""The SASRec service of the comparison, and the recall of an approximate index."""

from __future__ import annotations

import pytest
import torch

from benchmarks.service.comparison import peers
from benchmarks.service.comparison.sasrec import WINDOW, Block, with_random_weights

ITEMS = 100


def test_queries_of_a_batch_are_independent() -> None:
    vectors = torch.randn(ITEMS, 8)
    model, rows = with_random_weights(vectors), torch.randint(ITEMS, (3, WINDOW))
    queries = model(rows)
    for place in range(len(rows)):
        torch.testing.assert_close(model(rows[place : place + 1])[0], queries[place])
    for place in range(WINDOW):
        others = rows.clone()
        others[:, place] = (others[:, place] + 1) % ITEMS
        assert not torch.isclose(model(others), queries).all(dim=1).any()


def test_attention_is_causal() -> None:
    block, inputs = Block(8), torch.randn(1, WINDOW, 8)
    shorter = block(inputs[:, :7])
    torch.testing.assert_close(block(inputs)[:, :7], shorter)


def test_recall_is_the_share_of_the_exact_lists() -> None:
    assert peers.recall_of([{"a", "b"}, {"c", "d"}], [{"a", "b"}, {"c", "x"}]) == pytest.approx(0.75)

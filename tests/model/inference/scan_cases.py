"""Random catalogues and queries for scans, and brute force for comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model.inference.scan import Boosts, Lifted
from model.inference.scan_kernel import BLOCK
from tests.model.inference.bitmaps import from_mask

Floats = NDArray[np.float32]
Values = NDArray[Any]

TABLES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Values]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "all equal": lambda rng, shape: np.full(shape, rng.normal()),
    "all zero": lambda rng, shape: np.zeros(shape),
    "whole numbers": lambda rng, shape: rng.integers(-3, 4, shape),
    "on the edges of the deficits": lambda rng, shape: -127.0 * rng.integers(0, 3, shape),
    "huge ranges": lambda rng, shape: rng.standard_normal(shape) * 10.0 ** rng.uniform(-30, 30, shape),
    "one dominates": lambda rng, shape: (
        rng.standard_normal(shape) * 10.0 ** np.array([6, *[-3] * (shape[1] - 1)])[:, None]
    ),
    "hardly different": lambda rng, shape: 1e4 + 1e-3 * rng.integers(0, 3, shape),
    "tiny": lambda rng, shape: rng.standard_normal(shape) * 1e-42,
    "far below": lambda rng, shape: np.where(rng.random(shape) < 0.1, rng.random(shape), -1e34),
}
BIASES: dict[str, Callable[[np.random.Generator, int], Values]] = {
    "none": lambda rng, items: np.zeros(items),
    "all the same": lambda rng, items: np.full(items, -2.5),
    "normal": lambda rng, items: rng.standard_normal(items),
    "like minus infinity": lambda rng, items: np.where(rng.random(items) < 0.5, -1e36, rng.standard_normal(items)),
    "rising": lambda rng, items: np.linspace(-9, 9, items),
    "falling": lambda rng, items: np.linspace(9, -9, items),
    "two": lambda rng, items: rng.integers(0, 2, items),
    "whole numbers": lambda rng, items: rng.integers(-300, 300, items),
    "high in the first few": lambda rng, items: np.where(np.arange(items) < 30, 90 + rng.random(items), 0),
}


@dataclass(frozen=True)
class ScanCase:
    """A catalogue and queries to draw: sizes, how inner products and the bias are drawn, and how many codes differ.

    ordered  whether items are in the order of their codes, so that those of a block are alike
    by_block whether the mask leaves a few whole blocks
    """

    items: int
    books: int
    words: int
    queries: int
    table: str = "normal"
    bias: str = "normal"
    distinct: int = 10**6
    ordered: bool = False
    by_block: bool = False

    def draw(
        self, seed: int
    ) -> tuple[NDArray[np.uint8], Floats, torch.Tensor, Lifted[torch.Tensor], NDArray[np.bool_]]:
        """Codes, bias, inner products, lifted items and a mask."""
        rng, items, queries = np.random.default_rng(seed), self.items, self.queries
        different = rng.integers(0, self.words, (min(items, self.distinct), self.books), np.uint8)
        codes = different[rng.integers(0, self.distinct, items) % items]
        if self.ordered:
            codes = codes[np.lexsort(codes.T[::-1])]
        products = TABLES[self.table](rng, (queries, self.books, self.words)).astype(np.float32)
        lifts = int(rng.integers(0, 9))
        gains = rng.choice([0, 0.5, 3], (queries, lifts)).astype(np.float32)
        lifted = Lifted(torch.from_numpy(rng.integers(0, items, (queries, lifts))), torch.from_numpy(gains))
        mask = rng.random((queries, items)) < rng.choice([0, 0.3, 0.99, 1])
        if self.by_block:
            of_blocks = rng.random((queries, -(-items // BLOCK))) < rng.choice([0.8, 0.98])
            mask = np.repeat(of_blocks, BLOCK, axis=1)[:, :items]
        return codes, BIASES[self.bias](rng, items).astype(np.float32), torch.from_numpy(products), lifted, mask


def scores_one_by_one(
    codes: NDArray[np.uint8], bias: Floats, products: torch.Tensor, lifted: Lifted[torch.Tensor]
) -> Floats:
    """Sum bias, books in order, then gains in order; each step rounds to float32."""
    every = np.repeat(bias[None], len(products), axis=0)
    for scores, table, followers, gains in zip(every, products.numpy(), *lifted, strict=True):
        for row, column in zip(table, codes.T, strict=True):
            scores += row[column]
        for follower, gain in zip(followers.tolist(), gains.numpy(), strict=True):
            scores[follower] += gain
    return every


def sorted_best(scores: Floats, mask: NDArray[np.bool_], k: int) -> tuple[list[int], list[float]]:
    allowed = np.flatnonzero(~mask)
    best = sorted(allowed.tolist(), key=lambda item: (-scores[item], item))[:k]
    rest = k - len(best)
    return best + [-1] * rest, scores[best].tolist() + [-np.inf] * rest


def boosted(expected: Floats, gains: list[float], seed: int) -> tuple[Boosts, Floats]:
    """Sets of items with gains, often with gains of single items; and the scores with both."""
    rng = np.random.default_rng(seed)
    members = rng.random((len(gains), expected.shape[1])) < rng.choice([0, 0.01, 0.5, 1])
    scores = expected.copy()
    for of_set, gain in zip(members, np.array(gains, np.float32), strict=True):
        scores[:, of_set] += gain
    boosts = Boosts(from_mask(members), np.array(gains, np.float32))
    if rng.random() < 0.5:
        return boosts, scores
    items = expected.shape[1]
    few, many = rng.choice([0, 0.5, rng.normal() * 20], items), rng.normal(size=items) * rng.choice([0.01, 1.0, 20.0])
    by_item = (few if rng.random() < 0.5 else many).astype(np.float32)
    return Boosts(boosts.sets, boosts.gains, *Boosts.of_items(by_item)[2:]), scores + by_item

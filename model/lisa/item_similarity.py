"""How similar items are by their codes: target codes say when an item is chosen, history codes what follows it.

An item's vector is the sum of its target codewords, beside the sum of its history codewords. Both sums are centred on
their mean over all items. Their mean squares are 1 and ``HISTORY_SHARE``. To an item q, an item x has the score
q x - ``LENGTH_SHARE`` |x|^2, which ranks nearly as the cosine does, and is a sum over codebooks, as the scan needs it.
"""

from __future__ import annotations

from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.lisa.lisa_mini import SMALLEST_MASS, Lisa, sum_of_codewords

ITEMS_PER_CHUNK = 1 << 16
HISTORY_SHARE = 0.5
LENGTH_SHARE = 0.2  # 0.5 would rank by distance, which prefers the short vectors of items that are little known


class Similarity:
    """Compares items with all N items of a model: scores are sums over target codebooks, then history codebooks."""

    def __init__(self, target_codebooks: Tensor, history_codebooks: Tensor) -> None:
        self._parts = tuple(part.numpy(force=True) for part in (target_codebooks, history_codebooks))

    @classmethod
    def of(cls, model: Lisa) -> tuple[Self, Tensor, Tensor]:
        """Return the similarity of a model's items, their codes (N, B' + B) uint8 and their bias (N,) float32."""
        target, target_squares = _scaled(model.target_codes, model.target_codebooks, 1.0)
        history, history_squares = _scaled(model.history_codes, model.codebooks, HISTORY_SHARE)
        codes = torch.cat([model.target_codes, model.history_codes], dim=1)
        return cls(target, history), codes, -LENGTH_SHARE * (target_squares + history_squares)

    def vectors(self, target_codes: NDArray[np.uint8], history_codes: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the vectors of items by their codes: (Q, B') and (Q, B) -> (Q, 2 D)."""
        codes = target_codes, history_codes
        words = [part[np.arange(len(part)), own] for part, own in zip(self._parts, codes, strict=True)]
        return np.concatenate([one.sum(axis=1) for one in words], axis=1)

    def products(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the inner products of vectors with all codewords, of the target codebooks first: (Q, B' + B, W).

        W is the larger number of codewords; where a codebook has fewer, its last product is repeated. No product
        depends on the other vectors.
        """
        words = max(part.shape[1] for part in self._parts)
        products = np.empty((len(vectors), sum(map(len, self._parts)), words), np.float32)
        for rows, vector in zip(products, vectors, strict=True):
            begin = 0
            for part, half in zip(self._parts, np.split(vector, 2), strict=True):
                books, own, width = part.shape
                of_part = rows[begin : begin + books]
                of_part[:, :own] = (part.reshape(-1, width) @ half).reshape(books, own)
                of_part[:, own:] = of_part[:, own - 1 : own]
                begin += books
        return products


def _scaled(codes: Tensor, codebooks: Tensor, mean_square: float) -> tuple[Tensor, Tensor]:
    """Centre and scale codebooks, so that the sums of all items have the mean 0 and this mean square.

    codes      (N, B)     uint8
    codebooks  (B, W, D)  float32
    returns    the codebooks, and the square of the length of each item's sum (N,)
    """
    counts = torch.stack([torch.bincount(book, minlength=codebooks.shape[1]) for book in codes.T])  # (B, W)
    shares = (counts / len(codes)).to(codebooks.dtype)
    centred = codebooks - (shares[:, :, None] * codebooks).sum(dim=1, keepdim=True)
    squares = torch.cat([sum_of_codewords(part, centred).square().sum(dim=1) for part in codes.split(ITEMS_PER_CHUNK)])
    scale = mean_square / squares.mean().clamp_min(SMALLEST_MASS)
    return centred * scale.sqrt(), squares * scale

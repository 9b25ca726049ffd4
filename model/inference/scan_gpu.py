"""The catalogue scan on a GPU: exact top k that reads each code once, 8 bytes and the bias for an item.

A first pass finds the best score of each block of items and writes nothing else. The k best items lie in the k blocks
with the highest best scores (the first ones of equal blocks), so only these are scored again, and ranked by torch. All
paths add up an item's score in the same order: the bias first, then book by book.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor
from triton import language as tl
from typing_extensions import override

from model.inference import bitmap
from model.inference.scan import Boosts, Lifted, Ranked
from model.inference.scan_torch import TorchScan, select_top_k

BLOCK = 1024  # items


@triton.jit
def _score(tables, codes, bias, excluded, q, item, items, words, books: tl.constexpr, width: tl.constexpr):
    inside = item < items
    score = tl.load(bias + item, mask=inside, other=float("-inf"))
    for book in tl.static_range(books):
        code = tl.load(codes + book * items + item, mask=inside, other=0).to(tl.int32)
        score += tl.load(tables + (q * books + book) * width + code)
    word = tl.load(excluded + q * words + item // 32, mask=inside, other=-1)
    return tl.where((word >> (item % 32).to(tl.int32)) & 1 == 0, score, float("-inf"))


@triton.jit
def _best_of_blocks(
    tables,
    codes,
    bias,
    excluded,
    best,
    items,
    words,
    blocks,
    books: tl.constexpr,
    width: tl.constexpr,
    size: tl.constexpr,
):
    block, q = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    item = block * size + tl.arange(0, size)
    score = _score(tables, codes, bias, excluded, q, item, items, words, books, width)
    tl.store(best + q * blocks + block, tl.max(score, axis=0))


@triton.jit
def _scores_of_blocks(
    tables,
    codes,
    bias,
    excluded,
    chosen,
    out,
    items,
    words,
    count,
    books: tl.constexpr,
    width: tl.constexpr,
    size: tl.constexpr,
):
    place, q = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    block, offset = tl.load(chosen + q * count + place), tl.arange(0, size)
    score = _score(tables, codes, bias, excluded, q, block * size + offset, items, words, books, width)
    tl.store(out + (q * count + place) * size + offset, score)


class TritonScan(TorchScan):
    """Scans on a GPU as ``TorchScan`` does, with fused kernels for the top k."""

    def __init__(self, codes: Tensor, bias: Tensor) -> None:
        super().__init__(codes, bias)
        self._codes = codes.T.contiguous()  # (B', N) uint8

    @override
    def top_k(
        self, products: Tensor, lifted: Lifted, k: int, excluded: NDArray[np.uint64], boosts: Boosts | None = None
    ) -> Ranked:
        if k * BLOCK > self.items or boosts is not None:  # blocks save nothing, or do not bound scores
            return super().top_k(products, lifted, k, excluded, boosts)
        if not products.isfinite().all():
            raise ValueError("a query's scores are not finite, or beyond float32; train the model again")
        queries, books, width = products.shape
        gaining = [np.unique(row) for row in lifted.items.cpu().numpy()]
        allowed = [row[~bitmap.has(words, row)] for row, words in zip(gaining, excluded, strict=True)]
        apart = self.rank(products, lifted, k, allowed)
        left_out = excluded.copy()
        for words, row in zip(left_out, gaining, strict=True):
            bitmap.add(words, row)
        blocks = -(-self.items // BLOCK)
        masks = torch.from_numpy(left_out.view(np.int32)).to(products.device)
        common = products.contiguous(), self._codes, self.bias, masks
        sizes = {"books": books, "width": width, "size": BLOCK}
        best = torch.empty((queries, blocks), device=products.device)
        _best_of_blocks[blocks, queries](*common, best, self.items, masks.shape[1], blocks, **sizes)
        chosen = best.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values.contiguous()
        found = torch.empty((queries, k, BLOCK), device=products.device)
        _scores_of_blocks[k, queries](*common, chosen, found, self.items, masks.shape[1], k, **sizes)
        rows = (chosen[:, :, None] * BLOCK + torch.arange(BLOCK, device=products.device)).flatten(1)
        return _merged(rows.cpu().numpy(), found.flatten(1).cpu().numpy(), apart, k)


def _merged(rows: NDArray[np.int64], scores: NDArray[np.float32], apart: list[Ranked], k: int) -> Ranked:
    """Merge the blocks' items (Q, ...), which ascend, with the lifted items: the k best of both."""
    items, best = np.full((len(rows), k), -1, np.int64), np.full((len(rows), k), -np.inf, np.float32)
    for q, (lifted, lifted_scores) in enumerate(apart):
        order = np.argsort(both := np.concatenate([rows[q], lifted]), kind="stable")
        values = np.concatenate([scores[q], lifted_scores])[order]
        places, found = select_top_k(values, np.arange(len(values)), k)
        items[q, : len(places)], best[q, : len(places)] = both[order][places], found
    return items, best

"""The catalogue scan on a GPU: exact top k that reads each item's codes and bias once, eight bytes and four.

The first pass only finds the best score of each block of items. The k best items are in the k blocks with the highest
best scores (the first of equal blocks), so only these blocks are scored again. Lifted items are scored separately: both
passes skip them, and they compete with the results of the passes. All paths sum an item's score in the same order: the
bias, then book by book, then its gains.

No step waits for the device, so that ``model.inference.captured_batches`` can capture the scan.
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

from model.inference.scan import Boosts, Lifted, Ranked
from model.inference.scan_torch import TorchScan

BLOCK = 1024  # items
LIFTED_PER_PROGRAM = 64


@triton.jit
def _sum_of_codes(tables, codes, bias, q, item, items, books: tl.constexpr, width: tl.constexpr):
    inside = item < items
    score = tl.load(bias + item, mask=inside, other=float("-inf"))
    for book in tl.static_range(books):
        code = tl.load(codes + book * items + item, mask=inside, other=0).to(tl.int32)
        score += tl.load(tables + (q * books + book) * width + code)
    return score


@triton.jit
def _score(tables, codes, bias, excluded, q, item, items, words, books: tl.constexpr, width: tl.constexpr):
    score = _sum_of_codes(tables, codes, bias, q, item, items, books, width)
    word = tl.load(excluded + q * words + item // 32, mask=item < items, other=-1)
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


@triton.jit
def _score_lifted(
    tables,
    codes,
    bias,
    excluded,
    lifted,
    gains,
    is_new,
    out,
    items,
    words,
    count,
    books: tl.constexpr,
    width: tl.constexpr,
    size: tl.constexpr,
):
    """Exclude the lifted items from the passes, and score each once unless it was already excluded."""
    q = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    item = tl.load(lifted + q * count + place, mask=place < count, other=items)
    inside = item < items
    score = _sum_of_codes(tables, codes, bias, q, item, items, books, width)
    for other in range(count):
        gain = tl.load(gains + q * count + other)
        score += tl.where(item == tl.load(lifted + q * count + other), gain, 0.0)
    bit = tl.full((size,), 1, tl.int32) << (item % 32).to(tl.int32)
    before = tl.atomic_or(excluded + q * words + item // 32, bit, mask=inside)
    new = inside & ((before & bit) == 0)
    tl.store(is_new + q * count + place, new.to(tl.int32), mask=inside)
    tl.store(out + q * count + place, tl.where(new, score, float("-inf")), mask=inside)


@triton.jit
def _admit_lifted(excluded, lifted, is_new, words, count, size: tl.constexpr):
    """Undo the exclusions of ``_score_lifted``."""
    q = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    item = tl.load(lifted + q * count + place, mask=place < count, other=0)
    new = tl.load(is_new + q * count + place, mask=place < count, other=0) != 0
    bit = tl.full((size,), 1, tl.int32) << (item % 32).to(tl.int32)
    tl.atomic_and(excluded + q * words + item // 32, ~bit, mask=new)


class TritonScan(TorchScan):
    """Scans on a GPU as ``TorchScan`` does, with fused kernels for the top k."""

    @override
    def top_k(
        self,
        products: Tensor,
        lifted: Lifted[Tensor],
        k: int,
        excluded: NDArray[np.uint64],
        boosts: Boosts | None = None,
    ) -> Ranked:
        if not self.bounds_blocks(k) or boosts is not None:
            return super().top_k(products, lifted, k, excluded, boosts)
        if not products.isfinite().all():
            raise ValueError("a query's scores are not finite, or beyond float32; train the model again")
        on_device = Lifted(*(part.to(products.device) for part in lifted))
        masks = torch.from_numpy(excluded.view(np.int32).copy()).to(products.device)
        items, scores = self.top_k_on_device(products, on_device, k, masks)
        return items.cpu().numpy(), scores.cpu().numpy()

    def bounds_blocks(self, k: int) -> bool:
        """Return whether the best scores of blocks rule out most items; otherwise all scores are sorted."""
        return k * BLOCK <= self.items

    def top_k_on_device(self, products: Tensor, lifted: Lifted[Tensor], k: int, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Find the k best items without waiting for the device.

        products  (Q, B', W')  float32, finite
        lifted    of each query, on the device
        k         for which ``bounds_blocks`` returns True
        masks     (Q, 2 words) int32, bitmaps of the items to exclude; changed during the call, and restored
        returns   items (Q, k) int64 and scores (Q, k) float32, best first, ties by item order; padded with -1 and -inf
        """
        queries, books, width = products.shape
        common = products.contiguous(), self._codes_by_book, self.bias, masks
        sizes = {"books": books, "width": width}
        words, blocks = masks.shape[1], -(-self.items // BLOCK)
        rows, gains = lifted.items.contiguous(), lifted.gains.contiguous()
        gaining = torch.empty_like(gains)
        is_new = torch.empty_like(rows, dtype=torch.int32)
        grid = -(-rows.shape[1] // LIFTED_PER_PROGRAM), queries
        if rows.numel():
            counts = self.items, words, rows.shape[1]
            _score_lifted[grid](*common, rows, gains, is_new, gaining, *counts, **sizes, size=LIFTED_PER_PROGRAM)
        best = torch.empty((queries, blocks), device=products.device)
        found = torch.empty((queries, k, BLOCK), device=products.device)
        if queries:
            _best_of_blocks[blocks, queries](*common, best, self.items, words, blocks, **sizes, size=BLOCK)
        chosen = best_places(best, torch.arange(blocks, device=best.device).expand_as(best), k)
        if queries:
            _scores_of_blocks[k, queries](*common, chosen, found, self.items, words, k, **sizes, size=BLOCK)
        if rows.numel():
            _admit_lifted[grid](masks, rows, is_new, words, rows.shape[1], size=LIFTED_PER_PROGRAM)
        inside = (chosen[:, :, None] * BLOCK + torch.arange(BLOCK, device=best.device)).flatten(1)
        items, scores = torch.cat([inside, rows], dim=1), torch.cat([found.flatten(1), gaining], dim=1)
        places = best_places(scores, items, k)
        values = scores.gather(1, places)
        return items.gather(1, places).masked_fill(values.isneginf(), -1), values


def best_places(scores: Tensor, order: Tensor, k: int) -> Tensor:
    """Return the positions of the k best scores, best first: (Q, n) -> (Q, k).

    order  (Q, n)  int64, 0 to 2**31 - 1: of equal scores the one with the lower number comes first
    """
    bits = (scores + 0.0).view(torch.int32)  # a sum of 0 is never -0, whose bits differ
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return ((ascending << 32) - order).topk(k, dim=1).indices

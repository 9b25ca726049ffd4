"""The catalogue scan in torch: all scores, then ``topk``. GPUs use it, and it is the oracle in tests of ``Scan``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.inference import bitmap
from model.inference.scan import Boosts, Lifted, Ranked


class TorchScan:
    """Scans N items on the device of their codes, with the same arguments and results as ``Scan``.

    codes  (N, B')  uint8
    bias   (N,)     float32
    """

    def __init__(self, codes: Tensor, bias: Tensor) -> None:
        self.items = len(codes)
        self._codes_by_book = codes.T.contiguous()  # (B', N) uint8: each look-up reads one row
        self.bias = bias.detach()

    def bias_of(self, items: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the bias of some items: (len(items),)."""
        bias: NDArray[np.float32] = self.bias[torch.from_numpy(items).to(self.bias.device)].cpu().numpy()
        return bias

    def scores(self, products: Tensor, lifted: Lifted[Tensor]) -> Tensor:
        """Score every item: (Q, B', W') -> (Q, N), on the CPU.

        A GPU adds several gains of one item in no fixed order, so that two calls may round differently.
        """
        return self.plain_scores(products).cpu().scatter_add_(1, *(part.cpu() for part in lifted))

    def plain_scores(self, products: Tensor) -> Tensor:
        """Score every item without gains, on the device: (Q, B', W') -> (Q, N)."""
        scores = self.bias.expand(len(products), -1).clone()
        for book, codes in enumerate(self._codes_by_book):
            scores += products[:, book].index_select(1, codes.int())
        return scores

    def top_k(
        self,
        products: Tensor,
        lifted: Lifted[Tensor],
        k: int,
        excluded: NDArray[np.uint64],
        boosts: Boosts | None = None,
    ) -> Ranked:
        """Find the k best items of each query, as ``Scan.top_k`` does."""
        scores = self.scores(products, lifted)
        if boosts is not None:
            for members, gain in zip(boosts.sets, boosts.gains, strict=True):
                scores[:, torch.from_numpy(bitmap.to_mask(members, self.items))] += gain
            if len(boosts.by_item):
                scores += torch.from_numpy(boosts.by_item)
        scores[torch.from_numpy(bitmap.to_mask(excluded, self.items))] = -torch.inf
        highest = scores.topk(k, dim=1).values
        if highest.isnan().any():
            raise ValueError("a query's scores are not finite, or beyond float32; train the model again")
        worst = highest[:, -1].numpy()
        items = np.full((len(scores), k), -1, np.int64)
        best = np.full((len(scores), k), -np.inf, np.float32)
        for row, (values, threshold) in enumerate(zip(scores.numpy(), worst, strict=True)):
            found, found_scores = select_top_k(values, np.flatnonzero(values >= threshold), k)
            items[row, : len(found)] = found
            best[row, : len(found)] = found_scores
        return items, best

    def rank(
        self,
        products: Tensor,
        lifted: Lifted[Tensor],
        k: int,
        candidates: Sequence[NDArray[np.int64]],
        boosts: Boosts | None = None,
    ) -> list[Ranked]:
        """Rank each query's own candidates, as ``Scan.rank`` does."""
        ranked = []
        for table, followers, gains, indices in zip(products, *lifted, candidates, strict=True):
            distinct = np.unique(indices)
            values = self.scores_of(table[None], Lifted(followers[None], gains[None]), distinct, boosts)
            found, found_scores = select_top_k(values, np.arange(len(values)), k)
            ranked.append((distinct[found], found_scores))
        return ranked

    def scores_of(
        self, products: Tensor, lifted: Lifted[Tensor], items: NDArray[np.int64], boosts: Boosts | None = None
    ) -> NDArray[np.float32]:
        """Score some items for one query, as ``Scan.scores_of`` does."""
        chosen = torch.from_numpy(items).to(self.bias.device)
        scores = self.bias[chosen].clone()
        for row, codes in zip(products[0], self._codes_by_book[:, chosen], strict=True):
            scores += row[codes.int()]  # bytes would be interpreted as a mask
        values: NDArray[np.float32] = scores.cpu().numpy()
        followers, gains = (part.numpy(force=True)[0] for part in lifted)
        place, which = np.nonzero(items[:, None] == followers)
        np.add.at(values, place, gains[which])
        if boosts is not None:
            for members, gain in zip(boosts.sets, boosts.gains, strict=True):
                values[bitmap.has(members, items)] += gain
            if len(boosts.by_item):
                values += boosts.by_item[items]
        return values


def select_top_k(values: NDArray[np.float32], chosen: NDArray[np.int64], k: int) -> Ranked:
    """Return the k best of the chosen positions, which ascend, and their values, without those of minus infinity."""
    chosen = chosen[~np.isneginf(values[chosen])]
    order = chosen[np.argsort(-values[chosen], kind="stable")][:k]
    return order, values[order]

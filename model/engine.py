"""States to queries, queries to items: the same interface and the same answers on CPU and CUDA."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.artifact import Artifact
from model.lisa import AttentionTables
from model.step import Step

Ranked = tuple[NDArray[np.int64], NDArray[np.float32]]


@dataclass(frozen=True)
class Queries:
    """What states ask of the catalogue.

    vectors  (Q, D)  float32
    recent   (Q, K)  int64, each user's newest items, whose followers are lifted; -1 for none
    """

    vectors: Tensor
    recent: Tensor

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, rows: Sequence[int]) -> Queries:
        return Queries(self.vectors[rows], self.recent[rows])


class Engine:
    """One generation on one device. Synchronous; keep it off an event loop.

    raises ValueError for a device this machine does not have.
    """

    def __init__(self, artifact: Artifact, device: str = "cpu") -> None:
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device {device!r} is not there: torch finds no GPU; use --device cpu")
        self.device = torch.device(device)
        self.items = len(artifact.items)
        self.window = artifact.config.model.recent_items  # K, how many of a user's newest items a step wants
        # a copy, or the artifact and every engine made of it before would move along
        self._model = artifact.model if self.device.type == "cpu" else copy.deepcopy(artifact.model).to(self.device)
        self._tables = AttentionTables(*(table.to(self.device) for table in artifact.tables))
        self._step = Step(artifact.model, artifact.tables) if self.device.type == "cpu" else None
        self._codes_by_book = self._model.target_codes.T.contiguous()  # (B', N): each look-up reads one row

    def step(
        self, histograms: NDArray[np.float32], last_items: NDArray[np.integer], recent_items: NDArray[np.integer]
    ) -> Queries:
        """States to queries.

        histograms    (Q, R, B, W)  the scale of each row is free
        last_items    (Q,)          rows of the catalogue
        recent_items  (Q, K)        rows, newest first, -1 for none; K is ``window``
        returns       Q queries on the engine's device
        raises        ValueError    when a row of a histogram is empty
        """
        if self._step is None:
            return self._read(histograms, last_items, recent_items)
        vectors = self._step(histograms, last_items, recent_items)
        return Queries(torch.from_numpy(vectors), torch.from_numpy(np.array(recent_items, np.int64)))

    @torch.inference_mode()
    def _read(
        self, histograms: NDArray[np.float32], last_items: NDArray[np.integer], recent_items: NDArray[np.integer]
    ) -> Queries:
        """The step on a GPU."""
        rows = torch.tensor(histograms, dtype=torch.float32, device=self.device)
        if not bool((rows.sum(dim=-1) > 0).all()):
            raise ValueError("a state without a single step has no query")
        last, recent = (
            torch.tensor(part, dtype=torch.int64, device=self.device) for part in (last_items, recent_items)
        )
        return Queries(self._model.read(rows, last, recent, self._tables), recent)

    @torch.inference_mode()
    def scores(self, queries: Queries) -> Tensor:
        """Score of every item: Q queries -> (Q, N), summed from the codebooks' inner products in a fixed order."""
        products = torch.einsum("qd,bpd->bqp", queries.vectors, self._model.target_codebooks)  # (B', Q, W')
        scores = self._model.bias.expand(len(queries), -1).clone()
        for product, codes in zip(products, self._codes_by_book, strict=True):
            scores += product.index_select(1, codes)
        return scores.scatter_add_(1, *self._model.lifts(queries.recent))

    @torch.inference_mode()
    def top_k(self, queries: Queries, k: int, excluded: NDArray[np.bool_] | None = None) -> Ranked:
        """The k best items of each query, best first, ties by item order.

        queries   Q queries
        excluded  (Q, N)   True for what must not be shown
        returns   items (Q, k') int64 and scores (Q, k') float32, k' = min(k, N); where fewer items are allowed the
                  rest is -1 and -inf
        """
        scores = self.scores(queries).cpu()
        if excluded is not None:
            scores[torch.from_numpy(excluded)] = -torch.inf
        k = min(k, self.items)
        worst = scores.topk(k, dim=1).values[:, -1].numpy()
        items = np.full((len(scores), k), -1, np.int64)
        best = np.full((len(scores), k), -np.inf, np.float32)
        for row, (values, threshold) in enumerate(zip(scores.numpy(), worst, strict=True)):
            found, found_scores = best_first(values, np.flatnonzero(values >= threshold), k)
            items[row, : len(found)] = found
            best[row, : len(found)] = found_scores
        return items, best

    @torch.inference_mode()
    def rank_candidates(self, queries: Queries, candidates: Sequence[NDArray[np.int64]], k: int) -> list[Ranked]:
        """The k best of each query's own candidates, best first, ties by item order; only these are scored."""
        products = torch.einsum("qd,bpd->qbp", queries.vectors, self._model.target_codebooks)
        ranked = []
        for product, followers, lifts, indices in zip(
            products, *self._model.lifts(queries.recent), candidates, strict=True
        ):
            distinct = np.unique(indices)
            chosen = torch.from_numpy(distinct).to(self.device)
            scores = self._model.bias[chosen].clone()
            for row, codes in zip(product, self._codes_by_book[:, chosen], strict=True):
                scores += row[codes]
            place, which = torch.where(chosen[:, None] == followers)
            scores.index_add_(0, place, lifts[which])
            values = scores.cpu().numpy()
            found, found_scores = best_first(values, np.arange(len(values)), k)
            ranked.append((distinct[found], found_scores))
        return ranked


def best_first(values: NDArray[np.float32], chosen: NDArray[np.int64], k: int) -> Ranked:
    """The k best of the chosen places, which ascend; places at minus infinity are left out."""
    chosen = chosen[~np.isneginf(values[chosen])]
    order = chosen[np.argsort(-values[chosen], kind="stable")][:k]
    return order, values[order]

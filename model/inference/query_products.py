"""Queries, their products with the codewords on a CPU, and the compiled way from states to items."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.inference import step_kernel
from model.inference.captured_batches import States
from model.inference.pipeline import StageSeconds
from model.inference.scan import Array, Boosts, Lifted, Ranked, Scan
from model.inference.step import COMPILE_LOCK, Step, aligned_copy, panels
from model.inference.step_kernel import QUERY_PRODUCTS_SIGNATURE
from model.lisa.lisa_mini import Lisa, follower_decay


class QueryProducts:
    """Computes the products of one model as torch and ``Lisa.follower_gains`` do; copies its target codewords.

    Thread-safe; releases the GIL.
    """

    def __init__(self, model: Lisa) -> None:
        self._books, self._words, self._width = model.target_codebooks.shape
        with torch.no_grad():
            self._codebooks = aligned_copy(panels(model.target_codebooks.flatten(0, 1).T).flatten())
        self._padded = len(self._codebooks) // self._width
        self._followers, self._lift = model.followers.numpy(), model.lift.numpy()
        self._decay = follower_decay(model.config).numpy()
        _compile()

    def __call__(
        self, queries: NDArray[np.float32], recent: NDArray[np.int64], left_out: NDArray[np.integer] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
        """Compute the inner products with all codewords, and the lifted items.

        queries   (Q, D)
        recent    (Q, K)        rows, newest first, -1 for none
        left_out  (Q, m)        rows whose gain is minus infinity, -1 for none
        returns   (Q, B', W'), items (Q, F + m) and gains (Q, F + m); an item may appear several times
        """
        users, newest = len(queries), min(recent.shape[1], len(self._decay))
        without = np.empty((users, 0), np.int32) if left_out is None else np.ascontiguousarray(left_out, np.int32)
        products = np.zeros((users, self._padded), np.float32)
        lifts = users, newest * self._followers.shape[1] + without.shape[1]
        items, gains = np.empty(lifts, np.int64), np.empty(lifts, np.float32)
        step_kernel.query_products(
            self._codebooks,
            self._followers,
            self._lift,
            self._decay[:newest],
            queries,
            recent,
            without,
            products,
            items,
            gains,
        )
        whole = np.ascontiguousarray(products[:, : self._books * self._words])
        return whole.reshape(users, self._books, self._words), items, gains


Products = tuple[Any, Lifted[Any]]
"""Inner products of Q queries with all target codewords (Q, B', W'), and the lifted items of each query."""


@dataclass(slots=True)
class Queries:
    """Queries for items, made from states or from other items: in arrays, or tensors on the engine's device or the CPU.

    vectors     (Q, D)  float32
    recent      (Q, K)  int64, each user's newest items, whose followers are lifted; -1 for none
    similarity  whether the scores are similarities to other items, of vectors (Q, 2 D)
    products    the engine's products of these queries, once computed
    """

    vectors: Array
    recent: Array
    similarity: bool = False
    products: Products | None = None

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def vectors_on_cpu(self) -> Tensor:
        """The vectors as a tensor on the CPU."""
        return torch.as_tensor(self.vectors).cpu()

    def __getitem__(self, rows: Sequence[int] | slice) -> Queries:
        products = self.products and (self.products[0][rows], Lifted(*(part[rows] for part in self.products[1])))
        return Queries(self.vectors[rows], self.recent[rows], self.similarity, products)

    def one(self, place: int) -> Queries:
        """Return the query at that position, without copying."""
        return self if len(self) == 1 else self[place : place + 1]


class RankedQueries(NamedTuple):
    """Queries, the best items of each, and the seconds that the step took.

    If one captured graph has computed both, ``device_s`` is set, and ``step_s`` is 0.
    """

    queries: Queries
    ranked: Ranked
    step_s: float = 0.0
    device_s: StageSeconds | None = None


class CompiledStages(NamedTuple):
    """Step, products and scan on a CPU, from array to array: calls of torch take a part of a small batch's time."""

    step: Step
    query_products: QueryProducts
    scan: Scan

    def rank(
        self,
        states: States,
        k: int,
        excluded: NDArray[np.uint64],
        left_out: NDArray[np.integer] | None = None,
        boosts: Boosts | None = None,
    ) -> RankedQueries:
        """Find the k best items of each of Q states.

        excluded  (Q, words)  or (1, words), for all states
        left_out  (Q, n)      rows of other items that each state's list may not have, -1 for none; they are fewer bytes
                              than a bitmap for each state, which at ten million items is a megabyte
        """
        begin_s = time.perf_counter()
        recent = np.array(states.recent_items, np.int64)
        vectors = self.step(np.asarray(states.histograms), np.asarray(states.last_items), recent)
        step_s = time.perf_counter() - begin_s
        products, items, gains = self.query_products(vectors, recent, left_out)
        own = products, Lifted(items, gains)
        ranked = self.scan.top_k(*own, k, excluded, boosts)
        return RankedQueries(Queries(vectors, recent, products=own if left_out is None else None), ranked, step_s)


def _compile() -> None:
    """Compile before the first request, for the only types of arrays in use."""
    with COMPILE_LOCK:
        if not step_kernel.query_products.signatures:
            step_kernel.query_products.compile(QUERY_PRODUCTS_SIGNATURE)
            step_kernel.query_products.disable_compile()

"""States to queries, queries to items: the same interface and the same answers on CPU and CUDA."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import NamedTuple

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model import bitmap
from model.artifact import Artifact
from model.asking import Asking
from model.dense import Dense
from model.followers import LIFTING_ITEMS
from model.lisa import AttentionTables, LisaMini, sum_of_codewords
from model.scan import Boosts, Lifted, Ranked, Scan
from model.step import Step

ITEMS_AT_ONCE = 1 << 16

Asked = tuple[Tensor, Lifted]
"""Inner products of Q queries with all target codewords (Q, B', W'), and whose scores gain what."""


@dataclass(slots=True)
class Queries:
    """What states, or items, ask of the catalogue.

    vectors  (Q, D)  float32
    recent   (Q, K)  int64, each user's newest items, whose followers are lifted; -1 for none
    nearest  whether the best items are those that lie nearest to the vectors
    asked    what becomes of it, once an engine has needed it
    """

    vectors: Tensor
    recent: Tensor
    nearest: bool = False
    asked: Asked | None = None

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, rows: Sequence[int]) -> Queries:
        asked = self.asked and (self.asked[0][rows], Lifted(*(part[rows] for part in self.asked[1])))
        return Queries(self.vectors[rows], self.recent[rows], self.nearest, asked)

    def one(self, place: int) -> Queries:
        """Of the user at that place, without a copy."""
        if len(self) == 1:
            return self
        row = slice(place, place + 1)
        asked = self.asked and (self.asked[0][row], Lifted(*(part[row] for part in self.asked[1])))
        return Queries(self.vectors[row], self.recent[row], self.nearest, asked)


class Parts(NamedTuple):
    """What the scores of k items are the sums of, up to rounding.

    codewords  (k, B')  float32, what the item's codeword of each target codebook adds
    bias       (k,)     float32
    lifts      (k, K)   float32, what each of the query's newest items adds, as the item has followed it before
    """

    codewords: NDArray[np.float32]
    bias: NDArray[np.float32]
    lifts: NDArray[np.float32]


class Engine:
    """One generation on one device. Synchronous; keep it off an event loop.

    raises ValueError for a device this machine does not have.
    """

    def __init__(self, artifact: Artifact, device: str = "cpu") -> None:
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device {device!r} is not there: torch finds no GPU; use --device cpu")
        self.device = torch.device(device)
        self.items = len(artifact.items)
        self._words = len(bitmap.empty(self.items))
        self.window = artifact.config.model.recent_items  # K, how many of a user's newest items a step wants
        self.history_codes, self.target_codes = (
            artifact.history_codes,
            artifact.target_codes,
        )  # (N, books), on the CPU
        self.history_counts = artifact.history_counts
        # a copy, or the artifact and every engine made of it before would move along
        self._model = artifact.model if self.device.type == "cpu" else copy.deepcopy(artifact.model).to(self.device)
        self._tables = AttentionTables(*(table.to(self.device) for table in artifact.tables))
        # all that is there for one device, or one kind of model; the answers are the same
        self._step: Step | None = None
        self._asking: Asking | None = None
        self._catalogue: Scan | Dense
        if self.device.type == "cpu":
            self._asking = Asking(artifact.model)
            if isinstance(artifact.model, LisaMini):
                self._step = Step(artifact.model, artifact.tables)
            self._catalogue = Scan(artifact.target_codes, self._model.bias.detach().numpy())
        else:
            self._catalogue = _on_gpu()(self._model.target_codes, self._model.bias)
        artifact.let_go()

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
        recent = np.array(recent_items, np.int64)
        return Queries(torch.from_numpy(self._step(histograms, last_items, recent)), torch.from_numpy(recent))

    @torch.inference_mode()
    def _read(
        self, histograms: NDArray[np.float32], last_items: NDArray[np.integer], recent_items: NDArray[np.integer]
    ) -> Queries:
        """The step where it is not compiled: on a GPU, and of models whose codes were learned."""
        rows = torch.tensor(histograms, dtype=torch.float32, device=self.device)
        if not bool((rows.sum(dim=-1) > 0).all()):
            raise ValueError("a state without a single step has no query")
        last, recent = (
            torch.tensor(part, dtype=torch.int64, device=self.device) for part in (last_items, recent_items)
        )
        return Queries(self._model.read(rows, last, recent, self._tables), recent)

    @torch.inference_mode()
    def neighbours_of(self, items: Sequence[int]) -> Queries:
        """Queries for what is most like each of the items: minus half the squared distance of the sums of codewords.

        The first call takes 2 s for every ten million items; ``measure`` does so beforehand.
        """
        nobody = torch.empty((len(items), 0), dtype=torch.int64, device=self.device)
        if self.device.type != "cpu":
            return Queries(self._model.item_vectors(torch.tensor(items, device=self.device)), nobody, nearest=True)
        codebooks = self._model.target_codebooks.numpy()
        words = codebooks[np.arange(len(codebooks)), self.target_codes[np.array(items, np.int64)]]  # (Q, B', D)
        return Queries(torch.from_numpy(words.sum(axis=1)), nobody, nearest=True)

    @property
    def has_measured(self) -> bool:
        return "_distances" in self.__dict__

    def measure(self) -> None:
        """Make ready for ``neighbours_of``, in any thread."""
        _ = self._distances

    @torch.inference_mode()
    def scores(self, queries: Queries) -> Tensor:
        """Score of every item: Q queries -> (Q, N), summed from the codebooks' inner products in a fixed order."""
        return self._asked_of(queries).scores(*self.asked(queries))

    @torch.inference_mode()
    def top_k(
        self, queries: Queries, k: int, excluded: NDArray[np.uint64] | None = None, boosts: Boosts | None = None
    ) -> Ranked:
        """The k best items of each query, best first, ties by item order.

        queries   Q queries
        excluded  (Q, words)   bitmaps of what must not be shown
        boosts    of items whose scores are to gain something
        returns   items (Q, k') int64 and scores (Q, k') float32, k' = min(k, N); where fewer items are allowed the
                  rest is -1 and -inf
        raises    ValueError   for a model that gives scores which are not finite, k below 1 or bitmaps that do not fit
        """
        shape = len(queries), self._words
        excluded = np.zeros(shape, np.uint64) if excluded is None else excluded
        if k < 1 or excluded.shape != shape:
            raise ValueError(f"there is no top {k} of {shape} words with bitmaps of {excluded.shape}")
        words = np.ascontiguousarray(excluded)
        return self._asked_of(queries).top_k(*self.asked(queries), min(k, self.items), words, boosts)

    @torch.inference_mode()
    def rank_candidates(
        self, queries: Queries, candidates: Sequence[NDArray[np.int64]], k: int, boosts: Boosts | None = None
    ) -> list[Ranked]:
        """The k best of each query's own candidates, best first, ties by item order; only these are scored."""
        return self._asked_of(queries).rank(*self.asked(queries), k, candidates, boosts)

    def explain(self, query: Queries, items: NDArray[np.int64]) -> Parts:
        """What one query's scores of k items are made of."""
        products, lifted = self.asked(query)
        tables, followers, gains = (part.numpy(force=True)[0] for part in (products, *lifted))
        newest = min(query.recent.shape[1], LIFTING_ITEMS)
        codewords = np.empty((len(items), products.shape[1]), np.float32)
        lifts = np.zeros((len(items), newest), np.float32)
        _parts(tables, self.target_codes, followers, gains, self._model.config.followers, items, codewords, lifts)
        return Parts(codewords, self._asked_of(query).bias_of(items), lifts)

    @torch.inference_mode()
    def scores_of(self, query: Queries, items: NDArray[np.int64], boosts: Boosts | None = None) -> NDArray[np.float32]:
        """What one query scores each of k different items, in order: (k,)."""
        return self._asked_of(query).scores_of(*self.asked(query), items, boosts)

    @torch.inference_mode()
    def asked(self, queries: Queries) -> Asked:
        """Of the queries, once for all that is done with them."""
        if queries.asked is None and self._asking is not None:
            products, *lifted = map(torch.from_numpy, self._asking(queries.vectors.numpy(), queries.recent.numpy()))
            queries.asked = products, Lifted(*lifted)
        if queries.asked is None:
            products = torch.einsum("qd,bpd->bqp", queries.vectors, self._model.target_codebooks)
            queries.asked = products.transpose(0, 1).contiguous(), Lifted(*self._model.lifts(queries.recent))
        return queries.asked

    def _asked_of(self, queries: Queries) -> Scan | Dense:
        """Where their best items are looked for."""
        return self._distances if queries.nearest else self._catalogue

    @cached_property
    def _distances(self) -> Scan | Dense:
        """The same items, where half the square of an item's length takes the place of what the model adds to it.

        Half of the squared distance is then missing only half the square of the query's own length.
        """
        with torch.inference_mode():
            bias = torch.empty(self.items, device=self.device)
            for begin in range(0, self.items, ITEMS_AT_ONCE):
                part = slice(begin, begin + ITEMS_AT_ONCE)
                codes = self._model.target_codes[part]
                bias[part] = sum_of_codewords(codes, self._model.target_codebooks).square().sum(dim=1) / -2
            if isinstance(self._catalogue, Scan):  # whose lanes have levels of the bias between the codes
                return Scan(self.target_codes, bias.numpy())
            return self._catalogue.biased(bias)


@numba.njit(cache=True, nogil=True)
def _parts(products, codes, followers, gains, each, items, codewords, lifts):  # type: ignore[no-untyped-def]
    """Fill codewords (k, B') and lifts (k, K), where each of the K newest items has so many followers."""
    for place in range(len(items)):
        for book in range(len(products)):
            codewords[place, book] = products[book, codes[items[place], book]]
        for newest in range(lifts.shape[1]):
            for one in range(newest * each, (newest + 1) * each):
                if followers[one] == items[place]:
                    lifts[place, newest] += gains[one]


def _on_gpu() -> type[Dense]:
    """In one pass over the codes where Triton is, which torch's builds for GPUs bring along."""
    if find_spec("triton") is None:
        return Dense
    from model.gpu import Fused

    return Fused

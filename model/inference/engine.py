"""Inference: states to queries, and queries to items, with the same interface and the same results on CPU and CUDA."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.artifact.model_directory import Artifact
from model.inference import bitmap, scan_kernel
from model.inference.captured_batches import CAPTURE_LOCK, Bitmaps, CapturedBatches, DeviceScan, Resident, States
from model.inference.query_products import CompiledStages, Products, Queries, QueryProducts, RankedQueries
from model.inference.scan import Array, Boosts, Lifted, Ranked, Scan
from model.inference.scan_torch import TorchScan
from model.inference.step import Step
from model.lisa.item_similarity import Similarity
from model.lisa.lisa_mini import AttentionTables, Lisa, LisaMini, follower_decay

logger = logging.getLogger(__name__)

OLDEST_OF_TRITON = 8, 0  # compute capability
CAPTURED_K = 16  # list length for which graphs are captured before the first request


class ScoreParts(NamedTuple):
    """The terms of the scores of k items, up to rounding.

    codewords  (k, B')  float32, one term for the item's codeword of each target codebook
    history    (k, B)   float32, one term for the item's codeword of each history codebook; (k, 0) unless the scores
                        are similarities
    bias       (k,)     float32
    lifts      (k, K)   float32, one term for each of the query's newest items that this item has followed before
    """

    codewords: NDArray[np.float32]
    history: NDArray[np.float32]
    bias: NDArray[np.float32]
    lifts: NDArray[np.float32]


class DeviceUnavailable(ValueError):
    """The machine lacks the device, or the device lacks memory for the model. The message contains the reason."""


class Engine:
    """The inference of one generation on one device. It is synchronous: do not call it on an event loop.

    is_lost     whether the device no longer responds
    has_graphs  whether ``captures`` may return True

    raises DeviceUnavailable
    """

    def __init__(self, artifact: Artifact, device: str = "cpu") -> None:
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise DeviceUnavailable(f"device {device!r} is not available: torch finds no GPU")
        self.device = torch.device(device)
        self.items = len(artifact.items)
        self._words = len(bitmap.empty(self.items))
        self.window = artifact.config.model.recent_items  # K, the number of a user's newest items that a step reads
        self._lifting_items = len(follower_decay(artifact.config.model))  # the newest items whose followers are lifted
        self.history_codes, self.target_codes = artifact.history_codes, artifact.target_codes  # (N, books), on the CPU
        self.history_counts = artifact.history_counts
        with _within_memory(device, self.items):
            # a copy, because otherwise the artifact and its other engines would move to the device too
            self._model = artifact.model if self.device.type == "cpu" else copy.deepcopy(artifact.model).to(self.device)
            self._tables = AttentionTables(*(table.to(self.device) for table in artifact.tables))
        # the compiled parts exist only for the CPU, and the compiled step for one kind of model; all paths agree
        self._step: Step | None = None
        self._query_products: QueryProducts | None = None
        self._compiled: CompiledStages | None = None
        self._catalogue: Scan | TorchScan
        if self.device.type == "cpu":
            self._query_products = QueryProducts(artifact.model)
            if isinstance(artifact.model, LisaMini):
                self._step = Step(artifact.model, artifact.tables)
            self._catalogue = scan = Scan(artifact.target_codes, self._model.bias.detach().numpy())
            if self._step is not None:
                self._compiled = CompiledStages(self._step, self._query_products, scan)
        else:
            with _within_memory(device, self.items):
                self._catalogue = self._scan_of(self._model.target_codes, self._model.bias)
        # on a CPU no torch code runs between step and scan, and entering the mode takes microseconds
        self._inference_mode: Callable[[], AbstractContextManager[Any]] = (
            nullcontext if self.device.type == "cpu" else torch.inference_mode
        )
        self.is_lost = False
        self._captured = _captured(self._model, self._tables, self._catalogue, self._words)
        self.has_graphs = self._captured is not None
        artifact.release_pages()

    def step(
        self,
        histograms: NDArray[np.float32] | Sequence[NDArray[np.float32]],
        last_items: NDArray[np.integer] | Sequence[int],
        recent_items: NDArray[np.integer] | Sequence[NDArray[np.integer]],
    ) -> Queries:
        """Turn states into queries; each argument may be a sequence with one part per user.

        histograms    (Q, R, B, W)  the scale of each row is free
        last_items    (Q,)          rows of the catalogue
        recent_items  (Q, K)        rows, newest first, -1 for none; K is ``window``
        returns       Q queries on the engine's device
        raises        ValueError    when a row of a histogram is empty
        """
        bins, last, recent = np.asarray(histograms), np.asarray(last_items), np.array(recent_items, np.int64)
        if self._step is None:
            return self._read(bins, last, recent)
        return Queries(self._step(bins, last, recent), recent)

    @torch.inference_mode()
    def _read(
        self, histograms: NDArray[np.float32], last_items: NDArray[np.integer], recent_items: NDArray[np.integer]
    ) -> Queries:
        """Step with torch if there is no compiled step: on a GPU, and for models whose codes were learned."""
        rows = torch.tensor(histograms, dtype=torch.float32, device=self.device)
        if not bool((rows.sum(dim=-1) > 0).all()):
            raise ValueError("a state without a single step has no query")
        last, recent = (
            torch.tensor(part, dtype=torch.int64, device=self.device) for part in (last_items, recent_items)
        )
        return Queries(self._model.read(rows, last, recent, self._tables), recent)

    def has_lost_device(self) -> bool:
        """Check, after an error, whether the device still responds; ``is_lost`` stays True once it does not."""
        if self.device.type == "cuda" and not self.is_lost:
            try:
                with CAPTURE_LOCK:
                    torch.cuda.synchronize(self.device)
            except RuntimeError as exc:
                logger.error("lost %s until this process restarts: %s", self.device, exc)
                self.is_lost = True
        return self.is_lost

    def captures(self, k: int) -> bool:
        """Return whether ``rank_states`` can find this many items in one captured graph."""
        return self._captured is not None and self._captured.takes(k)

    def rank_states(
        self,
        states: States,
        k: int,
        excluded: Bitmaps,
        boosts: Boosts | None = None,
        left_out: NDArray[np.integer] | None = None,
    ) -> RankedQueries:
        """Step, and find the k best items of each state: in one captured graph on a GPU, without torch on a CPU.

        excluded  a bitmap for each state; with `left_out` a single one for all
        boosts    gains of some items' scores, with which no graph is captured
        left_out  (Q, n)  other rows that each state's list may not have; -1 for none

        raises  ValueError  as ``step`` and ``top_k``
                IndexError  for items beyond the catalogue, if a graph is captured
        """
        users = len(states.last_items)
        most = users if left_out is None else 1
        if len(excluded) != most or any(len(bits) != self._words for bits in excluded):
            raise ValueError(f"there is no top {k} of {users} states with other bitmaps than {most} of {self._words}")
        if self._compiled is not None and k > 0:
            return self._compiled.rank(states, min(k, self.items), np.asarray(excluded), left_out, boosts)
        each = excluded if left_out is None else bitmap.with_each(excluded[0], left_out.astype(np.int64))
        if self._captured is not None and boosts is None and users and self._captured.takes(k):
            try:
                found = self._captured.rank(states, k, each)
            except torch.OutOfMemoryError as exc:
                logger.warning("running step and scan for %d items one after the other: %s", k, exc)
            else:
                queries = Queries(found.vectors, np.array(states.recent_items, np.int64))
                return RankedQueries(queries, found.ranked, device_s=found.device_s)
        begin_s = time.perf_counter()
        queries = self.step(*states)
        step_s = time.perf_counter() - begin_s
        return RankedQueries(queries, self.top_k(queries, k, np.asarray(each), boosts), step_s)

    def neighbours_of(self, items: Sequence[int]) -> Queries:
        """Return queries for the items most similar to each of the given ones, as ``Similarity`` defines it.

        The first call takes tens of seconds for ten million items, unless ``prepare_similarity`` was called before.
        """
        rows, (similarity, _) = np.array(items, np.int64), self._similarity
        vectors = similarity.vectors(self.target_codes[rows], self.history_codes[rows])
        nobody, no_gains = np.empty((len(rows), 0), np.int64), np.empty((len(rows), 0), np.float32)
        parts: list[Array] = [similarity.products(vectors), nobody, no_gains]
        if self.device.type != "cpu":
            parts = [torch.as_tensor(part, device=self.device) for part in parts]
        return Queries(vectors, nobody, similarity=True, products=(parts[0], Lifted(*parts[1:])))

    @property
    def has_similarity(self) -> bool:
        """Whether ``neighbours_of`` needs no preparation."""
        return "_similarity" in self.__dict__

    def prepare_similarity(self) -> None:
        """Prepare for ``neighbours_of``, in any thread."""
        _ = self._similarity

    @torch.inference_mode()
    def scores(self, queries: Queries) -> Tensor:
        """Score every item: Q queries -> (Q, N) on the CPU, from the codebooks' inner products in a fixed order."""
        return self._scorer_of(queries).scores(*self.products(queries))

    def top_k(
        self, queries: Queries, k: int, excluded: NDArray[np.uint64] | None = None, boosts: Boosts | None = None
    ) -> Ranked:
        """Find the k best items of each query, best first, ties by item order.

        queries   Q queries
        excluded  (Q, words)   bitmaps of the items to exclude
        boosts    gains of some items' scores
        returns   items (Q, k') int64 and scores (Q, k') float32, k' = min(k, N); padded with -1 and -inf if fewer items
                  are allowed
        raises    ValueError   for a model whose scores are not finite, k below 1 or bitmaps that do not fit
        """
        shape = len(queries), self._words
        excluded = np.zeros(shape, np.uint64) if excluded is None else np.ascontiguousarray(excluded)
        if k < 1 or excluded.shape != shape:
            raise ValueError(f"there is no top {k} of {shape} words with bitmaps of {excluded.shape}")
        with self._inference_mode():
            return self._scorer_of(queries).top_k(*self.products(queries), min(k, self.items), excluded, boosts)

    def rank_candidates(
        self, queries: Queries, candidates: Sequence[NDArray[np.int64]], k: int, boosts: Boosts | None = None
    ) -> list[Ranked]:
        """Rank each query's own candidates, scoring no other items: the k best, best first, ties by item order."""
        with self._inference_mode():
            return self._scorer_of(queries).rank(*self.products(queries), k, candidates, boosts)

    def explain(self, query: Queries, items: NDArray[np.int64]) -> ScoreParts:
        """Split one query's scores of k items into their terms."""
        products, lifted = self.products(query)
        tables, followers, gains = (_on_host(part)[0] for part in (products, *lifted))
        newest = min(query.recent.shape[1], self._lifting_items)
        books = self.target_codes.shape[1]
        codewords = np.empty((len(items), books), np.float32)
        history = np.empty((len(items), len(tables) - books), np.float32)
        lifts = np.zeros((len(items), newest), np.float32)
        scan_kernel.look_up_products(tables[:books], self.target_codes, items, codewords)
        scan_kernel.look_up_products(tables[books:], self.history_codes, items, history)
        scan_kernel.add_lifts(followers, gains, self._model.config.followers, items, lifts)
        return ScoreParts(codewords, history, self._scorer_of(query).bias_of(items), lifts)

    def scores_of(self, query: Queries, items: NDArray[np.int64], boosts: Boosts | None = None) -> NDArray[np.float32]:
        """Score k distinct items for one query, in their order: (k,)."""
        with self._inference_mode():
            return self._scorer_of(query).scores_of(*self.products(query), items, boosts)

    def products(self, queries: Queries) -> Products:
        """Compute the queries' products with the codewords, once for all later uses of the queries."""
        if queries.products is None and self._query_products is not None:
            products, *lifted = self._query_products(np.asarray(queries.vectors), np.asarray(queries.recent))
            queries.products = products, Lifted(*lifted)
        if queries.products is None:
            queries.products = self._products(queries)
        return queries.products

    @torch.inference_mode()
    def _products(self, queries: Queries) -> Products:
        vectors, recent = (torch.as_tensor(part, device=self.device) for part in (queries.vectors, queries.recent))
        return self._model.codeword_products(vectors), Lifted(*self._model.follower_gains(recent))

    def lift(self, queries: Queries, lifted: Sequence[tuple[NDArray[np.int64], NDArray[np.float32]]]) -> None:
        """Add gains to the scores of some items, in addition to existing lifts.

        lifted  of each query, distinct items (F,) and their gains (F,)
        """
        products, before = self.products(queries)
        shape = len(queries), max((len(items) for items, _ in lifted), default=0)
        all_items, all_gains = np.zeros(shape, np.int64), np.zeros(shape, np.float32)  # a gain of 0 changes no score
        for place, (items, gains) in enumerate(lifted):
            all_items[place, : len(items)], all_gains[place, : len(gains)] = items, gains
        lists, sums = map(_on_host, before)
        parts: list[Array] = [np.concatenate([lists, all_items], 1), np.concatenate([sums, all_gains], 1)]
        if self.device.type != "cpu":
            parts = [torch.as_tensor(part, device=self.device) for part in parts]
        queries.products = products, Lifted(*parts)

    def _scorer_of(self, queries: Queries) -> Scan | TorchScan:
        """Return the scan that scores these queries."""
        return self._similarity[1] if queries.similarity else self._catalogue

    @cached_property
    def _similarity(self) -> tuple[Similarity, Scan | TorchScan]:
        with torch.inference_mode():
            similarity, codes, bias = Similarity.of(self._model)
            return similarity, self._scan_of(codes, bias)

    def _scan_of(self, codes: Tensor, bias: Tensor) -> Scan | TorchScan:
        if self.device.type == "cpu":
            return Scan(codes.numpy(), bias.numpy())
        return gpu_scan_class(self.device)(codes, bias)


def _on_host(part: Array) -> NDArray[Any]:
    return part.numpy(force=True) if isinstance(part, Tensor) else part


def _captured(model: Lisa, tables: AttentionTables, scan: Scan | TorchScan, words: int) -> CapturedBatches | None:
    """Capture step and scan on a GPU with Triton; None if that is not possible."""
    if tables.match.device.type != "cuda" or not isinstance(model, LisaMini) or not isinstance(scan, DeviceScan):
        return None
    return CapturedBatches.prepared(Resident(model, tables, scan), words, CAPTURED_K)


def open_engine(artifact: Artifact, device: str) -> Engine:
    """Return the engine on the device, or with a warning on the CPU if the device is missing or too small."""
    try:
        return Engine(artifact, device)
    except DeviceUnavailable as exc:
        logger.warning("ranking model %r on the CPU: %s", artifact.name, exc)
        return Engine(artifact)


@contextmanager
def _within_memory(device: str, items: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as exc:
        raise DeviceUnavailable(f"device {device!r} has too little memory for {items:,} items") from exc


def gpu_scan_class(device: torch.device) -> type[TorchScan]:
    """Return the scan by Triton if it supports the device and is installed, as with torch's GPU builds."""
    if find_spec("triton") is None:
        return TorchScan
    if torch.cuda.get_device_capability(device) < OLDEST_OF_TRITON:
        logger.warning(
            "%s is too old for Triton; using slower torch kernels, which score and sort every item for each request",
            device,
        )
        return TorchScan
    from model.inference.scan_gpu import TritonScan

    return TritonScan

"""The catalogue scan on a CPU: exact top k from one pass over the codes, one byte per codebook and item.

An item's score is the sum of one inner product per codebook and its bias. A scan does not compute every item's sum.
Given the k-th best score so far, it first rules out items, 256 at a time. The remaining items are scored exactly in
float32, summed in the same order as in ``scores``. The paths only differ in how they rule out items:

``portable``  by their scores, in float32
``neon``      by 8-bit deficits, looked up in four tables of 64 entries each (ARM, 64 bits)
``avx2``      by 8-bit deficits, looked up by byte shuffles of sixteen entries each
``vbmi``      by 8-bit deficits, looked up by byte permutes of 128 entries each (AVX-512 VBMI)

The *deficit* of a codeword is its distance from the best one of its codebook, rounded down, in units of 1/254 of the
total that an item may lose and still reach the k-th best score. Deficits are added with saturation, and an item that
saturates has lost more than that total. Rounding down never rules out too many items, so the result is exact. The bias
acts as another codebook of 256 levels, each of which is the largest bias in it. Other gains of an item become a deficit
of their own when its block is scanned. When the k-th best score has risen enough, deficits are recomputed.

Where items are in the order of their codes, as training writes them, whole blocks are ruled out: in some codebooks, the
codes of a block are in a narrow range, and no item loses less than the least deficit in it. The blocks that lose least
are scanned first, so that the k-th best score rules out most of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import numpy as np
import torch
from numba.core.registry import cpu_target
from numpy.typing import NDArray
from torch import Tensor

from model.inference import bitmap, scan_kernel
from model.inference.scan_kernel import BLOCK, SMALLEST_RANGE

ScanPath = Literal["portable", "neon", "avx2", "vbmi"]
Ranked = tuple[NDArray[np.int64], NDArray[np.float32]]

BIAS_LEVELS = 256  # of the bias
SAMPLED_BIASES = 1 << 18  # the largest sample of biases that places the levels
SAMPLED_BLOCKS = 1 << 10  # the largest sample of blocks that shows which rows are narrow
NARROW = 128  # the mean range of codes below which a row is narrow
CACHE_LINE = 64
CPU_FEATURES: dict[ScanPath, set[str]] = {
    "portable": set(),
    "neon": {"aarch64"},  # each such CPU has NEON
    "avx2": {"+avx2"},
    "vbmi": {"+avx512bw", "+avx512vbmi"},
}
DEFICITS: dict[ScanPath, tuple[int, ...]] = {"neon": (4, 4, 16), "avx2": (16, 16), "vbmi": (256,)}  # of a row

MOST_SETS = 4  # whose gains a scan adds by itself: more take longer than one pass over the sets beforehand
NO_GAINS = np.empty(0, np.float32)

Array: TypeAlias = "NDArray[Any] | Tensor"
"""An array, or a tensor."""

ArrayT = TypeVar("ArrayT", bound=Array)


class Lifted(NamedTuple, Generic[ArrayT]):
    """Items of each query with gains in addition to the scores of their codes; arrays on a CPU, or tensors.

    items  (Q, F)  int64; an item may appear several times
    gains  (Q, F)  float32, the gain of each appearance
    """

    items: ArrayT
    gains: ArrayT


class Boosts(NamedTuple):
    """Score gains for every query: of the items in sets, and of single items.

    sets     (G, words)   bitmaps; an item may be in any number of sets
    gains    (G,)         float32, the gain of each set's items; finite, and may be negative
    by_item  (N,) or (0,) float32, additional gain of each item; finite, and may be negative
    highest  the largest of these gains; 0 if there are none
    """

    sets: NDArray[np.uint64]
    gains: NDArray[np.float32]
    by_item: NDArray[np.float32] = NO_GAINS
    highest: float = 0.0

    @classmethod
    def of_sets(cls, sets: Sequence[NDArray[np.uint64]], gains: Sequence[float], items: int) -> Boosts:
        """Return boosts of the items in sets (words,); gains of many sets are added up, which makes the scan faster."""
        if len(sets) <= MOST_SETS:
            return cls(np.array(sets), np.array(gains, np.float32))
        by_item = np.zeros(items, np.float32)
        for members, gain in zip(sets, gains, strict=True):
            scan_kernel.add_gain(members, np.float32(gain), by_item)
        return cls.of_items(by_item)

    @classmethod
    def of_items(cls, gains: NDArray[np.float32]) -> Boosts:
        """Return boosts with one gain per item: (N,)."""
        return cls(bitmap.empty(len(gains))[None][:0], NO_GAINS, gains, float(gains.max(initial=-np.inf)))

    def plus(self, gains: NDArray[np.float32]) -> Boosts:
        """Return these boosts with an additional gain of each item: (N,)."""
        by_item = gains + self.by_item if len(self.by_item) else gains
        return self.of_items(by_item)._replace(sets=self.sets, gains=self.gains)

    def of(self, items: NDArray[np.signedinteger]) -> NDArray[np.float64]:
        """Return the gains of some items: (len(items),)."""
        total = np.zeros(len(items))
        for members, gain in zip(self.sets, self.gains.tolist(), strict=True):
            total += bitmap.has(members, items) * gain
        return total + self.by_item[items] if len(self.by_item) else total


class Scan:
    """Scans N items in blocks of 256: one row of 256 codes for each codebook.

    codes  (N, B')  uint8
    bias   (N,)     float32
    path   how items are ruled out; None for the fastest path of this CPU
    raises ValueError for a path that this CPU lacks
    """

    def __init__(self, codes: NDArray[np.uint8], bias: NDArray[np.float32], path: ScanPath | None = None) -> None:
        self.items, books = codes.shape
        self._path = path or supported_paths()[-1]
        if self._path not in supported_paths():
            raise ValueError(f"this CPU does not support {self._path}; it supports: {', '.join(supported_paths())}")
        blocks = -(-self.items // BLOCK)
        padded = np.full(blocks * BLOCK, -np.inf, np.float32)  # padding never wins
        padded[: self.items] = bias
        edges = _bias_edges(bias)
        lanes = _aligned((blocks, books + (len(edges) > 0), BLOCK))
        levels = np.full(BIAS_LEVELS if len(edges) else 0, -np.inf, np.float32)
        codes = np.ascontiguousarray(codes)  # of a model they are in its mapped file
        scan_kernel.pack_lanes(codes, bias, edges, lanes, levels)
        narrow = _narrow_rows(lanes)
        ranges = np.empty((len(narrow), 2, blocks), np.uint16)
        scan_kernel.find_ranges(lanes, narrow, ranges)
        highest, farthest = float(bias.max(initial=-np.inf)), float(np.abs(bias).max(initial=0.0))
        self._catalogue = scan_kernel.Catalogue(lanes, codes, padded, levels, highest, farthest, narrow, ranges)
        self._no_boosts = Boosts(bitmap.empty(self.items)[None][:0], NO_GAINS)
        self._compile(codes)

    @property
    def bias(self) -> Tensor:
        """The bias of each item: (N,) float32."""
        return torch.from_numpy(self._catalogue.bias)[: self.items]

    def bias_of(self, items: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the bias of some items: (len(items),)."""
        bias: NDArray[np.float32] = self._catalogue.bias[items]
        return bias

    def scores(self, products: Array, lifted: Lifted[Any]) -> Tensor:
        """Score every item: inner products (Q, B', W') -> (Q, N), bias first, then book by book, then gains."""
        scores = np.empty((len(products), len(self._catalogue.bias)), np.float32)
        scan_kernel.scores(self._catalogue, np.asarray(products), scores)
        return torch.from_numpy(scores)[:, : self.items].scatter_add_(1, *map(torch.as_tensor, lifted))

    def top_k(
        self, products: Array, lifted: Lifted[Any], k: int, excluded: NDArray[np.uint64], boosts: Boosts | None = None
    ) -> Ranked:
        """Find the k best items of each query, best first, ties by item order.

        products  (Q, B', W')  float32, of each query with the codewords
        lifted    of each query; an item of -1 stands for none, and a gain of minus infinity excludes its item
        excluded  (Q, words)   bitmaps of the items to exclude; or (1, words), for all queries
        returns   items (Q, k) int64 and scores (Q, k) float32, padded with -1 and -inf if fewer items are allowed
        raises    ValueError   for scores that are not finite or exceed float32
        """
        own, scratch = boosts or self._no_boosts, self._scratch(len(products))
        table, items, gains = map(np.asarray, (products, *lifted))
        best: Ranked = scan_kernel.top_k(self._catalogue, table, items, gains, own, excluded, scratch, k)
        return best

    def rank(
        self,
        products: Array,
        lifted: Lifted[Any],
        k: int,
        candidates: Sequence[NDArray[np.int64]],
        boosts: Boosts | None = None,
    ) -> list[Ranked]:
        """Rank each query's own candidates, scoring no other items: the k best, best first, ties by item order."""
        ranked = []
        for table, items, gains, own in zip(*map(np.asarray, (products, *lifted)), candidates, strict=True):
            distinct = np.unique(own)
            shown = min(k, len(distinct))
            best = np.empty(shown, np.int64), np.empty(shown, np.float32)
            found = scan_kernel.rank(self._catalogue, table, items, gains, boosts or self._no_boosts, distinct, *best)
            ranked.append((best[0][:found], best[1][:found]))
        return ranked

    def scores_of(
        self, products: Array, lifted: Lifted[Any], items: NDArray[np.int64], boosts: Boosts | None = None
    ) -> NDArray[np.float32]:
        """Score k distinct items for one query: products (1, B', W') -> (k,)."""
        scores = np.empty(len(items), np.float32)
        table, lifting, gains = (np.asarray(part)[0] for part in (products, *lifted))
        scan_kernel.scores_of(self._catalogue, table, lifting, gains, boosts or self._no_boosts, items, scores)
        return scores

    def _scratch(self, queries: int) -> NDArray[np.generic]:
        """Allocate scratch memory, whose type selects the path."""
        rows = self._catalogue.lanes.shape[1]
        if self._path == "portable":
            return np.empty((queries, BLOCK), np.float32)
        return np.empty((queries, rows, *DEFICITS[self._path]), np.uint8)

    def _compile(self, codes: NDArray[np.uint8]) -> None:
        """Compile, or load the compiled code, before the first request; also what explains scores."""
        books = codes.shape[1]
        nobody = np.empty((0, books, 2), np.float32), Lifted(np.empty((0, 0), np.int64), np.empty((0, 0), np.float32))
        self.scores(*nobody)
        self.top_k(*nobody, 1, bitmap.empty(self.items)[None][:0])
        table = np.zeros((books, 2), np.float32)
        lifted, gains, candidates, items, scores = (np.zeros(0, kind) for kind in (int, "f4", int, int, "f4"))
        scan_kernel.rank(self._catalogue, table, lifted, gains, self._no_boosts, candidates, items, scores)
        scan_kernel.scores_of(self._catalogue, table, lifted, gains, self._no_boosts, candidates, scores)
        scan_kernel.add_gain(bitmap.empty(0), np.float32(0), NO_GAINS)
        scan_kernel.look_up_products(table, codes, items, np.zeros((0, books), np.float32))
        scan_kernel.add_lifts(lifted, gains, 1, items, np.zeros((0, 0), np.float32))


def supported_paths() -> tuple[ScanPath, ...]:
    """Return the paths that this CPU supports, the fastest last."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()  # of the CPU that numba compiles for
    has = {triple.partition("-")[0].replace("arm64", "aarch64"), *features.split(",")}  # arm64 is Apple's name
    return tuple(path for path in get_args(ScanPath) if CPU_FEATURES[path] <= has)


def _bias_edges(bias: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute the lower edge of each level except the first: (255,), ascending; (0,) if all biases are equal.

    Half of the spacing follows the number of items, the other half the square roots of the distances between biases,
    which minimise the mean loss.
    """
    if (bias == bias[:1]).all():  # also if there are no items
        return np.empty(0, np.float32)
    ascending = np.sort(bias[:: -(-len(bias) // SAMPLED_BIASES)])
    spread = np.cumsum(np.sqrt(np.diff(ascending.astype(np.float64), prepend=ascending[0])))
    place = spread / max(spread[-1], SMALLEST_RANGE) + np.arange(len(ascending)) / len(ascending)  # 0 to below 2
    first = np.searchsorted(place * (BIAS_LEVELS / 2), np.arange(1, BIAS_LEVELS))
    return np.append(ascending, np.float32(np.inf))[first]


def _narrow_rows(lanes: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the rows in which the codes of a block are close together: (R,)."""
    sample = lanes[:: max(1, len(lanes) // SAMPLED_BLOCKS)]
    widths = np.ptp(sample, axis=2).mean(axis=0) if len(sample) else np.full(lanes.shape[1], 256)
    return np.flatnonzero(widths < NARROW)


def _aligned(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Allocate zeros aligned to a cache line, so that no vector crosses one."""
    size = int(np.prod(shape))
    memory = np.zeros(size + CACHE_LINE, np.uint8)
    begin = -memory.ctypes.data % CACHE_LINE
    return memory[begin : begin + size].reshape(shape)

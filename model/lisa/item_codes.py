"""Codes fixed in advance: item vectors from co-occurrence, quantised by residual k-means.

Codes that are learned end to end collapse into ties on sparse data; codes that are fixed before training cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from model.config import ModelConfig

WINDOW = 30  # the most events between two items that count as seen together
DECAY_PER_EVENT = 0.05
POWER_ITERATIONS = 6
OVERSAMPLING = 32
KMEANS_ITERATIONS = 25
KMEANS_SAMPLE = 65_536  # more points than this do not move 256 means


@dataclass(frozen=True)
class Quantisation:
    """Codes and the codewords they point to.

    codes      (N, books)            uint8
    codewords  (books, words, dims)  float32; the sum of an item's codewords approximates its vector
    """

    codes: NDArray[np.uint8]
    codewords: NDArray[np.float32]


@dataclass(frozen=True)
class FixedCodes:
    """The codes of all items, fixed in advance: history codes psi (N, B) and target codes phi (N, B')."""

    history: Quantisation
    target: Quantisation


def codes_of(vectors: NDArray[np.float32], config: ModelConfig, seed: int) -> FixedCodes:
    """Compute the codes of items from their vectors (N, width)."""
    history = residual_kmeans(vectors, config.history_codebooks, config.history_codewords, seed)
    target = residual_kmeans(vectors, config.target_codebooks, config.target_codewords, seed + 1)
    distinct = make_distinct(target.codes, config.target_codewords)
    return FixedCodes(history, Quantisation(distinct, target.codewords))


def cooccurrence(item: NDArray[np.int32], starts: NDArray[np.int64], items: int) -> sparse.csr_array:
    """Count how often two items are near each other in a history, nearer ones for more: symmetric (N, N).

    item    (events,)     item of every event, users one behind the other
    starts  (users + 1,)  where each user's events begin, and the end
    """
    counts = follower_counts(item, starts, items, WINDOW, DECAY_PER_EVENT)
    counts = sparse.csr_array(counts + counts.T)
    counts.setdiag(0)
    counts.eliminate_zeros()
    return counts


def follower_counts(
    item: NDArray[np.int32], starts: NDArray[np.int64], items: int, window: int, decay: float
) -> sparse.csr_array:
    """Count how often the column's item follows the row's within ``window`` events, decaying with distance: (N, N)."""
    user = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    counts = sparse.csr_array((items, items), dtype=np.float32)
    for distance in range(1, window + 1):
        together = user[distance:] == user[:-distance]
        earlier, later = item[:-distance][together], item[distance:][together]
        weight = np.full(len(earlier), np.exp(-decay * (distance - 1)), np.float32)
        counts += sparse.coo_array((weight, (earlier, later)), shape=(items, items)).tocsr()
    return counts


class Symmetric(Protocol):
    """A symmetric matrix (N, N), of which products alone are asked."""

    def __matmul__(self, other: NDArray[np.float32], /) -> NDArray[np.float32]:
        """Multiply it with (N, k): (N, k)."""
        ...


def item_vectors(counts: sparse.csr_array, width: int, seed: int) -> NDArray[np.float32]:
    """Compute item vectors (N, width) from counts of co-occurrence: the components of their mutual information."""
    return strongest_components(mutual_information(counts, degrees(counts)), counts.shape[0], width, seed)


def strongest_components(association: Symmetric, items: int, width: int, seed: int) -> NDArray[np.float32]:
    """Compute the strongest components of the positive pointwise mutual information of N items: (N, width).

    Randomised eigendecomposition (Halko, Martinsson and Tropp, 2011); items never seen get the zero vector.
    """
    sketch = min(width + OVERSAMPLING, items)
    basis = np.random.default_rng(seed).standard_normal((items, sketch)).astype(np.float32)
    for _ in range(POWER_ITERATIONS):
        basis, _ = np.linalg.qr(association @ basis)
    values, rotation = np.linalg.eigh(basis.T @ (association @ basis))
    strongest = np.argsort(-np.abs(values))[:width]
    components = (basis @ rotation[:, strongest]) * np.sqrt(np.abs(values[strongest]))
    vectors = np.zeros((items, width), np.float32)
    vectors[:, : components.shape[1]] = components
    return vectors


def degrees(counts: sparse.csr_array) -> NDArray[np.float32]:
    """Sum the counts of each row, above 0: (n, N) -> (n,)."""
    sums: NDArray[np.float32] = np.maximum(np.asarray(counts.sum(axis=1)).ravel(), 1e-12)
    return sums


def mutual_information(counts: sparse.csr_array, degree: NDArray[np.float32], first: int = 0) -> sparse.csr_array:
    """Compute the positive pointwise mutual information of a block of rows, discounted for rare pairs and items.

    By chance, rare pairs have the highest mutual information. A pair with a count of n, whose rarer item has a sum of
    m, keeps the share n / (n + 1) * m / (m + 1) of it (Pantel and Lin, 2002).

    counts   (n, N)
    degree   (N,)    the sums of all rows
    first    the number of the block's first row
    returns  (n, N)  with the same places as the counts
    """
    row = np.repeat(np.arange(first, first + counts.shape[0]), np.diff(counts.indptr))
    expected = degree[row] * degree[counts.indices] / max(float(degree.sum()), 1e-12)
    information = np.maximum(np.log(np.maximum(counts.data / expected, 1e-12)), 0)
    rarer = np.minimum(degree[row], degree[counts.indices])
    information *= counts.data / (counts.data + 1) * rarer / (rarer + 1)
    return sparse.csr_array((information.astype(np.float32), counts.indices, counts.indptr), shape=counts.shape)


def residual_kmeans(vectors: NDArray[np.float32], books: int, words: int, seed: int) -> Quantisation:
    """Quantise vectors codebook by codebook, each encoding the residual of those before."""
    rng = np.random.default_rng(seed)
    residual = vectors.copy()
    codes = np.empty((len(vectors), books), np.uint8)
    codewords = np.empty((books, words, vectors.shape[1]), np.float32)
    for book in range(books):
        codewords[book] = _kmeans(residual, words, rng)
        codes[:, book] = _nearest_means(residual, codewords[book])
        residual -= codewords[book][codes[:, book]]
    return Quantisation(codes, codewords)


def _kmeans(points: NDArray[np.float32], words: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Lloyd's algorithm; with fewer points than words some means are the same point twice."""
    if len(points) > KMEANS_SAMPLE:
        points = points[rng.choice(len(points), KMEANS_SAMPLE, replace=False)]
    means = np.zeros((words, points.shape[1]), np.float32)
    start = rng.choice(len(points), min(words, len(points)), replace=False)
    means[: len(start)] = points[start]
    for _ in range(KMEANS_ITERATIONS):
        assigned = _nearest_means(points, means)
        sums = sparse.csr_array(
            (np.ones(len(points), np.float32), (assigned, np.arange(len(points)))), shape=(words, len(points))
        )
        sizes = np.bincount(assigned, minlength=words)
        filled = sizes > 0
        means[filled] = (sums @ points)[filled] / sizes[filled, None]
        # a mean that lost all its points moves to a random one instead of being wasted
        lost = np.flatnonzero(~filled)[: len(points)]
        means[lost] = points[rng.choice(len(points), len(lost), replace=False)]
    return means


def _nearest_means(points: NDArray[np.float32], means: NDArray[np.float32]) -> NDArray[np.uint8]:
    squares = (means**2).sum(axis=1)
    nearest = np.empty(len(points), np.uint8)
    for begin in range(0, len(points), 16_384):
        block = points[begin : begin + 16_384]
        nearest[begin : begin + 16_384] = np.argmin(squares - 2 * (block @ means.T), axis=1)
    return nearest


def make_distinct(codes: NDArray[np.uint8], words: int) -> NDArray[np.uint8]:
    """Make equal codes distinct by incrementing their last places, as items of equal codes would always tie.

    raises ValueError when there are more items than code tuples.
    """
    if len(codes) > float(words) ** codes.shape[1]:
        raise ValueError(f"{len(codes)} items do not fit into {codes.shape[1]} codebooks of {words} codewords")
    distinct = codes.copy()
    taken: set[bytes] = set()
    _, first = np.unique(codes, axis=0, return_index=True)
    taken.update(codes[row].tobytes() for row in first)
    reached: dict[bytes, NDArray[np.uint8]] = {}  # where counting stands, as many codes may be equal
    for row in np.setdiff1d(np.arange(len(codes)), first):
        candidate = reached.setdefault(codes[row].tobytes(), codes[row].copy())
        while candidate.tobytes() in taken:
            _increment(candidate, words)
        taken.add(candidate.tobytes())
        distinct[row] = candidate
    return distinct


def _increment(codes: NDArray[np.uint8], words: int) -> None:
    for place in range(len(codes) - 1, -1, -1):
        codes[place] = (int(codes[place]) + 1) % words
        if codes[place]:
            return

"""A map from what items are to their vectors in the model's space, learned by ridge regression.

The targets are the learned items' sums of target codewords. An item that training has not seen gets the vector that
its title and categories, or the vector that its shop has computed, predict; the learned items next to that prediction
tell its codes (`model.cold_items`). The map's size does not depend on the number of items.
``benchmarks/quality/cold/content.py`` has chosen the constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from model.content.text_features import BUCKETS, Description, features, rarities, term_counts

MAX_ITEMS = 100_000  # the most used ones, from which a map is learned
EVENTS_OF_HALF_WEIGHT = 10.0  # an item of so many training events counts half as much as one of many
TEXT_PENALTY = 3.0
VECTOR_PENALTY = 1.0
ITERATIONS = 30
TOLERANCE = 1e-6  # of the squared residual, as a share of the first one
MAX_NUMBERS = 1_024  # of an item's vector
BLOCK = 8_192  # vectors that are gone through at a time
SMALLEST = 1e-30
LARGEST = 1e6  # number of a map, far beyond those that are learned


class ContentMap(NamedTuple):
    """Maps of content to vectors (D,). Without texts, or without vectors, there is no map of them.

    mean       (D,)          float32, what is predicted where content tells nothing
    rarity     (BUCKETS,)    float32, weights of terms; (0,) without texts
    of_texts   (BUCKETS, D)  float16; (0, D) without texts
    centre     (d,)          float32, the mean of the shop's vectors, each of length 1; (0,) without
    of_vectors (d, D)        float16; (0, D) without
    """

    mean: NDArray[np.float32]
    rarity: NDArray[np.float32]
    of_texts: NDArray[np.float16]
    centre: NDArray[np.float32]
    of_vectors: NDArray[np.float16]

    @property
    def reads_texts(self) -> bool:
        """Whether titles and categories contribute to the prediction."""
        return len(self.rarity) > 0

    @property
    def numbers(self) -> int:
        """The length of a shop's vectors; 0 if vectors do not contribute."""
        return len(self.centre)

    @property
    def exists(self) -> bool:
        """Whether anything was learned."""
        return self.reads_texts or self.numbers > 0

    def of_descriptions(self, descriptions: Sequence[Description]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Predict vectors (n, D). Also return which descriptions have a term from the training data (n,)."""
        if not self.reads_texts:
            return np.tile(self.mean, (len(descriptions), 1)), np.zeros(len(descriptions), bool)
        own = features(term_counts(descriptions), self.rarity)
        terms = np.unique(own.indices)
        predicted = self.mean + own[:, terms] @ self.of_texts[terms].astype(np.float32)
        return predicted.astype(np.float32), np.diff(own.indptr) > 0

    def of_shop_vectors(self, vectors: NDArray[np.floating]) -> NDArray[np.float32]:
        """Predict vectors: (n, d) -> (n, D); the lengths of those given are free, but above 0."""
        centred = _of_length_1(vectors) - self.centre
        return self.mean + centred @ self.of_vectors.astype(np.float32)


NO_CONTENT = ContentMap(
    np.zeros(0, np.float32),
    np.zeros(0, np.float32),
    np.zeros((0, 0), np.float16),
    np.zeros(0, np.float32),
    np.zeros((0, 0), np.float16),
)


def learned_content(
    targets: NDArray[np.float32],
    events: NDArray[np.integer],
    descriptions: Sequence[Description],
    vectors: NDArray[np.floating] | None = None,
) -> ContentMap:
    """Learn the map from learned items.

    targets       (n, D)  their vectors in the model's space
    events        (n,)    their training events
    descriptions  n of them, which may be empty
    vectors       (n, d)  those of the shop, NaN for an item without one
    """
    width = targets.shape[1]
    nothing = np.zeros(0, np.float32), np.zeros((0, width), np.float16)
    weights = (events / (events + EVENTS_OF_HALF_WEIGHT)).astype(np.float32)
    if not weights.any():
        return NO_CONTENT
    mean = (weights @ targets / weights.sum()).astype(np.float32)
    texts, dense = nothing, nothing
    counts = term_counts(descriptions)
    if counts.nnz:
        rarity = rarities(counts)
        x = features(counts, rarity)
        texts = rarity, _as_half(_ridge(x, targets - mean, weights))
    if vectors is not None:
        rows = np.flatnonzero(np.isfinite(vectors[:, 0]))
        if len(rows):
            centre = np.mean([_of_length_1(vectors[some]).mean(axis=0) for some in _blocks(rows)], axis=0)
            centre = centre.astype(np.float32)
            dense = centre, _as_half(_dense_ridge(vectors, rows, centre, targets - mean, weights))
    return ContentMap(mean, *texts, *dense) if len(texts[0]) or len(dense[0]) else NO_CONTENT


def _of_length_1(vectors: NDArray[np.floating]) -> NDArray[np.float32]:
    whole = vectors.astype(np.float32)
    lengths = np.sqrt(np.square(whole).sum(axis=1, keepdims=True))
    scaled: NDArray[np.float32] = whole / np.maximum(lengths, SMALLEST)
    return scaled


def _ridge(x: sparse.csr_array, y: NDArray[np.float32], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Minimise the weighted squares of x w - y and the penalty's share of w: (n, F), (n, D) -> w (F, D).

    Conjugate gradients of the normal equations, all D of them at once (Hestenes and Stiefel, 1952).
    """
    transposed = sparse.csr_array(x.T)
    row = weights[:, None]
    found = np.zeros((x.shape[1], y.shape[1]), np.float32)
    residual = np.asarray(transposed @ (row * y), np.float32)
    direction = residual.copy()
    squares = np.square(residual).sum(axis=0)
    enough = TOLERANCE * squares.max(initial=0.0)
    for _ in range(ITERATIONS):
        if squares.max(initial=0.0) <= enough:
            break
        image = transposed @ (row * (x @ direction)) + np.float32(TEXT_PENALTY) * direction
        step = squares / np.maximum((direction * image).sum(axis=0), SMALLEST)
        found += step * direction
        residual -= step * image
        before, squares = squares, np.square(residual).sum(axis=0)
        direction = residual + squares / np.maximum(before, SMALLEST) * direction
    return found


def _dense_ridge(
    vectors: NDArray[np.floating],
    rows: NDArray[np.int64],
    centre: NDArray[np.float32],
    y: NDArray[np.float32],
    weights: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Do as `_ridge` does for some rows of dense vectors, exactly, and in the memory of a block of them."""
    numbers = vectors.shape[1]
    gram, told = VECTOR_PENALTY * np.eye(numbers), np.zeros((numbers, y.shape[1]))
    for some in _blocks(rows):
        x = _of_length_1(vectors[some]) - centre
        weighed = x * weights[some, None]
        gram += weighed.T @ x
        told += weighed.T @ y[some]
    found: NDArray[np.float32] = np.linalg.solve(gram, told).astype(np.float32)
    return found


def _blocks(rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Split rows into blocks of nearly the same size."""
    return np.array_split(rows, -(-len(rows) // BLOCK))


def _as_half(weights: NDArray[np.float32]) -> NDArray[np.float16]:
    """Halve the precision, which is far above what a prediction has."""
    largest = float(np.finfo(np.float16).max)
    return np.clip(weights, -largest, largest).astype(np.float16)


def require_fit(content: ContentMap, width: int) -> None:
    """Raise ValueError where the map's parts do not belong together, or to a model of this width."""
    terms, numbers = (part.shape[:1] for part in (content.rarity, content.centre))
    expected = (width,), terms, (*terms, width), numbers, (*numbers, width)
    if tuple(part.shape for part in content) != expected:
        raise ValueError("the content map does not have the shape of the model")
    if terms not in ((0,), (BUCKETS,)) or numbers > (MAX_NUMBERS,):
        raise ValueError("the content map reads other features")
    fits = all(float(np.abs(part).max(initial=0)) <= LARGEST for part in content)  # NaN fits nowhere
    if not fits or (content.rarity < 0).any():
        raise ValueError("the content map contains NaN or infinity")

"""Baselines for comparison, each a few lines of counting or linear algebra.

A baseline is a frozen dataclass of its hyperparameters. ``fit`` learns from training histories and returns a scorer,
by which ``model.holdout_ranks`` ranks items, as by the model. ``GRIDS`` has the hyperparameters from which validation
chooses. With ``query_decay``, the events of a query's history decay at this rate per step; 0 is the published method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from typing_extensions import override

from model.data.interactions import Histories
from model.holdout_ranks import Scorer
from model.lisa import item_codes, item_followers

MIN_DECAY = 1e-4  # events that have decayed to less than this share of their weight are left out
EASE_MAX_ITEMS = 10_000  # a matrix of N x N float64 then takes 0.8 GB
ITEMS_PER_BLOCK = 1024
POSITIONS_PER_BLOCK = 16_384


class TooManyItems(ValueError):
    """The catalogue is too large for this baseline."""


class Baseline(Protocol):
    """Hyperparameters of a method that learns from histories; a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def fit(self, histories: Histories, items: int) -> Scorer:
        """Learn from training histories, some of which may be empty.

        items   size of the catalogue
        raises  TooManyItems
        """
        ...


@dataclass(frozen=True)
class Popularity(Baseline):
    """The items that occurred most often in training, for every user."""

    @override
    def fit(self, histories: Histories, items: int) -> Scorer:
        share = popularity(histories, items)
        return lambda prefixes: np.tile(share, (len(prefixes), 1))


@dataclass(frozen=True)
class Markov(Baseline):
    """The items that followed the last item most often; ``smoothing`` times the popularity ranks the others.

    Source: first-order chain as in Rendle, Freudenthaler and Schmidt-Thieme, 2010 (its unfactorised MC); smoothing of
    Jelinek and Mercer, 1980.
    """

    smoothing: float

    @override
    def fit(self, histories: Histories, items: int) -> Scorer:
        transitions = _row_shares(
            item_codes.follower_counts(histories.item, histories.starts, items, window=1, decay=0.0)
        )
        rest = self.smoothing * popularity(histories, items)
        return lambda prefixes: transitions[prefixes.last_items].toarray() + rest


@dataclass(frozen=True)
class CoVisitation(Baseline):
    """The items that followed the history's items, where counts and history both decay with distance.

    ``score(i) = sum over the history's items j of exp(-query_decay * steps ago) * P(i | j)``. P is the share of i among
    the followers of j within ``window`` events, each weighted by ``exp(-count_decay * events in between)``.

    Source: sequential rules with decay, Ludewig and Jannach, 2018, here with the whole history as the query.
    """

    window: int
    count_decay: float
    query_decay: float
    smoothing: float = 0.001

    @override
    def fit(self, histories: Histories, items: int) -> Scorer:
        counts = item_codes.follower_counts(histories.item, histories.starts, items, self.window, self.count_decay)
        rest = self.smoothing * popularity(histories, items)
        return _sum_over_history(_row_shares(counts), rest, self.query_decay)


@dataclass(frozen=True)
class LogCoVisitation(Baseline):
    """Co-visitation that adds logarithms of shares, as the lift of the model does, here for every follower.

    ``score(i) = sum over the history's items j of exp(-query_decay * steps ago) * log(1 + P(i | j) / faint_share)``.
    P is the share of ``CoVisitation``, of a total to which ``shrinkage`` is added.

    Source: ``model.lisa.item_followers``, without a network beside it.
    """

    count_decay: float
    query_decay: float
    faint_share: float
    window: int = item_followers.WINDOW
    shrinkage: float = item_followers.SHRINKAGE
    smoothing: float = 0.001

    @override
    def fit(self, histories: Histories, items: int) -> Scorer:
        counts = item_codes.follower_counts(histories.item, histories.starts, items, self.window, self.count_decay)
        gains = _row_shares(counts, self.shrinkage)
        gains.data = np.log1p(gains.data / np.float32(self.faint_share))
        rest = self.smoothing * popularity(histories, items)
        return _sum_over_history(gains, rest, self.query_decay)


@dataclass(frozen=True)
class Ridge(Baseline):
    """Linear least squares from decayed sums of item vectors to the next item, in closed form.

    Features are the sums of the history's unit item vectors at every rate of ``decay_rates``, scaled to comparable
    variance, and a constant; the weights W minimise ``|features W - one-hot next item|^2 + l2 * |W|^2`` over all
    training positions, l2 in units of the mean sum of squares of a feature. A score is divided by the item's training
    events to the power of ``discount``.

    Source: Hoerl and Kennard, 1970; the item vectors are those of ``model.lisa.item_codes``, from the
    discounted mutual information of co-occurrence (Levy and Goldberg, 2014; Pantel and Lin, 2002).
    """

    width: int
    l2: float
    discount: float
    decay_rates: tuple[float, ...] = (0.02, 0.1, 0.3, 0.6, 1.2, 10.0)

    @override
    def fit(self, histories: Histories, items: int) -> Scorer:
        vectors = item_codes.item_vectors(
            item_codes.cooccurrence(histories.item, histories.starts, items), self.width, seed=0
        )
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        gram, targets = self._normal_equations(vectors, histories, items)
        penalty = np.full(len(gram), self.l2 * np.trace(gram[:-1, :-1]) / (len(gram) - 1))
        penalty[-1] = 1e-9  # the constant is free
        weights = np.linalg.solve(gram + np.diag(penalty), targets)
        counts = np.bincount(histories.item, minlength=items)
        weights = (weights / np.maximum(counts, 1) ** self.discount).astype(np.float32)
        return lambda prefixes: self._last_features(vectors, prefixes) @ weights

    def _normal_equations(
        self, vectors: NDArray[np.float32], histories: Histories, items: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return sums of products over all positions: of features with features (F, F), and with next items (F, N)."""
        size = len(self.decay_rates) * vectors.shape[1] + 1
        gram, targets = np.zeros((size, size)), np.zeros((items, size))
        for users in _similar_lengths(histories):
            features, following = self._features(vectors, histories, users)
            one_hot = (np.ones(len(following), np.float32), (following, np.arange(len(following))))
            gram += features.T @ features
            targets += sparse.coo_array(one_hot, shape=(items, len(following))).tocsr() @ features
        return gram, targets.T

    def _features(
        self, vectors: NDArray[np.float32], histories: Histories, users: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Return the features (positions, F) after every event of some users except the last, and the next items.

        users  longest history first, so that the users who still have events at a step come first
        """
        fade = np.exp(-np.array(self.decay_rates, np.float32))[:, None]
        sums = np.zeros((len(users), len(self.decay_rates), vectors.shape[1]), np.float32)
        features, following = [], []
        steps = histories.lengths[users] - 1
        for step in range(steps[0]):
            sums = sums[: np.count_nonzero(steps > step)]
            events = histories.starts[users[: len(sums)]] + step
            sums *= fade
            sums += (vectors[histories.item[events]] * histories.weights[events, None])[:, None, :]
            features.append(self._scaled(sums))
            following.append(histories.item[events + 1])
        return np.concatenate(features), np.concatenate(following)

    def _last_features(self, vectors: NDArray[np.float32], prefixes: Histories) -> NDArray[np.float32]:
        """Return the features at the end of every history, without stepping: (Q, F)."""
        return self._scaled(
            np.stack([decayed(prefixes, rate, len(vectors)) @ vectors for rate in self.decay_rates], axis=1)
        )

    def _scaled(self, sums: NDArray[np.float32]) -> NDArray[np.float32]:
        """(Q, rates, D) -> (Q, rates D + 1); a sum of independent events with decay d has variance 1 / (1 - d^2)."""
        scale = np.sqrt(1 - np.exp(-2 * np.array(self.decay_rates, np.float32)))
        flat = (sums * scale[:, None]).reshape(len(sums), -1)
        return np.hstack([flat, np.ones((len(sums), 1), np.float32)])


@dataclass(frozen=True)
class Ease(Baseline):
    """Item-item weights with a zero diagonal that reproduce each user's items best, in closed form.

    Source: Steck, Embarrassingly shallow autoencoders for sparse data, WWW 2019, equation 8.
    """

    l2: float
    query_decay: float

    @override
    def fit(self, histories: Histories, items: int) -> Scorer:
        if items > EASE_MAX_ITEMS:
            raise TooManyItems(f"{items:,} items, but a dense matrix of all pairs is limited to {EASE_MAX_ITEMS:,}")
        used = used_items(histories, items).astype(np.float64)
        inverse = np.linalg.inv((used.T @ used).toarray() + self.l2 * np.eye(items))
        weights = -inverse / np.diag(inverse)
        np.fill_diagonal(weights, 0)
        weights = weights.astype(np.float32)
        return lambda prefixes: decayed(prefixes, self.query_decay, items) @ weights


@dataclass(frozen=True)
class ItemKnn(Baseline):
    """Sum of cosine similarities to the history's items, of which every item keeps its nearest ``neighbours``.

    Source: Deshpande and Karypis, 2004; the shrinkage of rare pairs of Bell and Koren, 2007, as in Ferrari Dacrema,
    Cremonesi and Jannach, 2019.
    """

    neighbours: int
    shrinkage: float
    query_decay: float

    @override
    def fit(self, histories: Histories, items: int) -> Scorer:
        used = used_items(histories, items)
        norms = np.sqrt(np.asarray(used.sum(axis=0)).ravel())
        by_item = used.T.tocsr()
        kept = [
            self._nearest((by_item[begin : begin + ITEMS_PER_BLOCK] @ used).toarray(), begin, norms)
            for begin in range(0, items, ITEMS_PER_BLOCK)
        ]
        similarity = sparse.csr_array(sparse.vstack(kept).T)  # (N, N): from an item of the history to a scored one
        return lambda prefixes: (decayed(prefixes, self.query_decay, items) @ similarity).toarray()

    def _nearest(self, together: NDArray[np.float32], begin: int, norms: NDArray[np.float32]) -> sparse.csr_array:
        """Return similarities from numbers of common users, for items from ``begin`` on; 0 except for the nearest."""
        rows = np.arange(len(together))
        similarity = together / (norms[begin + rows][:, None] * norms + self.shrinkage)
        similarity[rows, begin + rows] = 0
        neighbours = min(self.neighbours, similarity.shape[1])
        similarity[similarity < np.partition(similarity, -neighbours, axis=1)[:, -neighbours, None]] = 0
        return sparse.csr_array(similarity)


GRIDS: Mapping[str, Sequence[Baseline]] = {
    "popularity": [Popularity()],
    "markov": [Markov(smoothing) for smoothing in (0.001, 0.1)],
    "co-visitation": [
        CoVisitation(10, count_decay, query_decay) for count_decay in (0.1, 0.4) for query_decay in (0.2, 0.4, 0.8, 1.6)
    ],
    "log-co-visitation": [
        LogCoVisitation(0.4, query_decay, faint_share)
        for query_decay in (0.2, 0.4, 0.8, 1.6)
        for faint_share in (0.001, 0.01, 0.1, 1.0)
    ],
    "item-knn": [ItemKnn(neighbours, 10.0, query_decay) for neighbours in (20, 100) for query_decay in (0.0, 0.2, 1.0)],
    "ease": [Ease(l2, query_decay) for l2 in (300.0, 1000.0) for query_decay in (0.0, 0.2, 1.0)],
    "ridge": [Ridge(width, 0.01, discount) for width, discount in ((64, 0.0), (64, 0.2), (192, 0.2))],
}


def decayed(histories: Histories, rate: float, items: int) -> sparse.csr_array:
    """Return the sum of each history's item indicators, weighted by ``weight * exp(-rate * steps ago)``: (Q, N)."""
    rows = histories.rows
    steps_ago = histories.starts[1:][rows] - 1 - np.arange(len(rows))
    fade = np.exp(-rate * steps_ago)
    kept = fade > MIN_DECAY
    weights = (fade[kept] * histories.weights[kept]).astype(np.float32)
    return sparse.coo_array((weights, (rows[kept], histories.item[kept])), shape=(len(histories), items)).tocsr()


def used_items(histories: Histories, items: int) -> sparse.csr_array:
    """Return 1 for each item that a history has, however often: (histories, N) float32."""
    used = decayed(histories, 0.0, items)
    used.data[:] = 1
    return used


def popularity(histories: Histories, items: int) -> NDArray[np.float32]:
    """Return each item's share of the training events: (N,)."""
    counts = np.bincount(histories.item, minlength=items)
    return (counts / max(len(histories.item), 1)).astype(np.float32)


def _row_shares(counts: sparse.csr_array, shrinkage: float = 0.0) -> sparse.csr_array:
    totals = np.asarray(counts.sum(axis=1)).ravel() + shrinkage
    return sparse.csr_array(sparse.diags_array(1 / np.where(totals > 0, totals, 1).astype(np.float32)) @ counts)


def _sum_over_history(gains: sparse.csr_array, rest: NDArray[np.float32], query_decay: float) -> Scorer:
    """Return a scorer that adds the rows of a history's items, decayed, to what every item has: (N, N) and (N,)."""
    return lambda prefixes: (decayed(prefixes, query_decay, len(rest)) @ gains).toarray() + rest


def _similar_lengths(histories: Histories) -> Iterator[NDArray[np.int64]]:
    """Return users with a next item, longest history first, in groups with some thousand positions each."""
    users = np.argsort(-histories.lengths, kind="stable")
    users = users[histories.lengths[users] >= 2]
    group_of = np.cumsum(histories.lengths[users]) // POSITIONS_PER_BLOCK
    return (group for group in np.split(users, np.flatnonzero(np.diff(group_of)) + 1) if len(group))

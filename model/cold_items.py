"""Codes for cold items, which training has not seen, from the users who chose them.

The items before a cold item vote for its history codes. Its target codes and bias maximise the likelihood that these
users, by their queries, chose it and others did not: this is training's softmax, whose sum over all items is estimated
on a sample of queries, maximised codebook by codebook. A few events cannot tell 256 codewords apart, so a prior by the
votes decides where they do not.

Before any user has chosen the item, it gets the codes that most similar items have: those next to the vector that its
title, its categories or the shop's vector predict (`model.content`), or those of its categories.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.artifact.model_directory import Artifact
from model.artifact.string_table import FREE_SLOT

FIT_AT_USERS = (10, 30, 100)  # numbers of users with known items before, at which an item's codes are computed
PRIOR_EVENTS = 5.0  # weight of the prior in events; the best of 1, 5 and 20 on validation
SAMPLED_QUERIES = 600  # queries that represent those of all users
CONTEXT_ITEMS = 5  # known items before an event that vote
CONTEXT_DECAY = 0.2  # decay of their votes, per item further back
POPULARITY_OFFSET = 10.0  # a vote counts 1 / sqrt(training events + this), or popular items alone would decide
SWEEPS = 3  # over the codebooks
SMALLEST_LENGTH = 1e-12
MAX_SIMILAR_ITEMS = 30  # items of the same categories that vote for an item without events
UNPROVEN_QUANTILE = 0.25  # its likelihood among theirs: at the median, new items would crowd out known ones
POOLED_QUERIES = 100  # users of a single event that represent all users
POOLED_ITEMS = 4096  # items that represent the catalogue
NEIGHBOURS = 16_384  # the most used items, among which those next to a prediction are found
NEAREST_ITEMS = 3  # that vote for an item by its content
FARTHER_VOTE = 0.1  # less than the one before: where they agree in nothing, the nearest one decides
DESCRIBED_QUANTILE = 0.5  # of the likelihood of these, that of the item


class ColdCodes(NamedTuple):
    """The codes of one cold item: history (B,) and target (B',), uint8; and its bias."""

    history: NDArray[np.uint8]
    target: NDArray[np.uint8]
    bias: float


class ColdItems(NamedTuple):
    """The codes of n cold items: history (n, B) and target (n, B'), uint8; and their biases (n,)."""

    history: NDArray[np.uint8]
    target: NDArray[np.uint8]
    bias: NDArray[np.float64]

    @classmethod
    def of(cls, codes: Iterable[ColdCodes]) -> Self:
        """Return the codes of at least one item, in columns."""
        history, target, bias = zip(*codes, strict=True)
        return cls(np.stack(history), np.stack(target), np.array(bias))

    def at(self, items: NDArray[np.bool_]) -> Self:
        """Return the codes of some of the items (n,)."""
        return type(self)(self.history[items], self.target[items], self.bias[items])


class ColdItemEvent(NamedTuple):
    """An event on a cold item: rows of known items before it, newest first, and the user's query (D,)."""

    before: tuple[int, ...]
    query: Tensor


class SampledQuery(NamedTuple):
    """The query (D,) of some user, and the logarithm of the softmax's sum over all items."""

    query: Tensor
    log_sum: float


def with_cold_items(trained: Artifact, item_ids: Sequence[str], codes: ColdItems) -> Artifact:
    """Return the model with these cold items behind those that training has seen."""
    if not item_ids:
        return trained
    return replace(trained, items=trained.items.with_cold_items(item_ids), model=trained.model.with_cold_items(*codes))


def codes_fit(trained: Artifact, item_ids: Sequence[str], codes: ColdItems) -> NDArray[np.bool_]:
    """Return which items `with_cold_items` accepts: no learned ones, whose codes fit the codebooks (n,).

    codes  as many for each item as there are codebooks
    """
    shape = trained.config.model
    fits: NDArray[np.bool_] = np.isfinite(codes.bias) & (trained.items.rows.places_of(item_ids) == FREE_SLOT)
    fits &= codes.history.max(axis=1, initial=0) < shape.history_codewords
    fits &= codes.target.max(axis=1, initial=0) < shape.target_codewords
    return fits


def sampled_query(trained: Artifact, query: Tensor, scores: Tensor) -> SampledQuery:
    """Make a sampled query of a query (D,) and its scores (N,) of the items that training has seen."""
    return SampledQuery(query, float(torch.logsumexp(scores[: len(trained.items)], 0)))


@torch.inference_mode()
def likeliest_codes(
    trained: Artifact, choices: Sequence[ColdItemEvent], sample: Sequence[SampledQuery], events: int
) -> ColdCodes:
    """Compute the likeliest codes of a cold item.

    choices  its first events
    sample   queries that represent all users
    events   the number of all events on any item since its first one
    """
    shape, model = trained.config.model, trained.model
    before = [one.before for one in choices]
    votes = _votes(trained, before, trained.target_codes, shape.target_codewords)  # (B', W')
    log_prior = torch.from_numpy(PRIOR_EVENTS * np.log((votes + 1) / (votes + 1).sum(axis=1, keepdims=True))).float()
    by_users, by_all = (
        torch.einsum("qd,bwd->bqw", torch.stack([one.query for one in some]), model.target_codebooks)
        for some in (choices, sample)
    )
    log_sums = torch.tensor([one.log_sum for one in sample])[:, None]
    codes = votes.argmax(axis=1)
    books = range(len(codes))
    for _ in range(SWEEPS):
        for book in books:
            others = [other for other in books if other != book]
            of_users = by_users[book] + _scores(by_users, codes, others)  # (count, W')
            of_all = by_all[book] + _scores(by_all, codes, others) - log_sums
            # the likelihood with the best bias for each codeword
            likelihood = of_users.sum(dim=0) - len(choices) * torch.logsumexp(of_all, dim=0)
            codes[book] = int((likelihood + log_prior[book]).argmax())
    of_all = _scores(by_all, codes, books)[:, 0] - log_sums[:, 0]
    each_stands_for = max(events, len(choices)) / len(sample)
    bias = float(np.log(len(choices) / each_stands_for) - torch.logsumexp(of_all, dim=0))
    history = _votes(trained, before, trained.history_codes, shape.history_codewords).argmax(axis=1)
    learned = model.bias.detach()
    return ColdCodes(
        history.astype(np.uint8), codes.astype(np.uint8), min(max(bias, float(learned.min())), float(learned.max()))
    )


class QuerySample(NamedTuple):
    """The queries of Q users who represent all.

    products  (Q, B', W')  their inner products with the target codewords
    log_sums  (Q,)         logarithms of the softmax's sums over items that represent the catalogue
    """

    products: NDArray[np.float32]
    log_sums: NDArray[np.float32]

    def log_shares(self, codes: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Sum the softmax over users for items of these codes (n, B') without a bias: logarithms (n,)."""
        return _log_sum(_summed_products(self.products, codes) - self.log_sums[:, None])


@torch.inference_mode()
def query_sample(trained: Artifact, queries: Tensor) -> QuerySample:
    """Make a sample of queries (Q, D)."""
    products = torch.einsum("qd,bwd->qbw", queries, trained.model.target_codebooks).numpy()
    items = np.random.default_rng(0).permutation(len(trained.items))[:POOLED_ITEMS]
    scores = _summed_products(products, trained.target_codes[items]) + trained.model.bias.detach().numpy()[items]
    return QuerySample(products, _log_sum(scores.T))


class Neighbours:
    """The most used learned items, among which those next to a predicted vector are found."""

    @torch.inference_mode()
    def __init__(self, trained: Artifact) -> None:
        self._rows = trained.items.popular_first[:NEIGHBOURS].astype(np.int64)
        self._codes = trained.target_codes[self._rows]
        self._codebooks: NDArray[np.float32] = trained.model.target_codebooks.detach().numpy()
        self._mean = trained.content.mean
        vectors = trained.model.item_vectors(torch.from_numpy(self._rows)).numpy() - self._mean
        self._lengths = np.maximum(np.linalg.norm(vectors, axis=1), SMALLEST_LENGTH)

    def nearest(self, predicted: NDArray[np.float32], count: int) -> NDArray[np.int64]:
        """Return rows of items whose vectors, seen from the mean, point where the prediction (D,) does, best first."""
        direction = predicted - self._mean
        products = self._codebooks @ direction  # (B', W')
        likeness = (_summed_products(products[None], self._codes)[0] - direction @ self._mean) / self._lengths
        count = min(count, len(likeness))
        best = np.argpartition(-likeness, count - 1)[:count] if count else np.zeros(0, np.int64)
        return self._rows[best[np.argsort(-likeness[best], kind="stable")]]


def drawn(similar: NDArray[np.int64], most: int, item_id: str) -> NDArray[np.int64]:
    """Draw some of the items that are similar to a new one, at random by its id.

    If many new items had the same codes, they would stand side by side in every list.
    """
    rng = np.random.default_rng(list(item_id.encode()))
    return rng.choice(similar, min(most, len(similar)), replace=False)


def codes_of_similar_items(trained: Artifact, similar: NDArray[np.int64], sample: QuerySample) -> ColdCodes:
    """Return codes for an item without events: the most common codes of the similar items.

    The most common codes suit more users than those of each similar item. So the bias makes the item as likely, over
    all users, as one of the less likely similar items.

    similar  (voters,)  their rows; each item has one vote, popular or not
    """
    return _voted_codes(trained, similar, np.ones(len(similar)), sample, UNPROVEN_QUANTILE)


def codes_of_nearest_items(trained: Artifact, nearest: NDArray[np.int64], sample: QuerySample) -> ColdCodes:
    """Return codes for an item without events, by the items next to the vector that its content predicts.

    Two that agree in a codebook decide on it, else the nearest does. The item is as likely as the median of them.

    nearest  (voters,)  their rows, the nearest first
    """
    votes = 1 - FARTHER_VOTE * np.arange(len(nearest), dtype=np.float64)
    return _voted_codes(trained, nearest, votes, sample, DESCRIBED_QUANTILE)


def _voted_codes(
    trained: Artifact,
    voters: NDArray[np.int64],
    votes: NDArray[np.float64],
    sample: QuerySample,
    quantile: float,
) -> ColdCodes:
    shape, target = trained.config.model, trained.target_codes[voters]
    own = _most_common(target, votes, shape.target_codewords)
    likely = sample.log_shares(target) + trained.model.bias.detach().numpy()[voters]
    bias = np.quantile(likely, quantile) - sample.log_shares(own[None])[0]
    return ColdCodes(_most_common(trained.history_codes[voters], votes, shape.history_codewords), own, float(bias))


def _log_sum(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute the logarithm of the sum of exponentials of each column: (Q, n) -> (n,)."""
    highest = scores.max(axis=0)
    found: NDArray[np.float32] = highest + np.log(np.exp(scores - highest).sum(axis=0))
    return found


def _summed_products(products: NDArray[np.float32], codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Sum scores without a bias: (Q, B', W'), (n, B') -> (Q, n)."""
    scores = np.zeros((len(products), len(codes)), np.float32)
    for book, words in enumerate(codes.T):
        scores += products[:, book, words]
    return scores


def _most_common(codes: NDArray[np.uint8], votes: NDArray[np.float64], words: int) -> NDArray[np.uint8]:
    """Find the code of each book with the most votes: (voters, books), (voters,) -> (books,)."""
    return np.array([np.bincount(book, votes, words).argmax() for book in codes.T], np.uint8)


def _votes(
    trained: Artifact, before: Sequence[tuple[int, ...]], codes: NDArray[np.uint8], words: int
) -> NDArray[np.float64]:
    """Count the votes of the items before for each codeword: (books, words)."""
    rows = np.array([row for items in before for row in items])
    decay = np.array([np.exp(-CONTEXT_DECAY * place) for items in before for place in range(len(items))])
    weights = decay / np.sqrt(trained.items.counts[rows] + POPULARITY_OFFSET)
    return np.array([np.bincount(book, weights, words) for book in codes[rows].T])


def _scores(products: Tensor, codes: NDArray[np.int64], books: Iterable[int]) -> Tensor:
    """Sum the codewords of some books: (B', Q, W') -> (Q, 1)."""
    return torch.stack([products[book][:, codes[book]] for book in books]).sum(dim=0)[:, None]

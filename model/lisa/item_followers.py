"""The followers of items, counted: exact pairs, which vectors of bounded width cannot hold.

Where items are many and each is rare, next items are memorised rather than generalised: at rank 128, the matrix of
counts loses two thirds of its quality (``docs/measurements/experiments.md``). So a model has the few strongest
followers of every item beside the codes, and lifts the scores of those that followed a user's newest items.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from model.config import DEFAULT_LIFT_DECAY
from model.lisa import item_codes
from model.lisa.neighbours import strongest_columns

WINDOW = 10  # the most events later that count as following
SHRINKAGE = 5.0  # weight of follow-ups at which an item's shares count half
DEFAULT_LIFT_STRENGTH = 1.5  # where no validation chooses it
LIFT_STRENGTHS = (0.0, 0.75, DEFAULT_LIFT_STRENGTH, 3.0, 6.0, 12.0)
LIFT_DECAYS = (DEFAULT_LIFT_DECAY, 0.2, 0.05)
MOST_LIFTING_ITEMS = 24
FADED = 3.5  # the rate times the steps after which an item lifts its followers no more: to 3 % of what it did


class Lift(NamedTuple):
    """What the scores of an item's followers gain while it is the newest: ``strength * log(1 + share / faint_share)``.

    followers    how many of each item do, 8 bytes each
    count_decay  how much less an event counts as following for each one between, a rate
    faint_share  far smaller shares lift nothing
    decay        how much less they gain for each newer item, a rate
    """

    followers: int
    strength: float
    count_decay: float
    faint_share: float
    decay: float = DEFAULT_LIFT_DECAY


class Followers(NamedTuple):
    """The K items that followed each item most often, and their shares of all that did.

    items   (N, K)  int32, strongest first, -1 where there are fewer
    shares  (N, K)  float32, 0 there
    """

    items: NDArray[np.int32]
    shares: NDArray[np.float32]

    def gains(self, lift: Lift) -> NDArray[np.float32]:
        """Return what their scores gain, in the shape of the shares."""
        gains: NDArray[np.float32] = lift.strength * np.log1p(self.shares / lift.faint_share)
        return gains


def lifting_items(decay: float) -> int:
    """Return how many of a user's newest items lift their followers, with this decay."""
    return min(round(FADED / decay), MOST_LIFTING_ITEMS)


def strongest_followers(
    item: NDArray[np.int32], starts: NDArray[np.int64], items: int, count: int, count_decay: float
) -> Followers:
    """Find the ``count`` strongest followers of every item in packed histories.

    item         (events,)     item of every event, users one behind the other
    starts       (users + 1,)  where each user's events begin, and the end
    count_decay  how much less an event counts for each one between, a rate
    """
    return strongest_of(item_codes.follower_counts(item, starts, items, WINDOW, count_decay), count)


def strongest_of(counts: sparse.csr_array, count: int) -> Followers:
    """Find the ``count`` strongest followers of the items of a block of rows, by how often they followed: (n, N)."""
    totals = np.asarray(counts.sum(axis=1)).ravel()
    shares = sparse.csr_array(sparse.diags_array(1 / (totals + SHRINKAGE)) @ counts)
    return Followers(*strongest_columns(shares, count))

"""The splits of the evaluation protocols into training events and held-out events."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from model.config import DataCard, SplitName, TrainOn
from model.data.arrays import Arrays
from model.data.interactions import DataError, Interactions

BINS = 65_536  # of the histograms that find a quantile
MAX_EVENTS_OF_USER = 10_000  # bounds what a bot teaches, and the memory of its histograms to 60 MB
MICROSECONDS = 1_000_000


@dataclass(frozen=True)
class Split:
    """Training events and held-out events. A held-out event is predicted from all earlier events of its user.

    train       (events,) bool   events the model may learn from; a prefix of every history, unless thinned
    validation  (users',) int64  positions of the held-out validation events
    test        (users'',) int64 positions of the held-out test events
    cutoff_us   of the temporal split: no training or validation event is at or after it
    """

    train: NDArray[np.bool_]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]
    cutoff_us: int | None = None


def split(interactions: Interactions, name: SplitName, train_on: TrainOn = "train") -> Split:
    """Split the interactions by the rules of the named split; raises DataError.

    loo       the last event of each user with at least 3 is the test event, the one before it validation
    temporal  trains before the 90 % quantile of time, tests each later user's last event; the last earlier event of
              each user with at least 3 earlier ones is validation; refused if timestamps only give an order

    With train_on ``validation``, validation events are training events too; with ``all``, all events are.
    """
    parts = _split_temporal(interactions) if name == "temporal" else _split_loo(interactions)
    if train_on == "all":
        parts.train[:] = True
    elif train_on == "validation":
        parts.train[parts.validation] = True
    interactions.arrays.release()
    return parts


def thinned(interactions: Interactions, parts: Split, card: DataCard) -> Split:
    """Return the split with the training events that the card allows: recent ones, of a sample of the users.

    Of users with more than MAX_EVENTS_OF_USER training events, these are the newest ones. Held-out events stay, each
    with its whole history, which a state would have, too.

    raises  DataError  when timestamps only give an order, or no training event is left
    """
    _drop_oldest(interactions, parts.train)
    if card.since is None and card.users_sample == 1:
        return parts
    users = len(interactions.user_ids)
    drawn = np.zeros(users, bool)
    drawn[np.random.default_rng(0).permutation(users)[: ceil(card.users_sample * users)]] = True
    since_us = np.iinfo(np.int64).min
    if card.since is not None:
        if interactions.time_is_order:
            raise DataError("the timestamps only give the order within each user; omit --since")
        since_us = int(card.since.timestamp() * MICROSECONDS)
    kept = False
    for part in interactions.pieces():
        train = parts.train[part]
        train &= drawn[interactions.user[part]] & (interactions.timestamp_us[part] >= since_us)
        kept = kept or bool(train.any())
    if not kept:
        raise DataError("no training event is left; use an earlier --since or a larger --users-sample")
    return parts


def _drop_oldest(interactions: Interactions, train: NDArray[np.bool_]) -> None:
    """Drop the oldest training events of users who have too many."""
    starts = interactions.starts
    for user in np.flatnonzero(np.diff(starts) > MAX_EVENTS_OF_USER):
        own = train[starts[user] : starts[user + 1]]
        own[np.flatnonzero(own)[:-MAX_EVENTS_OF_USER]] = False


def _split_loo(interactions: Interactions) -> Split:
    lengths = np.diff(interactions.starts)
    last = interactions.starts[1:][lengths >= 3] - 1
    train = interactions.arrays.empty(len(interactions), np.bool_)
    train[:] = True
    train[last] = train[last - 1] = False
    return Split(train, last - 1, last)


def _split_temporal(interactions: Interactions) -> Split:
    if interactions.time_is_order:
        raise DataError(
            "the timestamps only give the order within each user, so a split by time is not possible; use the protocol "
            "loo_full"
        )
    arrays, times_us = interactions.arrays, interactions.timestamp_us
    cutoff_us = _value_of_rank(times_us, int(0.9 * (len(times_us) - 1)), arrays)
    train = arrays.joined((times_us[part] < cutoff_us for part in interactions.pieces()), len(times_us), np.bool_)
    earlier_events = arrays.counted(interactions.user, len(interactions.user_ids), train)
    lengths = np.diff(interactions.starts)
    train_ends = interactions.starts[:-1] + earlier_events
    validation = train_ends[earlier_events >= 3] - 1
    test = interactions.starts[1:][(lengths > earlier_events) & (lengths >= 2)] - 1
    train[validation] = False
    return Split(train, validation, test, cutoff_us)


def _value_of_rank(values: NDArray[np.int64], rank: int, arrays: Arrays) -> int:
    """Return the value of this rank, where 0 is the smallest. With several pieces, narrow it down by ever smaller bins.

    values  (n,)  not empty, with differences below 2 ** 63
    """
    if len(values) <= arrays.piece:
        return int(np.partition(values, rank)[rank])
    low = min(int(values[part].min()) for part in arrays.slices(len(values)))
    beyond = 1 + max(int(values[part].max()) for part in arrays.slices(len(values)))
    while beyond - low > 1:
        width = -(-(beyond - low) // BINS)
        counts = np.zeros(BINS, np.int64)
        for part in arrays.slices(len(values)):
            inside = values[part][(values[part] >= low) & (values[part] < beyond)]
            counts += np.bincount((inside - low) // width, minlength=BINS)
        chosen = int(np.searchsorted(np.cumsum(counts), rank, side="right"))
        rank -= int(counts[:chosen].sum())
        low, beyond = low + chosen * width, min(beyond, low + (chosen + 1) * width)
    return low

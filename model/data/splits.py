"""The splits of the evaluation protocols: which events train a model, and which are held out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.config import SplitName, TrainOn
from model.data.interactions import DataError, Interactions


@dataclass(frozen=True)
class Split:
    """Training events and held-out events. A held-out event is predicted from all earlier events of its user.

    train       (events,) bool   events the model may learn from; a prefix of every user
    validation  (users',) int64  positions of the held-out validation events
    test        (users'',) int64 positions of the held-out test events
    """

    train: NDArray[np.bool_]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]


def split(interactions: Interactions, name: SplitName, train_on: TrainOn = "train") -> Split:
    """Split the interactions as the protocol of that name does; raises DataError.

    loo       the last event of each user with at least 3 is the test event, the one before it validation
    temporal  trains before the 90 % quantile of time, tests each later user's last event; the last earlier event of
              each user with at least 3 earlier ones is validation; refused where timestamps are only an order

    With train_on ``validation`` the validation events are training events too, with ``all`` every event is.
    """
    parts = _split_temporal(interactions) if name == "temporal" else _split_loo(interactions)
    if train_on == "all":
        return Split(np.ones(len(interactions), bool), parts.validation, parts.test)
    if train_on == "validation":
        train = parts.train.copy()
        train[parts.validation] = True
        return Split(train, parts.validation, parts.test)
    return parts


def _split_loo(interactions: Interactions) -> Split:
    lengths = np.diff(interactions.starts)
    last = interactions.starts[1:][lengths >= 3] - 1
    train = np.ones(len(interactions), bool)
    train[last] = train[last - 1] = False
    return Split(train, last - 1, last)


def _split_temporal(interactions: Interactions) -> Split:
    if interactions.time_is_order:
        raise DataError("the timestamps are only an order within each user, so there is no 'temporal' split; use 'loo'")
    cutoff_us = np.quantile(interactions.timestamp_us, 0.9, method="lower")
    earlier = interactions.timestamp_us < cutoff_us
    users = len(interactions.user_ids)
    earlier_events = np.bincount(interactions.user[earlier], minlength=users)
    lengths = np.diff(interactions.starts)
    train_ends = interactions.starts[:-1] + earlier_events
    validation = train_ends[earlier_events >= 3] - 1
    test = interactions.starts[1:][(lengths > earlier_events) & (lengths >= 2)] - 1
    train = earlier.copy()
    train[validation] = False
    return Split(train, validation, test)

"""Interactions, the users' histories in them, and the history before an event."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.config import IMPRESSION
from model.data.arrays import IN_MEMORY, Arrays

REPEAT_SHARE_OF_SHOPS = 0.05
MAX_NAMED_TYPES = 20
TIMES_MEDIAN, SHARE_OF_EVENTS = 200, 0.01  # more of both has no person; resellers have up to 190 times the median

logger = logging.getLogger(__name__)


class DataError(ValueError):
    """A data directory cannot be read. The message names the file, the line and the fix."""


@dataclass(frozen=True)
class Interactions:
    """Events grouped by user, each user's in order of time; equal times keep the order of the file.

    user, item, type  (events,)  int32, indices into user_ids, item_ids, type_names
    timestamp_us      (events,)  int64, microseconds since the epoch
    value             (events,)  float64, NaN for an event without a value
    time_is_order     whether the timestamps only number the events of a user
    sha256            hex digest of the uncompressed table in the file
    is_log            whether these are a service's events, which may have types without a weight
    order             (events,)  int32, the order that an event belongs to, -1 for none; None if the table has no orders
    order_ids         the order ids that `order` numbers
    arrays            creates these arrays and derived ones: in memory, or mapped
    """

    user_ids: list[str]
    item_ids: list[str]
    type_names: list[str]
    user: NDArray[np.int32]
    item: NDArray[np.int32]
    type: NDArray[np.int32]
    timestamp_us: NDArray[np.int64]
    value: NDArray[np.float64]
    time_is_order: bool
    sha256: str
    is_log: bool = False
    order: NDArray[np.int32] | None = None
    order_ids: list[str] = field(default_factory=list)
    arrays: Arrays = IN_MEMORY

    def __len__(self) -> int:
        return len(self.user)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where each user's events begin, and the end: (users + 1,)."""
        return starts_of(self.arrays.counted(self.user, len(self.user_ids)))

    def pieces(self) -> Iterator[slice]:
        """Iterate over the events of whole users, as many as a pass works on at a time."""
        starts = self.starts
        return (slice(int(starts[users.start]), int(starts[users.stop])) for users in self.arrays.groups(starts))

    def count_before(self, moment_us: int) -> int:
        """Return the number of events before this time."""
        parts = self.arrays.slices(len(self))
        return sum(int(np.count_nonzero(self.timestamp_us[part] < moment_us)) for part in parts)

    def order_id(self, row: int) -> str | None:
        """Return the id of the order that the event belongs to; None for none."""
        number = -1 if self.order is None else int(self.order[row])
        return None if number < 0 else self.order_ids[number]

    def weights(self, event_weights: Mapping[str, float]) -> NDArray[np.float32]:
        """Return the weight of every event by its type; raises as ``type_weights``."""
        return self.type_weights(event_weights)[self.type]

    def type_weights(self, event_weights: Mapping[str, float]) -> NDArray[np.float32]:
        """Return the weight of every type: (types,).

        In a log, a type without a weight has weight 0, as in the service; elsewhere it raises DataError. The weight of
        an impression is always 0.
        """
        missing = sorted(set(self.type_names) - {*event_weights, IMPRESSION})
        if missing and not self.is_log:
            named, known = ", ".join(map(repr, missing[:MAX_NAMED_TYPES])), ", ".join(sorted(event_weights))
            options = weight_options(dict.fromkeys(missing[:MAX_NAMED_TYPES], 1))
            raise DataError(
                f"event types without a weight: {named}{_and_others(missing)}; pass {options}, or 0 to ignore a type. "
                f"Known weights: {known}. 'lisarec check' shows how to translate other names of these with --types"
            )
        weights = {**event_weights, IMPRESSION: 0.0}
        return np.array([weights.get(name, 0.0) for name in self.type_names], np.float32)

    def stepping(self, event_weights: Mapping[str, float]) -> Interactions:
        """Drop the events that do not change a state: those of weight 0. Warn of types without a weight.

        raises  DataError  when no event is left
        """
        steps = self.type_weights(event_weights) > 0
        counts = self.arrays.counted(self.type, len(self.type_names))
        named_counts = zip(self.type_names, counts.tolist(), strict=True)
        if unknown := {name: count for name, count in named_counts if name not in {*event_weights, IMPRESSION}}:
            named = ", ".join(f"{name} ({count})" for name, count in islice(unknown.items(), MAX_NAMED_TYPES))
            logger.warning(
                "ignored %d events of types without a weight: %s%s; to train on a type, pass --event-weight TYPE=1",
                sum(unknown.values()),
                named,
                _and_others(unknown),
            )
        if steps[counts > 0].all():
            return self
        if not steps[counts > 0].any():
            raise DataError("no event has a weight above 0; pass --event-weight TYPE=1 for a type to train on")
        parts = (steps[self.type[part]] for part in self.arrays.slices(len(self)))
        return self.where(self.arrays.joined(parts, len(self), np.bool_))

    def with_items_first(self, item_ids: Sequence[str]) -> Interactions:
        """Return the same events. These items, even those without events, come before all others, in this order."""
        row_of = {name: row for row, name in enumerate(item_ids)}
        others = [name for name in self.item_ids if name not in row_of]
        row_of.update(zip(others, range(len(item_ids), len(item_ids) + len(others)), strict=True))
        rows = np.array([row_of[name] for name in self.item_ids], np.int32)
        parts = (rows[self.item[part]] for part in self.arrays.slices(len(self)))
        item = self.arrays.joined(parts, len(self), np.int32)
        return replace(self, item_ids=[*item_ids, *others], item=item)

    def where(self, keep: NDArray[np.bool_]) -> Interactions:
        """Return the chosen events of the same users, items and types."""
        count = int(np.count_nonzero(keep))

        def kept(column: NDArray[Any]) -> NDArray[Any]:
            parts = (column[part][keep[part]] for part in self.arrays.slices(len(self)))
            return self.arrays.joined(parts, count, column.dtype)

        return replace(
            self,
            user=kept(self.user),
            item=kept(self.item),
            type=kept(self.type),
            timestamp_us=kept(self.timestamp_us),
            value=kept(self.value),
            order=None if self.order is None else kept(self.order),
        )


def weight_options(weights: Mapping[str, int]) -> str:
    """Return the options of a training that give types these weights."""
    return " ".join(f"--event-weight {name}={weight}" for name, weight in weights.items())


def _and_others(types: Sized) -> str:
    more = len(types) - MAX_NAMED_TYPES
    return f" and {more:,} others" if more > 0 else ""


@dataclass(frozen=True)
class Histories:
    """Histories of events, oldest first, concatenated.

    item     (events,)         int32
    weights  (events,)         float32
    starts   (histories + 1,)  int64, where each history begins, and the end
    """

    item: NDArray[np.int32]
    weights: NDArray[np.float32]
    starts: NDArray[np.int64]

    @classmethod
    def joined(cls, items: Sequence[NDArray[Any]], weights: Sequence[NDArray[Any]] | None = None) -> Histories:
        """Concatenate the items of histories, and the weights of their events; without weights, each weighs 1."""
        item = np.concatenate([np.empty(0, np.int32), *items]).astype(np.int32)
        of_events = np.ones(len(item)) if weights is None else np.concatenate([np.empty(0), *weights])
        return cls(item, of_events.astype(np.float32), starts_of(np.array([len(one) for one in items], np.int64)))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, rows: slice) -> Histories:
        """Return a slice of the histories."""
        begin, end, step = rows.indices(len(self))
        assert step == 1
        starts = self.starts[begin : end + 1]
        events = slice(starts[0], starts[-1])
        return Histories(self.item[events], self.weights[events], starts - starts[0])

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        """Iterate over the items of each history."""
        return (self.item[begin:end] for begin, end in pairwise(self.starts))

    @property
    def weights_of_each(self) -> Iterator[NDArray[np.float32]]:
        """The weights of each history's events."""
        return (self.weights[begin:end] for begin, end in pairwise(self.starts))

    @property
    def last_items(self) -> NDArray[np.int32]:
        """The last item of each history, none of which may be empty: (histories,)."""
        return self.item[self.starts[1:] - 1]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of events of each history: (histories,)."""
        return np.diff(self.starts)

    @property
    def rows(self) -> NDArray[np.int64]:
        """The history that each event belongs to: (events,)."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def positions(self) -> int:
        """The number of events that have a successor of the same user."""
        return int(np.maximum(self.lengths - 1, 0).sum())


def training_histories(
    interactions: Interactions, train: NDArray[np.bool_], event_weights: Mapping[str, float]
) -> Histories:
    """Return the training events of every user, with their weights; ``train`` as in a Split."""
    by_type, arrays = interactions.type_weights(event_weights), interactions.arrays
    lengths = arrays.counted(interactions.user, len(interactions.user_ids), train)
    events = int(lengths.sum())
    items = (interactions.item[part][train[part]] for part in interactions.pieces())
    weights = (by_type[interactions.type[part][train[part]]] for part in interactions.pieces())
    return Histories(
        arrays.joined(items, events, np.int32), arrays.joined(weights, events, np.float32), starts_of(lengths)
    )


def histories_before(
    interactions: Interactions, positions: NDArray[np.int64], event_weights: Mapping[str, float]
) -> Histories:
    """Return the history before each of the given positions."""
    by_type = interactions.type_weights(event_weights)
    begins = interactions.starts[interactions.user[positions]]
    lengths = positions - begins
    starts = starts_of(lengths)
    events = np.arange(starts[-1]) + np.repeat(begins - starts[:-1], lengths)
    return Histories(interactions.item[events], by_type[interactions.type[events]], starts)


def seen_before(
    interactions: Interactions, positions: NDArray[np.int64], unseen_types: Collection[str]
) -> list[NDArray[np.int32]]:
    """Return the items before each of the given positions, without events of the unseen types."""
    is_seen = np.array([name not in unseen_types for name in interactions.type_names])
    item, type_ = interactions.item, interactions.type
    begins = interactions.starts[interactions.user[positions]]
    return [item[begin:end][is_seen[type_[begin:end]]] for begin, end in zip(begins, positions, strict=True)]


def most_events(counts: NDArray[np.integer]) -> int:
    """Return the largest number of events that a person may have, from the numbers of all users.

    Users without events, such as those whose events a training drops, do not count.
    """
    return max(int(TIMES_MEDIAN * np.median(counts[counts > 0])), int(SHARE_OF_EVENTS * counts.sum()))


def warn_of_bots(interactions: Interactions) -> None:
    """Warn of users who have far more events than others."""
    counts = np.diff(interactions.starts)
    if len(many := counts[counts > most_events(counts)]):
        logger.warning(
            "%d users have %d of %d events, the median user %d: leave out bots, and ids that many people share",
            len(many),
            many.sum(),
            len(interactions),
            np.median(counts[counts > 0]),
        )


def repeat_share(interactions: Interactions) -> float:
    """Return the share of events whose item the same user had before: high in shops, near 0 for ratings.

    Users with more events than a person may have do not count.
    """
    counts = np.diff(interactions.starts)
    is_person = counts <= most_events(counts)
    items, different = len(interactions.item_ids), 0
    for part in interactions.pieces():
        user = interactions.user[part]
        pairs = user.astype(np.int64) * items + interactions.item[part]
        different += len(np.unique(pairs[is_person[user]]))
    return 1.0 - different / int(counts[is_person].sum())


def starts_of(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the begins of concatenated stretches of these lengths, and the end: (n,) -> (n + 1,)."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

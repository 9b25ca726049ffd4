"""The comparison of two models that were trained at different times, on events that neither has seen.

An evaluation tests a model on events held out of its own data. A comparison has two models that know different items,
because one of them has been served for a while. So items are identified by their ids, each model ranks the items that
it knows, and an unknown item is a miss. Events that one of the models may have been trained on are never held out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from model.artifact.model_directory import Artifact
from model.config import SeenRule
from model.data.interactions import REPEAT_SHARE_OF_SHOPS, Histories, starts_of
from model.evaluation.trial import model_scorer
from model.holdout_ranks import HeldOutEvents, Scorer, ranks_full
from model.lisa.item_followers import Lift
from model.metrics import CUTOFFS
from model.training.lift_choice import LiftedRanks

HELD_OUT_SHARE = 0.1  # of all events, at most
EARLY_SHARE = 0.05  # of the unseen events: a few events with an old time do not move the end of the past
MAX_HELD_OUT_EVENTS = 5_000
SECOND_US = 1_000_000
QUANTILE_STEPS = 65_536
MARKS = ("place", "is_last", "is_counted", "is_repeat")
"""The columns of an event's position in its history.

place       the number of the user's earlier events
is_last     whether it is the user's last event
is_counted  whether it is one second after the user's previous event, or the first
is_repeat   whether the user had the item before
"""


@dataclass(frozen=True)
class HoldoutComparison:
    """Q held-out events, each with the history before it.

    histories  Q times (item id, event type), oldest first, never empty
    targets    (Q,) ids of the held-out items
    values     (Q,) the value of each held-out event, NaN for no value; or (0,) if values are unknown
    """

    histories: Sequence[Sequence[tuple[str, str]]]
    targets: Sequence[str]
    seen_rule: SeenRule
    values: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def __len__(self) -> int:
        return len(self.targets)

    def halves(self) -> tuple[HoldoutComparison, HoldoutComparison]:
        """Split off every other event: one half to choose a model by, one to judge it by."""
        first, second = (
            HoldoutComparison(self.histories[begin::2], self.targets[begin::2], self.seen_rule, self.values[begin::2])
            for begin in range(2)
        )
        return first, second

    def ranks(self, model: Artifact) -> NDArray[np.int64]:
        """Rank the targets among the model's items: (Q,).

        A history without an item that the model knows gets popular items.
        """
        known = _KnownEvents(self, model.items.ids, model.config.event_weights)
        is_personal = known.lengths > 0
        ranks = known.ranks(_popular(model.items.counts))
        ranks[is_personal] = known.ranks(model_scorer(model), is_personal)
        return ranks

    def lifted_ranks(self, model: Artifact, lift: Lift) -> Callable[[Lift], NDArray[np.int64]]:
        """Return a function that ranks the targets like ``ranks``, exactly up to 10, by the model with any lift: (Q,).

        lift  the lift of the model, whose strength is above 0
        """
        known = _KnownEvents(self, model.items.ids, model.config.event_weights)
        ranks = known.ranks(_popular(model.items.counts))
        places, events = known.events(known.lengths > 0)
        if not len(places):
            return lambda _: ranks
        lifted = LiftedRanks(
            events, model_scorer(unlifted(model)), self.seen_rule, model.model.shares_of_followers(lift)
        )

        def ranks_with(other: Lift) -> NDArray[np.int64]:
            ranks[places] = lifted.ranks(other)
            return ranks.copy()

        return ranks_with

    def ranks_by_counts(self, counts: Mapping[str, int]) -> NDArray[np.int64]:
        """Rank the targets among these items, the most frequent first: (Q,)."""
        weights = {kind: 1.0 for history in self.histories for _, kind in history}
        known = _KnownEvents(self, list(counts), weights)
        return known.ranks(_popular(np.array(list(counts.values()), np.int64)))


def mark_for_comparison(events: pl.DataFrame) -> pl.DataFrame:
    """Add the columns of MARKS to all events of some users, each user's in order of time."""
    step_us = pl.col("timestamp_us").diff().over("user_id")
    return events.with_columns(
        place=pl.int_range(pl.len()).over("user_id"),
        is_last=pl.col("user_id").ne(pl.col("user_id").shift(-1)).fill_null(True),
        is_counted=(step_us == SECOND_US).fill_null(True),
        is_repeat=~pl.struct("user_id", "item_id").is_first_distinct(),
    )


def split_for_comparison(events: pl.LazyFrame, unseen_after_ms: int) -> tuple[pl.LazyFrame, HoldoutComparison]:
    """Split a log into the past, to train on, and held-out events after it, on which no model was trained before.

    events           user_id, item_id, type, value, timestamp_us, logged_ms, and MARKS; each user's in order of time,
                     none of weight 0; they are read several times, a few at a time
    unseen_after_ms  an existing model may know the events that were logged until then

    With real timestamps, an event is unseen only if it is later than that, too: older ones may be logged late, such as
    those that a shop replays after training on them. The past ends where the last tenth of the events begins, or where
    the unseen events begin, whichever is later; the last event of each later user is held out. If timestamps only give
    an order, the last event of each user with at least three events is held out, if it is unseen.
    """
    is_unseen = pl.col("logged_ms") > unseen_after_ms
    if events.select(pl.col("is_counted").all()).collect(engine="streaming").item():
        held_out = (pl.col("place") >= 2) & pl.col("is_last") & is_unseen
        past = events.filter(~held_out)
    else:
        is_unseen &= pl.col("timestamp_us") > unseen_after_ms * 1000
        tenth = lower_quantile(events, "timestamp_us", 1 - HELD_OUT_SHARE)
        unseen = lower_quantile(events.filter(is_unseen), "timestamp_us", EARLY_SHARE)
        end_us = max(tenth or 0, unseen or 0)
        held_out = (pl.col("place") >= 1) & pl.col("is_last") & is_unseen & (pl.col("timestamp_us") >= end_us)
        past = events.filter(pl.col("timestamp_us") < end_us)
    return past.drop(MARKS), _build_comparison(events, held_out)


def _build_comparison(events: pl.LazyFrame, held_out: pl.Expr) -> HoldoutComparison:
    users = events.filter(held_out).select("user_id").collect(engine="streaming")
    users = users.sample(min(len(users), MAX_HELD_OUT_EVENTS), seed=0, shuffle=True)
    histories = (
        events.filter(pl.col("user_id").is_in(users["user_id"].implode()))
        .select("user_id", "item_id", "type", "value")
        .collect(engine="streaming")
        .group_by("user_id")
        .agg("item_id", "type", pl.col("value").last().fill_null(np.nan))
    )
    of_users = users.join(histories, on="user_id", how="left", maintain_order="left")
    pairs_of_users = of_users.select("item_id", "type").iter_rows()
    full_histories = [list(zip(items, kinds, strict=True)) for items, kinds in pairs_of_users]
    count, repeated = events.select(pl.len(), pl.col("is_repeat").sum()).collect(engine="streaming").row(0)
    repeats = 1 - (count - repeated) / max(count, 1)
    return HoldoutComparison(
        [history[:-1] for history in full_histories],
        [history[-1][0] for history in full_histories],
        "none" if repeats > REPEAT_SHARE_OF_SHOPS else "all",
        of_users["value"].cast(pl.Float64).to_numpy(),
    )


def lower_quantile(table: pl.LazyFrame, column: str, share: float) -> int | None:
    """Return the lower quantile of a column of integers without holding it in memory; None without values.

    Each pass counts the values in equal steps, and the next one divides the step that has the quantile.
    """
    value = pl.col(column)
    bounds = table.select(pl.len().alias("count"), value.min().alias("low"), value.max().alias("high"))
    count, low, high = bounds.collect(engine="streaming").row(0)
    rank = int((count - 1) * share)
    while count and low < high:
        width = (high - low) // QUANTILE_STEPS + 1
        steps = table.filter(value.is_between(low, high)).group_by(((value - low) // width).alias("step")).len()
        counts = steps.collect(engine="streaming").sort("step")
        up_to = counts["len"].cast(pl.Int64).cum_sum()
        place = int((up_to <= rank).sum())
        rank -= int(up_to[place - 1]) if place else 0
        low += int(counts["step"][place]) * width
        high = min(high, low + width - 1)
    return low if count else None


class _KnownEvents:
    """The events of a comparison, with rows of N items instead of ids, and without all other items."""

    def __init__(self, comparison: HoldoutComparison, item_ids: Sequence[str], weights: Mapping[str, float]) -> None:
        row_of = {item_id: row for row, item_id in enumerate(item_ids)}
        self._histories = [
            [
                (row_of[item_id], weights[kind])
                for item_id, kind in history
                if item_id in row_of and weights.get(kind, 0.0) > 0
            ]
            for history in comparison.histories
        ]
        self._targets = np.array([row_of.get(item_id, -1) for item_id in comparison.targets], np.int64)
        self._seen_rule = comparison.seen_rule
        self._miss = max(len(item_ids), *CUTOFFS) + 1
        self.lengths = np.array([len(history) for history in self._histories], np.int64)

    def ranks(self, scorer: Scorer, selected: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        """Rank the targets of the selected events by the scorer."""
        selected = np.ones(len(self._targets), bool) if selected is None else selected
        ranks = np.full(len(selected), self._miss, np.int64)
        places, events = self.events(selected)
        ranks[places] = ranks_full(events, scorer, self._seen_rule)
        return ranks[selected]

    def events(self, selected: NDArray[np.bool_]) -> tuple[NDArray[np.int64], HeldOutEvents]:
        """Return the places of the selected events whose target is known, and these events."""
        places = np.flatnonzero(selected & (self._targets >= 0))
        rows = [row for place in places for row, _ in self._histories[place]]
        weights = [weight for place in places for _, weight in self._histories[place]]
        starts = starts_of(self.lengths[places])
        histories = Histories(np.array(rows, np.int32), np.array(weights, np.float32), starts)
        return places, HeldOutEvents(self._targets[places], histories, places.astype(np.int32))


def unlifted(model: Artifact) -> Artifact:
    """Return the model without its lift."""
    plain = copy.copy(model.model)
    plain.lift = torch.zeros_like(plain.lift)
    return replace(model, model=plain)


def _popular(counts: NDArray[np.signedinteger]) -> Scorer:
    return lambda histories: np.tile(counts.astype(np.float32), (len(histories), 1))

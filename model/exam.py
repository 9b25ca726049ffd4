"""Questions to models that were trained at different times: what did each user do after this history?

Evaluation tests a model on events held out of its own data. Here are two models, one of them served for a while, that
know different items. So items have their ids; each model ranks those that it knows, and what it does not know is a
miss. Nobody is asked for an event that one of them may have been trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from model.artifact import Artifact
from model.config import SeenRule
from model.data import REPEAT_SHARE_OF_SHOPS, Histories
from model.evaluate import model_scorer
from model.metrics import CUTOFFS
from model.ranking import HeldOut, Scorer, ranks_full

HELD_OUT_SHARE = 0.1  # of all events, at most
EARLY_SHARE = 0.05  # of the unseen events: a few that come with an old time do not make the past end there
MOST_QUESTIONS = 5_000
SECOND_US = 1_000_000


@dataclass(frozen=True)
class Exam:
    """Q questions.

    histories  Q times (item id, event type), oldest first, never empty
    answers    (Q,) item ids
    """

    histories: Sequence[Sequence[tuple[str, str]]]
    answers: Sequence[str]
    seen_rule: SeenRule

    def __len__(self) -> int:
        return len(self.answers)

    def halves(self) -> tuple[Exam, Exam]:
        """Every other question: one half to choose by, one to judge by."""
        first, second = (Exam(self.histories[begin::2], self.answers[begin::2], self.seen_rule) for begin in range(2))
        return first, second

    def ranks(self, model: Artifact) -> NDArray[np.int64]:
        """Where the answers stand among the model's items: (Q,). Who did nothing that it knows gets popular items."""
        weights = model.config.event_weights
        known = _Known(self, model.items.ids, weights)
        is_personal = known.lengths > 0
        ranks = known.ranks(_popular(model.items.counts))
        ranks[is_personal] = known.ranks(model_scorer(model), is_personal)
        return ranks

    def ranks_by_counts(self, counts: Mapping[str, int]) -> NDArray[np.int64]:
        """Where they stand among these items, the most frequent first: (Q,)."""
        weights = {kind: 1.0 for history in self.histories for _, kind in history}
        known = _Known(self, list(counts), weights)
        return known.ranks(_popular(np.array(list(counts.values()), np.int64)))


def cut(events: pl.DataFrame, unseen_after_ms: int) -> tuple[pl.DataFrame, Exam]:
    """The past to train on, and questions about what came then, which nobody was trained on before.

    events           user_id, item_id, type, timestamp_us, logged_ms; each user's in order of time, weightless ones not
    unseen_after_ms  a model that exists already may know what was logged until then

    Where timestamps tell a time, the past ends where the last tenth of the events begins, or where what is unseen
    begins, whichever is later, and the last event of each later user is asked for. Where they are only an order, it
    is the last event of each user with at least three, if it is unseen. The events before it are the question.
    """
    marked = events.with_columns(
        is_last=pl.col("user_id").ne(pl.col("user_id").shift(-1)).fill_null(True),
        place=pl.int_range(pl.len()).over("user_id"),
        is_unseen=pl.col("logged_ms") > unseen_after_ms,
    )
    if _only_counts(marked):
        asked = (pl.col("place") >= 2) & pl.col("is_last") & pl.col("is_unseen")
        past = marked.filter(~asked)
    else:
        end_us = _end_of_past_us(marked)
        asked = (pl.col("place") >= 1) & pl.col("is_last") & pl.col("is_unseen") & (pl.col("timestamp_us") >= end_us)
        past = marked.filter(pl.col("timestamp_us") < end_us)
    return past.select(events.columns), _questions(marked, marked.filter(asked))


def _end_of_past_us(events: pl.DataFrame) -> int:
    tenth = events["timestamp_us"].quantile(1 - HELD_OUT_SHARE, "lower")
    unseen = events.filter("is_unseen")["timestamp_us"].quantile(EARLY_SHARE, "lower")
    return int(max(tenth or 0, unseen or 0))


def _only_counts(events: pl.DataFrame) -> bool:
    """Whether every event of a user stands one second after the one before."""
    steps = events.select(pl.col("timestamp_us").diff().filter(pl.col("place") > 0)).to_series()
    return bool((steps == SECOND_US).all())


def _questions(events: pl.DataFrame, asked: pl.DataFrame) -> Exam:
    users = asked.select("user_id").sample(min(len(asked), MOST_QUESTIONS), seed=0, shuffle=True)
    histories = events.join(users, on="user_id", how="semi").group_by("user_id").agg("item_id", "type")
    of_users = users.join(histories, on="user_id", how="left", maintain_order="left")
    whole = [list(zip(items, kinds, strict=True)) for _, items, kinds in of_users.iter_rows()]
    pairs = events.select("user_id", "item_id")
    repeats = 1 - len(pairs.unique()) / max(len(pairs), 1)
    return Exam(
        [history[:-1] for history in whole],
        [history[-1][0] for history in whole],
        "none" if repeats > REPEAT_SHARE_OF_SHOPS else "all",
    )


class _Known:
    """The questions in the rows of N items, as far as these have them."""

    def __init__(self, exam: Exam, item_ids: Sequence[str], weights: Mapping[str, float]) -> None:
        row_of = {item_id: row for row, item_id in enumerate(item_ids)}
        self._histories = [
            [
                (row_of[item_id], weights[kind])
                for item_id, kind in history
                if item_id in row_of and _steps(weights, kind)
            ]
            for history in exam.histories
        ]
        self._answers = np.array([row_of.get(item_id, -1) for item_id in exam.answers], np.int64)
        self._seen_rule = exam.seen_rule
        self._miss = max(len(item_ids), *CUTOFFS) + 1
        self.lengths = np.array([len(history) for history in self._histories], np.int64)

    def ranks(self, scorer: Scorer, chosen: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        """Of the chosen questions."""
        places = np.arange(len(self._answers)) if chosen is None else np.flatnonzero(chosen)
        ranks = np.full(len(places), self._miss, np.int64)
        can_be_right = self._answers[places] >= 0
        places = places[can_be_right]
        rows = [row for place in places for row, _ in self._histories[place]]
        weights = [weight for place in places for _, weight in self._histories[place]]
        starts = np.concatenate([[0], np.cumsum(self.lengths[places])]).astype(np.int64)
        histories = Histories(np.array(rows, np.int32), np.array(weights, np.float32), starts)
        held_out = HeldOut(self._answers[places], histories, places.astype(np.int32))
        ranks[can_be_right] = ranks_full(held_out, scorer, self._seen_rule)
        return ranks


def _steps(weights: Mapping[str, float], kind: str) -> bool:
    return weights.get(kind, 0.0) > 0


def _popular(counts: NDArray[np.signedinteger]) -> Scorer:
    return lambda histories: np.tile(counts.astype(np.float32), (len(histories), 1))

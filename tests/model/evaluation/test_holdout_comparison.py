"""Test questions for models of different times, against counting by hand."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.artifact.item_table import ItemTable
from model.artifact.model_directory import Artifact
from model.config import Config, ModelConfig
from model.data.interactions import REPEAT_SHARE_OF_SHOPS
from model.evaluation import holdout_comparison
from model.evaluation.holdout_comparison import (
    HoldoutComparison,
    lower_quantile,
    mark_for_comparison,
    split_for_comparison,
)
from model.inference.engine import Engine
from model.lisa.histogram import history_histogram
from model.lisa.item_followers import Followers, Lift
from model.lisa.lisa_mini import LisaMini

SHAPE = ModelConfig(
    width=8,
    decay_rates=(0.1,),
    history_codebooks=2,
    history_codewords=4,
    target_codebooks=2,
    target_codewords=8,
    recent_items=2,
    followers=0,
)
WEIGHTS = {"click": 1.0, "like": 2.0, "dislike": 0.0}
MISS = 51


def make_model(names: str, seed: int = 0) -> Artifact:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    history, target = (
        torch.from_numpy(rng.integers(0, words, (len(names), 2)))
        for words in (SHAPE.history_codewords, SHAPE.target_codewords)
    )
    model = LisaMini(SHAPE, history, target)
    model.fold_norms_and_round()
    model.eval()
    with torch.no_grad():
        model.target_codebooks.normal_()
        model.bias.normal_()
        tables = model.tables()
    items = ItemTable(list(names), [""] * len(names), [()] * len(names), np.arange(len(names), dtype=np.int64))
    return Artifact("m", "00" * 8, Config(model=SHAPE, event_weights=WEIGHTS), items, model, tables, {})


def table(*rows: tuple[str, str, int, int], kind: str = "click") -> pl.DataFrame:
    """Rows of user, item, second, and millisecond of logging, in any order."""
    frame = pl.DataFrame(rows, schema=["user_id", "item_id", "second", "logged_ms"], orient="row")
    return (
        frame.select(
            "user_id",
            "item_id",
            pl.lit(kind).alias("type"),
            pl.lit(None, pl.Float64).alias("value"),
            pl.col("second") * 1_000_000,
            "logged_ms",
        )
        .rename({"second": "timestamp_us"})
        .sort("user_id", "timestamp_us", maintain_order=True)
    )


def split(events: pl.DataFrame, seen_ms: int, users_at_once: int = 9) -> tuple[pl.DataFrame, HoldoutComparison]:
    """Mark events in chunks of users, like the reader of a large log, and split them."""
    some = events.with_columns(piece=pl.col("user_id").rank("dense") // users_at_once)
    pieces = [mark_for_comparison(piece) for piece in some.partition_by("piece", include_key=False)]
    past, comparison = split_for_comparison(pl.concat(pieces).lazy(), seen_ms)
    return past.collect(), comparison


def split_as_a_whole(events: pl.DataFrame, seen_ms: int) -> tuple[pl.DataFrame, HoldoutComparison]:
    """Split a table in memory directly."""
    user, time = pl.col("user_id"), pl.col("timestamp_us")
    place, is_last = pl.int_range(pl.len()).over(user), user.ne(user.shift(-1)).fill_null(True)
    is_new = pl.col("logged_ms") > seen_ms
    if (events.filter(place > 0).is_empty()) or events.select(
        (time.diff() == 1_000_000).filter(place > 0).all()
    ).item():
        past, asked = events.filter(~((place >= 2) & is_last & is_new)), events.filter((place >= 2) & is_last & is_new)
    else:
        is_new &= time > seen_ms * 1000
        tenth = events["timestamp_us"].quantile(0.9, "lower")
        unseen = events.filter(is_new)["timestamp_us"].quantile(0.05, "lower")
        end_us = int(max(tenth or 0, unseen or 0))
        past = events.filter(time < end_us)
        asked = events.filter((place >= 1) & is_last & is_new & (time >= end_us))
    users = asked["user_id"].to_frame().sample(min(len(asked), 5_000), seed=0, shuffle=True)["user_id"]
    own = {str(user_id): rows for (user_id,), rows in events.group_by("user_id")}
    histories = [list(own[user_id].select("item_id", "type").iter_rows()) for user_id in users]
    repeats = 1 - len(events.select("user_id", "item_id").unique()) / max(len(events), 1)
    return past, HoldoutComparison(
        [history[:-1] for history in histories],
        [history[-1][0] for history in histories],
        "none" if repeats > REPEAT_SHARE_OF_SHOPS else "all",
        np.array([own[user_id]["value"][-1] for user_id in users], np.float64),
    )


def rank_by_hand(model: Artifact, history: list[tuple[str, str]], answer: str, seen_rule: str) -> int:
    """Ranks of single questions by the engine's own scores."""
    ids = model.items.ids
    if answer not in ids:
        return MISS
    steps = [(ids.index(name), WEIGHTS[kind]) for name, kind in history if name in ids and WEIGHTS.get(kind, 0) > 0]
    if not steps:
        scores = model.items.counts.astype(np.float32)
    else:
        rows = np.array([row for row, _ in steps])
        weights = np.array([weight for _, weight in steps], np.float32)
        recent = np.full(SHAPE.recent_items, -1)
        recent[: len(rows)] = rows[::-1][: SHAPE.recent_items]
        histogram = history_histogram(model.history_codes[rows], SHAPE.decay_rates, SHAPE.history_codewords, weights)
        engine = Engine(model)
        scores = engine.scores(engine.step(histogram[None], rows[-1:], recent[None])).numpy()[0]
    if seen_rule == "all":
        if ids.index(answer) in [row for row, _ in steps]:
            return MISS
        scores[[row for row, _ in steps]] = -np.inf
    return int((scores >= scores[ids.index(answer)]).sum())


def lifted(model: Artifact, followers: Followers, lift: Lift) -> Artifact:
    """The model with another lift."""
    network = copy.copy(model.model)
    network.set_followers(followers, lift)
    return replace(model, model=network, config=model.config.model_copy(update={"model": network.config}))


class TestRanks:
    @pytest.mark.parametrize("seen_rule", ["none", "all"])
    def test_of_a_batch_equal_single_questions(self, seen_rule: Any) -> None:
        """Including items unknown to one of the models, and unknown users."""
        rng = np.random.default_rng(1)
        kinds = ["click", "like", "dislike", "never heard of"]
        histories = [
            [
                (str(item), str(kind))
                for item, kind in zip(rng.choice(list("abcdefgh"), n), rng.choice(kinds, n), strict=True)
            ]
            for n in rng.integers(1, 6, 60)
        ]
        comparison = HoldoutComparison(histories, [str(item) for item in rng.choice(list("abcdefgh"), 60)], seen_rule)
        for model in (make_model("abcdef"), make_model("fedcxyz", seed=1)):
            pairs = zip(histories, comparison.targets, strict=True)
            expected = [rank_by_hand(model, *pair, seen_rule) for pair in pairs]
            assert comparison.ranks(model).tolist() == expected
        comparison = replace(comparison, values=np.arange(60.0))
        first, second = comparison.halves()
        assert (len(first), len(second), second.targets[0]) == (30, 30, comparison.targets[1])
        assert (first.values[1], second.values[1]) == (2, 3)

    @pytest.mark.parametrize("seen_rule", ["none", "all"])
    def test_with_a_given_lift_equal_a_model_with_that_lift(self, seen_rule: Any) -> None:
        rng = np.random.default_rng(2)
        histories = [
            [(str(item), "click") for item in rng.choice(list("abcdefgz"), n)] for n in rng.integers(1, 30, 80)
        ]
        comparison = HoldoutComparison(histories, [str(item) for item in rng.choice(list("abcdefgh"), 80)], seen_rule)
        followers = Followers(rng.integers(-1, 6, (6, 3)).astype(np.int32), rng.random((6, 3)).astype(np.float32))
        followers.shares[followers.items < 0] = 0
        own = Lift(3, 1.5, 0.4, 0.01)
        model = lifted(make_model("abcdef"), followers, own)
        ranks = comparison.lifted_ranks(model, own)
        for lift in (own, own._replace(strength=0.0), own._replace(strength=0.75, decay=0.05)):
            expected = comparison.ranks(lifted(model, followers, lift))
            assert ranks(lift).tolist() == expected.tolist()
            assert len(set(expected.tolist())) > 3

    def test_of_popular_items_follow_counts_with_pessimistic_ties(self) -> None:
        comparison = HoldoutComparison(
            [[("a", "click")], [("a", "click")], [("b", "click")], [("a", "click")]], ["b", "c", "c", "z"], "none"
        )
        assert comparison.ranks_by_counts({"a": 5, "b": 3, "c": 3}).tolist() == [3, 3, 3, MISS]
        of_unseen = replace(comparison, seen_rule="all")
        assert of_unseen.ranks_by_counts({"a": 5, "b": 3, "c": 3}).tolist() == [2, 2, 2, MISS]


class TestCut:
    rows = st.lists(
        st.tuples(st.sampled_from("uvwxyz"), st.sampled_from("abc"), st.integers(0, 40)), min_size=1, max_size=60
    )

    @given(rows, st.integers(-1, 60))
    def test_no_answer_is_in_the_training_data(self, rows: list[tuple[str, str, int]], seen_ms: int) -> None:
        """Each answer is the user's last event, logged since; everything before it is the history."""
        events = table(*((*row, logged_ms) for logged_ms, row in enumerate(rows)))
        past, comparison = split(events, seen_ms)
        asked = list(zip(comparison.histories, comparison.targets, strict=True))
        trained = {row[-1] for row in past.iter_rows()}  # every row has a millisecond of its own
        for _, of_user in groupby(events.iter_rows(), lambda row: row[0]):
            own = list(of_user)
            known = [row[-1] in trained for row in own]
            assert known == sorted(known, reverse=True), "the past is where a history begins"
            question = [(row[1], row[2]) for row in own[:-1]], own[-1][1]
            if question in asked and own[-1][-1] > seen_ms and not known[-1]:
                asked.remove(question)
        assert asked == []

    @settings(max_examples=40)
    @given(
        rows,
        st.integers(-1, 60),
        st.integers(1, 4),
        st.sampled_from([2, 65_536]),
        st.booleans(),
        st.lists(st.none() | st.floats(0, 9), min_size=60, max_size=60),
    )
    def test_a_chunked_log_is_split_like_a_whole_table(
        self,
        rows: list[tuple[str, str, int]],
        seen_ms: int,
        users_at_once: int,
        steps: int,
        is_counted: bool,
        values: list[float | None],
    ) -> None:
        events = table(*((*row, logged_ms) for logged_ms, row in enumerate(rows)))
        events = events.with_columns(value=pl.Series(values[: len(rows)], dtype=pl.Float64))
        if is_counted:
            events = events.with_columns(timestamp_us=pl.int_range(pl.len()).over("user_id") * 1_000_000)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(holdout_comparison, "QUANTILE_STEPS", steps)
            past, comparison = split(events, seen_ms, users_at_once)
        expected_past, expected = split_as_a_whole(events, seen_ms)
        none = np.empty(0)
        assert past.equals(expected_past)
        assert replace(comparison, values=none) == replace(expected, values=none)
        np.testing.assert_array_equal(comparison.values, expected.values)

    @settings(max_examples=40)
    @given(
        st.lists(st.integers(-(2**40), 2**52) | st.integers(0, 3), min_size=1, max_size=50),
        st.sampled_from([0.0, 0.05, 0.5, 0.9, 1.0]),
    )
    def test_a_quantile_by_counts_equals_that_of_sorted_values(self, values: list[int], share: float) -> None:
        column = pl.DataFrame({"value": values})
        assert lower_quantile(column.lazy(), "value", share) == column["value"].quantile(share, "lower")
        assert lower_quantile(column.lazy().head(0), "value", share) is None

    def test_the_past_ends_at_the_last_tenth_or_at_unseen_events(self) -> None:
        rows = [(f"u{n % 10}", "a", n, n) for n in range(100)]
        for seen_ms, end in ((-1, 89), (50, 89), (94, 95)):
            past, comparison = split(table(*rows), seen_ms)
            assert (len(past), len(comparison)) == (end, min(10, 100 - max(end, seen_ms + 1)))

    def test_late_logged_events_from_before_the_model_are_no_questions(self) -> None:
        rows = [(f"u{n % 10}", "a", n, 100_000 + n) for n in range(100)]
        for seen_ms, end in ((50_000, 89), (94_000, 95), (99_000, 89)):
            past, comparison = split(table(*rows), seen_ms)
            assert (len(past), len(comparison)) == (end, min(10, 99 - seen_ms // 1000))

    def test_with_ordinal_timestamps_the_last_new_event_is_the_question(self) -> None:
        rows = [
            (user, item, n, n + 10 * (user == "v"))
            for user in "uvw"
            for n, item in enumerate("abc"[: 2 + (user != "w")])
        ]
        past, comparison = split(table(*rows), -1)
        assert (len(past), sorted(comparison.targets)) == (6, ["c", "c"])
        past, comparison = split(table(*rows), 5)
        assert (len(past), comparison.histories) == (7, [[("a", "click"), ("b", "click")]])

    def test_each_question_has_the_value_of_its_event(self) -> None:
        events = table(*[(f"u{n % 10}", f"i{n}", n, n) for n in range(100)])
        worth = events.with_columns(
            value=pl.when(pl.col("item_id").ne("i95")).then(pl.col("logged_ms").cast(pl.Float64))
        )
        _, comparison = split(worth, -1)
        expected = [np.nan if item == "i95" else float(item[1:]) for item in comparison.targets]
        assert len(expected) == 10
        np.testing.assert_array_equal(comparison.values, expected)

    def test_seen_items_stay_for_repeat_consumption(self) -> None:
        again = table(*[(f"u{n % 9}", "a", n * n, n) for n in range(60)])
        once = table(*[(f"u{n % 9}", f"i{n}", n * n, n) for n in range(60)])
        assert (split(again, -1)[1].seen_rule, split(once, -1)[1].seen_rule) == (
            "none",
            "all",
        )

    def test_without_new_events_there_are_no_questions(self) -> None:
        assert len(split(table(*[(f"u{n % 9}", "a", n * n, n) for n in range(60)]), 1_000)[1]) == 0

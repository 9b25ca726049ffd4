"""Protocols and metrics against rankings written out in plain Python."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import artifact, data, evaluate, train
from model.config import DataCard, SeenRule

USERS, ITEMS = 300, 40  # more users than one block holds


def held_out(targets: Any, history: list[Any]) -> evaluate.HeldOut:
    """Held-out events whose histograms carry nothing but the number of their row, for the scorer to find."""
    rows = np.arange(len(targets), dtype=np.float32).reshape(-1, 1, 1, 1)
    users = np.arange(len(targets), dtype=np.int32)
    return evaluate.HeldOut(rows, np.zeros((len(rows), 1), np.uint8), np.asarray(targets, np.int64), history, users)


def scorer(scores: Any) -> evaluate.Scorer:
    return lambda histograms, _: scores[histograms[:, 0, 0, 0].astype(int)].astype(np.float32)


def random_events(seed: int, score_levels: int) -> tuple[evaluate.HeldOut, Any]:
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, score_levels, (USERS, ITEMS))
    history = [rng.integers(0, ITEMS, rng.integers(1, 60)).astype(np.int32) for _ in range(USERS)]
    return held_out(rng.integers(0, ITEMS, USERS), history), scores


@pytest.mark.parametrize("seen_rule", ["none", "recent", "all"])
@pytest.mark.parametrize("score_levels", [1, 4, 1000])
def test_ranks_count_every_shown_item_that_scores_at_least_as_much(seen_rule: SeenRule, score_levels: int) -> None:
    events, scores = random_events(0, score_levels)
    expected = []
    for row, (target, history) in enumerate(zip(events.targets, events.history, strict=True)):
        hidden = {"none": [], "recent": history[-24:], "all": history}[seen_rule]
        shown = set(range(ITEMS)) - {int(item) for item in hidden}
        others = sum(scores[row, item] >= scores[row, target] for item in shown - {int(target)})
        expected.append(1 + others if int(target) in shown else ITEMS + 1)
    ranks = evaluate.ranks_full(events, scorer(scores), seen_rule)
    assert ranks.tolist() == expected


def test_a_model_without_an_opinion_never_hits() -> None:
    events = held_out([3] * 5, [np.array([0], np.int32)] * 5)
    constant = scorer(np.zeros((5, 200)))
    assert evaluate.metrics(evaluate.ranks_full(events, constant, "none"))["hr_at_50"] == 0
    assert evaluate.metrics(evaluate.ranks_sampled(events, constant, seed=0))["hr_at_50"] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_refused(bad: float) -> None:
    events, scores = random_events(1, 5)
    broken = scores.astype(np.float32)
    broken[7, 7] = bad
    for ranking in (
        lambda: evaluate.ranks_full(events, scorer(broken), "none"),
        lambda: evaluate.ranks_sampled(events, scorer(broken), seed=0),
    ):
        with pytest.raises(ValueError, match="not finite"):
            ranking()


class TestSampledNegatives:
    HISTORY = np.arange(0, 50, dtype=np.int32)
    TARGET = 50

    def events(self, users: int = 20) -> evaluate.HeldOut:
        return held_out([self.TARGET] * users, [self.HISTORY] * users)

    def ranks(self, scores: Any, users: int = 20, seed: int = 0) -> Any:
        return evaluate.ranks_sampled(self.events(users), scorer(np.tile(scores, (users, 1))), seed)

    def test_there_are_a_hundred_and_a_tie_counts_against_the_model(self) -> None:
        assert self.ranks(np.zeros(400)).tolist() == [101] * 20

    def test_they_are_never_of_the_history(self) -> None:
        scores = np.zeros(400)
        scores[self.HISTORY], scores[self.TARGET] = 9, 1
        assert self.ranks(scores).tolist() == [1] * 20

    def test_they_are_distinct(self) -> None:
        scores = np.zeros(151)  # exactly a hundred are left: each is drawn once, so exactly these thirty win
        scores[51:81], scores[self.TARGET] = 9, 1
        assert self.ranks(scores).tolist() == [31] * 20

    def test_they_are_uniform(self) -> None:
        users, winners = 600, [51, 150, 250]
        for winner in winners:
            scores = np.zeros(251)  # two hundred are left, so each is drawn for half of the users
            scores[winner], scores[self.TARGET] = 9, 1
            assert (self.ranks(scores, users) == 2).mean() == pytest.approx(0.5, abs=0.1)

    def test_the_seed_repeats_them(self) -> None:
        scores = np.random.default_rng(0).random(400)
        assert self.ranks(scores, seed=1).tolist() == self.ranks(scores, seed=1).tolist()
        assert self.ranks(scores, seed=1).tolist() != self.ranks(scores, seed=2).tolist()


@given(st.lists(st.integers(1, 80), min_size=1, max_size=30))
def test_metrics_equal_their_definitions(ranks: list[int]) -> None:
    found = evaluate.metrics(np.array(ranks))
    for cutoff in (1, 5, 10, 50):
        hits = [rank for rank in ranks if rank <= cutoff]
        assert found[f"hr_at_{cutoff}"] == pytest.approx(len(hits) / len(ranks))
        assert found[f"ndcg_at_{cutoff}"] == pytest.approx(sum(1 / math.log2(rank + 1) for rank in hits) / len(ranks))
        assert found[f"mrr_at_{cutoff}"] == pytest.approx(sum(1 / rank for rank in hits) / len(ranks))


@settings(max_examples=10)
@given(st.integers(0, 1000))
def test_the_interval_contains_the_mean_and_narrows_with_more_users(seed: int) -> None:
    ranks = np.random.default_rng(seed).integers(1, 31, 200)
    many = np.tile(ranks, 25)
    for metric in ("hr_at_10", "ndcg_at_10", "mrr_at_10"):
        mean = evaluate.metrics(ranks)[metric]
        low, high = evaluate.interval_95(ranks, metric, draws=300)
        low_of_many, high_of_many = evaluate.interval_95(many, metric, draws=300)
        assert low < mean < high
        assert low_of_many < mean < high_of_many
        assert (high - low) / (high_of_many - low_of_many) == pytest.approx(5, rel=0.5)  # the root of 25


def test_the_interval_is_that_of_the_normal_approximation() -> None:
    ranks = np.array([1] * 300 + [99] * 700)
    low, high = evaluate.interval_95(ranks, "hr_at_10")
    half_width = 1.96 * math.sqrt(0.3 * 0.7 / 1000)
    assert (low, high) == (pytest.approx(0.3 - half_width, abs=0.005), pytest.approx(0.3 + half_width, abs=0.005))


def table(directory: Path) -> dict[str, list[str]]:
    """The items of every user, read without the code under test."""
    events = defaultdict(list)
    for number, line in enumerate((directory / "interactions.tsv").read_text().splitlines()[1:]):
        user, item, timestamp = line.split("\t")
        events[user].append((int(timestamp), number, item))
    return {user: [item for *_, item in sorted(rows)] for user, rows in events.items()}


@pytest.mark.parametrize("seen_rule", ["none", "recent", "all"])
def test_the_whole_evaluation_equals_the_parallel_forward_and_a_sort(
    shop: Path, trained: Path, seen_rule: SeenRule
) -> None:
    loaded = artifact.load(trained)
    index = {name: place for place, name in enumerate(loaded.items.ids)}
    expected = []
    for names in table(shop).values():
        if len(names) < 3:
            continue
        items = [index[name] for name in names]
        hidden = {"none": set(), "recent": set(items[:-1][-24:]), "all": set(items[:-1])}[seen_rule]
        with torch.inference_mode():
            query = loaded.model(torch.tensor(items[:-1]))[-1]
            scores = (loaded.model.item_vectors() @ query + loaded.model.bias).tolist()
        better = sum(scores[item] >= scores[items[-1]] for item in index.values() if item not in {*hidden, items[-1]})
        expected.append(len(index) + 1 if items[-1] in hidden else 1 + better)
    report = evaluate.evaluate(loaded, shop, None, seen_rule)
    assert report.ranks.tolist() == expected


def test_a_report_says_all_that_is_needed_to_repeat_it(shop: Path, trained: Path) -> None:
    loaded = artifact.load(trained)
    full = evaluate.evaluate(loaded, shop, None, None).to_json()
    sampled = evaluate.evaluate(loaded, shop, "loo_sampled100", None).to_json()
    json.dumps(full, allow_nan=False)
    assert full["protocol"] == "loo_full"
    assert full["data_sha256"] == loaded.config.data.sha256 == data.read_interactions(shop).sha256
    assert full["seen_rule"] == loaded.config.data.seen_rule
    assert full["tie_rule"] == "against the model"
    assert full["items"] == len(loaded.items)
    assert 0 < full["metrics"]["ndcg_at_10_full"] < full["metrics"]["hr_at_10_full"] < 1
    low, high = full["interval_95"]["hr_at_10_full"]
    assert low < full["metrics"]["hr_at_10_full"] < high
    assert set(sampled["metrics"]) == {name.replace("full", "sampled100") for name in full["metrics"]}


class TestRefusals:
    def carded(self, trained: Path, **card: Any) -> artifact.Artifact:
        loaded = artifact.load(trained)
        config = loaded.config.model_copy(update={"data": loaded.config.data.model_copy(update=card)})
        return artifact.Artifact(
            loaded.name, loaded.tag, config, loaded.items, loaded.model, loaded.tables, loaded.metrics
        )

    def test_another_table(self, shop: Path, trained: Path, tmp_path: Path) -> None:
        shutil.copytree(shop, tmp_path / "other")
        with (tmp_path / "other" / "interactions.tsv").open("a") as file:
            file.write("u1\ti1\t99999999\n")
        with pytest.raises(data.DataError, match="evaluate on the data the model was trained on"):
            evaluate.evaluate(artifact.load(trained), tmp_path / "other", None, None)

    def test_a_model_that_trained_on_the_test_events(self, shop: Path, trained: Path) -> None:
        with pytest.raises(data.DataError, match="trained on all events"):
            evaluate.evaluate(self.carded(trained, train_on="all"), shop, None, None)

    def test_a_model_that_trained_on_another_split(self, shop: Path, trained: Path) -> None:
        # its training events include some of what the other split holds out
        with pytest.raises(data.DataError, match="trained for the split 'loo'"):
            evaluate.evaluate(artifact.load(trained), shop, "temporal", None)
        for protocol in ("loo_full", "loo_sampled100"):
            with pytest.raises(data.DataError, match="trained for the split 'temporal'"):
                evaluate.evaluate(self.carded(trained, split="temporal"), shop, protocol, None)

    def test_a_table_that_leaves_nothing_to_test(
        self,
        tmp_path: Path,
        write_rows: Callable[..., Path],
        tiny_config: Callable[..., Any],
        silent: Callable[[], train.Progress],
    ) -> None:
        directory = write_rows(tmp_path / "data", [("u", "a", 1), ("u", "b", 2), ("v", "a", 7), ("v", "b", 9)])
        made = train.train(directory, tmp_path / "out", tiny_config(), progress=silent())
        with pytest.raises(data.DataError, match="leaves no event to test"):
            evaluate.evaluate(made, directory, None, None)


def test_a_temporal_model_is_tested_on_the_later_events(
    shop: Path, tmp_path: Path, tiny_config: Callable[..., Any], silent: Callable[[], train.Progress]
) -> None:
    config = tiny_config(epochs=1).model_copy(update={"data": DataCard(split="temporal")})
    made = train.train(shop, tmp_path / "out", config, progress=silent())
    report = evaluate.evaluate(made, shop, None, None)
    interactions = data.read_interactions(shop)
    assert report.to_json()["protocol"] == "temporal"
    assert report.users.tolist() == interactions.user[data.split(interactions, "temporal").test].tolist()

"""Evaluation protocols end to end: a trained model beside baselines on its data."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from model.artifact import model_directory
from model.config import DataCard, SeenRule
from model.data.interactions import DataError, Histories
from model.data.readers import read_interactions
from model.data.splits import split
from model.evaluation import baselines, evaluate
from model.evaluation.comparison import Variant
from model.evaluation.neural_baselines import Gru4Rec
from model.evaluation.report import Report
from model.metrics import metrics
from model.training import train
from model.training.loop import Progress
from tests.model.data.histories import packed


def table(directory: Path) -> dict[str, list[str]]:
    """Items of every user, read independently of the code under test."""
    events = defaultdict(list)
    for number, line in enumerate((directory / "interactions.tsv").read_text().splitlines()[1:]):
        user, item, timestamp = line.split("\t")
        events[user].append((int(timestamp), number, item))
    return {user: [item for *_, item in sorted(rows)] for user, rows in events.items()}


@pytest.mark.parametrize("seen_rule", ["none", "recent", "all"])
def test_the_whole_evaluation_equals_the_parallel_forward_and_a_sort(
    shop: Path, trained: Path, seen_rule: SeenRule
) -> None:
    loaded = model_directory.load(trained)
    index = {name: place for place, name in enumerate(loaded.items.ids)}
    expected = []
    for names in table(shop).values():
        if len(names) < 3:
            continue
        items = [index[name] for name in names]
        recent = [*dict.fromkeys(items[-2::-1])][:24]
        hidden = {"none": set(), "recent": set(recent), "all": set(items[:-1])}[seen_rule]
        with torch.inference_mode():
            query = loaded.model(torch.tensor(items[:-1]))[-1]
            scores = (loaded.model.item_vectors() @ query + loaded.model.bias).tolist()
        for steps_ago, item in enumerate(items[-2:-7:-1]):
            for follower, lift in zip(loaded.model.followers[item], loaded.model.lift[item].tolist(), strict=True):
                scores[follower] += math.exp(-0.7 * steps_ago) * lift
        better = sum(scores[item] >= scores[items[-1]] for item in index.values() if item not in {*hidden, items[-1]})
        expected.append(max(len(index), 50) + 1 if items[-1] in hidden else 1 + better)
    report = evaluate.evaluate([loaded], shop, None, seen_rule)
    assert report.ranks.tolist() == expected


def test_a_report_contains_everything_to_reproduce_it(shop: Path, trained: Path) -> None:
    loaded = model_directory.load(trained)
    full = evaluate.evaluate([loaded], shop, None, None).to_json()
    sampled = evaluate.evaluate([loaded], shop, "loo_sampled100", None).to_json()
    json.dumps(full, allow_nan=False)
    assert full["protocol"] == "loo_full"
    assert full["data_sha256"] == loaded.config.data.sha256 == read_interactions(shop).sha256
    assert full["seen_rule"] == loaded.config.data.seen_rule
    assert full["tie_rule"] == "against the model"
    assert full["items"] == len(loaded.items)
    assert 0 < full["metrics"]["ndcg_at_10_full"] < full["metrics"]["hr_at_10_full"] < 1
    low, high = full["interval_95"]["hr_at_10_full"]
    assert low < full["metrics"]["hr_at_10_full"] < high
    assert set(sampled["metrics"]) == {name.replace("full", "sampled100") for name in full["metrics"]}


class TestRefusals:
    def carded(self, trained: Path, **card: Any) -> model_directory.Artifact:
        loaded = model_directory.load(trained)
        config = loaded.config.model_copy(update={"data": loaded.config.data.model_copy(update=card)})
        return model_directory.Artifact(
            loaded.name, loaded.tag, config, loaded.items, loaded.model, loaded.tables, loaded.metrics
        )

    def test_another_table(self, shop: Path, trained: Path, tmp_path: Path) -> None:
        shutil.copytree(shop, tmp_path / "other")
        with (tmp_path / "other" / "interactions.tsv").open("a") as file:
            file.write("u1\ti1\t99999999\n")
        with pytest.raises(DataError, match="evaluate on the data that the model was trained on"):
            evaluate.evaluate([model_directory.load(trained)], tmp_path / "other", None, None)

    def test_a_model_that_trained_on_the_test_events(self, shop: Path, trained: Path) -> None:
        with pytest.raises(DataError, match="trained on all events"):
            evaluate.evaluate([self.carded(trained, train_on="all")], shop, None, None)

    def test_a_model_that_trained_on_another_split(self, shop: Path, trained: Path) -> None:
        # its training events include some of what the other split holds out
        with pytest.raises(DataError, match="trained for the split 'loo'"):
            evaluate.evaluate([model_directory.load(trained)], shop, "temporal", None)
        for protocol in ("loo_full", "loo_sampled100"):
            with pytest.raises(DataError, match="trained for the split 'temporal'"):
                evaluate.evaluate([self.carded(trained, split="temporal")], shop, protocol, None)

    def test_a_table_without_test_events(
        self,
        tmp_path: Path,
        write_rows: Callable[..., Path],
        tiny_config: Callable[..., Any],
        silent: Callable[[], Progress],
    ) -> None:
        directory = write_rows(tmp_path / "data", [("u", "a", 1), ("u", "b", 2), ("v", "a", 7), ("v", "b", 9)])
        made = train.train(directory, tmp_path / "out", tiny_config(), progress=silent())
        with pytest.raises(DataError, match="leaves no test event"):
            evaluate.evaluate([made], directory, None, None)


def test_a_temporal_model_is_tested_on_the_later_events(
    shop: Path, tmp_path: Path, tiny_config: Callable[..., Any], silent: Callable[[], Progress]
) -> None:
    config = tiny_config(epochs=1).model_copy(update={"data": DataCard(split="temporal")})
    made = train.train(shop, tmp_path / "out", config, progress=silent())
    report = evaluate.evaluate([made], shop, None, None)
    interactions = read_interactions(shop)
    assert report.to_json()["protocol"] == "temporal"
    assert report.users.tolist() == interactions.user[split(interactions, "temporal").test].tolist()


GRIDS: dict[str, list[baselines.Baseline]] = {
    "popularity": [baselines.Popularity()],
    "ease": [baselines.Ease(0.1, 0.0), baselines.Ease(0.1, 5.0), baselines.Ease(1e9, 0.0)],
}


@pytest.fixture(scope="module")
def report(shop: Path, trained: Path) -> Report:
    """The tiny model beside the baselines of GRIDS."""
    return evaluate.evaluate([model_directory.load(trained)], shop, None, None, GRIDS)


class TestBaselines:
    def test_are_tuned_on_validation_without_training_on_it(self, report: Report, shop: Path) -> None:
        interactions = read_interactions(shop)
        users = [interactions.item[begin:end] for begin, end in pairwise(interactions.starts)]
        histories = [items[:-2] if len(items) >= 3 else items for items in users]
        found = {}
        for baseline in GRIDS["ease"]:
            scorer = baseline.fit(packed(histories), len(interactions.item_ids))
            held_out = [(items[:-2], items[-2]) for items in users if len(items) >= 3]
            ranks = []
            for scores, (_, target) in zip(scorer(packed([past for past, _ in held_out])), held_out, strict=True):
                ranks.append((scores >= scores[target]).sum())
            found[baseline] = metrics(np.array(ranks))["ndcg_at_10"]
        assert report.trial.seen_rule == "none"
        assert len(set(found.values())) == 3
        assert report.baselines[1].settings == asdict(max(found, key=found.__getitem__))

    def test_are_tested_by_the_protocol_of_the_model(self, report: Report) -> None:
        popularity, trial = report.baselines[0], report.trial
        scores = trial.counts.astype(np.float32)
        assert popularity.ranks.tolist() == [(scores >= scores[target]).sum() for target in trial.events.targets]
        assert popularity.recommended is not None
        assert (popularity.recommended == np.argsort(-scores, kind="stable")).all()

    def test_are_reported_with_paired_differences(self, report: Report) -> None:
        numbers = report.to_json()
        json.dumps(numbers, allow_nan=False)
        assert list(numbers["baselines"]) == ["popularity", "ease"]
        for found, result in zip(numbers["baselines"].values(), report.baselines, strict=True):
            margin = found["model_minus_baseline"]["ndcg_at_10_full"]
            expected = metrics(report.ranks)["ndcg_at_10"] - metrics(result.ranks)["ndcg_at_10"]
            assert margin["difference"] == pytest.approx(expected)
            assert margin["interval_95"][0] <= margin["difference"] <= margin["interval_95"][1]

    def test_differ_from_the_model_as_in_the_verdict(self, report: Report) -> None:
        rng = np.random.default_rng(0)
        model, baseline = (
            replace(result, ranks=rng.integers(1, 12, len(result.ranks)))
            for result in (report.models[0], report.baselines[0])
        )
        drawn = replace(report, first=Variant("shop", [model]), baselines=[baseline])
        found = drawn.to_json()["baselines"]["popularity"]["model_minus_baseline"]["ndcg_at_10_full"]
        rival = drawn.leaderboard.rival
        assert rival is not None
        assert rival.best_minus is not None
        assert found == rival.best_minus["ndcg_at_10"]._asdict()

    def test_that_exceed_memory_are_omitted_with_the_reason(
        self, shop: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(baselines, "EASE_MAX_ITEMS", 3)
        numbers = evaluate.evaluate([model_directory.load(trained)], shop, None, None, GRIDS).to_json()
        assert list(numbers["baselines"]) == ["popularity"]
        assert "40 items" in numbers["skipped_baselines"]["ease"]

    def test_train_on_the_validation_events_when_the_model_does(
        self, shop: Path, tmp_path: Path, tiny_config: Callable[..., Any], silent: Callable[[], Progress]
    ) -> None:
        config = tiny_config(epochs=1).model_copy(update={"data": DataCard(train_on="validation")})
        made = train.train(shop, tmp_path / "out", config, progress=silent())
        report = evaluate.evaluate([made], shop, None, "none", {"popularity": GRIDS["popularity"]})
        interactions = read_interactions(shop)
        counts = np.bincount(np.delete(interactions.item, split(interactions, "loo").test))
        assert report.baselines[0].ranks.tolist() == [
            (counts >= counts[target]).sum() for target in report.trial.events.targets
        ]


def test_seeds_have_a_mean_and_a_spread(shop: Path, trained: Path) -> None:
    first = model_directory.load(trained)
    training = first.config.training.model_copy(update={"seed": 1})
    other = replace(first, tag="f" * 16, config=first.config.model_copy(update={"training": training}))
    with torch.no_grad():
        worse = copy.deepcopy(first.model)
        worse.bias.add_(torch.randn(len(worse.bias), generator=torch.Generator().manual_seed(0)))
    report = evaluate.evaluate([first, replace(other, model=worse)], shop, None, None)
    numbers = report.to_json()
    values = [model["metrics"]["hr_at_10_full"] for model in numbers["models"]]
    assert numbers["metrics"]["hr_at_10_full"] == values[0] != values[1]
    assert numbers["spread"]["hr_at_10_full"]["mean"] == pytest.approx(sum(values) / 2)
    assert numbers["spread"]["hr_at_10_full"]["standard_deviation"] == pytest.approx(
        abs(values[0] - values[1]) / 2**0.5
    )
    assert [model["generation"] for model in numbers["models"]] == [first.tag, "f" * 16]
    assert [model["seed"] for model in numbers["models"]] == [0, 1]
    assert "other_models" not in numbers


def test_the_same_model_twice_is_refused(shop: Path, trained: Path) -> None:
    with pytest.raises(DataError, match="given twice"):
        evaluate.evaluate([model_directory.load(trained), model_directory.load(trained)], shop, None, None)


def test_sampled_protocols_refuse_other_seen_rules(shop: Path, trained: Path) -> None:
    with pytest.raises(DataError, match="never in the history"):
        evaluate.evaluate([model_directory.load(trained)], shop, "loo_sampled100", "none")


def test_every_rank_is_written_with_the_protocol(shop: Path, trained: Path, tmp_path: Path) -> None:
    report = evaluate.evaluate([model_directory.load(trained)], shop, None, "all", {"popularity": GRIDS["popularity"]})
    report.write_ranks(tmp_path / "ranks.parquet")
    frame = pl.read_parquet(tmp_path / "ranks.parquet")
    events = table(shop)
    counts = Counter(item for items in events.values() for item in (items[:-2] if len(items) >= 3 else items))
    of_model = frame.filter(pl.col("scorer") == "lisa-mini")
    assert of_model["rank"].to_list() == report.ranks.tolist()
    assert frame.filter(pl.col("scorer") == "popularity")["rank"].to_list() == report.baselines[0].ranks.tolist()
    assert len(frame) == 2 * len(report.ranks)
    for row in frame.iter_rows(named=True):
        *past, last = events[row["user_id"]]
        assert (row["item_id"], row["history_length"]) == (last, len(past))
        assert row["item_training_events"] == counts[last]
    about = pl.read_parquet_metadata(tmp_path / "ranks.parquet")
    assert (about["protocol"], about["seen_rule"]) == ("loo_full", "all")
    assert about["data_sha256"] == read_interactions(shop).sha256


def test_cold_items_are_counted(
    tmp_path: Path,
    write_rows: Callable[..., Path],
    tiny_config: Callable[..., Any],
    silent: Callable[[], Progress],
) -> None:
    rows = [(f"u{user}", item, time) for user in range(4) for time, item in enumerate("abcd")]
    rows += [("w", item, time) for time, item in enumerate(("a", "new-too", "new"))]
    directory = write_rows(tmp_path / "data", rows)
    made = train.train(directory, tmp_path / "out", tiny_config(epochs=1), progress=silent())
    numbers = evaluate.evaluate([made], directory).to_json()
    # c is only ever validation, d and new only ever test
    assert (numbers["items"], numbers["cold_items"], numbers["cold_targets"]) == (6, 4, 5)
    cold = numbers["by_item_frequency"][0]
    assert (cold["first"], cold["last"], cold["users"]) == (0, 0, 5)
    assert [(bucket["first"], bucket["users"]) for bucket in numbers["by_history_length"]] == [(1, 5)]


def test_a_neural_baseline_is_fitted_once_and_reports_progress(trained: Path, shop: Path) -> None:
    messages: list[str] = []
    grids = {"gru4rec": [Gru4Rec(width=8, epochs=2)]}
    report = evaluate.evaluate([model_directory.load(trained)], shop, None, None, grids, messages.append)
    assert [line.split(",")[0] for line in messages[-2:]] == ["Gru4Rec: epoch 1 of 2", "Gru4Rec: epoch 2 of 2"]
    assert report.baselines[0].settings["width"] == 8
    assert len(report.baselines[0].ranks) == len(report.ranks)


@pytest.mark.parametrize("train_on", ["train", "validation"])
def test_a_neural_baseline_selects_its_epoch_on_held_out_events(trained: Path, shop: Path, train_on: str) -> None:
    messages: list[str] = []
    model = model_directory.load(trained)
    card = model.config.data.model_copy(update={"train_on": train_on})
    model = replace(model, config=model.config.model_copy(update={"data": card}))
    evaluate.evaluate([model], shop, None, None, {"gru4rec": [Gru4Rec(width=8, epochs=1)]}, messages.append)
    is_measured = "validation NDCG@10" in messages[-1]
    assert is_measured == (train_on == "train")


def test_a_tuned_baseline_learns_from_the_same_users_as_the_model(
    shop: Path, tmp_path: Path, tiny_config: Callable[..., Any], silent: Callable[[], Progress]
) -> None:
    learned: list[int] = []

    class Counting(baselines.Popularity):
        def fit(self, histories: Histories, items: int) -> Any:
            learned.append(histories.positions)
            return super().fit(histories, items)

    config = tiny_config(epochs=1).model_copy(update={"data": DataCard(users_sample=0.5)})
    model = train.train(shop, tmp_path / "model", config, progress=silent())
    evaluate.evaluate([model], shop, None, None, {"one": [Counting()], "tuned": [Counting(), Counting()]})
    assert len(learned) == 3
    assert len(set(learned)) == 1

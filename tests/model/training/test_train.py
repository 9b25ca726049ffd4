"""Training: every position once, only training events, early stopping on validation, and learning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from model import holdout_ranks, metrics
from model.artifact import model_directory
from model.config import Config, DataCard, TrainConfig
from model.data.interactions import Interactions
from model.data.readers import read_interactions
from model.data.splits import Split, split
from model.evaluation import evaluate
from model.evaluation.trial import model_scorer
from model.lisa.item_followers import DEFAULT_LIFT_STRENGTH, LIFT_STRENGTHS, Lift
from model.lisa.lisa_mini import LisaMini
from model.training import train
from model.training.lift_choice import LiftedRanks
from model.training.loop import EpochReport, Progress, Validation
from model.training.trainer import Trainer, prepare

Make = Callable[..., Any]


def trainer_on(interactions: Interactions, parts: Split, config: Config, directory: Path) -> Trainer:
    return Trainer(prepare(interactions, parts, config), config, directory, "cpu")


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return dict(model_directory.load(directory).model.state_dict())


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def popularity_hit_rate(directory: Path) -> float:
    """HR@10 of popularity on the events that loo holds out."""
    interactions = read_interactions(directory)
    parts = split(interactions, "loo")
    counts = Counter(interactions.item[parts.train].tolist())
    best = [item for item, _ in counts.most_common(10)]
    return float(np.isin(interactions.item[parts.test], best).mean())


@pytest.mark.parametrize("full_softmax_items", [1_000_000, 1], ids=["full softmax", "sampled softmax"])
def test_training_learns_the_next_item(
    shop: Path, tmp_path: Path, tiny_config: Make, silent: Make, full_softmax_items: int
) -> None:
    config = tiny_config(epochs=8, full_softmax_items=full_softmax_items, sampled_negatives=20)
    made = train.train(shop, tmp_path / "model", config, progress=silent())
    losses = [report["loss"] for report in made.metrics["epochs"]]
    assert losses[-1] < 0.8 * losses[0]
    report = evaluate.evaluate([made], shop, None, "none").to_json()["metrics"]
    # four of five steps are the next item of forty: the first place alone beats ten popular items
    assert report["hr_at_1_full"] > 0.6
    assert report["hr_at_10_full"] > popularity_hit_rate(shop) + 0.3


@pytest.mark.parametrize("full_softmax_items", [1_000_000, 1])
def test_a_batch_scores_only_the_items_it_needs(
    monkeypatch: pytest.MonkeyPatch, shop: Path, tmp_path: Path, tiny_config: Make, full_softmax_items: int
) -> None:
    interactions = read_interactions(shop)
    config = tiny_config(full_softmax_items=full_softmax_items, sampled_negatives=7)
    trainer = trainer_on(interactions, split(interactions, "loo"), config, tmp_path)
    looked_up: list[int] = []
    whole = LisaMini.item_vectors

    def item_vectors(model: LisaMini, items: torch.Tensor | None = None) -> torch.Tensor:
        vectors = whole(model, items)
        looked_up.append(len(vectors))
        return vectors

    monkeypatch.setattr(LisaMini, "item_vectors", item_vectors)
    batch = next(trainer.batch_maker.batches(seed=0))
    trainer.train_batch(batch)
    assert sum(looked_up) == (len(interactions.item_ids) if full_softmax_items > 1 else len(batch.targets) + 7)


@pytest.mark.parametrize("liked", LIFT_STRENGTHS)
def test_the_lift_strength_is_chosen_on_validation(
    monkeypatch: pytest.MonkeyPatch, shop: Path, tmp_path: Path, tiny_config: Make, silent: Make, liked: float
) -> None:
    interactions = read_interactions(shop)
    trainer = trainer_on(interactions, split(interactions, "loo"), tiny_config(epochs=1), tmp_path)
    unit = trainer.model.lift / DEFAULT_LIFT_STRENGTH
    assert unit.any()

    def ranks(ranked: LiftedRanks, lift: Lift) -> np.ndarray[Any, Any]:
        return np.array([1 if lift.strength == liked else 2])

    monkeypatch.setattr(LiftedRanks, "ranks", ranks)
    trainer.fit(silent(), resume=False)
    torch.testing.assert_close(trainer.model.lift, liked * unit)
    assert [report.lift and report.lift["strength"] for report in trainer.reports] == [liked]


@pytest.mark.parametrize("given", [0.0, 4.5])
def test_a_given_lift_strength_is_kept(
    shop: Path, tmp_path: Path, tiny_config: Make, silent: Make, given: float
) -> None:
    interactions = read_interactions(shop)
    parts = split(interactions, "loo")
    unit = trainer_on(interactions, parts, tiny_config(epochs=1), tmp_path).model.lift / DEFAULT_LIFT_STRENGTH
    trainer = trainer_on(interactions, parts, tiny_config(epochs=1, lift_strength=given), tmp_path)
    trainer.fit(silent(), resume=False)
    torch.testing.assert_close(trainer.model.lift, given * unit)
    assert trainer.chosen is not None
    assert list(trainer.chosen.ndcg_at_10_by_strength) == [given]


def test_the_default_lift_is_used_without_validation(
    shop: Path, tmp_path: Path, tiny_config: Make, silent: Make
) -> None:
    interactions = read_interactions(shop)
    parts = replace(split(interactions, "loo"), validation=np.empty(0, np.int64))
    trainer = trainer_on(interactions, parts, tiny_config(epochs=1), tmp_path)
    usual = trainer.model.lift.clone()
    trainer.fit(silent(), resume=False)
    assert trainer.chosen is None
    assert usual.any()
    torch.testing.assert_close(trainer.model.lift, usual)


def ends_with(model: LisaMini, weights: dict[str, torch.Tensor]) -> bool:
    """Whether a model equals the given weights after training."""
    expected = deepcopy(model)
    expected.load_state_dict(weights)
    expected.fold_norms_and_round()
    return same_weights(model.state_dict(), expected.state_dict())


def test_every_stage_is_reported(shop: Path, tmp_path: Path, tiny_config: Make, silent: Make) -> None:
    progress = silent()
    made = train.train(shop, tmp_path / "model", tiny_config(), progress=progress)
    first_words = [" ".join(stage.split()[:2]) for stage in progress.stages]
    assert list(dict.fromkeys(first_words)) == [
        "reading data",
        "counting training",
        "counting neighbours",
        "computing item",
        "computing the",
        "counting followers",
        "validating epoch",
        "choosing the",
        "writing the",
    ]
    assert f"computing the codes of {len(made.items)} items" in progress.stages
    assert {"validating epoch 1, 0%", "validating epoch 2, 0%"} <= {*progress.stages}
    assert "choosing the lift, 0%" in progress.stages


def weights_by_epoch(trainer: Trainer) -> list[dict[str, torch.Tensor]]:
    """Train to the end; return the weights after every epoch."""
    weights = []

    class Watching(Progress):
        def epoch(self, report: EpochReport) -> None:
            weights.append({name: tensor.clone() for name, tensor in trainer.model.state_dict().items()})

    trainer.fit(Watching(), resume=False)
    return weights


class TestEarlyStopping:
    def train_on_script(
        self, monkeypatch: pytest.MonkeyPatch, shop: Path, directory: Path, config: Config, script: list[float]
    ) -> tuple[Trainer, list[dict[str, torch.Tensor]]]:
        """Train with scripted validation; return the result and the weights after every epoch."""
        interactions = read_interactions(shop)
        training = config.training.model_copy(update={"lift_strength": DEFAULT_LIFT_STRENGTH})  # none is chosen
        config = config.model_copy(update={"training": training})
        trainer = trainer_on(interactions, split(interactions, "loo"), config, directory)
        results = chain(script, repeat(0.0))
        monkeypatch.setattr(trainer, "validate", lambda *_: Validation(next(results), 0.0))
        return trainer, weights_by_epoch(trainer)

    def test_stops_after_patience_and_keeps_the_best_epoch(
        self, monkeypatch: pytest.MonkeyPatch, shop: Path, tmp_path: Path, tiny_config: Make
    ) -> None:
        script = [0.1, 0.5, 0.3, 0.4, 0.9, 0.9]
        trainer, weights = self.train_on_script(monkeypatch, shop, tmp_path, tiny_config(epochs=6, patience=2), script)
        assert [report.ndcg_at_10 for report in trainer.reports] == script[:4]
        assert ends_with(trainer.model, weights[1])
        assert not trainer.model.training

    def test_resets_patience_after_a_better_epoch(
        self, monkeypatch: pytest.MonkeyPatch, shop: Path, tmp_path: Path, tiny_config: Make
    ) -> None:
        script = [0.1, 0.5, 0.3, 0.6, 0.2]
        trainer, weights = self.train_on_script(monkeypatch, shop, tmp_path, tiny_config(epochs=5, patience=2), script)
        assert len(trainer.reports) == 5
        assert ends_with(trainer.model, weights[3])

    def test_saves_the_model_of_the_best_validation_ndcg(
        self, shop: Path, tmp_path: Path, tiny_config: Make, silent: Make
    ) -> None:
        config = tiny_config(epochs=6, learning_rate=0.1, patience=2)
        made = train.train(shop, tmp_path / "model", config, progress=silent())
        interactions = read_interactions(shop).with_items_first(list(made.items.ids))
        positions = split(interactions, "loo").validation
        events = holdout_ranks.held_out_events(interactions, positions, made.config)
        scorer = model_scorer(made)
        found = metrics.metrics(holdout_ranks.ranks_full(events, scorer, made.config.data.seen_rule))
        reported = [report["ndcg_at_10"] for report in made.metrics["epochs"]]
        by_strength = made.metrics["ndcg_at_10_by_lift_strength"]
        assert max(by_strength.values()) == max(reported)
        assert by_strength[str(made.metrics["lift"]["strength"])] == max(reported)
        assert found["ndcg_at_10"] == pytest.approx(max(reported), abs=1e-6)

    def test_evaluates_the_model_that_would_be_served(
        self, shop: Path, tmp_path: Path, tiny_config: Make, in_memory: Make
    ) -> None:
        """As ranked by an engine, for each strength of the lift."""
        interactions = read_interactions(shop)
        parts, config = split(interactions, "loo"), tiny_config(epochs=3)
        trainer = trainer_on(interactions, parts, config, tmp_path)
        fresh, unit = deepcopy(trainer.model), trainer.model.lift / DEFAULT_LIFT_STRENGTH
        events = holdout_ranks.held_out_events(interactions, parts.validation, config)
        for weights, report in zip(weights_by_epoch(trainer), trainer.reports, strict=True):
            served = deepcopy(fresh)
            served.load_state_dict(weights)
            served.fold_norms_and_round()
            found = []
            for strength in LIFT_STRENGTHS:
                served.lift.copy_(strength * unit)
                ranks = holdout_ranks.ranks_full(events, model_scorer(in_memory(served.eval())), "all")
                found.append((metrics.metrics(ranks)["ndcg_at_10"], metrics.metrics(ranks)["hr_at_10"], strength))
            assert report.lift is not None
            judged = next(each for each in found if each[2] == report.lift["strength"])
            assert (report.ndcg_at_10, report.hr_at_10) == pytest.approx(judged[:2], abs=1e-6)
            assert report.ndcg_at_10 == pytest.approx(max(each[0] for each in found), abs=1e-6)

    def test_ends_early_on_a_memorised_table(
        self, tmp_path: Path, write_rows: Make, tiny_config: Make, silent: Make
    ) -> None:
        """Random events teach nothing except popularity."""
        rng, popular = np.random.default_rng(0), 1 / np.arange(1, 81)
        draws = rng.choice(80, (60, 15), p=popular / popular.sum())
        rows = [(f"u{user}", f"i{item}", place) for user, items in enumerate(draws) for place, item in enumerate(items)]
        config = tiny_config(epochs=60, learning_rate=0.03, patience=2)
        made = train.train(write_rows(tmp_path / "data", rows), tmp_path / "model", config, progress=silent())
        quality = [epoch["ndcg_at_10"] for epoch in made.metrics["epochs"]]
        best = max(range(len(quality)), key=lambda epoch: (quality[epoch], epoch))
        assert len(quality) == best + 3 < 60
        assert made.metrics["lift"] == made.metrics["epochs"][best]["lift"]
        interactions = read_interactions(tmp_path / "data").with_items_first(list(made.items.ids))
        events = holdout_ranks.held_out_events(interactions, split(interactions, "loo").validation, made.config)
        ranks = holdout_ranks.ranks_full(events, model_scorer(made), made.config.data.seen_rule)
        assert metrics.metrics(ranks)["ndcg_at_10"] == pytest.approx(quality[best], abs=1e-6)


def changed_rows(rows: list[Any], held_out: int) -> list[Any]:
    """Rows of a shop in which the last ``held_out`` items of all customers but the first are exchanged."""
    by_user: dict[str, list[Any]] = {}
    for row in rows:
        by_user.setdefault(row[0], []).append(row)
    for user, events in by_user.items():
        for place in range(len(events) - held_out, len(events)):
            _, item, timestamp = events[place]
            if user != "u0":
                events[place] = (user, f"i{(int(item[1:]) + 7) % 40}", timestamp)
    changed = [row for events in by_user.values() for row in events]
    assert (changed != rows) == (held_out > 0)
    return changed


class TestNoLeakage:
    """Held-out events never affect weights; the first customer fixes the item order."""

    @pytest.fixture
    def weights(self, rows: list[Any], tmp_path: Path, write_rows: Make, tiny_config: Make, silent: Make) -> Make:
        """Returns weights after one epoch with the last items of all customers but the first exchanged."""

        def train_on_changed(held_out: int, train_on: str) -> dict[str, torch.Tensor]:
            directory, changed = tmp_path / str(held_out), changed_rows(rows, held_out)
            config = tiny_config(epochs=1).model_copy(update={"data": DataCard(train_on=train_on)})
            data = write_rows(directory / "data", changed)
            train.train(data, directory / "model", config, progress=silent())
            weights = weights_of(directory / "model")
            if weights["lift"].any():  # validation chooses the strength, as it chooses the epoch
                weights["lift"] /= weights["lift"].max()
            return weights

        return train_on_changed

    @pytest.mark.parametrize(
        ("train_on", "held_out", "leaves_a_trace"),
        [("train", 1, False), ("validation", 1, False), ("train", 3, True), ("validation", 2, True), ("all", 1, True)],
    )
    def test_only_training_events_change_the_weights(
        self, weights: Make, train_on: str, held_out: int, leaves_a_trace: bool
    ) -> None:
        made = [weights(changed, train_on) for changed in (0, held_out)]
        assert same_weights(*made) == (not leaves_a_trace)

    def test_validation_events_change_only_the_lift_strength(self, weights: Make) -> None:
        made = [weights(changed, "train") for changed in (0, 2)]
        for without_lift in made:
            del without_lift["lift"]
        assert same_weights(*made)

    def test_popularity_counts_training_events_only(self, shop: Path, trained: Path) -> None:
        interactions = read_interactions(shop)
        loaded = model_directory.load(trained)
        items = interactions.item[split(interactions, "loo").train].tolist()
        expected = Counter(interactions.item_ids[item] for item in items)
        assert set(loaded.items.ids) == set(interactions.item_ids)
        assert loaded.items.counts.tolist() == [expected[item_id] for item_id in loaded.items.ids]


def test_the_model_records_its_training_data(shop: Path, trained: Path) -> None:
    interactions, loaded = read_interactions(shop), model_directory.load(trained)
    assert loaded.config.data == DataCard(
        sha256=interactions.sha256,
        seen_rule="none",  # a shop: people buy again
        users=len(interactions.user_ids),
        events=len(interactions),
        events_per_item=len(interactions) / 40,
    )
    rows = loaded.items.rows.places_of(["i0", "i1", "i13"])
    assert loaded.items.titles.at(rows) == ["Item 0", "Item 1", "Item 13"]
    assert loaded.items.categories[rows[2]] == ("shelf-1", "all")


def test_seen_items_are_excluded_without_repeat_consumption(
    tmp_path: Path, write_rows: Make, tiny_config: Make, silent: Make
) -> None:
    rng = np.random.default_rng(0)
    rows = [(f"u{user}", f"i{item}", place) for user in range(20) for place, item in enumerate(rng.permutation(12))]
    made = train.train(write_rows(tmp_path / "data", rows), tmp_path / "out", tiny_config(epochs=1), progress=silent())
    assert made.config.data.seen_rule == "all"
    assert list(made.items.titles) == [""] * 12


def test_events_of_weight_zero_do_not_affect_training(
    tmp_path: Path, rows: list[Any], write_rows: Make, tiny_config: Make, silent: Make
) -> None:
    columns = "user_id item_id timestamp type"
    typed = [(*row, "click") for row in rows]
    disliked = [(user, item, time_s + 1, "dislike") for user, item, time_s in rows[100:400]]
    for name, table in (("plain", typed), ("with dislikes", typed + disliked)):
        directory = write_rows(tmp_path / name / "data", table, columns)
        train.train(directory, tmp_path / name / "model", tiny_config(epochs=1), progress=silent())
    assert same_weights(*(weights_of(tmp_path / name / "model") for name in ("plain", "with dislikes")))


def test_retired_settings_are_ignored_and_unknown_ones_refused() -> None:
    earlier = {"seed": 3, "lift_choice": "table", "regularisation": "by-density"}
    assert TrainConfig.model_validate(earlier) == TrainConfig(seed=3)
    with pytest.raises(ValidationError, match="unheard_of"):
        TrainConfig.model_validate({"unheard_of": 1})

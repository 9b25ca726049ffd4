"""Comparison of models on the same held-out events, against explicit means and hand-made ranks."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from model.config import EVENT_WEIGHTS, Config, DataCard
from model.data.interactions import DataError
from model.evaluation.baselines import GRIDS
from model.evaluation.comparison import Comparison, Variant
from model.evaluation.evaluate import by_variant, evaluate
from model.evaluation.leaderboard import Leaderboard
from model.evaluation.trial import Result
from model.training import train

Make = Callable[..., Any]


def variant(name: str, *ranks: list[int]) -> Variant:
    return Variant(name, [Result(name, {}, np.array(one, np.int64), None) for one in ranks])


def verdict(first: list[int], other: list[int]) -> str:
    return Comparison.of(variant("one", first), variant("other", other)).verdict


class TestVerdict:
    def test_names_the_better_model_and_the_difference(self) -> None:
        assert verdict([1] * 50, [11] * 50) == (
            "one is better than other in HR@10 (+1.0000, 95% +1.0000 to +1.0000) and "
            "NDCG@10 (+1.0000, 95% +1.0000 to +1.0000)."
        )
        assert verdict([11] * 50, [1] * 50).startswith("one is worse than other in HR@10 (-1.0000")

    def test_says_if_a_difference_may_be_chance(self) -> None:
        found = verdict([1] * 50, [2] * 50)
        assert found.startswith("one is better than other in NDCG@10 (+0.3691")
        assert found.endswith("; in HR@10 (+0.0000, 95% +0.0000 to +0.0000) the difference may be chance.")
        alike = verdict([1, 11] * 25, [11, 1] * 25)
        assert alike.startswith("one and other do not differ significantly: in HR@10 (+0.0000")
        assert " and NDCG@10 (" in alike

    def test_may_be_better_in_one_way_and_worse_in_another(self) -> None:
        # more are found, but those that both find stand lower
        found = verdict([10] * 100, [1] * 80 + [11] * 20)
        assert found.startswith("one is better than other in HR@10 (+0.2000")
        assert " and worse in NDCG@10 (-" in found

    def test_reports_different_training_events(self) -> None:
        one, other = variant("one", [1] * 50), variant("other", [11] * 50)
        more = Variant("other", [replace(other.results[0], event_options="--train-on validation --users-sample 0.5")])
        less = Variant("one", [replace(one.results[0], event_options="--train-on train")])
        caveat = (
            " They learned from different events: one with --train-on train, "
            "other with --train-on validation --users-sample 0.5."
        )
        assert Comparison.of(less, more).verdict == Comparison.of(one, other).verdict + caveat
        assert Leaderboard.of([less, more], []).verdict == Leaderboard.of([one, other], []).verdict + caveat

    @pytest.mark.parametrize(("users", "is_little"), [(29, True), (30, False)])
    def test_warns_of_few_users(self, users: int, is_little: bool) -> None:
        board = Leaderboard.of([variant("one", [1] * users), variant("other", [11] * users)], [])
        assert ("fewer than 30 users" in board.verdict) is is_little


def test_seeds_are_averaged_per_user() -> None:
    first, other = variant("one", [1, 11, 3], [2, 1, 11]), variant("other", [4, 4, 4])
    differences = Comparison.of(first, other).differences

    def gain(rank: int) -> float:
        return 1 / math.log2(rank + 1) if rank <= 10 else 0.0

    by_user = [(gain(a) + gain(b)) / 2 - gain(4) for a, b in ((1, 2), (11, 1), (3, 11))]
    assert differences["ndcg_at_10"].difference == pytest.approx(sum(by_user) / 3)
    assert differences["hr_at_10"].difference == pytest.approx(2 / 3 - 1)
    low, high = differences["ndcg_at_10"].interval_95
    assert min(by_user) - 1e-9 <= low <= high <= max(by_user) + 1e-9
    itself = Comparison.of(first, variant("one again", [2, 1, 11], [1, 11, 3])).differences
    assert all(each == (0.0, (0.0, 0.0)) for each in itself.values())


def test_intervals_equal_a_bootstrap_over_users() -> None:
    rng = np.random.default_rng(0)
    seeds = [rng.integers(1, 15, 400).tolist() for _ in range(3)]
    low, high = Comparison.of(variant("a", *seeds[:2]), variant("b", seeds[2])).differences["hr_at_10"].interval_95
    found = np.array(seeds) <= 10
    by_user = found[:2].mean(axis=0) - found[2]
    means = [by_user[rng.integers(0, 400, 400)].mean() for _ in range(4_000)]
    np.testing.assert_allclose((low, high), np.percentile(means, [2.5, 97.5]), atol=0.006)


@pytest.fixture
def first(trained: Path) -> Artifact:
    return model_directory.load(trained)


def changed(model: Artifact, name: str, noise: float = 0.0, **training: Any) -> Artifact:
    """The model with other training settings, and noise in its biases."""
    config = model.config.model_copy(update={"training": model.config.training.model_copy(update=training)})
    other = copy.deepcopy(model.model)
    with torch.no_grad():
        other.bias.add_(noise * torch.randn(len(other.bias), generator=torch.Generator().manual_seed(0)))
    tag = f"{abs(hash((name, noise, *training.items()))) % 16**16:016x}"
    return replace(model, name=name, tag=tag, config=config, model=other)


class TestModels:
    def test_are_grouped_by_configuration_without_the_seed(self, first: Artifact) -> None:
        models = [
            first,
            changed(first, "longer", epochs=9),
            changed(first, "seed 1", seed=1),
            changed(first, "longer, seed 1", epochs=9, seed=1),
            changed(first, "of another program"),
            replace(changed(first, "tiny", epochs=10), tag="f" * 16),
        ]
        assert {name: [model.name for model in group] for name, group in by_variant(models).items()} == {
            f"tiny ({first.tag})": ["tiny", "seed 1"],
            "longer": ["longer", "longer, seed 1"],
            "of another program": ["of another program"],
            f"tiny ({'f' * 16})": ["tiny"],
        }

    def test_are_compared_with_the_first_user_by_user(self, first: Artifact, shop: Path) -> None:
        worse = changed(first, "worse", noise=3.0, epochs=9)
        report = evaluate([first, worse], shop)
        alone = evaluate([worse], shop)
        numbers = report.to_json()
        json.dumps(numbers, allow_nan=False)
        assert numbers["metrics"] == evaluate([first], shop).to_json()["metrics"]
        assert "spread" not in numbers
        found = numbers["other_models"]["worse"]
        assert found["metrics"] == pytest.approx(alone.to_json()["metrics"])
        hits = (report.ranks <= 10).astype(float) - (alone.ranks <= 10)
        margin = found["first_minus_it"]["hr_at_10_full"]
        assert margin["difference"] == pytest.approx(hits.mean())
        assert margin["interval_95"][0] <= hits.mean() <= margin["interval_95"][1]
        assert found["verdict"].startswith("tiny is better than worse in ")
        assert [model["name"] for model in found["models"]] == ["worse"]

    def test_of_several_seeds_are_averaged(self, first: Artifact, shop: Path) -> None:
        others = [changed(first, f"other {seed}", noise=1.0 + seed, epochs=9, seed=seed) for seed in (0, 1)]
        found = evaluate([first, *others], shop).to_json()["other_models"]["other 0"]
        for name, mean in found["metrics"].items():
            assert mean == pytest.approx(sum(model["metrics"][name] for model in found["models"]) / 2)
        assert [model["seed"] for model in found["models"]] == [0, 1]

    def test_trained_on_validation_events_may_be_compared(self, first: Artifact, shop: Path) -> None:
        data = first.config.data.model_copy(update={"train_on": "validation"})
        other = replace(first, name="on more", config=first.config.model_copy(update={"data": data}))
        report = evaluate([first, other], shop)
        assert [one.name for one in report.others] == ["on more"]
        found = report.to_json()["other_models"]["on more"]
        assert "do not differ significantly" in found["verdict"]
        caveat = " They learned from different events: tiny with --train-on train, on more with --train-on validation."
        assert found["verdict"].endswith(caveat)
        assert [model["event_options"] for model in found["models"]] == ["--train-on validation"]
        assert (
            "different events"
            not in evaluate([first], shop, grids={"popularity": GRIDS["popularity"]}).to_json()["verdict"]
        )

    @pytest.mark.parametrize(
        ("card", "reason"),
        [
            ({"train_on": "all"}, "trained on all events"),
            ({"split": "temporal"}, "trained for the split"),
            ({"sha256": "0" * 64}, "was trained on the table 0000"),
        ],
    )
    def test_that_may_know_test_events_are_refused_in_any_position(
        self, first: Artifact, shop: Path, card: dict[str, str], reason: str
    ) -> None:
        data = first.config.data.model_copy(update=card)
        knowing = replace(first, name="knowing", config=first.config.model_copy(update={"data": data}))
        for models in ([knowing, first], [first, knowing]):
            with pytest.raises(DataError, match=reason):
                evaluate(models, shop)

    def test_write_their_ranks(self, first: Artifact, shop: Path) -> None:
        other = changed(first, "other", noise=1.0, epochs=9)
        report = evaluate([first, other], shop)
        frame = report.ranks_frame()
        by_generation = {tag: frame.filter(generation=tag)["rank"].to_list() for tag in (first.tag, other.tag)}
        assert by_generation == {
            first.tag: report.ranks.tolist(),
            other.tag: report.others[0].results[0].ranks.tolist(),
        }


class TestEventTypes:
    """Users whose events are views and purchases."""

    @pytest.fixture
    def data(self, tmp_path: Path, write_rows: Make) -> Path:
        rng = np.random.default_rng(0)
        rows = [
            (f"u{user}", f"i{int(item)}", place, "purchase" if rng.random() < 0.5 else "view")
            for user in range(40)
            for place, item in enumerate(rng.integers(0, 12, 8))
        ]
        columns = "user_id item_id timestamp type"
        made: Path = write_rows(tmp_path / "data", rows, columns)
        return made

    @pytest.fixture
    def weighed(self, data: Path, tmp_path: Path, tiny_config: Make, silent: Make) -> Callable[..., Artifact]:
        def weighed(name: str, **weights: float) -> Artifact:
            plain: Config = tiny_config(epochs=1)
            config = plain.model_copy(update={"event_weights": EVENT_WEIGHTS | weights, "data": DataCard()})
            return train.train(data, tmp_path / name, config, progress=silent())

        return weighed

    def test_weights_are_those_of_each_model(self, data: Path, weighed: Callable[..., Artifact]) -> None:
        plain, heavy = weighed("plain"), weighed("heavy", purchase=7.0)
        report = evaluate([plain, heavy], data)
        assert report.others[0].results[0].ranks.tolist() == evaluate([heavy], data).ranks.tolist()

    def test_models_with_different_event_types_are_not_compared(
        self, data: Path, weighed: Callable[..., Artifact]
    ) -> None:
        plain, bought = weighed("plain"), weighed("bought", view=0.0)
        for models in ([plain, bought], [bought, plain]):
            with pytest.raises(DataError, match="types of weight 0 are the same"):
                evaluate(models, data)

"""Warm starts: states stay valid, new items get codes, and training continues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from model.cold_items import SAMPLED_QUERIES
from model.config import (
    FINE_CODEBOOKS,
    FINE_ITEMS,
    Config,
    DataCard,
    ModelConfig,
    SplitName,
    TrainConfig,
    TrainOn,
    preset,
    warm_training,
)
from model.data.interactions import DataError
from model.evaluation import evaluate
from model.training import train
from model.training.warm_start import WarmStart, WarmStartError

Make = Callable[..., Any]
NEW = {f"i{item}" for item in range(36, 40)}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory, write_rows: Make, tiny_config: Make, silent: Make) -> Artifact:
    """A model of the shop without four of its items, in another order."""
    from tests.model.conftest import shop_rows

    place = tmp_path_factory.mktemp("before")
    rows = [row for row in shop_rows()[::-1] if row[1] not in NEW]
    config = tiny_config(epochs=6)
    made: Artifact = train.train(write_rows(place / "data", rows), place / "model", config, progress=silent())
    return made


@pytest.fixture(scope="module")
def after(
    before: Artifact, shop: Path, tiny_config: Make, silent: Make, tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    config = tiny_config(lift_strength=0.0)  # the weights alone are judged
    config = config.model_copy(update={"training": warm_training(config.training)})
    return train.train_warm(before, shop, tmp_path_factory.mktemp("after") / "model", config, progress=silent())


def test_known_items_keep_their_rows_and_codes_and_states_keep_their_shape(before: Artifact, after: Artifact) -> None:
    known = len(before.items)
    assert list(after.items.ids)[:known] == list(before.items.ids)
    assert set(list(after.items.ids)[known:]) == NEW
    np.testing.assert_array_equal(after.history_codes[:known], before.history_codes)
    np.testing.assert_array_equal(after.target_codes[:known], before.target_codes)
    assert len(np.unique(after.target_codes, axis=0)) == len(after.items)
    shapes = [
        (one.decay_rates, one.history_codebooks, one.recent_items) for one in (before.config.model, after.config.model)
    ]
    assert shapes[0] == shapes[1]
    assert after.config.event_weights == before.config.event_weights
    trained, continued = before.config.training, after.config.training
    assert isinstance(trained, TrainConfig)
    assert isinstance(continued, TrainConfig)
    assert continued.warm_from == before.tag
    assert (trained.warm_count, continued.warm_count) == (0, 1)


def test_a_small_catalogue_gets_and_keeps_finer_target_codes(before: Artifact) -> None:
    shape, training = preset("lisa-mini")
    recipe = Config(model=shape, training=training)
    small, large = recipe.for_catalogue(FINE_ITEMS), recipe.for_catalogue(FINE_ITEMS + 1)
    assert (small.model.target_codebooks, large.model.target_codebooks) == (FINE_CODEBOOKS, shape.target_codebooks)
    # versions before finer codes read both, and a finished recipe is not changed again
    assert all("fine_items" not in one.model_dump_json() for one in (small, large))
    assert large.for_catalogue(1) == large
    mine = before.config.model.model_copy(update={"target_codebooks": 5})
    trained = replace(before, config=before.config.model_copy(update={"model": mine}))
    config = Config(model=mine.model_copy(update={"target_codebooks": 2}), training=training)
    continued = WarmStart(trained).continued(config.model_copy(update={"event_weights": before.config.event_weights}))
    assert continued.for_catalogue(1).model.target_codebooks == 5


def test_new_items_get_vectors_near_items_chosen_together(before: Artifact, after: Artifact) -> None:
    """Customers walk along a ring, so neighbours of an item have adjacent numbers."""
    vectors = after.model.item_vectors().detach().numpy()
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = after.items.rows
    near = [
        vectors[rows[f"i{one}"]] @ vectors[rows[f"i{(one + step) % 40}"]] for one in range(36, 40) for step in (-1, 1)
    ]
    far = [
        vectors[rows[f"i{one}"]] @ vectors[rows[f"i{(one + step) % 40}"]] for one in range(36, 40) for step in (15, 20)
    ]
    assert np.mean(near) > np.mean(far)


def test_one_short_epoch_beats_one_from_scratch(
    after: Artifact, shop: Path, tiny_config: Make, silent: Make, tmp_path: Path
) -> None:
    assert len(after.metrics["epochs"]) == 1
    config = tiny_config(lift_strength=0.0)
    fresh = config.model_copy(update={"training": warm_training(config.training)})
    cold = train.train(shop, tmp_path / "cold", fresh, progress=silent())
    judged = after.config.training.model_copy(update={"warm_knows_no_tests": True})  # it knows few of the test events
    continued = replace(after, config=after.config.model_copy(update={"training": judged}))
    report = evaluate.evaluate([continued, cold], shop).to_json()
    warm, cold_quality = (
        report["metrics"]["ndcg_at_10_full"],
        report["other_models"]["cold"]["metrics"]["ndcg_at_10_full"],
    )
    assert warm > cold_quality + 0.1
    alone = evaluate.evaluate([cold], shop).to_json()["metrics"]["ndcg_at_10_full"]
    assert alone == pytest.approx(cold_quality), "the order of the items changes nothing"


def test_a_model_of_another_kind_is_refused(
    before: Artifact, shop: Path, tiny_config: Make, silent: Make, tmp_path: Path
) -> None:
    wider = tiny_config().model_copy(update={"model": ModelConfig()})
    others = tiny_config().model_copy(update={"event_weights": {"click": 2.0}})
    for config, reason in ((wider, "another shape"), (others, "other event weights")):
        with pytest.raises(WarmStartError, match=reason):
            train.train_warm(before, shop, tmp_path / "model", config, progress=silent())
    assert not model_directory.exists(tmp_path / "model")


@pytest.mark.parametrize("data", [DataCard(train_on="all"), DataCard(split="temporal")])
def test_evaluation_refuses_a_base_model_that_knows_test_events(
    data: DataCard, shop: Path, tiny_config: Make, silent: Make, tmp_path: Path
) -> None:
    config = tiny_config(epochs=1)
    about = config.model_copy(update={"data": data})
    knowing = train.train(shop, tmp_path / "knowing", about, progress=silent())
    model = train.train_warm(knowing, shop, tmp_path / "next", config, progress=silent())
    for number in range(2):  # also one that continues from that one
        with pytest.raises(DataError, match="may know the test events"):
            evaluate.evaluate([model], shop)
        model = train.train_warm(model, shop, tmp_path / f"next-{number}", config, progress=silent())


def purchases(users: int, begin: int, end: int, count: int) -> list[tuple[str, str, int]]:
    """Rows of purchases between two times."""
    rng = np.random.default_rng(begin)
    chosen = rng.integers(users, size=count), rng.integers(20, size=count), np.linspace(begin, end - 1, count)
    return [(f"u{user}", f"i{item}", int(time_s)) for user, item, time_s in zip(*chosen, strict=True)]


@pytest.mark.parametrize("split", ["loo", "temporal"])
def test_evaluation_refuses_tables_with_added_earlier_events(
    split: SplitName, tiny_config: Make, write_rows: Make, silent: Make, tmp_path: Path
) -> None:
    config = tiny_config(epochs=1).model_copy(update={"data": DataCard(split=split)})
    rows = purchases(200, 1_000_000, 2_000_000, 400)
    trained = train.train(write_rows(tmp_path / "a", rows), tmp_path / "first", config, progress=silent())
    filled = write_rows(tmp_path / "b", [*purchases(200, 0, 1_000_000, 800), *rows])
    model = train.train_warm(trained, filled, tmp_path / "next", config, progress=silent())
    with pytest.raises(DataError, match="may know the test events"):
        evaluate.evaluate([model], filled)


def test_evaluation_accepts_its_table_and_later_events(
    tiny_config: Make, write_rows: Make, silent: Make, tmp_path: Path
) -> None:
    config = tiny_config(epochs=1).model_copy(update={"data": DataCard(split="temporal")})
    rows = purchases(100, 0, 1_000_000, 1000)
    tables = [rows, rows, [*rows, *purchases(100, 1_000_000, 1_100_000, 50)]]
    tables.append([*tables[-1], *purchases(100, 1_100_000, 1_200_000, 50)])
    places = [write_rows(tmp_path / f"data-{number}", table) for number, table in enumerate(tables)]
    model = train.train(places[0], tmp_path / "first", config, progress=silent())
    for number, place in enumerate(places[1:]):
        model = train.train_warm(model, place, tmp_path / f"next-{number}", config, progress=silent())
        assert evaluate.evaluate([model], place).trial.protocol == "temporal"


@pytest.mark.parametrize("train_on", ["train", "validation"])
def test_evaluation_refuses_a_lift_chosen_on_known_events(
    train_on: TrainOn, shop: Path, tiny_config: Make, silent: Make, tmp_path: Path
) -> None:
    config = tiny_config(epochs=1)
    both = [config.model_copy(update={"data": DataCard(train_on=one)}) for one in ("validation", train_on)]
    trained = train.train(shop, tmp_path / "first", both[0], progress=silent())
    model = train.train_warm(trained, shop, tmp_path / "next", both[1], progress=silent())
    if train_on == "validation":
        assert evaluate.evaluate([model], shop)
    else:
        with pytest.raises(DataError, match="may know the test events"):
            evaluate.evaluate([model], shop)


def test_a_catalogue_without_known_items_is_refused(
    before: Artifact, tiny_config: Make, write_rows: Make, silent: Make, tmp_path: Path
) -> None:
    rows = [(f"u{user}", f"other{(user + step) % 7}", step) for user in range(20) for step in range(5)]
    with pytest.raises(WarmStartError, match="no event is about an item that 'model' knows"):
        train.train_warm(
            before, write_rows(tmp_path / "data", rows), tmp_path / "model", tiny_config(), progress=silent()
        )
    assert not model_directory.exists(tmp_path / "model")


def test_new_items_get_codes_with_few_cooccurrences(
    before: Artifact, tiny_config: Make, write_rows: Make, silent: Make, tmp_path: Path
) -> None:
    users = 20 * SAMPLED_QUERIES
    rows = [(f"u{user}", f"other{(user + step) % 7}", step) for user in range(users) for step in range(3)]
    known = [("known", item, step) for step, item in enumerate(["i1", "i2", "i3", "i4"])]
    data = write_rows(tmp_path / "data", [*rows, *known])
    model = train.train_warm(before, data, tmp_path / "model", tiny_config(epochs=1), progress=silent())
    assert {f"other{number}" for number in range(7)} < set(model.items.ids)


def test_an_interrupted_warm_training_resumes_only_itself(
    before: Artifact, after: Artifact, shop: Path, tiny_config: Make, silent: Make, tmp_path: Path
) -> None:
    config = tiny_config(epochs=2)
    whole = train.train_warm(before, shop, tmp_path / "whole", config, progress=silent())
    with pytest.raises(KeyboardInterrupt):
        train.train_warm(before, shop, tmp_path / "parts", config, progress=silent(stop_after=0))
    with pytest.raises(ValueError, match="other options"):
        train.train_warm(after, shop, tmp_path / "parts", config, resume=True, progress=silent())
    resumed = train.train_warm(before, shop, tmp_path / "parts", config, resume=True, progress=silent())
    assert resumed.tag == whole.tag

"""The benchmark of objectives, shortened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmarks.quality import objective
from model.config import DataCard
from model.data.readers import read_interactions
from model.evaluation.evaluate import prepare_trial
from model.evaluation.trial import model_scorer
from model.metrics import metrics
from model.training import train
from tests.model.conftest import Silent, tiny_config, write_rows

ITEMS = 40


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw, directory = np.random.default_rng(0), tmp_path_factory.mktemp("prices")
    rows = [
        (str(user), str(item), 100 * n) for user in range(60) for n, item in enumerate(draw.permutation(ITEMS)[:12])
    ]
    return write_rows(directory, rows)


@pytest.fixture(scope="module")
def raw(data: Path) -> Path:
    """Raw lines of the interactions: an item's number is its price, and half of the items are bought in pairs."""
    table = read_interactions(data)
    items = np.array([int(table.item_ids[item]) for item in table.item])
    quantities = 1 + items % 2
    lines = pl.DataFrame(
        {
            "household_id": [int(table.user_ids[user]) for user in table.user],
            "product_id": items,
            "transaction_timestamp": pl.Series(table.timestamp_us).cast(pl.Datetime("us")),
            "store_id": np.ones(len(items), np.int64),
            "quantity": quantities,
            "sales_value": (items * quantities).astype(np.float64),
            "retail_disc": np.zeros(len(items)),
            "coupon_match_disc": np.zeros(len(items)),
        }
    )
    lines.write_parquet(data / objective.TRANSACTIONS)
    return data


def test_objectives_gain_value_and_strength_0_equals_the_evaluation(
    data: Path, raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(epochs=1).model_copy(update={"data": DataCard(split="temporal")})
    trained = train.train(data, tmp_path / "prices", config, progress=Silent())
    trial = prepare_trial(trained, data, "temporal", "none", rows_of_model=True)
    values = objective.values_of(trial, raw)
    numbers = np.array([float(one) for one in trial.interactions.item_ids])
    sold = ~np.isnan(values["price"])
    np.testing.assert_array_equal(values["price"][sold & (numbers > 0)], numbers[sold & (numbers > 0)])
    np.testing.assert_array_equal(values["sale"][sold], (numbers * (1 + numbers % 2))[sold])
    assert np.isnan(values["price"][numbers == 0]).all(), "what was sold for nothing has no price"
    found = objective.measure(trial, model_scorer(trained), trial.parts.test, values["price"])
    plain = metrics(trial.test_model(trained).ranks)
    assert found[0.0].hit.mean() == pytest.approx(plain["hr_at_10"])
    assert found[0.0].ndcg.mean() == pytest.approx(plain["ndcg_at_10"])
    for weaker, stronger in zip(objective.STRENGTHS, objective.STRENGTHS[1:], strict=False):
        assert (found[stronger].mean_value >= found[weaker].mean_value - 1e-9).mean() > 0.9
    objective.main(data, tmp_path / "prices", raw, users=20)
    printed = " ".join(capsys.readouterr().out.split())
    assert "seen rule none, ties against the model" in printed
    assert "test, " in printed
    assert "validation, " in printed

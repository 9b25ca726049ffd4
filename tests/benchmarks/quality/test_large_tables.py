"""Synthetic large tables keep the statistics of the real one; measured trainings report their phases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.quality.training import large_tables, limited_memory, memory
from model.artifact import model_directory
from model.data.readers import read_interactions, read_items
from model.training.memory import GIB
from tests.model.conftest import shop_rows, write_rows


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_rows(tmp_path_factory.mktemp("real") / "shop", shop_rows())
    (directory / "items.tsv").write_text("item_id\ttitle\ni1\tOne\n", encoding="utf-8")
    return directory


def test_a_large_table_is_like_the_real_one(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(large_tables, "PIECE", 6_000)
    large_tables.main(shop, tmp_path / "large", events=20_000)
    assert "20,000 events" in capsys.readouterr().out
    real, made = read_interactions(shop), read_interactions(tmp_path / "large")
    assert len(made) == 20_000
    assert read_items(tmp_path / "large").titles == {"i1": "One"}
    assert {path.name for path in (tmp_path / "large").iterdir()} == {"interactions.parquet", "items.tsv"}

    def statistics(table: Any) -> large_tables.Statistics:
        place = {name: row for row, name in enumerate(real.item_ids)}
        item = np.array([place[name] for name in table.item_ids])[table.item]
        times_s = table.timestamp_us / 1e6
        assert (np.diff(times_s)[table.user[1:] == table.user[:-1]] >= 0).all()
        return large_tables.Statistics.of(large_tables.Histories(item, times_s, table.starts), len(real.item_ids))

    one, other = statistics(real), statistics(made)
    assert other.mean_length == pytest.approx(one.mean_length, rel=0.1)
    assert other.median_length == pytest.approx(one.median_length, rel=0.15)
    assert other.longest <= one.longest
    assert other.repeat_share == pytest.approx(one.repeat_share, abs=0.1)
    assert one.likeness_of_pairs(other) > 0.8


def test_repeats_appear_only_if_the_real_table_has_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    histories = [rng.permutation(20)[: user % 9 + 2] for user in range(30)]
    rows = [(f"u{user}", f"i{item}", n) for user, own in enumerate(histories) for n, item in enumerate(own)]
    table = large_tables.LargeTable(write_rows(tmp_path / "ratings", rows), seed=0)
    made = table.users(200)
    assert len(np.unique(made.users * 20 + made.item)) == len(made.item)
    assert (np.diff(made.time_s)[np.diff(made.users) == 0] == 1).all()  # timestamps are only an order, as they were


@pytest.mark.parametrize(("limit", "said"), [(None, "no limit"), (2 * GIB, "limit 2,048 MiB")])
def test_a_measured_training_reports_its_phases(
    shop: Path, capsys: pytest.CaptureFixture[str], limit: int | None, said: str
) -> None:
    memory.main(shop, memory=limit, share=0.001)
    printed = capsys.readouterr().out
    assert said in printed
    for phase in ("reading data", "computing the codes of 40 items", "epoch 1", "all of it"):
        assert phase in printed
    assert "on validation None" in printed  # it ended within the epoch
    assert [path.name for path in shop.parent.iterdir()] == ["shop"]


def test_a_whole_training_is_measured(shop: Path, tmp_path: Path) -> None:
    found: Any = memory.TrainingRun(str(shop), "loo_full", 1, 2.0, None).measure(tmp_path / "model")
    assert found["ndcg_at_10"] > 0
    assert found["phases"][-1]["name"] == "writing the model"
    assert all(phase["peak_bytes"] > 0 for phase in found["phases"])


def test_models_with_and_without_a_limit_are_compared(shop: Path, tmp_path: Path) -> None:
    run = memory.TrainingRun(str(shop), "loo_full", 1, 2.0, 2 * GIB)
    assert limited_memory.differing_files(run, tmp_path) == []
    models = tmp_path / "limited", tmp_path / "unlimited"
    weights = models[1] / model_directory.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    (models[0] / model_directory.ITEMS).unlink()
    assert limited_memory.compare(*models) == sorted([model_directory.ITEMS, model_directory.WEIGHTS])

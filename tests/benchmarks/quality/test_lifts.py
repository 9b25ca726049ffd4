"""The comparison of lifts of a trained model, shortened."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quality.training import lifts
from model.lisa.item_followers import LIFT_DECAYS
from model.training.train import train
from tests.model.conftest import Silent, shop_rows, tiny_config, write_rows


def test_lifts_are_scored_as_in_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows(tmp_path / "shop", shop_rows()[:600])
    made = train(data, tmp_path / "model", tiny_config(epochs=1), progress=Silent())
    lifts.main(tmp_path / "model", data)
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("|")}
    assert rows.keys() >= {f"{decay:g}" for decay in LIFT_DECAYS} | {"0 or more"}
    (epoch,) = made.metrics["epochs"]
    quality = f"{epoch['hr_at_10']:.4f} / {epoch['ndcg_at_10']:.4f}"
    assert quality in rows["0.7"]
    assert rows["0 or more"].split("|")[3].strip() == quality

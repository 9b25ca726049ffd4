"""The comparison of settings on validation, in short."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import typer

from benchmarks.quality.training import choices
from model.lisa.item_followers import Lift
from tests.model.conftest import shop_rows, write_rows


@pytest.mark.parametrize(("patience", "kept"), [(1, 1), (2, 3), (3, 6), (9, 6)])
def test_an_epoch_is_kept_as_a_training_keeps_it(patience: int, kept: int) -> None:
    quality = [0.1, 0.3, 0.2, 0.4, 0.3, 0.3, 0.4]
    trial = choices.LiftTrial({}, {}, [])
    assert choices.Run(7.0, quality, {}, {}, trial).kept(patience) == kept


def test_pairs_are_trained_once_and_compared_user_by_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows(tmp_path / "shop", shop_rows()[:600])
    run = partial(choices.main, [data], tmp_path / "runs", pair=["0.2,1", "0.5,2"], seed=[0])
    run()
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("| shop ")]
    assert [line.split("|")[3].strip() for line in lines[:2]] == ["0.2, 1", "0.5, 2"]
    assert len(lines) == 3, "and one of the lift"
    files = sorted((tmp_path / "runs").rglob("run.json"))
    made = [file.stat().st_mtime_ns for file in files]
    run()
    assert capsys.readouterr().out.count("epoch 1,") == 0 < printed.count("epoch 1,")
    assert [file.stat().st_mtime_ns for file in files] == made
    pairs = choices.Pair(0.2, 1), choices.Pair(0.5, 2)
    first, other = (choices.train(data, pair, 0, tmp_path / "runs", "cpu") for pair in pairs)
    margin = np.mean(other.by_user["hr_at_10"] - first.by_user["hr_at_10"])
    assert f"{margin:+.4f} (" in lines[1]
    assert max(first.ndcg_at_10) == pytest.approx(first.by_user["ndcg_at_10"].mean())
    assert [lift._replace(strength=1.5) for lift in first.lift_trial.lifts] == [Lift(16, 1.5, 0.4, 0.01)] * 2


def test_what_is_no_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="no DROPOUT,EPOCHS"):
        choices.main([tmp_path], tmp_path, pair=["0.5"])

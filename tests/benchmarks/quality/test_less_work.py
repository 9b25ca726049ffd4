"""The comparison of cheaper trainings, shortened."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks.quality.training import less_work
from tests.model.conftest import shop_rows, write_rows


def test_each_way_is_trained_once_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows(tmp_path / "shop", shop_rows()[:600])
    warm = ["1,0.001,0.5", "1,0.001,0.5,2"]
    run = partial(less_work.main, data, tmp_path / "runs", epochs=1, way=["--users-sample 0.5"], warm=warm)
    run()
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    once = "warm: 1 epochs, rate 0.001, share 0.5"
    names = ["everything", "--users-sample 0.5", once, f"{once}, 2 in a row"]
    assert [line[1].strip() for line in lines[1:]] == names
    files = sorted((tmp_path / "runs" / "shop").glob("*.json"))
    assert len(files) == 4
    quality = {f"{json.loads(file.read_text())['ndcg_at_10']:.4f}" for file in files}
    assert {line[3].strip() for line in lines[1:]} == quality
    run()
    assert "epoch 1," not in capsys.readouterr().out

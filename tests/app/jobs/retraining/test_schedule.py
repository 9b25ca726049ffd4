"""The schedule of the trainer: when the next round is due, and how intervals are written."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from app.jobs.retraining import loop
from app.jobs.retraining.report import TrainerReport
from app.serving import empty_model
from app.serving.model_registry import LocalModels
from storage.folders.local_folder import LocalFolder
from tests.app.support import run_command


def test_when_the_next_round_is_due(tmp_path: Path) -> None:
    assert loop.due_in_s(LocalModels(tmp_path), 86_400) == 0
    for outcome, served, expected_s in (
        ("waiting", empty_model.TAG.hex(), 600),
        ("waiting", "ab", 86_400),
        ("refused", "ab", 86_400),
    ):
        last = {"outcome": outcome, "served": served, "at": datetime.now(UTC).isoformat()}
        TrainerReport(last).write(LocalFolder(tmp_path))
        assert expected_s - 60 < loop.due_in_s(LocalModels(tmp_path), 86_400) <= expected_s
        ahead = datetime.now(UTC) + timedelta(days=365)  # by a clock that is right again
        TrainerReport(last | {"at": ahead.isoformat()}).write(LocalFolder(tmp_path))
        assert loop.due_in_s(LocalModels(tmp_path), 86_400) == expected_s
    (tmp_path / ".retraining").mkdir()
    (tmp_path / ".retraining" / "round.json").write_text("{}")
    assert loop.due_in_s(LocalModels(tmp_path), 86_400) == 0


@pytest.mark.parametrize("every", ["24", "h", "0h", "1.5h", "-1h", "1w"])
def test_intervals_have_a_unit(every: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("retrain", "--every", every) == 2
    assert "24h, 30m or 7d" in " ".join(capsys.readouterr().err.split())

"""Options that reduce the work of a training: they are recorded, and only if given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.jobs.datasets.synthetic_shop import generate
from app.jobs.retraining import loop
from app.jobs.retraining.plan import RetrainingPlan
from app.jobs.retraining.report import RoundOutcome
from tests.app.support import run_command

LIMITS = {"MEMORY": "3GiB", "MAX_EVENTS": "5000", "EVENTS_PER_USER": "64", "USERS_SAMPLE": "0.5", "FULL_EVERY": "3"}


def run(*arguments: object) -> None:
    assert run_command(*arguments) == 0


def test_reduced_trainings_and_warm_starts_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, model, warm = tmp_path / "shop", tmp_path / "model", tmp_path / "warm"
    data.mkdir()
    generate(data, shoppers=60)
    train = ("train", "--data", data, "--epochs", 1)
    run(*train, "--out", model)
    less = ("--since", "2020-01-01", "--users-sample", 0.5, "--events-per-user", 4, "--negatives", "popular")
    run(*train, "--out", warm, "--warm-from", model, *less)
    assert "time: reading" in capsys.readouterr().out
    before, after = (json.loads((place / "config.json").read_text()) for place in (model, warm))
    training, card = after["training"], after["data"]
    assert (training["warm_count"], training["events_per_user"], training["negatives"]) == (1, 4, "popular")
    assert (card["users_sample"], card["since"]) == (0.5, "2020-01-01T00:00:00Z")
    # earlier versions read models that have none of them
    assert not {"warm_from", "warm_count", "epoch_share", "events_per_user", "negatives"} & before["training"].keys()
    assert not {"users_sample", "since"} & before["data"].keys()
    run("evaluate", "--model", warm, "--model", model, "--data", data)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--preset", "lisa-base", "--since", "2026-05-31"], "omit --since"),
        (["--preset", "lisa-base", "--warm-from", "m"], "--warm-from"),
        (["--since", "lately"], "2026-05-31"),
        (["--users-sample", "0"], "users-sample"),
    ],
)
def test_conflicting_options_are_refused(options: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("train", "--data", "d", "--out", "m", *options) == 2
    assert hint in " ".join(capsys.readouterr().err.split())


def test_the_environment_may_limit_a_round(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Compose sets all variables, empty without a limit; options take precedence."""
    plans: list[RetrainingPlan] = []

    def run_trainer(_: object, plan: RetrainingPlan, *__: object) -> RoundOutcome:
        plans.append(plan)
        return RoundOutcome("waiting", "too few events", "2026-11-26T03:00:00+00:00")

    monkeypatch.setattr(loop, "run_trainer", run_trainer)
    for values in (LIMITS, dict.fromkeys(LIMITS, "")):
        for name, value in values.items():
            monkeypatch.setenv(f"LISAREC_RETRAIN_{name}", value)
        run("retrain")
        run("retrain", "--memory", "2GiB", "--no-warm")
    limited = RetrainingPlan(memory=3 << 30, max_events=5_000, events_per_user=64, users_sample=0.5, full_every=3)
    by_option: dict[str, Any] = {"memory": 2 << 30, "warm": False}
    assert plans == [limited, replace(limited, **by_option), RetrainingPlan(), RetrainingPlan(**by_option)]
    monkeypatch.setenv("LISAREC_RETRAIN_MEMORY", "much")
    assert run_command("retrain") == 2
    assert "LISAREC_RETRAIN_MEMORY" in capsys.readouterr().err

"""The options of a training that has less to do: they are recorded, and only where they are given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli.main import main
from app.jobs.datasets.synthetic_shop import generate


def run(*arguments: object) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([str(argument) for argument in arguments])


def test_less_work_and_going_on_from_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_what_does_not_fit_is_refused(options: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--data", "d", "--out", "m", *options])
    assert hint in " ".join(capsys.readouterr().err.split())

"""The fairness benchmark in short: it makes every attack, on both stores, and notices an unfair service."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
import typer

from benchmarks.attack import fairness
from benchmarks.attack.attacked_service import Store
from benchmarks.attack.attacks import attacks
from tests.app.conftest import item_id, write_model
from tests.benchmarks.support import require_servers


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_every_attack_is_made_while_the_plain_user_is_answered(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_servers()
    monkeypatch.setattr(fairness, "ATTACKERS", ["stranger"])
    monkeypatch.setattr(fairness, "MAX_MORE_MS", inf)  # how long it waits in a moment says more about the machine
    fairness.main(write_model(tmp_path / "tiny"), items=2_000, store=store, seconds=0.2, rounds=1, connections=4)
    printed = capsys.readouterr().out
    for attack in attacks([item_id(0)], ["tea"]):
        assert f"{attack.name}, by a stranger" in printed
    assert {"undo", "merge", "erase", "items", "events", "batch of 100: plain"} <= {
        attack.name for attack in attacks([item_id(0)], ["tea"])
    }


def test_a_plain_user_who_waits_too_long_fails_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "MAX_MORE_MS", -inf)
    with pytest.raises(typer.Exit):
        fairness.main(write_model(tmp_path / "tiny"), items=2_000, seconds=0.2, rounds=1, connections=1, only=["plain"])

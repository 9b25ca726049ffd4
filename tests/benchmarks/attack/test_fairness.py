"""The fairness benchmark, shortened: every attack on both stores; an unfair service is detected."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import typer

from app.schemas.items import MAX_ITEMS
from app.settings import Settings
from benchmarks.attack import attacked_service, fairness
from benchmarks.attack.attacked_service import Store, request_bytes
from benchmarks.attack.attacks import ONE_CALL, Attack, attacks
from benchmarks.attack.costly_calls import Call
from benchmarks.attack.fairness import Fairness, Waited
from tests.app.conftest import item_id, write_model
from tests.benchmarks.support import require_servers

LAST_TURN = 1_000_000_000

FAIR = Fairness(
    quiet=[Waited([4.0] * 100, [2.0] * 100)] * 3,
    during=[Waited([28.0] * 100, [24.0] * 100)] * 3,
    after=[Waited([28.0] * 100, [99.0] * 100)] * 3,
)


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_attacks_delay_a_plain_user_only_little(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_servers()
    monkeypatch.setattr(fairness, "ATTACKERS", ["stranger"])
    monkeypatch.setattr(fairness, "MAX_MORE_MS", inf)  # how long it waits in a moment says more about the machine
    monkeypatch.setattr(fairness, "MAX_MORE_WORK_MS", 100.0)  # a busy machine takes several times the processor time
    fairness.main(write_model(tmp_path / "tiny"), items=2_000, store=store, seconds=0.2, rounds=1, connections=8)
    printed = capsys.readouterr().out
    for attack in attacks([item_id(0)], ["tea"]):
        assert f"{attack.name}, by a stranger" in printed
    assert {*ONE_CALL, "undo", "merge", "erase", "batch of 100: plain"} <= {
        attack.name for attack in attacks([item_id(0)], ["tea"])
    }


def test_attack_bodies_stay_below_the_size_limit() -> None:
    found = attacks([item_id(number) for number in range(MAX_ITEMS)], ["tea"])
    calls = [call for attack in found for call in attack.calls(LAST_TURN)]
    for call in calls:
        body = request_bytes(call, "", LAST_TURN).partition(b"\r\n\r\n")[2]
        assert len(body) <= Settings().max_body_bytes, call.name


def test_a_long_delay_of_the_plain_user_fails_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last test of this file shows what breaks each rule."""
    monkeypatch.setattr(attacked_service, "LONG_LOG", 0)
    for law in ("MAX_MORE_MS", "MAX_MORE_WORK_MS"):
        monkeypatch.setattr(fairness, law, -inf)
    with pytest.raises(typer.Exit):
        fairness.main(write_model(tmp_path / "tiny"), items=2_000, seconds=0.2, rounds=1, connections=1, only=["plain"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "waits too long, waits too long afterwards, waits for too much work" in printed


def test_a_refused_attack_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attacked_service, "LONG_LOG", 0)
    wrong = Attack("wrong", lambda _: [Call("", "GET", "/v1/nothing")])
    monkeypatch.setattr(fairness, "attacks", lambda *_: [wrong])
    with pytest.raises(RuntimeError, match="wrong"):
        fairness.main(write_model(tmp_path / "tiny"), items=2_000, seconds=0.2, rounds=1, connections=1)


@pytest.mark.parametrize(
    ("found", "broken"),
    [
        (FAIR, []),
        (replace(FAIR, during=[Waited([28.1] * 100, [24.0] * 100)] * 3), ["waits too long"]),
        (replace(FAIR, during=[Waited([4.0] * 98 + [99.0] * 2, [2.0] * 100)] * 3), ["waits too long"]),
        (replace(FAIR, after=[Waited([28.1] * 100, [2.0] * 100)] * 3), ["waits too long afterwards"]),
        (replace(FAIR, during=[Waited([28.0] * 100, [24.1] * 100)] * 3), ["waits for too much work"]),
        (replace(FAIR, during=[*FAIR.during, replace(FAIR.during[0], refused=1)]), ["is refused"]),
        (replace(FAIR, after=[*FAIR.after, replace(FAIR.after[0], refused=1)]), ["is refused"]),
        (replace(FAIR, during=[*FAIR.during[:2], Waited([99.0] * 100, [99.0] * 100)]), []),  # the median of three
        (
            replace(FAIR, during=[FAIR.during[0], *[Waited([99.0] * 100, [99.0] * 100)] * 2]),
            ["waits too long", "waits for too much work"],
        ),
    ],
)
def test_the_median_of_the_rounds_decides(found: Fairness, broken: list[str]) -> None:
    assert found.broken() == broken

"""The amplification benchmark, shortened: no call takes much more processor time than it is charged."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from app.main import create_app
from app.settings import Settings
from benchmarks.attack import amplification, attacked_service, costly_calls
from benchmarks.attack.attacked_service import Store
from benchmarks.attack.costly_calls import endpoint_of, unmeasured
from tests.app.conftest import item_id, write_model
from tests.benchmarks.support import require_servers


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_every_call_takes_the_processor_time_it_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: Store
) -> None:
    """The longest log is only read; corrected logs are shorter, because each is corrected once."""
    if store == "redis":
        require_servers()
    monkeypatch.setattr(amplification, "MAX_CALLS", 100)
    amplification.main(write_model(tmp_path / "tiny"), items=2_000, cpu_s=0.05, store=store, corrected=1_000)
    printed = capsys.readouterr().out
    for name in (
        "explain",
        "exclude_seen",
        "events",
        "search",
        "personal search",
        "put item",
        "undo",
        "merge",
        "erase",
        "activate",
        *(["archived log", "archived exclude_seen"] if store == "redis" else []),
    ):
        assert f" {name} " in printed
    assert re.search(r"\| `DELETE /v1/users/{user_id}` *\| erase *\| ", printed)


def test_a_call_that_costs_more_or_is_not_measured_fails_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(amplification, "AGAIN", 0)
    monkeypatch.setattr(amplification, "MAX_CALLS", 20)
    monkeypatch.setattr(attacked_service, "LONG_LOG", 0)
    for name in ("recommendations", "other_reads", "corrections", "operations", "portable"):
        monkeypatch.setattr(amplification, name, lambda *_: [])
    monkeypatch.setattr(
        amplification, "writes", lambda ids: [replace(one, bound=0.0) for one in costly_calls.writes(ids)[:1]]
    )
    with pytest.raises(typer.Exit):
        amplification.main(write_model(tmp_path / "tiny"), items=2_000, cpu_s=0.05, corrected=1)
    printed = capsys.readouterr().out
    assert "than it may: event\n" in printed
    assert "no call measures DELETE /v1/users/{user_id}\n" in printed
    assert "no call measures POST /v1/events" not in printed


def test_every_endpoint_has_a_call_and_a_missing_one_is_named() -> None:
    ids, paths = [item_id(number) for number in range(100)], create_app(Settings()).openapi()["paths"]
    calls = [*costly_calls.recommendations(ids, ["tea"]), *costly_calls.other_reads(ids, ["tea"])]
    calls += [*costly_calls.writes(ids), *costly_calls.corrections(1), *costly_calls.operations()]
    calls += costly_calls.portable("state", ids)
    assert unmeasured(paths, calls) == []
    endpoints = {endpoint_of(call, paths) for call in calls}
    assert len(endpoints) > 40
    for endpoint in endpoints & {f"{method.upper()} {path}" for path in paths for method in paths[path]}:
        assert unmeasured(paths, [call for call in calls if endpoint_of(call, paths) != endpoint]) == [endpoint]

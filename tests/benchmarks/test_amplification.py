"""No call costs much more processor time than it is charged for; the benchmark in short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import typer

from benchmarks.attack import amplification, costly_calls
from tests.app.conftest import write_model


def test_a_call_costs_what_it_is_charged_for_and_one_that_costs_more_fails_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "tiny")
    amplification.main(model, items=2_000, cpu_s=0.05)
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("explain", "candidates", "events", "search", "popular"))
    monkeypatch.setattr(amplification, "recommendations", lambda *_: [])
    monkeypatch.setattr(amplification, "other_reads", lambda *_: [])
    monkeypatch.setattr(
        amplification, "writes", lambda ids: [replace(one, bound=0.0) for one in costly_calls.writes(ids)[:1]]
    )
    with pytest.raises(typer.Exit):
        amplification.main(model, items=2_000, cpu_s=0.05)

"""The simulation of rotation, shortened."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality import rotation
from benchmarks.quality.rotation import Visitor
from model.artifact import model_directory
from tests.app.conftest import ITEMS, item_id, write_model


def test_rotation_finds_rare_wanted_items_sooner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With random scores, wanted items are anywhere in the list, and only a full scan finds all."""
    model = write_model(tmp_path / "tiny")
    draw = np.random.default_rng(0)
    visitors = [
        Visitor([item_id(0)], frozenset(map(item_id, draw.choice(ITEMS, 3, replace=False).tolist()))) for _ in range(12)
    ]
    found = asyncio.run(rotation.measure(model_directory.load(model), model, visitors))
    assert list(found) == list(rotation.STRENGTHS)
    assert found[1.0].mean() > found[0.0].mean()
    assert rotation.report(found) > 0
    printed = capsys.readouterr().out
    assert "test, 6 users" in printed


def test_an_interval_contains_the_sample_mean() -> None:
    values = np.random.default_rng(0).normal(3.0, 1.0, 400)
    low, high = rotation.interval_95(values)
    assert low < values.mean() < high
    assert high - low == pytest.approx(4 / np.sqrt(400), rel=0.1)

"""The benchmark of complements, shortened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality import together
from model.config import DataCard
from model.data.readers import read_interactions
from model.training import train
from tests.model.conftest import Silent, tiny_config, write_rows

KITS = [("pot", "lid"), ("cup", "saucer"), ("pen", "ink"), ("nail", "hammer"), ("bat", "ball"), ("key", "lock")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Orders of two kits each, and of a dozen items that everybody buys."""
    draw, rows = np.random.default_rng(0), list[tuple[str, str, int]]()
    for order in range(400):
        kits = [KITS[n] for n in draw.permutation(len(KITS))[:2]]
        plain = [f"plain-{n}" for n in draw.permutation(30)[:3]]
        rows += [(f"u{order % 20}", item, 10_000 * order) for item in (*kits[0], *plain, *kits[1])]
    return write_rows(tmp_path_factory.mktemp("kits"), sorted(rows, key=lambda row: row[0]))


def test_complements_rank_better_than_popular_items(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "K", 2)
    together.main(data, most=40)
    printed = " ".join(capsys.readouterr().out.split())
    assert "seen rule none, ties against the method, seed 0" in printed
    assert "window 1440 min, as served" in printed
    assert "first minus it" not in printed  # the test is read when that is asked for
    together.main(data, most=40, test=True)
    assert "first minus it" in " ".join(capsys.readouterr().out.split())
    found = together.measure(read_interactions(data), 0.9, 40, 0)
    assert found["complements"].mean() > found["popularity"].mean() + 0.1


def test_lists_of_the_service_are_compared(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(epochs=1).model_copy(update={"data": DataCard(split="temporal")})
    train.train(data, tmp_path / "kits", config, progress=Silent())
    together.main(data, model=tmp_path / "kits", most=30)
    printed = capsys.readouterr().out
    for way in together.WAYS:
        assert way.split(",")[0] in printed

"""The benchmarks in short, so that they stand when somebody wants their numbers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import typer

from app import shop
from benchmarks import constant, served_equals_offline
from model import artifact
from model.config import Config, ModelConfig, TrainConfig
from model.train import EpochReport, train


class Silent:
    def batch(self, epoch: int, share: float, loss: float) -> None: ...
    def epoch(self, report: EpochReport) -> None: ...


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shop")
    shop.generate(directory, shoppers=300)
    return directory


@pytest.fixture(scope="module")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "shop"
    config = Config(model=ModelConfig(width=32), training=TrainConfig(epochs=2))
    train(data, directory, config, progress=Silent())
    return directory


@pytest.mark.parametrize("exclude_seen", ["none", "recent", "all"])
def test_served_equals_offline(data: Path, model: Path, exclude_seen: str) -> None:
    served_equals_offline.main(data, model, exclude_seen, users=150)


def test_a_service_that_differs_from_the_evaluation_fails_the_benchmark(
    data: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = served_equals_offline.serve_ranks
    monkeypatch.setattr(served_equals_offline, "serve_ranks", lambda *args: asked(*args) * 0 + 11)
    with pytest.raises(typer.Exit):
        served_equals_offline.main(data, model, "none", users=150)


def test_the_state_of_a_long_history_has_the_bytes_of_a_short_one(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(constant.measure(artifact.load(model), tmp_path, (10, 3000), rounds=5))
    (sizes,) = (line for line in capsys.readouterr().out.splitlines() if "bytes of the state" in line)
    assert sizes.count("3,476") == 2

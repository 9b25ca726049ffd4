"""A synthetic shop, and a model of one, for tests of benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.jobs.datasets import synthetic_shop
from model.config import Config, ModelConfig, TrainConfig
from model.training.loop import Progress
from model.training.train import train
from tests.docker.shells import alpine_shell

__all__ = ["alpine_shell"]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data directory of a synthetic shop with 300 users; do not change it."""
    directory = tmp_path_factory.mktemp("shop")
    synthetic_shop.generate(directory, shoppers=300)
    return directory


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of a synthetic shop, for tests that do not depend on its quality."""
    data, directory = tmp_path_factory.mktemp("shop"), tmp_path_factory.mktemp("models") / "shop"
    synthetic_shop.generate(data, shoppers=100)
    train(data, directory, Config(model=ModelConfig(width=16), training=TrainConfig(epochs=1)), progress=Progress())
    return directory

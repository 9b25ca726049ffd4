"""Fixtures of the trainer's tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.jobs import generations
from app.jobs.datasets.synthetic_shop import generate
from app.jobs.retraining import loop
from app.serving import switcher
from model.config import PRESETS
from model.data.readers import read_interactions
from storage.maintenance.rebuild import Rebuilt
from tests.app.jobs.retraining.shops import TINY, Shop


@pytest.fixture
def rebuilds(monkeypatch: pytest.MonkeyPatch) -> list[Rebuilt]:
    """Statistics of each rebuild."""
    found = []
    rebuild = generations.rebuild

    async def recorded(*arguments: Any) -> Rebuilt:
        found.append(await rebuild(*arguments))
        return found[-1]

    monkeypatch.setattr(generations, "rebuild", recorded)
    return found


@pytest.fixture(scope="session")
def visits(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Clicks of each shopper, one shopper after another."""
    directory = tmp_path_factory.mktemp("shop")
    generate(directory, shoppers=440)
    table = read_interactions(directory)
    ends = table.starts[1:]
    return [[table.item_ids[item] for item in table.item[a:b]] for a, b in zip(table.starts, ends, strict=False)]


@pytest.fixture
def shop(tmp_path: Path, visits: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setitem(PRESETS, "tiny", TINY)
    monkeypatch.setattr(loop, "NICENESS", 0)  # the tests that follow are not to be slower
    for module in (switcher, generations):
        monkeypatch.setattr(module, "LIVE_FOR_S", 0.01)
    shop = Shop(tmp_path, visits)
    yield shop
    shop.client.close()

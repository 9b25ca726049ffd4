"""What the data chooses of a training: dropout and epochs, by how many events an item has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model.config import Config, DataCard, TrainConfig
from model.training import regularisation
from model.training.regularisation import SPARSE, SPARSE_EVENTS_PER_ITEM, regularised
from model.training.train import train

Make = Callable[..., Any]


def config(events_per_item: float, choice: str = "by-density") -> Config:
    training = TrainConfig.model_validate({"regularisation": choice})
    return Config(training=training, data=DataCard(events_per_item=events_per_item))


@pytest.mark.parametrize("events_per_item", [0.5, 7.0, SPARSE_EVENTS_PER_ITEM - 0.1])
def test_sparse_tables_have_more_dropout_and_fewer_epochs(events_per_item: float) -> None:
    found, plain = regularised(config(events_per_item)), Config()
    assert (found.model.dropout, found.training.epochs) == SPARSE
    assert found.model.dropout > plain.model.dropout
    assert found.training.epochs < plain.training.epochs


@pytest.mark.parametrize(("events_per_item", "choice"), [(SPARSE_EVENTS_PER_ITEM, "by-density"), (7.0, "given")])
def test_others_keep_their_own(events_per_item: float, choice: str) -> None:
    asked = config(events_per_item, choice)
    assert regularised(asked) == asked


def test_a_model_says_what_it_was_trained_with(
    shop: Path, tmp_path: Path, tiny_config: Make, silent: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regularisation, "SPARSE_EVENTS_PER_ITEM", 1e9)
    asked = tiny_config(epochs=1, patience=9, regularisation="by-density")
    told: list[Config] = []
    made = train(shop, tmp_path / "model", asked, progress=silent(), on_config=told.append)
    items = Counter(line.split("\t")[1] for line in (shop / "interactions.tsv").read_text().splitlines()[1:])
    assert made.config.data.events_per_item == pytest.approx(items.total() / len(items))
    assert (made.config.model.dropout, made.config.training.epochs) == SPARSE
    assert len(made.metrics["epochs"]) == SPARSE.epochs
    assert [each.model_dump() for each in told] == [made.config.model_dump()]

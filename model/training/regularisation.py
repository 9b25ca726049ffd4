"""Dropout and epochs by how many events an item has: rare items are learned by heart before anything of use."""

from __future__ import annotations

from typing import NamedTuple

from model.config import Config

SPARSE_EVENTS_PER_ITEM = 15.0  # tables with fewer are sparse


class Regularisation(NamedTuple):
    """Regularisation: prevents overfitting."""

    dropout: float
    epochs: int


SPARSE = Regularisation(0.5, 5)


def regularised(config: Config) -> Config:
    """Return the configuration with the regularisation that it asks for: its own, or one for its data.

    With ``by-density`` a sparse table, as the card of the data says, has that of SPARSE; others keep their own.
    """
    if config.training.regularisation == "given" or config.data.events_per_item >= SPARSE_EVENTS_PER_ITEM:
        return config
    model = config.model.model_copy(update={"dropout": SPARSE.dropout})
    training = config.training.model_copy(update={"epochs": SPARSE.epochs})
    return config.model_copy(update={"model": model, "training": training})

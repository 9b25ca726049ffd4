"""Dropout and epochs by the number of events per item: models overfit rare items before they learn anything useful."""

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
    """Return the configuration with the regularisation that it selects: its own, or one for its data.

    With ``by-density``, the regularisation of a sparse table is SPARSE; others keep their own. The data card has the
    density.
    """
    if config.training.regularisation == "given" or config.data.events_per_item >= SPARSE_EVENTS_PER_ITEM:
        return config
    model = config.model.model_copy(update={"dropout": SPARSE.dropout})
    training = config.training.model_copy(update={"epochs": SPARSE.epochs})
    return config.model_copy(update={"model": model, "training": training})

"""Decides whether a round continues from the active model or trains from scratch."""

from __future__ import annotations

from typing import Any

from model.artifact.model_directory import Artifact
from model.config import Config, TrainConfig
from model.training.warm_start import WarmStart, WarmStartError


def model_to_continue(
    config: Config, served: Artifact | None, full_every: int, last: dict[str, Any] | None
) -> Artifact | None:
    """Return the active model if the round continues from it, or None if it trains from scratch.

    Every `full_every`-th model is trained from scratch, because item codes fit the behaviour at the time of their
    assignment. So is a model after a rejected warm one, and one with another preset.

    last  the outcome of the last round
    """
    if served is None or not isinstance(served.config.training, TrainConfig):
        return None
    if served.config.training.warm_count + 1 >= full_every or (last is not None and last["outcome"] == "refused"):
        return None
    try:
        WarmStart(served).continued(config)
    except WarmStartError:
        return None
    return served

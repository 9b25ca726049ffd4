"""Whether a round goes on from the served model, or trains afresh."""

from __future__ import annotations

from typing import Any

from model.artifact.model_directory import Artifact
from model.config import Config, TrainConfig
from model.training.warm_start import WarmStart, WarmStartError


def model_to_continue(
    config: Config, served: Artifact | None, full_every: int, last: dict[str, Any] | None
) -> Artifact | None:
    """Return the served model, if a round is to go on from it; None for one that trains afresh.

    One model in `full_every` is trained afresh: codes of items fit what people did when they were assigned. So is one
    after a warm one that was refused, and one of another preset or other weights.

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

"""The options of a round of retraining, and the configuration of its trainings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.jobs.retraining.gate import Criterion
from model.artifact.model_directory import Artifact
from model.config import FULL_EVERY, Config, DataCard, TrainConfig, preset, warm_training
from model.lisa.item_followers import Lift
from model.training.warm_start import WarmStart, WarmStartError


@dataclass(frozen=True)
class RetrainingPlan:
    """The options of a round.

    max_loss   the largest accepted loss, as a share of the active model's quality, if the loss is not significant
    criterion  the measure of quality: NDCG@10, or value-weighted HR@10 if enough events have values
    memory     the memory limit of the process during training, in bytes; None for no limit
    warm       whether to continue from the active model, if there is one, except for every `full_every`-th model
    """

    preset: str = "lisa-mini"
    epochs: int | None = None
    min_events: int = 2_000
    max_events: int = 2_000_000
    max_loss: float = 0.1
    criterion: Criterion = "ndcg"
    memory: int | None = None
    warm: bool = True
    full_every: int = FULL_EVERY
    events_per_user: int | None = None
    users_sample: float = 1.0

    def config(self, served: Artifact | None, lift: Lift | None = None, *, is_warm: bool = False) -> Config:
        """Return the configuration of a training on all events of its data directory.

        The event weights and unseen types are those of the active model, if there is one.
        """
        shape, training = preset(self.preset)
        about: dict[str, Any] = {"epochs": self.epochs or training.epochs, "events_per_user": self.events_per_user}
        if lift is not None:
            shape = shape.model_copy(update={"lift_decay": lift.decay})
            about["lift_strength"] = lift.strength
        training = training.model_copy(update=about)
        training = warm_training(training) if is_warm else training
        card = DataCard(train_on="all", users_sample=self.users_sample)
        kept = {} if served is None else served.config.model_dump(include={"event_weights", "unseen_types"})
        return Config(model=shape, training=training, data=card, **kept)

    def model_to_continue(self, served: Artifact | None, last: dict[str, Any] | None) -> Artifact | None:
        """Return the active model if the round continues from it, or None if it trains from scratch.

        Every `full_every`-th model is trained from scratch, because item codes fit the behaviour at the time of their
        assignment. So is a model after a rejected warm one, and one with another preset.

        last  the outcome of the last round
        """
        if not self.warm or served is None or not isinstance(served.config.training, TrainConfig):
            return None
        is_full = served.config.training.warm_count + 1 >= self.full_every
        if is_full or (last is not None and last["outcome"] == "refused"):
            return None
        try:
            WarmStart(served).continued(self.config(served))
        except WarmStartError:
            return None
        return served

"""The generations that are arms of an experiment."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from app.recommendation.experiments import ExperimentRecommender
from app.recommendation.recommender import Recommender
from app.schemas.operations import Experiment
from app.serving.served_generation import ServedGeneration, TenantContext
from storage.records import NamedGeneration


@dataclass(frozen=True, slots=True)
class ExperimentArms:
    """An experiment, if any, and the generations of its arms by name; none if it compares scenarios.

    text  the experiment's JSON in the store
    """

    experiment: Experiment | None = None
    text: str | None = None
    generations: Mapping[str, ServedGeneration] = field(default_factory=dict)

    @classmethod
    async def load(cls, context: TenantContext, text: str | None, served: Iterable[ServedGeneration]) -> ExperimentArms:
        """Load the generations of the experiment, except those that are already served; None means no experiment.

        raises  ValueError  when the text is not a valid experiment, or one of its models cannot be loaded
        """
        if text is None:
            return cls()
        experiment = Experiment.model_validate_json(text)
        if experiment.over == "scenarios":
            return cls(experiment, text)
        by_name = {one.named.name: one for one in served}
        for name in experiment.shares:
            if name not in by_name:
                by_name[name] = await asyncio.to_thread(ServedGeneration.load, context, name)
        return cls(experiment, text, {name: by_name[name] for name in experiment.shares})

    @property
    def name(self) -> str:
        """The experiment's name; "" if there is none."""
        return "" if self.experiment is None else self.experiment.name

    def with_replaced(self, before: ServedGeneration, after: ServedGeneration) -> ExperimentArms:
        """Return the same arms with one generation replaced, after its catalogue has changed."""
        return replace(
            self, generations={name: after if one is before else one for name, one in self.generations.items()}
        )

    def with_served(self, served: Mapping[NamedGeneration, ServedGeneration]) -> ExperimentArms:
        """Return the same arms, with generations that are served already instead of those that were loaded again."""
        return replace(self, generations={name: served.get(one.named, one) for name, one in self.generations.items()})

    def build_recommender(self, default: Recommender) -> Recommender | ExperimentRecommender:
        """Build a recommender that answers each user from their arm, and all other requests with `default`."""
        if not self.generations or self.experiment is None:
            return default
        arms = {name: one.build_recommender(self.name) for name, one in self.generations.items()}
        return ExperimentRecommender(self.experiment, arms, default)

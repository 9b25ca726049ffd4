"""A served generation with everything that its recommendations are computed from."""

from collections.abc import Collection
from dataclasses import dataclass

from app.catalogue.live_catalogue import LiveCatalogue
from app.recommendation.ranking.together import LiveComplements
from app.recommendation.ranking.trending import Trending
from model.data.orders import PURCHASE
from model.inference.engine import Engine
from model.lisa.item_complements import Complements
from model.lisa.item_intervals import NO_INTERVALS, Intervals
from storage.state.generation import Generation


@dataclass(frozen=True, slots=True)
class GenerationContext:
    """A generation's name, catalogue, engine, trends and counts."""

    name: str
    generation: Generation
    catalogue: LiveCatalogue
    engine: Engine
    trending: Trending
    complements: Complements
    live_complements: LiveComplements
    intervals: Intervals = NO_INTERVALS

    @property
    def bought_types(self) -> Collection[str]:
        """The event types that count as buying: `purchase`, or all stepping types if training had no purchases."""
        if self.intervals.of_purchases:
            return (PURCHASE,)
        return [name for name, weight in self.generation.event_weights.items() if weight > 0]

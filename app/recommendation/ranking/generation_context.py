"""One served generation with everything that recommendations are computed from."""

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
    """A generation by its name, with the catalogue, the engine, the trends and what was counted that belong to it."""

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
        """Types of events that buy an item: `purchase`, or all that step where the model was trained on none."""
        if self.intervals.of_purchases:
            return (PURCHASE,)
        return [name for name, weight in self.generation.event_weights.items() if weight > 0]

"""One served generation with everything that recommendations are computed from."""

from dataclasses import dataclass

from app.catalogue.live_catalogue import LiveCatalogue
from app.recommendation.ranking.trending import Trending
from model.inference.engine import Engine
from model.lisa.item_complements import NO_COMPLEMENTS, Complements
from storage.state.generation import Generation


@dataclass(frozen=True, slots=True)
class GenerationContext:
    """A generation by its name, with the catalogue, the engine, the trends and the complements that belong together."""

    name: str
    generation: Generation
    catalogue: LiveCatalogue
    engine: Engine
    trending: Trending
    complements: Complements = NO_COMPLEMENTS

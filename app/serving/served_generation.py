"""A generation served by a process: its model, its catalogue, and the recommender that uses them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from app.catalogue.background_tasks import BackgroundTasks
from app.catalogue.cold_item_codes import NO_ASSIGNMENTS, Assignments, ColdItemCodes
from app.catalogue.description_codes import DescriptionCodes
from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.overrides.item_overrides import ItemOverrides
from app.events.cold_item_learner import ColdItemLearner
from app.events.live_signals import LiveSignals
from app.events.user_data import UserData
from app.observability.metrics import Metrics
from app.recommendation.executor import EngineThreads
from app.recommendation.ranking.generation_context import GenerationContext
from app.recommendation.ranking.together import LiveComplements
from app.recommendation.ranking.trending import Trending
from app.recommendation.recommender import Readers, Recommender
from app.recommendation.state_reader import LogReader, StateReader
from app.recommendation.user_properties import UserPropertyReader
from app.schemas.operations import ServedModel
from app.serving.model_locations import load_model, models_of
from app.settings import Settings
from model.artifact.model_directory import Artifact, ArtifactError
from model.cold_items import with_cold_items
from model.inference.engine import Engine, open_engine
from storage.folders.place import Place
from storage.protocol import UserStore
from storage.records import NamedGeneration
from storage.state.event import IMPRESSION
from storage.state.generation import Generation


@dataclass(frozen=True, slots=True)
class TenantContext:
    """The data that all generations of one tenant share in this process.

    item_codes  codes of items that models have not learned
    overrides   values of items that the tenant has set through the API
    tasks       background tasks, which assign codes to items
    """

    settings: Settings
    store: UserStore
    engine_threads: EngineThreads
    metrics: Metrics
    signals: LiveSignals
    log_reader: LogReader
    item_codes: ColdItemCodes = field(default_factory=ColdItemCodes)
    overrides: ItemOverrides = field(default_factory=ItemOverrides)
    tasks: BackgroundTasks = field(default_factory=BackgroundTasks)


@dataclass(slots=True, eq=False)
class ServedGeneration:
    """One served generation. None of its parts is replaced, so a request keeps those with which it started.

    artifact           the model as it was trained
    learner            assigns codes to unlearned items from the events on them
    description_codes  assigns codes to unlearned items from their titles and categories
    assignments        all code assignments when this object was built
    cold_items         the assignments that fit the model; catalogue and engine include these items
    """

    context: TenantContext
    named: NamedGeneration
    generation: Generation
    artifact: Artifact
    learner: ColdItemLearner
    description_codes: DescriptionCodes
    catalogue: LiveCatalogue
    engine: Engine
    assignments: Assignments = field(default_factory=lambda: NO_ASSIGNMENTS)
    cold_items: Assignments = field(default_factory=lambda: NO_ASSIGNMENTS)
    trending: Trending = field(init=False)
    live_complements: LiveComplements = field(init=False)
    recommender: Recommender = field(init=False)
    users: UserData = field(init=False)
    model: ServedModel = field(init=False)

    def __post_init__(self) -> None:
        context, name = self.context, self.named.name
        tenant = context.settings.tenant
        self.trending = Trending(context.signals.trend_counter, self.catalogue)
        learned = len(self.artifact.items)
        self.live_complements = LiveComplements(context.signals.order_counter, self.catalogue, learned)
        self.recommender = self.build_recommender("")
        self.users = UserData(name, self.generation, self.catalogue, context.store, tenant)
        self.model = describe_model(context.settings, self.artifact, name, self.generation.dtype.itemsize)

    @classmethod
    def load(cls, context: TenantContext, name: str) -> ServedGeneration:
        """Load the model with this name from the models folder.

        raises  NoSuchModel, ArtifactError  when it cannot be loaded
        """
        with _failing_as_artifact(name):
            return cls.build(context, models_of(context.settings).load(name), name)

    @classmethod
    def load_initial(cls, context: TenantContext, place: Place) -> ServedGeneration:
        """Load the model at that place, which the settings name; raises as `load` does."""
        with _failing_as_artifact(place.name):
            artifact = load_model(place, context.settings)
            return cls.build(context, artifact, artifact.name)

    @classmethod
    def build(cls, context: TenantContext, artifact: Artifact, name: str) -> ServedGeneration:
        """Build everything that serving the model under this name requires."""
        settings, store, engine_thread = context.settings, context.store, context.engine_threads.light
        generation, codes, tasks = generation_of(artifact), context.item_codes, context.tasks
        served = cls(
            context=context,
            named=NamedGeneration(name, generation.tag),
            generation=generation,
            artifact=artifact,
            learner=ColdItemLearner(artifact, generation, codes, engine_thread, store, settings.tenant, tasks),
            description_codes=DescriptionCodes(artifact, codes, engine_thread, store, settings.tenant, tasks),
            catalogue=LiveCatalogue(artifact.items, context.overrides),
            engine=open_engine(artifact, settings.device),
        )
        return served.with_new_assignments() if served.has_new_assignments else served

    @property
    def has_new_assignments(self) -> bool:
        """Whether codes were assigned since this object was built."""
        return self.context.item_codes.of(self.named.tag) is not self.assignments

    def with_new_assignments(self) -> ServedGeneration:
        """Build the same generation with all items that have codes now."""
        assignments = self.context.item_codes.of(self.named.tag)
        cold_items, codes = assignments.fitting(self.artifact)
        extended = with_cold_items(self.artifact, [*cold_items], codes)
        engine = open_engine(extended, self.context.settings.device)
        if self.engine.has_similarity:  # requests have needed them, and should not wait for them again
            engine.prepare_similarity()
        return replace(
            self,
            assignments=assignments,
            cold_items=cold_items,
            catalogue=LiveCatalogue(extended.items, self.context.overrides),
            engine=engine,
        )

    def build_recommender(self, experiment: str) -> Recommender:
        """Build a recommender for an arm of the experiment with this name; "" for none."""
        context, generation, tenant = self.context, self.generation, self.context.settings.tenant
        return Recommender(
            GenerationContext(
                name=self.named.name,
                generation=generation,
                catalogue=self.catalogue,
                engine=self.engine,
                trending=self.trending,
                complements=self.artifact.complements,
                live_complements=self.live_complements,
                intervals=self.artifact.intervals,
            ),
            Readers(
                StateReader(context.store, tenant, generation, context.metrics.store),
                context.log_reader,
                UserPropertyReader(context.store.properties, tenant, context.overrides),
            ),
            context.engine_threads,
            context.metrics,
            context.signals.click_through,
            experiment,
        )


@contextmanager
def _failing_as_artifact(name: str) -> Iterator[None]:
    try:
        yield
    except ArtifactError:
        raise
    except Exception as exc:  # as when the machine lacks memory for it, or the device is lost
        raise ArtifactError(f"model {name!r} cannot be loaded: {exc!r}") from exc


def generation_of(artifact: Artifact) -> Generation:
    """Return the generation of the model, which determines how events are folded into states."""
    shape = artifact.config.model
    return Generation(
        tag=bytes.fromhex(artifact.tag),
        decay_rates=shape.decay_rates,
        codewords=shape.history_codewords,
        item_index=artifact.items.rows,
        codes=artifact.history_codes,
        event_weights={kind: one for kind, one in artifact.config.event_weights.items() if kind != IMPRESSION},
        unseen_types=frozenset(artifact.config.unseen_types),
        stepped_items=shape.recent_items,
        shares=artifact.history_shares,
    )


def describe_model(settings: Settings, artifact: Artifact, name: str, state_bytes: int) -> ServedModel:
    """Return the answer of ``GET /v1/model`` for the model."""
    return ServedModel(
        generation=name,
        tag=artifact.tag,
        device=settings.device,
        items=len(artifact.items),
        state_bytes=state_bytes,
        config=artifact.config.model_dump(mode="json"),
        metrics=artifact.metrics,
    )

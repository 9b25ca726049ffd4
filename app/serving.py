"""What one process serves: a generation with all that answers from it, and following the store's pointer to another."""

import asyncio
import logging
from concurrent.futures import Executor
from dataclasses import dataclass

from app.catalogue import Catalogue
from app.metrics import Metrics
from app.models_folder import load_named
from app.recommend import Recommender
from app.schemas import ServedModel
from app.settings import Settings
from app.users import Users
from model.artifact import Artifact, ArtifactError
from model.engine import Engine
from storage.state import Generation
from storage.store import NamedGeneration, StorageError, UserStore

LOOK_EVERY_S = 0.25
RETRY_AFTER_S = 5.0  # when the model that the pointer names could not be loaded
ANNOUNCE_EVERY_S = 20.0
LIVE_FOR_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Serving:
    """One generation, served. A request works with the one it began with."""

    named: NamedGeneration
    generation: Generation
    catalogue: Catalogue
    recommender: Recommender
    users: Users
    model: ServedModel


class Switch:
    """Holds what is served, and changes it when the store's pointer does or a request wants it to.

    While another model is read, the old one serves; the change itself is one assignment.
    """

    def __init__(
        self, settings: Settings, artifact: Artifact, store: UserStore, engine_thread: Executor, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._store = store
        self._engine_thread = engine_thread
        self._metrics = metrics
        self._one_at_a_time = asyncio.Lock()
        self._failed: NamedGeneration | None = None
        self._retry_at_s = 0.0
        self._announce_at_s = 0.0
        self.serving = self._ready(artifact, artifact.name)

    async def follow(self) -> None:
        """Look where the pointer points, again and again, and tell the store what is served here."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Serve what the store's pointer points at. What goes wrong is logged, and the old model goes on serving."""
        try:
            await self._announce()
            active = await self._store.generations.active()
            if active is not None and active.tag != self.serving.named.tag and not self._waits_after_failure(active):
                async with self._one_at_a_time:
                    await self._go_to(active)
        except StorageError as exc:
            logger.debug("cannot look which generation is active: %s", exc)
        except Exception:
            logger.exception("looking which generation is active failed")

    async def activate(self, name: str) -> Serving:
        """Let everybody serve the model of that name, this process from now on.

        raises  NoSuchModel, ArtifactError  when this process cannot load it; nothing changed then
                StorageError                when the pointer could not be set; the same
        """
        async with self._one_at_a_time:
            serving = await asyncio.to_thread(self._load, name)
            await self._store.generations.activate(serving.named)
            self._serve(serving)
            return serving

    async def _announce(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._announce_at_s:
            await self._store.generations.announce(self.serving.named, LIVE_FOR_S)
            self._announce_at_s = now_s + ANNOUNCE_EVERY_S

    def _waits_after_failure(self, active: NamedGeneration) -> bool:
        return active == self._failed and asyncio.get_running_loop().time() < self._retry_at_s

    async def _go_to(self, active: NamedGeneration) -> None:
        try:
            serving = await asyncio.to_thread(self._load, active.name)
            if serving.named != active:
                raise ArtifactError(
                    f"model {active.name!r} is generation {serving.named.tag.hex()} here, and {active.tag.hex()} is "
                    f"active; bring that one here, or 'lisarec activate {active.name}' to serve this one"
                )
        except (ValueError, OSError) as exc:
            if self._failed != active:
                logger.error("still serving %r: %s", self.serving.named.name, exc)
            self._failed, self._retry_at_s = active, asyncio.get_running_loop().time() + RETRY_AFTER_S
            self._metrics.count_switch("failed")
        else:
            self._serve(serving)

    def _serve(self, serving: Serving) -> None:
        logger.warning("serving %r instead of %r", serving.named.name, self.serving.named.name)
        self._store.fold_into([serving.generation])
        self.serving = serving
        self._failed = None
        self._announce_at_s = 0
        self._metrics.count_switch("switched")

    def _load(self, name: str) -> Serving:
        return self._ready(load_named(self._settings.models_folder, name), name)

    def _ready(self, artifact: Artifact, name: str) -> Serving:
        generation = generation_of(artifact)
        catalogue = Catalogue(artifact.items)
        store, tenant = self._store, self._settings.tenant
        engine = Engine(artifact, self._settings.device)
        return Serving(
            named=NamedGeneration(name, generation.tag),
            generation=generation,
            catalogue=catalogue,
            recommender=Recommender(
                artifact.name, generation, catalogue, engine, self._engine_thread, store, tenant, self._metrics
            ),
            users=Users(artifact.name, generation, catalogue, store, tenant),
            model=_served_model(self._settings, artifact),
        )


def generation_of(artifact: Artifact) -> Generation:
    """How the artifact's generation folds events."""
    shape = artifact.config.model
    return Generation(
        tag=bytes.fromhex(artifact.tag),
        decay_rates=shape.decay_rates,
        codewords=shape.history_codewords,
        item_index=artifact.items.rows,
        codes=artifact.history_codes,
        event_weights=artifact.config.event_weights,
        stepped_items=shape.recent_items,
    )


def _served_model(settings: Settings, artifact: Artifact) -> ServedModel:
    return ServedModel(
        generation=artifact.name,
        tag=artifact.tag,
        device=settings.device,
        items=len(artifact.items),
        config=artifact.config.model_dump(mode="json"),
        metrics=artifact.metrics,
    )

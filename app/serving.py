"""What one process serves: a generation with all that answers from it, and following the store's pointer to another."""

import asyncio
import logging
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass

from app import no_model
from app.metrics import Metrics
from app.models_folder import load_named
from app.recommend import Recommender
from app.said import Said
from app.schemas import ServedModel
from app.settings import Settings
from app.shelf import Shelf
from app.trends import Trending, Trends
from app.users import Users
from model.artifact import Artifact, ArtifactError
from model.engine import Engine
from storage.state import Generation
from storage.store import NamedGeneration, StorageError, UserStore

LOOK_EVERY_S = 0.25
RETRY_AFTER_S = 5.0  # when the model that the pointer names could not be loaded
ANNOUNCE_EVERY_S = 20.0
LIVE_FOR_S = 60.0
ITEMS_AT_ONCE = 1000
COUNT_EVERY_S = 1.0  # items, while there is no model; and at most a twentieth of the time
COUNTING_SHARE = 0.05

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Serving:
    """One generation, served. A request works with the one it began with."""

    named: NamedGeneration
    generation: Generation
    catalogue: Shelf
    engine: Engine
    trending: Trending
    recommender: Recommender
    users: Users
    model: ServedModel


class Switch:
    """Holds what is served, and changes it when the store's pointer does or a request wants it to.

    While another model is read, the old one serves; the change itself is one assignment.
    """

    def __init__(
        self,
        settings: Settings,
        artifact: Artifact,
        store: UserStore,
        engine_thread: Executor,
        metrics: Metrics,
        trends: Trends,
    ) -> None:
        self._settings = settings
        self._store = store
        self._engine_thread = engine_thread
        self._metrics = metrics
        self._trends = trends
        self._said = Said()
        self._one_at_a_time = asyncio.Lock()
        self._one_reads_items = asyncio.Lock()
        self._failed: NamedGeneration | None = None
        self._retry_at_s = 0.0
        self._announce_at_s = 0.0
        self._count_at_s = 0.0
        self.serving = self._ready(artifact, artifact.name)
        self._note_served()

    async def follow(self) -> None:
        """Look where the pointer points, again and again, and tell the store what is served here."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Serve what the store's pointer points at. What goes wrong is logged, and the old model goes on serving."""
        try:
            await self._announce()
            version = self._said.version
            watched = await self._store.watched()
            if watched.items_version < version:  # the store has lost something, or is another one
                self._said.version = 0
            if watched.items_version != version:
                await self.look_at_items()
            active = watched.active
            if active is not None and active.tag != self.serving.named.tag and not self._waits_after_failure(active):
                async with self._one_at_a_time:
                    await self._go_to_looking_at_items(active)
            if self.serving.named.tag == no_model.TAG:
                await self._count()
        except StorageError as exc:
            logger.debug("cannot look which generation is active: %s", exc)
        except Exception:
            logger.exception("looking which generation is active failed")

    async def look_at_items(self) -> None:
        """Go by what was said of items until now; raises StorageError where that cannot be read."""
        async with self._one_reads_items:
            while True:
                changes = await self._store.item_changes(self._settings.tenant, self._said.version, ITEMS_AT_ONCE)
                if not changes.entries:
                    return
                self._said.take(changes)
                await asyncio.to_thread(self.serving.catalogue.catch_up)

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

    async def _count(self) -> None:
        """Serve what is popular now, without a model."""
        begin_s = asyncio.get_running_loop().time()
        if begin_s < self._count_at_s:
            return
        before, generation = self.serving, self.serving.generation
        catalogue = await no_model.shelf(self._store, self._settings.tenant, self._said)
        end_s = asyncio.get_running_loop().time()
        self._count_at_s = end_s + max(COUNT_EVERY_S, (end_s - begin_s) / COUNTING_SHARE)
        counted = self._served(before.named, generation, catalogue, before.engine, before.model)
        catalogue.catch_up()  # with what was said while it was counted
        if self.serving is before:  # and no request has activated a model meanwhile
            self.serving = counted

    def _waits_after_failure(self, active: NamedGeneration) -> bool:
        return active == self._failed and asyncio.get_running_loop().time() < self._retry_at_s

    async def _go_to_looking_at_items(self, active: NamedGeneration) -> None:
        """Loading may take longer than an unavailable item may be shown."""

        async def look() -> None:
            while True:
                with suppress(StorageError):
                    await self.look_at_items()
                await asyncio.sleep(LOOK_EVERY_S)

        async with asyncio.TaskGroup() as group:
            looking = group.create_task(look())
            await self._go_to(active)
            looking.cancel()

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
        serving.catalogue.catch_up()  # with what was said while it was loaded
        self.serving = serving
        self._failed = None
        self._announce_at_s = 0
        self._metrics.count_switch("switched")
        self._note_served()

    def _note_served(self) -> None:
        generation, named = self.serving.generation, self.serving.named
        self._trends.count_types(generation.event_weights)
        state_bytes = generation.dtype.itemsize
        self._metrics.serve(self._settings.tenant, named.name, named.tag.hex(), state_bytes)

    def _load(self, name: str) -> Serving:
        return self._ready(load_named(self._settings.models_folder, name), name)

    def _ready(self, artifact: Artifact, name: str) -> Serving:
        generation = generation_of(artifact)
        engine = Engine(artifact, self._settings.device)
        named = NamedGeneration(name, generation.tag)
        model = _served_model(self._settings, artifact, name, generation.dtype.itemsize)
        return self._served(named, generation, Shelf(artifact.items, self._said), engine, model)

    def _served(
        self,
        named: NamedGeneration,
        generation: Generation,
        catalogue: Shelf,
        engine: Engine,
        model: ServedModel,
    ) -> Serving:
        store, tenant = self._store, self._settings.tenant
        trending = Trending(self._trends, catalogue)
        return Serving(
            named=named,
            generation=generation,
            catalogue=catalogue,
            engine=engine,
            trending=trending,
            recommender=Recommender(
                named.name, generation, catalogue, engine, self._engine_thread, store, tenant, self._metrics
            ),
            users=Users(named.name, generation, catalogue, store, tenant),
            model=model,
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
        unseen_types=frozenset(artifact.config.unseen_types),
        stepped_items=shape.recent_items,
    )


def _served_model(settings: Settings, artifact: Artifact, name: str, state_bytes: int) -> ServedModel:
    return ServedModel(
        generation=name,
        tag=artifact.tag,
        device=settings.device,
        items=len(artifact.items),
        state_bytes=state_bytes,
        config=artifact.config.model_dump(mode="json"),
        metrics=artifact.metrics,
    )

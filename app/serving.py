"""What one process serves: a generation with all that answers from it, and following the store's pointer to another."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import ValidationError

from app import no_model
from app.assigned import NONE, CodeAssignment, ColdItemCodes
from app.errors import InvalidRequest, details_of
from app.experiments import Split
from app.live import LiveSignals
from app.metrics import Metrics
from app.models_folder import load_named
from app.newcomers import ColdItemLearner
from app.recommend import Recommender
from app.said import ItemOverrides
from app.schemas.operations import Experiment, ServedModel
from app.settings import Settings
from app.shelf import LiveCatalogue
from app.trends import Trending
from app.users import UserData
from model.artifact import Artifact, ArtifactError
from model.cold import fits, with_cold
from model.engine import Engine
from storage.errors import StorageError
from storage.protocol import UserStore
from storage.records import NamedGeneration
from storage.state import Generation

LOOK_EVERY_S = 0.25
RETRY_AFTER_S = 5.0  # when the model that the pointer names could not be loaded
ANNOUNCE_EVERY_S = 20.0
LIVE_FOR_S = 60.0
ITEMS_AT_ONCE = 1000
MADE_EVERY_S = 1.0  # a catalogue of the same model: counted items while there is none, or items with new codes
MAKING_SHARE = 0.05  # of the time, at most

logger = logging.getLogger(__name__)
WorkT = TypeVar("WorkT")


@dataclass(frozen=True, slots=True)
class ServedGeneration:
    """One generation, served. A request works with the one it began with.

    artifact   the model as it was trained
    assigned   codes of items that it has not learned, as they were when this was made
    cold       those that fit the model; catalogue and engine have these items too
    newcomers  watches for more of them
    """

    named: NamedGeneration
    generation: Generation
    artifact: Artifact
    assigned: Mapping[str, CodeAssignment]
    cold: Mapping[str, CodeAssignment]
    newcomers: ColdItemLearner
    catalogue: LiveCatalogue
    engine: Engine
    trending: Trending
    recommender: Recommender
    users: UserData
    model: ServedModel


class GenerationSwitcher:
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
        live: LiveSignals,
    ) -> None:
        self._settings = settings
        self._store = store
        self._engine_thread = engine_thread
        self._metrics = metrics
        self._live = live
        self._assigned = ColdItemCodes()
        self._said = ItemOverrides()
        self._one_at_a_time = asyncio.Lock()
        self._one_reads_items = asyncio.Lock()
        self._failed: NamedGeneration | None = None
        self._retry_at_s = 0.0
        self._announce_at_s = 0.0
        self._make_at_s = 0.0
        self._arms: dict[str, ServedGeneration] = {}  # of an experiment, beside what everybody else is served
        self.experiment: Experiment | None = None
        self._experiment_text: str | None = None  # as it was noted, once it is gone by
        self._experiment_at_s = 0.0
        self._take(self._ready(artifact, artifact.name))
        self._note_served()

    async def follow(self) -> None:
        """Look where the pointer points, again and again, and tell the store what is served here."""
        while True:
            await self.poll()
            await asyncio.sleep(LOOK_EVERY_S)

    async def poll(self) -> None:
        """Serve what the store's pointer points at. What goes wrong is logged, and the old model goes on serving."""
        try:
            await self._announce()
            version = self._said.version
            pointers = await self._store.pointers()
            if pointers.items_version < version:  # the store has lost something, or is another one
                self._said.version = 0
            if pointers.items_version != version:
                await self.refresh_items()
            active = pointers.active
            if active is not None and active.tag != self.current.named.tag and not self._waits_after_failure(active):
                async with self._one_at_a_time:
                    await self._looking_at_items(self._go_to(active))
            if pointers.experiment != self._experiment_text:
                await self._go_by_experiment(pointers.experiment)
            if self.current.named.tag == no_model.TAG:
                await self._make_again(self.current, self._counted)
            for serving in self._served():
                if len(serving.artifact.items):
                    serving.newcomers.introduce(self._said)
                if self._assigned.of(serving.named.tag) is not serving.assigned:
                    await self._make_again(serving, self._grown)
        except StorageError as exc:
            logger.debug("cannot look which generation is active: %s", exc)
        except Exception:
            logger.exception("looking which generation is active failed")

    async def refresh_items(self) -> None:
        """Go by what was said of items until now; raises StorageError where that cannot be read."""
        async with self._one_reads_items:
            while True:
                changes = await self._store.item_changes(self._settings.tenant, self._said.version, ITEMS_AT_ONCE)
                if not changes.entries:
                    return
                self._assigned.apply(changes.entries)
                self._said.apply(changes)
                for serving in self._served():
                    await asyncio.to_thread(serving.catalogue.catch_up)

    async def activate(self, name: str) -> ServedGeneration:
        """Let everybody serve the model of that name, this process from now on.

        raises  NoSuchModel, ArtifactError  when this process cannot load it; nothing changed then
                StorageError                when the pointer could not be set; the same
        """
        async with self._one_at_a_time:
            serving = await asyncio.to_thread(self._load, name)
            await self._store.generations.activate(serving.named)
            self._serve(serving)
            return serving

    async def experiment_with(self, body: object) -> Experiment:
        """Let everybody go by the parsed body of ``PUT /v1/admin/experiment``, this process from now on.

        raises  InvalidRequest              when it is no experiment
                NoSuchModel, ArtifactError  when this process cannot load a model of it; nothing changed then
                StorageError                when it could not be noted; the same
        """
        try:
            experiment = Experiment.model_validate(body)
        except ValidationError as exc:
            raise InvalidRequest("the body is no experiment", details_of(exc)) from None
        async with self._one_at_a_time:
            arms = await self._arms_of(experiment)
            text = experiment.model_dump_json()
            await self._store.generations.set_experiment(text)
            self._experiment_with(experiment, text, arms)
        return experiment

    async def end_experiment(self) -> None:
        """Let everybody serve the active model again; StorageError when that could not be noted."""
        async with self._one_at_a_time:
            await self._store.generations.set_experiment(None)
            self._experiment_with(None, None, {})

    async def _go_by_experiment(self, text: str | None) -> None:
        if asyncio.get_running_loop().time() < self._experiment_at_s:
            return
        async with self._one_at_a_time:
            try:
                experiment = None if text is None else Experiment.model_validate_json(text)
                arms = {} if experiment is None else await self._arms_of(experiment)
            except (ValueError, OSError) as exc:
                logger.error("not going by the experiment: %s", exc)
                self._experiment_at_s = asyncio.get_running_loop().time() + RETRY_AFTER_S
            else:
                self._experiment_with(experiment, text, arms)

    async def _arms_of(self, experiment: Experiment) -> dict[str, ServedGeneration]:
        """By name; those that are served already as they are."""
        served = {serving.named.name: serving for serving in self._served()}
        return {
            name: served[name] if name in served else await asyncio.to_thread(self._load, name)
            for name in experiment.shares
        }

    def _experiment_with(
        self, experiment: Experiment | None, text: str | None, arms: dict[str, ServedGeneration]
    ) -> None:
        logger.warning("experiment: %s", "none" if experiment is None else text)
        self.experiment, self._experiment_text, self._arms = experiment, text, arms
        self._announce_at_s = 0
        for serving in arms.values():
            serving.catalogue.catch_up()  # with what was said while it was loaded
        self._spread()

    def _served(self) -> list[ServedGeneration]:
        """First what everybody is served who is in no experiment."""
        by_tag = {serving.named.tag: serving for serving in (self.current, *self._arms.values())}
        return list(by_tag.values())

    async def _announce(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._announce_at_s:
            for serving in self._served():
                await self._store.generations.announce(serving.named, LIVE_FOR_S)
            self._announce_at_s = now_s + ANNOUNCE_EVERY_S

    async def _make_again(
        self, before: ServedGeneration, make: Callable[[ServedGeneration], Awaitable[ServedGeneration]]
    ) -> None:
        """Serve the same generation with another catalogue."""
        begin_s = asyncio.get_running_loop().time()
        if begin_s < self._make_at_s:
            return
        made = await self._looking_at_items(make(before))
        end_s = asyncio.get_running_loop().time()
        self._make_at_s = end_s + max(MADE_EVERY_S, (end_s - begin_s) / MAKING_SHARE)
        made.catalogue.catch_up()  # with what was said while it was made
        self._arms = {name: made if serving is before else serving for name, serving in self._arms.items()}
        self._take(made if self.current is before else self.current)  # a request may have activated a model meanwhile

    async def _counted(self, before: ServedGeneration) -> ServedGeneration:
        """What is popular now, without a model."""
        catalogue = await no_model.shelf(self._store, self._settings.tenant, self._said)
        return self._with(before, catalogue=catalogue)

    async def _grown(self, before: ServedGeneration) -> ServedGeneration:
        """With the items that have codes now."""
        return await asyncio.to_thread(self._with_assigned, before)

    def _waits_after_failure(self, active: NamedGeneration) -> bool:
        return active == self._failed and asyncio.get_running_loop().time() < self._retry_at_s

    async def _looking_at_items(self, work: Awaitable[WorkT]) -> WorkT:
        """What it comes to; loading may take longer than an unavailable item may be shown."""

        async def look() -> None:
            while True:
                with suppress(StorageError):
                    await self.refresh_items()
                await asyncio.sleep(LOOK_EVERY_S)

        looking = asyncio.create_task(look())
        try:
            return await work
        finally:
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
                logger.error("still serving %r: %s", self.current.named.name, exc)
            self._failed, self._retry_at_s = active, asyncio.get_running_loop().time() + RETRY_AFTER_S
            self._metrics.generations.count_switch("failed")
        else:
            self._serve(serving)

    def _serve(self, serving: ServedGeneration) -> None:
        logger.warning("serving %r instead of %r", serving.named.name, self.current.named.name)
        serving.catalogue.catch_up()  # with what was said while it was loaded
        self._take(serving)
        self._failed = None
        self._announce_at_s = 0
        self._metrics.generations.count_switch("switched")
        self._note_served()

    def _take(self, serving: ServedGeneration) -> None:
        """The one assignment that a change is."""
        self.current = serving
        self._spread()

    def _spread(self) -> None:
        """Let everything else work with what is served now."""
        served, experiment = self._served(), self.experiment
        name = "" if experiment is None else experiment.name
        for serving in served:
            counted = [kind for kind, weight in serving.generation.event_weights.items() if weight > 0]
            serving.newcomers.serve(serving.catalogue, serving.engine, serving.cold)
            self._live.click_through.serve(serving.named.tag, serving.named.name, name, counted)
        self._live.learners = [serving.newcomers for serving in served if len(serving.artifact.items)]
        self._store.serve_generations([serving.generation for serving in served])
        self.recommender: Recommender | Split = self.current.recommender
        if experiment is not None:
            arms = {arm: self._recommender_in(name, serving) for arm, serving in self._arms.items()}
            self.recommender = Split(experiment, arms, self.current.recommender)

    def _recommender_in(self, experiment: str, serving: ServedGeneration) -> Recommender:
        return self._recommender(
            serving.named.name, serving.generation, serving.catalogue, serving.engine, serving.trending, experiment
        )

    def _note_served(self) -> None:
        generation, named = self.current.generation, self.current.named
        self._live.trend_counter.count_types(generation.event_weights)
        state_bytes = generation.dtype.itemsize
        self._metrics.generations.set_served(self._settings.tenant, named.name, named.tag.hex(), state_bytes)

    def _load(self, name: str) -> ServedGeneration:
        return self._ready(load_named(self._settings.models_folder, name), name)

    def _ready(self, artifact: Artifact, name: str) -> ServedGeneration:
        store, tenant = self._store, self._settings.tenant
        generation = generation_of(artifact)
        catalogue, engine = LiveCatalogue(artifact.items, self._said), Engine(artifact, self._settings.device)
        trending = Trending(self._live.trend_counter, catalogue)
        serving = ServedGeneration(
            named=NamedGeneration(name, generation.tag),
            generation=generation,
            artifact=artifact,
            assigned=NONE,
            cold=NONE,
            newcomers=ColdItemLearner(artifact, generation, self._assigned, self._engine_thread, store, tenant),
            catalogue=catalogue,
            engine=engine,
            trending=trending,
            recommender=self._recommender(name, generation, catalogue, engine, trending),
            users=UserData(name, generation, catalogue, store, tenant),
            model=_served_model(self._settings, artifact, name, generation.dtype.itemsize),
        )
        return serving if self._assigned.of(generation.tag) is NONE else self._with_assigned(serving)

    def _with_assigned(self, before: ServedGeneration) -> ServedGeneration:
        assigned = self._assigned.of(before.named.tag)
        cold = {item_id: one for item_id, one in assigned.items() if fits(before.artifact, item_id, one.codes)}
        grown = with_cold(before.artifact, {item_id: one.codes for item_id, one in cold.items()})
        engine = Engine(grown, self._settings.device)
        return self._with(
            replace(before, assigned=assigned, cold=cold),
            catalogue=LiveCatalogue(grown.items, self._said),
            engine=engine,
        )

    def _with(
        self, before: ServedGeneration, catalogue: LiveCatalogue, engine: Engine | None = None
    ) -> ServedGeneration:
        """The same generation, of whose catalogue everything is made that belongs to it."""
        engine = engine or before.engine
        name, generation, trending = before.named.name, before.generation, Trending(self._live.trend_counter, catalogue)
        return replace(
            before,
            catalogue=catalogue,
            engine=engine,
            trending=trending,
            recommender=self._recommender(name, generation, catalogue, engine, trending),
            users=UserData(name, generation, catalogue, self._store, self._settings.tenant),
        )

    def _recommender(
        self,
        name: str,
        generation: Generation,
        catalogue: LiveCatalogue,
        engine: Engine,
        trending: Trending,
        experiment: str = "",
    ) -> Recommender:
        return Recommender(
            name,
            generation,
            catalogue,
            engine,
            trending,
            self._engine_thread,
            self._store,
            self._settings.tenant,
            self._metrics,
            self._live.click_through,
            experiment,
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
        shares=artifact.history_shares,
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

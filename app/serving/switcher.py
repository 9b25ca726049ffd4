"""Switches the generations that one process serves to a tenant, following the store's pointers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.overrides.item_overrides import ItemOverrides
from app.errors import Overloaded
from app.recommendation.experiments import ExperimentRecommender
from app.recommendation.recommender import Recommender
from app.schemas.operations import Experiment
from app.serving import empty_model
from app.serving.experiment_arms import ExperimentArms
from app.serving.model_registry import NoSuchModel
from app.serving.served_generation import ServedGeneration, TenantContext
from model.artifact.model_directory import Artifact, ArtifactError
from storage.errors import StorageError
from storage.folders.place import Place
from storage.records import HeldProperties, ItemChanges, NamedGeneration
from storage.state.event import IMPRESSION

POLL_EVERY_S = 0.25
RETRY_AFTER_S = 5.0  # after the active model failed to load
ANNOUNCE_EVERY_S = 20.0
LIVE_FOR_S = 60.0
ITEM_CHANGES_PER_READ = 1000
REBUILD_EVERY_S = 1.0  # for catalogues of the same model with new item counts or new codes
MAX_REBUILD_SHARE = 0.05  # of the time

logger = logging.getLogger(__name__)
WorkT = TypeVar("WorkT")
Build = Callable[[ServedGeneration], Awaitable[ServedGeneration]]
"""Builds a generation's catalogue again; returns the same generation if nothing is new."""


class GenerationSwitcher:
    """Holds the served generations, and replaces them when the store's pointers change or a request asks for it.

    While a new model loads, the old one continues to serve. The switch itself is a single assignment.

    current        the generation of users outside experiments
    recommender    answers all requests, including those of users in an experiment
    rebuild_at_s   the earliest time of the next rebuild of a catalogue, by the event loop's clock
    """

    def __init__(self, context: TenantContext, artifact: Artifact) -> None:
        self.rebuild_at_s = 0.0
        self._context = context
        self._tenant = context.settings.tenant
        self._arms = ExperimentArms()
        self._switching = asyncio.Lock()
        self._refreshing_items = asyncio.Lock()
        self._failed: NamedGeneration | Place | None = None
        self._logged: tuple[NamedGeneration | Place, str] | None = None
        self._retry_at_s = self._retry_experiment_at_s = 0.0
        self._announce_at_s = 0.0
        self._set_current(ServedGeneration.build(context, artifact, artifact.name))
        self._record_current()

    @property
    def experiment(self) -> Experiment | None:
        """The experiment that this process takes part in."""
        return self._arms.experiment

    def served(self) -> list[ServedGeneration]:
        """Return all served generations, the current one first."""
        return list(dict.fromkeys((self.current, *self._arms.generations.values())))

    def catalogues(self) -> list[LiveCatalogue]:
        """Return the catalogues of all served generations, that of the current one first."""
        return [one.catalogue for one in self.served()]

    async def poll(self) -> None:
        """Serve the generations that the store's pointers name. Failures are logged, and the old generations stay."""
        try:
            with suppress(StorageError):  # a store that refuses writes can still be read
                await self._announce()
            read = self._context.overrides.version
            pointers = await self._context.store.pointers()
            self.hold(pointers.held)
            await self._refresh_items_to(pointers.items_version, read)
            await self._follow_active(pointers.active)
            await self._follow_experiment(pointers.experiment)
            await self._rebuild_catalogues()
        except StorageError as exc:
            logger.debug("cannot read the active generation: %s", exc)
        except Exception:
            logger.exception("tenant %s: failed to follow the active generation", self._tenant)

    async def refresh_items(self) -> None:
        """Apply all item changes up to now; raise StorageError if they cannot be read."""
        context = self._context
        async with self._refreshing_items:
            while True:
                read = context.overrides.version
                changes = await context.store.item_changes(self._tenant, read, ITEM_CHANGES_PER_READ)
                if changes.version == read:
                    return
                context.item_codes.apply(changes.codes)
                apply = partial(_apply, context.overrides, changes, self.catalogues)
                await context.engine_threads.shared.run(apply, 1.0 + len(changes.entries))

    async def activate(self, name: str) -> ServedGeneration:
        """Make every process serve the model with this name, starting with this process.

        raises  NoSuchModel, ArtifactError  when this process cannot load it; nothing has changed then
                StorageError                when the pointer could not be set; nothing has changed then
        """
        async with self._switching:
            served = await asyncio.to_thread(ServedGeneration.load, self._context, name)
            await self._context.store.generations.activate(served.named)
            self._switch_to(served)
            return served

    async def start_experiment(self, experiment: Experiment) -> None:
        """Make every process take part in the experiment, starting with this process.

        raises  NoSuchModel, ArtifactError  when this process cannot load one of its models; nothing has changed then
                StorageError                when the experiment could not be stored; nothing has changed then
        """
        async with self._switching:
            text = experiment.model_dump_json(exclude_unset=True)
            arms = await ExperimentArms.load(self._context, text, self.served())
            await self._context.store.generations.set_experiment(text)
            self._set_arms(arms)

    async def end_experiment(self) -> None:
        """Make every process serve only the active model; raise StorageError if this could not be stored."""
        async with self._switching:
            await self._context.store.generations.set_experiment(None)
            self._set_arms(ExperimentArms())

    async def _announce(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._announce_at_s:
            served = self.served()
            for one in served:
                await self._context.store.generations.announce(one.named, LIVE_FOR_S)
            if served == self.served():  # else others must be announced, too
                self._announce_at_s = now_s + ANNOUNCE_EVERY_S

    def hold(self, held: HeldProperties) -> None:
        """Apply these declared properties."""
        if self._context.overrides.hold(held):
            for catalogue in self.catalogues():
                catalogue.catch_up()

    async def _refresh_items_to(self, version: int, read: int) -> None:
        """Read the item changes up to `version`, the store's version when this process had read up to `read`."""
        if version < read:  # the store has lost data, or was replaced
            async with self._refreshing_items:
                self._context.overrides.start_over()
        if version > self._context.overrides.version:
            await self.refresh_items()
        self._context.overrides.is_complete = True

    async def _follow_active(self, active: NamedGeneration | None) -> None:
        wanted = _to_load(self.current, active)
        if wanted is None or (wanted == self._failed and asyncio.get_running_loop().time() < self._retry_at_s):
            return
        async with self._switching:
            # asked again, because this process may have activated one
            wanted = _to_load(self.current, (await self._context.store.pointers()).active)
            if wanted is not None:
                await self._while_refreshing_items(self._load_and_switch_to(wanted))

    async def _load_and_switch_to(self, wanted: NamedGeneration | Place) -> None:
        try:
            served = await asyncio.to_thread(_load, self._context, wanted)
        except ValueError as exc:
            self._failed, self._retry_at_s = wanted, asyncio.get_running_loop().time() + RETRY_AFTER_S
            if isinstance(exc, NoSuchModel) and not isinstance(wanted, NamedGeneration):
                return  # it is not trained yet
            if self._logged != (problem := (wanted, str(exc))):
                logger.error("tenant %s: still serving %r: %s", self._tenant, self.current.named.name, exc)
            self._logged = problem
            self._context.metrics.generations.count_switch(self._tenant, "failed")
        else:
            self._switch_to(served)

    async def _follow_experiment(self, text: str | None) -> None:
        if text == self._arms.text or asyncio.get_running_loop().time() < self._retry_experiment_at_s:
            return
        async with self._switching:
            text = (await self._context.store.pointers()).experiment  # this process may have begun or ended it
            if text == self._arms.text:
                return
            try:
                load = ExperimentArms.load(self._context, text, self.served())
                arms = await self._while_refreshing_items(load)
            except ValueError as exc:
                logger.error("tenant %s: not taking part in the experiment: %s", self._tenant, exc)
                self._retry_experiment_at_s = asyncio.get_running_loop().time() + RETRY_AFTER_S
            else:
                self._set_arms(arms)

    async def _rebuild_catalogues(self) -> None:
        if self.current.named.tag == empty_model.TAG:
            await self._rebuild(self.current, partial(_with_popular_catalogue, self._context))
        for served in self.served():
            if len(served.artifact.items):
                served.description_codes.start_assignment(self._context.overrides)
            if served.has_new_assignments:
                await self._rebuild(served, lambda before: asyncio.to_thread(before.with_new_assignments))

    async def _rebuild(self, before: ServedGeneration, build: Build) -> None:
        """Serve the same generation with a new catalogue, unless the last rebuild is too recent or nothing is new."""
        if (begin_s := asyncio.get_running_loop().time()) < self.rebuild_at_s:
            return
        try:
            rebuilt = await self._while_refreshing_items(build(before))
        finally:  # a rebuild that fails is not repeated at once, either
            end_s = asyncio.get_running_loop().time()
            self.rebuild_at_s = end_s + max(REBUILD_EVERY_S, (end_s - begin_s) / MAX_REBUILD_SHARE)
        if rebuilt is before:
            return
        self._arms = self._arms.with_replaced(before, rebuilt)
        self._set_current(rebuilt if self.current is before else self.current)  # a request may have switched meanwhile
        rebuilt.catalogue.catch_up()  # it may be an arm

    async def _while_refreshing_items(self, work: Awaitable[WorkT]) -> WorkT:
        """Await the work while refreshing items, so that unavailable items disappear in time, and staying live."""

        async def refresh() -> None:
            while True:
                with suppress(StorageError, Overloaded):
                    await self._announce()
                    await self.refresh_items()
                await asyncio.sleep(POLL_EVERY_S)

        refreshing = asyncio.create_task(refresh())
        try:
            return await work
        finally:
            refreshing.cancel()

    def _switch_to(self, served: ServedGeneration) -> None:
        logger.info("tenant %s: serving %r instead of %r", self._tenant, served.named.name, self.current.named.name)
        self._set_current(self._already_served().get(served.named, served))
        self._failed = self._logged = None
        self._announce_at_s, self.rebuild_at_s = 0, 0.0  # so that its new items are served soon
        self._context.metrics.generations.count_switch(self._tenant, "switched")
        self._record_current()

    def _set_arms(self, arms: ExperimentArms) -> None:
        logger.info("tenant %s: experiment: %s", self._tenant, "none" if arms.experiment is None else arms.text)
        self._arms, self._announce_at_s = arms.with_served(self._already_served()), 0
        self._propagate_served(*self._arms.generations.values())

    def _already_served(self) -> dict[NamedGeneration, ServedGeneration]:
        """Return the served generations: one of them may have been rebuilt while it was loaded again."""
        return {one.named: one for one in self.served()}

    def _set_current(self, served: ServedGeneration) -> None:
        """Replace the current generation in a single assignment."""
        self._context.overrides.keep_in(served.catalogue.values)
        self.current = served
        self._propagate_served(served)

    def _propagate_served(self, *new: ServedGeneration) -> None:
        """Pass the served generations to the learners, the store, click-through and the recommender."""
        signals = self._context.signals
        for one in new:
            one.catalogue.catch_up()  # with what was set while it was built, and before `_apply` knew it
        served = list({one.named.tag: one for one in self.served()}.values())
        for one in served:
            counted = [kind for kind, weight in one.generation.event_weights.items() if weight > 0]
            one.learner.set_catalogue(one.catalogue, one.engine, one.cold_items)
            one.description_codes.set_catalogue(one.catalogue, one.engine)
            signals.click_through.add_generation(one.named.tag, one.named.name, self._arms.name, counted)
        signals.learners = [one.learner for one in served if len(one.artifact.items)]
        generations = [one.generation for one in served]
        types = (kind for one in generations for kind in (*one.event_weights, *one.unseen_types))
        signals.event_types = frozenset({IMPRESSION, *types})
        self._context.store.serve_generations(generations)
        self.recommender: Recommender | ExperimentRecommender = self._arms.build_recommender(self.current.recommender)

    def _record_current(self) -> None:
        """Use the current generation's model to count trends and orders, and set its metrics."""
        generation, named, context = self.current.generation, self.current.named, self._context
        context.signals.trend_counter.set_event_weights(generation.event_weights)
        context.signals.order_counter.set_learned(self.current.artifact.items.rows)
        context.metrics.generations.set_served(self._tenant, named.name, named.tag.hex(), generation.dtype.itemsize)


def _to_load(current: ServedGeneration, active: NamedGeneration | None) -> NamedGeneration | Place | None:
    """Return the active model, or where the initial one is to be, if the current one has to give way to it."""
    if active is None:
        return current.context.settings.model_dir if current.named.tag == empty_model.TAG else None
    return None if active.tag == current.named.tag else active


def _load(context: TenantContext, wanted: NamedGeneration | Place) -> ServedGeneration:
    if not isinstance(wanted, NamedGeneration):
        return ServedGeneration.load_initial(context, wanted)
    served = ServedGeneration.load(context, wanted.name)
    if served.named != wanted:
        raise ArtifactError(
            f"model {wanted.name!r} is generation {served.named.tag.hex()} here, but {wanted.tag.hex()} is active; "
            f"copy that model here, or run 'lisarec activate {wanted.name}' to serve this one"
        )
    return served


async def _with_popular_catalogue(context: TenantContext, before: ServedGeneration) -> ServedGeneration:
    tenant, overrides = context.settings.tenant, context.overrides
    catalogue = await empty_model.popular_catalogue(context.store, tenant, overrides, before.catalogue)
    return before if catalogue is before.catalogue else replace(before, catalogue=catalogue)


def _apply(overrides: ItemOverrides, changes: ItemChanges, catalogues: Callable[[], Sequence[LiveCatalogue]]) -> None:
    overrides.apply(changes)
    for catalogue in catalogues():  # asked now: others may have been served since the changes were read
        catalogue.catch_up()

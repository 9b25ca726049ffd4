"""Operators' commands on the generations of a store: rebuild, activate, experiment and drop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from app.recommendation.scenarios import unshared_param
from app.schemas.operations import Experiment
from app.schemas.scenarios import ScenarioVersion
from app.serving.model_locations import load_model, models_at, models_of
from app.serving.served_generation import generation_of
from app.serving.store_factory import audit_command, opened_store, opened_tenant
from app.serving.switcher import ANNOUNCE_EVERY_S, LIVE_FOR_S
from app.settings import StoreSettings
from model.artifact.model_directory import Artifact
from model.config import TrainConfig
from storage.errors import StorageError
from storage.folders.place import Place
from storage.maintenance import rebuild as storage_rebuild
from storage.maintenance.rebuild import Rebuilt
from storage.protocol import GenerationRegistry, UserStore
from storage.records import KnownGeneration, NamedGeneration
from storage.state.generation import Generation


class Superseded(ValueError):
    """Another model is active than the one that was to be replaced."""


async def rebuild(settings: StoreSettings, model: Place, on_progress: Callable[[Rebuilt], None]) -> Rebuilt:
    """Fold the store's whole log into the states of the model's generation.

    If the model's training continued from the active model, the active model's states are copied where possible.

    raises  ArtifactError, StorageError, ValueError  when the model or the store cannot be used
    """
    loaded = await asyncio.to_thread(load_model, model, settings)
    generation = generation_of(loaded)
    async with opened_tenant(settings, generation, may_be_new=True) as store:
        named = NamedGeneration(loaded.name, generation.tag)
        announcing = asyncio.create_task(_keep_announcing(store.generations, named))
        try:
            before = await _trained_from(loaded, model, store, settings)
            return await storage_rebuild.rebuild(store, generation, on_progress, tenant=settings.tenant, before=before)
        finally:
            announcing.cancel()
            await asyncio.wait([announcing])


async def _trained_from(loaded: Artifact, place: Place, store: UserStore, settings: StoreSettings) -> Generation | None:
    """Return the generation of the active model, if this model continued from it and it can be loaded; else None."""
    active, training = await store.generations.active(), loaded.config.training
    if active is None or not isinstance(training, TrainConfig) or training.warm_from != active.tag.hex():
        return None
    for models in (models_of(settings), models_at(place.parent, settings)):
        with suppress(ValueError, OSError):  # if it is missing or unreadable, everything is folded
            found = await asyncio.to_thread(models.load, active.name)
            if found.tag == training.warm_from:
                return generation_of(found)
    return None


async def activate(
    settings: StoreSettings, name: str, replaces: str | None = None
) -> tuple[NamedGeneration, NamedGeneration | None]:
    """Switch every process on the store to the model with this name. Return it and the previous one.

    replaces  tag of the only model that it may replace, unless it is active already; None for any
    raises    Superseded, NoSuchModel, ArtifactError, StorageError, ValueError  and nothing changed
    """
    loaded = await asyncio.to_thread(models_of(settings).load, name)
    named = NamedGeneration(name, bytes.fromhex(loaded.tag))
    async with opened_tenant(settings, may_be_new=True) as store:
        before = await store.generations.active()
        if replaces is not None:
            _require_active(before, replaces, loaded.tag)
        await store.generations.activate(named)
        previous = None if before is None else before.name
        await audit_command(store, settings, "model.activate", name, tag=loaded.tag, previous=previous)
    return named, before


async def require_active(settings: StoreSettings, tag: str) -> None:
    """Return if the model with this tag, or none, is active.

    raises  Superseded, StorageError
    """
    async with opened_store(settings) as store:
        _require_active(await store.generations.active(), tag)


def _require_active(active: NamedGeneration | None, *tags: str) -> None:
    if active is not None and active.tag.hex() not in tags:
        raise Superseded(f"{active.name!r} was activated meanwhile")


async def set_experiment(settings: StoreSettings, experiment: Experiment | None) -> None:
    """Make every process on the store take part in the experiment; None ends it.

    raises  NoSuchModel, ArtifactError, StorageError, ValueError  and nothing changed
    """
    for name in experiment.shares if experiment is not None and experiment.over == "models" else ():
        await asyncio.to_thread(models_of(settings).load, name)
    async with opened_tenant(settings, may_be_new=True) as store:
        if experiment is not None and experiment.over == "scenarios":
            _require_suitable(experiment.shares, (await store.scenarios.scenarios(settings.tenant)).newest)
        await store.generations.set_experiment(None if experiment is None else experiment.model_dump_json())
        if experiment is None:
            await audit_command(store, settings, "experiment.end")
        else:
            about = experiment.model_dump(include={"over", "shares"})
            await audit_command(store, settings, "experiment.start", experiment.name, **about)


def _require_suitable(names: Collection[str], newest: Mapping[str, str]) -> None:
    """Raise ValueError for a name that no scenario has, by the newest version of each, and for a missing parameter."""
    versions = {name: ScenarioVersion.model_validate_json(text).settings for name, text in newest.items()}
    known = {name: settings for name, settings in versions.items() if settings is not None}
    for name in set(names).difference(known):
        raise ValueError(f"unknown scenario {name!r}; existing scenarios: {', '.join(sorted(known)) or 'none'}")
    if reason := unshared_param({name: known[name] for name in names}):
        raise ValueError(f"no request fits every scenario: {reason}")


async def drop(settings: StoreSettings, name: str) -> int:
    """Drop a generation, by its name or tag, that is neither active nor live; return how many states it had.

    raises  StorageError, ValueError
    """
    async with opened_tenant(settings) as store:
        known = await store.generations.known()
        matching = [one for one in known if name in (one.named.name, one.named.tag.hex())]
        _require_unserved(name, matching, known)
        # before the drop: a dropped generation cannot be dropped again to be logged
        tags = [one.named.tag.hex() for one in matching]
        await audit_command(store, settings, "model.drop", name, tags=tags)
        return sum([await store.generations.drop(one.named.tag) for one in matching])


async def drop_unserved(settings: StoreSettings, names: Collection[str]) -> set[str]:
    """Drop the generations of these names that no process serves; return the names that are free then.

    raises  StorageError, ValueError
    """
    async with opened_store(settings) as store:
        known = [one for one in await store.generations.known() if one.named.name in names]
        for one in known:
            if not (one.is_active or one.is_live):
                await store.generations.drop(one.named.tag)
        return set(names) - {one.named.name for one in known if one.is_active or one.is_live}


def _require_unserved(name: str, matching: list[KnownGeneration], known: list[KnownGeneration]) -> None:
    if not matching:
        others = ", ".join(f"{one.named.name} ({one.named.tag.hex()})" for one in known) or "none"
        raise ValueError(f"unknown generation {name!r}; generations in the store: {others}")
    idle = "".join(
        f"; to delete an older one, pass {one.named.tag.hex()!r} instead of the name"
        for one in matching
        if not (one.is_active or one.is_live)
    )
    if any(one.is_active for one in matching):
        raise ValueError(f"{name!r} is active; activate another one first{idle}")
    if any(one.is_live for one in matching):
        raise ValueError(
            f"{name!r} is or was in use by a process within the last {LIVE_FOR_S:.0f} s; "
            f"stop the process, or try again later{idle}"
        )


async def _keep_announcing(registry: GenerationRegistry, named: NamedGeneration) -> None:
    while True:
        with suppress(StorageError):  # the rebuild itself will fail, too
            await registry.announce(named, LIVE_FOR_S)
        await asyncio.sleep(ANNOUNCE_EVERY_S)

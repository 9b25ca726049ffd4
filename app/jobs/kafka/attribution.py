"""The recommendation that led to an event: the names of what its id is signed for, and the item's place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Mapping
from itertools import chain

from app.events.click_through import experiments_in
from app.events.recommendation_ids import RecommendationIds, hash_of, scenario_hash_of
from app.schemas.operations import Experiment
from app.serving.store_factory import opened_store
from app.settings import StoreSettings
from storage.state.event import Event

READ_AGAIN_AFTER_S = 60.0


class Attribution:
    """Decodes recommendation ids of every tenant, with the store's names of generations, experiments and scenarios."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._ids: dict[str, RecommendationIds] = {}
        self._missed: set[Hashable] = set()
        self._read()

    def of(self, tenant: str, event: Event) -> Mapping[str, str | int | None] | None:
        """Return generation, experiment, scenario and place; None if no list of the service had the item at that place.

        An impression of several items has no single place, so it gets None.

        The name is None for a generation that was dropped, and a scenario that was replaced by another one.
        """
        if event.recommendation_id is None or len(event.items) > 1:
            return None
        place = self._ids_of(tenant).place(event.recommendation_id, event.item_ids[0])
        if place is None:
            return None
        keys: Mapping[str, Hashable] = {
            "generation": place.generation,
            "experiment": place.experiment,
            "scenario": (tenant, place.scenario),
        }
        missing = {*keys.values()} - self._names.keys() - {0, (tenant, b"")}
        if missing - self._missed or (missing and time.monotonic() > self._read_at_s + READ_AGAIN_AFTER_S):
            self._missed |= missing  # new names are read at once, and missing ones not for every event
            self._read()
        return {**{of: self._names.get(key) for of, key in keys.items()}, "place": place.place}

    def _ids_of(self, tenant: str) -> RecommendationIds:
        if tenant not in self._ids:
            self._ids[tenant] = RecommendationIds(tenant)
            self._ids[tenant].set_secret(self._secret)
        return self._ids[tenant]

    def _read(self) -> None:
        asyncio.run(self._read_store())
        self._read_at_s = time.monotonic()

    async def _read_store(self) -> None:
        async with opened_store(self._settings) as store:
            self._secret = await store.secret()
            known = await store.generations.known()
            pointers = await store.pointers()
            tenants = await store.tenants()
            scenarios = {tenant: await store.scenarios.scenarios(tenant) for tenant in tenants}
            experiments = experiments_in([tally for tenant in tenants for tally in await store.tallies(tenant)])
        if pointers.experiment is not None:
            name = Experiment.model_validate_json(pointers.experiment).name
            experiments[hash_of(name)] = name
        generations = {one.named.tag[:4]: one.named.name for one in known}
        of_scenarios = {
            (tenant, scenario_hash_of(name)): name for tenant, one in scenarios.items() for name in one.newest
        }
        names = chain(generations.items(), experiments.items(), of_scenarios.items())
        self._names: dict[Hashable, str] = dict(names)

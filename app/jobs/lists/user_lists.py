"""Recommends to every user in a store's log and its archive."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from app.errors import RequestError
from app.http.services import open_services
from app.jobs.lists.resumable_parquet import ListCounts, ListParts
from app.observability.metrics import Metrics
from app.recommendation.state_reader import log_queries
from app.schemas.recommendations import RecommendationRequest, Recommendations
from app.serving import empty_model
from app.serving.lifespan import Service
from app.serving.model_locations import load_model
from app.serving.store_factory import audit_command, opened_tenant
from app.settings import Settings
from storage.errors import StorageBusy, StorageError, StorageUnavailable
from storage.protocol import EventStore
from storage.state.event import Event, Merge, digest

USERS_AT_ONCE = 256
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0  # after a failure of the store
ANYBODY = "0"

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ListPlan:
    """The lists to make, and the users to make them for.

    wishes    fields of requests for recommendations, such as `scenario` and `k`
    since_us  only users with an event since this time, in microseconds since the epoch
    user_ids  only these users; None for all
    """

    wishes: Mapping[str, object]
    since_us: int = 0
    user_ids: frozenset[str] | None = None

    @property
    def digest(self) -> str:
        """A hash of this plan: 128 bits in hexadecimal."""
        user_ids = None if self.user_ids is None else sorted(self.user_ids)
        return digest(json.dumps([self.wishes, self.since_us, user_ids], sort_keys=True)).hex()

    def is_for(self, user_id: str, newest_us: int) -> bool:
        """Return whether a user whose newest event is of that time gets a list."""
        return newest_us >= self.since_us and (self.user_ids is None or user_id in self.user_ids)


async def write_lists(settings: Settings, plan: ListPlan, out: Path, on_progress: Callable[[int], None]) -> ListCounts:
    """Write the lists of all users to a Parquet file. The file appears once it is complete.

    It continues with the parts of an interrupted command, and waits for an unreachable store. Users whose data are
    damaged get no list. Each list counts as shown in the service's statistics.

    on_progress  is called with the number of users who have a list

    raises  ArtifactError, StorageError, ValueError  when lists are not possible
    """
    own = settings.for_tenant(settings.tenant).model_copy(update={"keys_file": None, "seal_keys_file": None})
    model = own.model_dir
    artifact = empty_model.artifact() if model is None else await asyncio.to_thread(load_model, model, own)
    metrics = Metrics()
    async with opened_tenant(own):  # else a misspelt name would become a tenant without users
        pass
    async with open_services(own, {own.tenant: artifact}, metrics) as services:
        service = services.by_tenant[own.tenant]
        await _require_active(service)
        maker = _ListMaker(service, own, plan.wishes, metrics)
        parts = await asyncio.to_thread(ListParts, out, plan.digest)

        async def make_lists() -> None:
            async for user_ids in _in_groups(_users_of_log(service.store, own.tenant, plan)):
                lists = await _once_reached(partial(maker.lists_of, parts.lacks(user_ids)))
                await asyncio.to_thread(parts.add, lists)
                on_progress(parts.users)

        await _once_reached(make_lists)
        await _once_reached(lambda: audit_command(service.store, own, "export.lists", users=parts.users))
        damaged = len(parts.lacks([*maker.damaged]))
    return replace(await asyncio.to_thread(parts.finish), damaged=damaged)


async def _once_reached(work: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Return the result of the work, which is retried as long as the store is unreachable."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await work()
        except StorageError as exc:
            if not _is_temporary(exc):
                raise
            logger.warning("retrying in %.1f s: %s", pause_s, exc)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def _is_temporary(failure: StorageError) -> bool:
    """Return whether the store may recover by itself; it does not if data are damaged."""
    return isinstance(failure, StorageBusy | StorageUnavailable) and failure.failure_cause != "damaged"


async def _require_active(service: Service) -> None:
    """Raise ValueError unless this process serves the active model."""
    active, served = (await service.store.pointers()).active, service.switcher.current.named
    if active is not None and active.tag != served.tag:
        raise ValueError(f"cannot load the active model {active.name!r}; pass its folder as --models-dir")


async def _users_of_log(store: EventStore, tenant: str, plan: ListPlan) -> AsyncIterator[str]:
    """Iterate over the plan's users, each once, with the users of one partition in memory."""
    newest_us: dict[str, int] = {}
    async for page in store.log():
        if page.starts_over:
            newest_us.clear()
        if page.erased:
            erased = set(page.erased)
            newest_us = {user_id: us for user_id, us in newest_us.items() if (tenant, digest(user_id)) not in erased}
        for owner, entry in page.entries:
            match entry.record:
                case Event(user_id=user_id, timestamp_us=event_us) if owner == tenant:
                    newest_us[user_id] = max(newest_us.get(user_id, event_us), event_us)
                case Merge(user_id) if owner == tenant:
                    newest_us.pop(user_id, None)  # the user that this one was merged into has copies of the events
        if page.is_complete:
            for user_id, event_us in newest_us.items():
                if plan.is_for(user_id, event_us):
                    yield user_id
            newest_us.clear()


async def _in_groups(users: AsyncIterator[str]) -> AsyncIterator[list[str]]:
    group: list[str] = []
    async for user_id in users:
        group.append(user_id)
        if len(group) == USERS_AT_ONCE:
            yield group
            group = []
    yield group


class _ListMaker:
    """Recommends to users whose states are up to date.

    damaged  the users who got no list, because their data are damaged
    """

    def __init__(self, service: Service, settings: Settings, wishes: Mapping[str, object], metrics: Metrics) -> None:
        self._service = service
        self._tenant = settings.tenant
        self._max_seen_events = settings.max_seen_events
        self._wishes = wishes
        self._metrics = metrics
        self._requests([ANYBODY])  # raises ValueError before the first list is made
        self.damaged: set[str] = set()

    async def lists_of(self, user_ids: Sequence[str]) -> dict[str, Recommendations]:
        """Return the lists of the users who have a log, by user, without the damaged ones; raise StorageUnavailable."""
        try:
            return await self._lists_of_readable(user_ids)
        except StorageError:
            damages = {user_id: await self._damage_of(user_id) for user_id in user_ids}
        damaged = {user_id: str(damage) for user_id, damage in damages.items() if damage is not None}
        for reason, users in Counter(damaged.values()).items():
            logger.error("%d users get no list: %s", users, reason)
        self.damaged.update(damaged)
        return await self._lists_of_readable([user_id for user_id in user_ids if user_id not in damaged])

    async def _damage_of(self, user_id: str) -> StorageError | None:
        """Read what the user's list needs. Return why that is impossible for ever; raise StorageUnavailable."""
        try:
            if await self._with_states([user_id]) and log_queries(self._requests([user_id])):
                await self._service.store.seen_items(self._tenant, user_id, limit=self._max_seen_events)
        except StorageError as exc:
            if _is_temporary(exc):
                raise
            return exc
        return None

    async def _lists_of_readable(self, user_ids: Sequence[str]) -> dict[str, Recommendations]:
        known, failed_reads = await self._with_states(user_ids), self._metrics.store.failed_reads
        lists = await self._service.switcher.recommender.recommend(self._requests(known)) if known else []
        if self._metrics.store.failed_reads > failed_reads:
            raise StorageUnavailable("some users could not be read, so their lists would be those of unknown users")
        return dict(zip(known, lists, strict=True))

    async def _with_states(self, user_ids: Sequence[str]) -> list[str]:
        """Bring the users' states up to date, however many entries they lack. Return the users who have states."""
        gone: set[str] = set()  # erased since the log was read
        for served in self._service.switcher.served():
            states = await self._service.store.states(self._tenant, user_ids, served.generation)
            gone |= {user_id for user_id, state in zip(user_ids, states, strict=True) if state is None}
        return [user_id for user_id in user_ids if user_id not in gone]

    def _requests(self, user_ids: Sequence[str]) -> Sequence[RecommendationRequest]:
        """Return the requests for the users' lists; raise ValueError if they are invalid."""
        requests = [RecommendationRequest.model_validate({**self._wishes, "user_id": one}) for one in user_ids]
        try:
            return self._service.scenarios.resolve(requests, self._service.switcher.experiment)
        except RequestError as exc:
            reasons = "; ".join(f"{detail.field}: {detail.reason}" for detail in exc.details)
            raise ValueError(f"{exc}; {reasons}" if reasons else str(exc)) from None

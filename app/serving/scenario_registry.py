"""The scenarios of one tenant: follows the store, and adds versions to it."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from app.errors import ErrorDetail, InvalidRequest, NotYetRead, ScenarioNotFound
from app.events.click_through import ClickThrough
from app.recommendation.experiments import arm_of
from app.recommendation.scenarios import require_known_params, unknown_scenario, with_settings
from app.schemas.operations import Experiment
from app.schemas.recommendations import RecommendationRequest
from app.schemas.scenarios import MAX_SCENARIO_BYTES, MAX_SCENARIOS, ScenarioSettings, ScenarioVersion
from storage.protocol import ScenarioStore

logger = logging.getLogger(__name__)


class ScenarioRegistry:
    """Resolves the scenarios of requests from the store's current versions. Changes never overwrite each other."""

    def __init__(self, store: ScenarioStore, tenant: str, clicks: ClickThrough) -> None:
        self._store = store
        self._clicks = clicks
        self._tenant = tenant
        self._revision: str | None = None  # None until the first read
        self._newest: Mapping[str, ScenarioVersion] = {}
        self._following = asyncio.Lock()

    async def follow(self) -> None:
        """Load the scenarios of the store; raise StorageError and keep the current ones if it cannot be read."""
        async with self._following:
            if await self._store.revision(self._tenant) != self._revision:
                stored = await self._store.scenarios(self._tenant)
                read = {name: _parse(text) or self._newest.get(name) for name, text in stored.newest.items()}
                self._newest = {name: version for name, version in read.items() if version is not None}
                self._revision = stored.revision
                self._clicks.add_scenarios(self._newest)

    def resolve(
        self, requests: Sequence[RecommendationRequest], experiment: Experiment | None
    ) -> Sequence[RecommendationRequest]:
        """Return the requests with the settings of the scenarios that they name, or that the experiment assigns.

        raises  InvalidRequest  when the scenario does not exist, or the request contradicts it
                NotYetRead      when this process has not yet read any scenarios
        """
        if self._revision is None:
            raise NotYetRead("scenarios")
        return [
            self._resolve(request, experiment, f"requests.{place}." if len(requests) > 1 else "")
            for place, request in enumerate(requests)
        ]

    def _resolve(
        self, request: RecommendationRequest, experiment: Experiment | None, path: str
    ) -> RecommendationRequest:
        if request.scenario is None:
            return request
        name, of_experiment, choices = request.scenario, "", [request.scenario]
        if experiment is not None and experiment.over == "scenarios" and name in experiment.shares:
            choices = [*experiment.shares]
            arm = None if request.user_id is None else arm_of(experiment, request.user_id)
            if arm is not None and self._settings(arm) is not None:  # otherwise it was removed meanwhile
                name, of_experiment = arm, experiment.name
        settings = self._settings(name)
        if settings is None:
            raise unknown_scenario(request.scenario, self._existing(), path)
        possible = [one for each in choices if (one := self._settings(each))]
        if request.params and len(possible) == len(choices):  # a removed scenario may have declared them
            require_known_params(request, possible, path)
        return with_settings(request, settings, path, name=name, experiment=of_experiment)

    def _settings(self, name: str) -> ScenarioSettings | None:
        version = self._newest.get(name)
        return None if version is None else version.settings

    def _existing(self) -> dict[str, ScenarioVersion]:
        return {name: one for name, one in self._newest.items() if one.settings is not None}

    # ---- stored versions

    async def scenarios(self) -> list[ScenarioVersion]:
        """Return the existing scenarios in order of their names; raise StorageError."""
        await self.follow()
        existing = self._existing()
        return [existing[name] for name in sorted(existing)]

    async def scenario(self, name: str) -> ScenarioVersion:
        """Return the current version of the scenario.

        raises  ScenarioNotFound, StorageError
        """
        await self.follow()
        found = self._newest.get(name)
        if found is None or found.settings is None:
            raise self._not_found(name)
        return found

    async def versions(self, name: str) -> list[ScenarioVersion]:
        """Return the stored versions of the scenario, newest first, even if it was removed.

        raises  ScenarioNotFound  when there are none, or another version of lisarec wrote them all
                StorageError
        """
        texts = await self._store.versions(self._tenant, name)
        versions = [one for text in reversed(texts) if (one := _parse(text))]
        if not versions:
            raise self._not_found(name)
        return versions

    async def put(self, name: str, settings: ScenarioSettings | None, changed_by: str) -> ScenarioVersion:
        """Store new settings of the scenario, or remove it with None. Identical settings change nothing.

        This process applies them before the call returns, all others within a second.

        raises  InvalidRequest    when there would be too many scenarios, or the settings are too long
                ScenarioNotFound  when there is nothing to remove
                StorageError      when the store did not accept the change; resending is safe
        """
        while True:
            await self.follow()
            before, believed = self._newest.get(name), self._revision
            if settings is None and before is None:
                raise self._not_found(name)
            if before is not None and _content(before.settings) == _content(settings):
                return before
            version = ScenarioVersion(
                name=name,
                version=1 if before is None else before.version + 1,
                changed_at=datetime.now(UTC),
                changed_by=changed_by,
                settings=settings,
            )
            text, dropped = _encoded(version), None if before is not None else self._dropped()
            if await self._store.add(self._tenant, name, text, believed=believed or "", dropped=dropped):
                await self.follow()
                return version

    async def earlier(self, name: str, number: int | None) -> ScenarioVersion:
        """Return the version with this number, the previous one if None; raise as `versions` does."""
        versions = await self.versions(name)
        wanted = versions[0].version - 1 if number is None else number
        found = next((one for one in versions if one.version == wanted), None)
        if found is None:
            kept = f"is not one of the stored versions {versions[-1].version} to {versions[0].version}"
            raise ScenarioNotFound(
                "this version does not exist; nothing changed", [ErrorDetail(field="version", reason=kept)]
            )
        return found

    def _dropped(self) -> str | None:
        """Return the scenario to delete for a new one: the one that was removed first.

        raises  InvalidRequest  when the limit is reached and none was removed
        """
        if len(self._newest) < MAX_SCENARIOS:
            return None
        removed = [one for one in self._newest.values() if one.settings is None]
        if not removed:
            raise InvalidRequest(f"there are {MAX_SCENARIOS} scenarios, the maximum; delete one first")
        return min(removed, key=lambda one: one.changed_at).name

    def _not_found(self, name: str) -> ScenarioNotFound:
        hint = unknown_scenario(name, self._existing()).details[0]
        return ScenarioNotFound(
            "this scenario does not exist; nothing changed", [hint.model_copy(update={"field": "name"})]
        )


def _parse(text: str) -> ScenarioVersion | None:
    try:
        return ScenarioVersion.model_validate_json(text)
    except ValidationError:
        logger.error(
            "a scenario was written by another version of lisarec; this process keeps the version that it loaded before"
        )
        return None


def _content(settings: ScenarioSettings | None) -> dict[str, Any] | None:
    return None if settings is None else settings.model_dump(exclude_unset=True)


def _encoded(version: ScenarioVersion) -> str:
    text = version.model_dump_json(exclude_unset=True)
    if len(text.encode()) > MAX_SCENARIO_BYTES:
        raise InvalidRequest(f"a scenario may have at most {MAX_SCENARIO_BYTES:,} bytes of JSON; nothing changed")
    return text

"""The routes of scenarios: settings of lists that the shop changes without a release."""

from typing import Annotated

from fastapi import Path, Response

from app.errors import validate
from app.http.access import audit, charge_operation, needs
from app.http.charged_calls import INVALID, preview_scenario, put_scenario, restore_scenario
from app.http.dependencies import NO_QUERY, CallerDep, JsonBody, ServiceDep, ServicesDep, example
from app.http.openapi import errors, json_request
from app.http.routes.guarded_route import GuardedRouter
from app.recommendation.cost import SCENARIOS
from app.schemas import fields
from app.schemas.recommendations import Recommendations
from app.schemas.scenarios import (
    EXAMPLE,
    Rollback,
    ScenarioList,
    ScenarioPreview,
    ScenarioSettings,
    ScenarioVersion,
    ScenarioVersions,
)

router = GuardedRouter(prefix="/v1/admin", tags=["scenarios"], dependencies=[needs("scenarios:write"), NO_QUERY])
Name = Annotated[fields.Name, Path(description="The name of the scenario.", openapi_examples=example("product-page"))]

SETTINGS = json_request(ScenarioSettings, {"a product page": EXAMPLE})
ROLLBACK = json_request(Rollback, {"to the second version": {"version": 2}})
PREVIEW = json_request(
    ScenarioPreview,
    {"for ada": {"settings": EXAMPLE, "request": {"user_id": "ada", "current_item": "tea-2"}}},
)


@router.get("/scenarios", response_model_exclude_unset=True)
async def get_scenarios(service: ServiceDep, services: ServicesDep, caller: CallerDep) -> ScenarioList:
    """List all scenarios, at most 100."""
    await charge_operation(services, caller, SCENARIOS)
    return ScenarioList(scenarios=await service.scenarios.scenarios())


@router.get("/scenarios/{name}", response_model_exclude_unset=True, responses=errors(404))
async def get_scenario(name: Name, service: ServiceDep) -> ScenarioVersion:
    """Return the current version of the scenario."""
    return await service.scenarios.scenario(name)


@router.put(
    "/scenarios/{name}", response_model_exclude_unset=True, openapi_extra=SETTINGS, responses=errors(400, 408, 413, 415)
)
async def put_scenario_settings(
    name: Name, body: JsonBody, services: ServicesDep, caller: CallerDep
) -> ScenarioVersion:
    """Store settings of a list under this name. This creates a new version, unless nothing changes.

    Every process applies it within one second. An invalid expression is a 422 that names the position in the text. A
    scenario of more than 16,384 bytes is a 422, as is the 101st scenario. Declare the types of properties first.
    """
    version = await put_scenario(services, caller, name, body)
    await audit(services, caller, "scenario.put", name, {"version": version.version})
    return version


@router.delete("/scenarios/{name}", response_model_exclude_unset=True, responses=errors(404))
async def remove_scenario(name: Name, service: ServiceDep, services: ServicesDep, caller: CallerDep) -> ScenarioVersion:
    """Remove the scenario. Doing so again changes nothing.

    Its versions remain until their space is needed; until then a rollback restores the scenario.
    """
    await charge_operation(services, caller, SCENARIOS)
    version = await service.scenarios.put(name, None, caller.name)
    await audit(services, caller, "scenario.remove", name, {"version": version.version})
    return version


@router.get("/scenarios/{name}/versions", response_model_exclude_unset=True, responses=errors(404))
async def get_scenario_versions(
    name: Name, service: ServiceDep, services: ServicesDep, caller: CallerDep
) -> ScenarioVersions:
    """List the newest 50 versions, also of a removed scenario: who changed what, and when."""
    await charge_operation(services, caller, SCENARIOS)
    return ScenarioVersions(versions=await service.scenarios.versions(name))


@router.post(
    "/scenarios/{name}/rollback",
    response_model_exclude_unset=True,
    openapi_extra=ROLLBACK,
    responses=errors(400, 404, 408, 413, 415),
)
async def roll_back_scenario(name: Name, body: JsonBody, services: ServicesDep, caller: CallerDep) -> ScenarioVersion:
    """Restore the settings of an earlier version, as a new version.

    Without `version`, a second call undoes the first. Settings that name a deleted property are a 422.
    """
    wanted = validate(Rollback, body, INVALID).version
    version = await restore_scenario(services, caller, name, wanted)
    await audit(services, caller, "scenario.roll_back", name, {"to": wanted, "version": version.version})
    return version


@router.post(
    "/preview", response_model=Recommendations, openapi_extra=PREVIEW, responses=errors(400, 404, 408, 409, 413, 415)
)
async def preview_list(body: JsonBody, services: ServicesDep, caller: CallerDep) -> Response:
    """Return the list that a request would get with unsaved settings, or with changes to a stored scenario."""
    return Response(await preview_scenario(services, caller, body), media_type="application/json")

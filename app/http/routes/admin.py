"""The routes of operators: property types, activation, experiments, the audit log."""

from typing import Annotated

from fastapi import Path, Query, Response

from app.errors import ErrorDetail, InvalidRequest, validate
from app.http.access import audit, charge, charge_operation, needs
from app.http.dependencies import NO_QUERY, CallerDep, JsonBody, ServiceDep, ServicesDep, example
from app.http.openapi import errors, json_request
from app.http.routes.guarded_route import GuardedRouter
from app.recommendation.cost import LOADED_MODEL, LOGGED_EVENTS, OPERATION
from app.recommendation.scenarios import unshared_param
from app.schemas.fields import LogPageQuery, Name
from app.schemas.operations import Activated, AuditPage, Experiments, NewExperiment
from app.schemas.properties import DeclaredTypes, HeldTypes
from app.serving.property_types import declare_types, shown_types

router = GuardedRouter(tags=["admin"], dependencies=[needs("admin")])

EXPERIMENT = json_request(
    NewExperiment,
    {
        "the new model for a tenth of the users": {"name": "june", "shares": {"shop-may": 0.9, "shop-june": 0.1}},
        "the other settings for half of the users": {
            "name": "prices",
            "over": "scenarios",
            "shares": {"home": 1, "home-2": 1},
        },
    },
)

PROPERTIES = json_request(
    DeclaredTypes,
    {
        "of items and users": {"items": {"price": "number", "brand": "text"}, "users": {"member": "boolean"}},
        "remove a property": {"items": {"size": None}},
    },
)


@router.put(
    "/v1/admin/properties",
    openapi_extra=PROPERTIES,
    responses=errors(400, 408, 409, 413, 415),
    dependencies=[NO_QUERY],
)
async def put_property_types(
    body: JsonBody, service: ServiceDep, services: ServicesDep, caller: CallerDep
) -> HeldTypes:
    """Declare the types of properties of items and users, or remove properties. All changes are applied, or none.

    A property that is not declared takes the type of its first value. A type never changes: declaring another type is a
    422, as are more than 64 properties of items or more than 64 of users. `null` removes a property and all its values
    in every process within one second; the name can then have another type. Removing a property that a scenario names
    is a 409.
    """
    await charge_operation(services, caller, OPERATION)
    held = await declare_types(service.store, service.scenarios, caller.tenant, body)
    service.switcher.hold(held)
    return shown_types(held)


@router.get("/v1/admin/properties", dependencies=[NO_QUERY])
async def get_property_types(service: ServiceDep, caller: CallerDep) -> HeldTypes:
    """Return the types of all properties of items and users, declared or not."""
    return shown_types(await service.store.properties.held(caller.tenant))


@router.post("/v1/admin/generations/{name}/activate", responses=errors(404, 409), dependencies=[NO_QUERY])
async def activate_generation(
    name: Annotated[Name, Path(description="The name of the model.", openapi_examples=example("shop-june"))],
    service: ServiceDep,
    services: ServicesDep,
    caller: CallerDep,
) -> Activated:
    """Serve the model with this name from the models folder.

    This process switches at once, all others within about a second. Each model that may have to be loaded costs 500
    requests. The whole call costs at most half of the key's requests per minute.
    """
    await charge_operation(services, caller, LOADED_MODEL)
    previous = service.served_model.generation
    served = await service.switcher.activate(name)
    activated = Activated(generation=served.model.generation, tag=served.model.tag, previous=previous)
    await audit(services, caller, "model.activate", name, {"tag": activated.tag, "previous": previous})
    return activated


@router.put(
    "/v1/admin/experiment",
    response_model_exclude_unset=True,
    openapi_extra=EXPERIMENT,
    responses=errors(400, 404, 408, 409, 413, 415),
    dependencies=[NO_QUERY],
)
async def put_experiment(body: JsonBody, service: ServiceDep, services: ServicesDep, caller: CallerDep) -> Experiments:
    """Start an experiment: serve several models or scenarios at the same time, each to its share of the users."""
    experiment = validate(NewExperiment, body, "the body is not a valid experiment")
    if experiment.over == "models":
        await charge_operation(services, caller, LOADED_MODEL * len(experiment.shares))
    else:
        found = {name: (await service.scenarios.scenario(name)).settings for name in experiment.shares}
        if reason := unshared_param({name: settings for name, settings in found.items() if settings}):
            raise InvalidRequest("no request fits every scenario", [ErrorDetail(field="shares", reason=reason)])
    await service.switcher.start_experiment(experiment)
    await audit(
        services, caller, "experiment.start", experiment.name, experiment.model_dump(include={"over", "shares"})
    )
    return Experiments(experiment=experiment)


@router.get("/v1/admin/experiment", response_model_exclude_unset=True, dependencies=[NO_QUERY])
async def get_experiment(service: ServiceDep) -> Experiments:
    """Return the experiment that this process follows, or null."""
    return Experiments(experiment=service.switcher.experiment)


@router.delete("/v1/admin/experiment", dependencies=[NO_QUERY])
async def end_experiment(service: ServiceDep, services: ServicesDep, caller: CallerDep) -> Experiments:
    """End the experiment. All users get the active model again."""
    await charge_operation(services, caller, OPERATION)
    await service.switcher.end_experiment()
    await audit(services, caller, "experiment.end")
    return Experiments(experiment=None)


@router.get("/v1/admin/audit", response_model=AuditPage)
async def get_audit(
    query: Annotated[LogPageQuery, Query()], service: ServiceDep, services: ServicesDep, caller: CallerDep
) -> Response:
    """List the audit log in pages, oldest first: who did what with keys, models, experiments, scenarios and user data.

    It records changes of keys, models, experiments and scenarios, and erasures, merges and exports. No entry can be
    changed or removed. A user appears as a keyed hash; `lisarec audit --user` computes it from an id. A call costs 1
    request, and 1 more for each 100 entries of `limit`.
    """
    await charge(services, caller, 1 + query.limit // LOGGED_EVENTS)
    found = await service.store.audit.entries(caller.tenant, after=query.after, limit=query.limit + 1)
    page = AuditPage.of(found, query.limit)
    # the framework would traverse the page three more times
    return Response(page.model_dump_json(), media_type="application/json")

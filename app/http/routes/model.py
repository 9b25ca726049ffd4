"""The routes of the served model and of the statistics of its recommendations."""

from fastapi import Response

from app.events.click_through import stats_of
from app.http.access import charge_operation, needs
from app.http.dependencies import NO_QUERY, CallerDep, ServiceDep, ServicesDep
from app.http.routes.guarded_route import GuardedRouter
from app.recommendation.cost import statistics_charge
from app.schemas.operations import ServedModel, Stats

TALLY_COST = 300.0  # of summing up a tally, where parsing a byte of JSON costs 1

router = GuardedRouter(tags=["model"], dependencies=[needs("recs:read")])


@router.get("/v1/stats", response_model=Stats, dependencies=[NO_QUERY])
async def get_stats(service: ServiceDep, services: ServicesDep, caller: CallerDep) -> Response:
    """Return, by generation, how often each position of a list was shown and which events followed.

    The response also has the outcomes of each scenario's lists. Dropping a generation removes its statistics. A call
    costs 10 requests, and 3 more for each generation in the store.
    """
    clicks = service.signals.click_through
    await charge_operation(services, caller, statistics_charge(clicks.generations))
    tallies = await clicks.tallies()
    cost = 1 + TALLY_COST * len(tallies)
    stats = await services.shared_thread.run(lambda: stats_of(tallies).model_dump_json(), cost, caller.requester)
    return Response(stats, media_type="application/json")


@router.get("/v1/model", dependencies=[NO_QUERY])
async def get_model(service: ServiceDep) -> ServedModel:
    """Return the generation that is served: its configuration and its training metrics."""
    return service.served_model

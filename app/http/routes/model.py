"""The routes of the served model and of the statistics of its recommendations."""

from app.http.access import needs
from app.http.dependencies import NO_QUERY, ServiceDep
from app.http.routes.guarded_route import GuardedRouter
from app.schemas.operations import ServedModel, Stats

router = GuardedRouter(tags=["model"], dependencies=[needs("recs:read")])


@router.get("/v1/stats", dependencies=[NO_QUERY])
async def get_stats(service: ServiceDep) -> Stats:
    """Return, by generation, how often each position of a list was shown and which events followed.

    The response also has the outcomes of each scenario's lists.
    """
    return await service.signals.click_through.stats()


@router.get("/v1/model", dependencies=[NO_QUERY])
async def get_model(service: ServiceDep) -> ServedModel:
    """Return the generation that is served: its configuration and its training metrics."""
    return service.served_model

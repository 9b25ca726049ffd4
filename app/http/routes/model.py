"""The routes of the served model and of the statistics of its recommendations."""

from app.http.access import needs
from app.http.dependencies import NO_QUERY, ServiceDep
from app.http.routes.guarded_route import GuardedRouter
from app.schemas.operations import ServedModel, Stats

router = GuardedRouter(tags=["model"], dependencies=[needs("recs:read")])


@router.get("/v1/stats", dependencies=[NO_QUERY])
async def get_stats(service: ServiceDep) -> Stats:
    """How often each place of the recommendations was shown, and what events came of it, by generation."""
    return await service.signals.click_through.stats()


@router.get("/v1/model", dependencies=[NO_QUERY])
async def get_model(service: ServiceDep) -> ServedModel:
    """The generation that answers: its configuration, and how training went."""
    return service.served_model

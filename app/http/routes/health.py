"""The routes of operations: liveness, readiness, metrics."""

import asyncio

from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from app.errors import DeviceLost, Draining
from app.http.access import NO_SCOPE, needs
from app.http.dependencies import NO_QUERY, ChargeDep, ServicesDep
from app.http.routes.guarded_route import GuardedRouter
from app.recommendation.cost import METRICS
from app.schemas.operations import Health

EXAMPLE = 'lisarec_events_total{outcome="accepted"} 3.0'

router = GuardedRouter(tags=["operations"], dependencies=[NO_QUERY])


@router.head("/healthz", include_in_schema=False, dependencies=[NO_SCOPE])  # some balancers probe with it
@router.get("/healthz", dependencies=[NO_SCOPE])
async def get_health() -> Health:
    """The process lives."""
    return Health(status="ok")


@router.head("/readyz", include_in_schema=False, dependencies=[NO_SCOPE])
@router.get("/readyz", dependencies=[NO_SCOPE])
async def get_readiness(services: ServicesDep) -> Health:
    """The model is loaded, the process is not shutting down, its GPU answers, and its store is the right one.

    A store that cannot be reached does not matter: popular items flow. One that was replaced, removed or has lost
    events that it acknowledged does: 503 until somebody has put that right.
    """
    if services.draining:
        raise Draining
    if services.has_lost_device:
        raise DeviceLost
    if (failure := services.store_failure) is not None:
        raise failure
    return Health(status="ready")


@router.get(
    "/metrics",
    dependencies=[needs("metrics:read")],
    responses={200: {"content": {"text/plain": {"example": EXAMPLE}}}},
)
async def get_metrics(services: ServicesDep, charge: ChargeDep) -> PlainTextResponse:
    """The numbers of this service, all of its worker processes together, for Prometheus."""
    await charge(METRICS)
    services.sample()
    # A thread, because the files of many workers take milliseconds to read.
    numbers = await asyncio.to_thread(services.metrics.exposition)
    return PlainTextResponse(numbers, media_type=CONTENT_TYPE_LATEST)

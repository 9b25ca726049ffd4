"""The routes of operations: liveness, readiness, metrics."""

import asyncio

from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from app.errors import DeviceLost, Draining
from app.http.access import NO_SCOPE, charge, needs
from app.http.dependencies import NO_QUERY, CallerDep, ServicesDep
from app.http.routes.guarded_route import GuardedRouter
from app.recommendation.cost import METRICS
from app.schemas.operations import Health

EXAMPLE = 'lisarec_events_total{outcome="accepted"} 3.0'

router = GuardedRouter(tags=["operations"], dependencies=[NO_QUERY])


@router.head("/healthz", include_in_schema=False, dependencies=[NO_SCOPE])  # some load balancers probe with HEAD
@router.get("/healthz", dependencies=[NO_SCOPE])
async def get_health() -> Health:
    """Report that the process is alive."""
    return Health(status="ok")


@router.head("/readyz", include_in_schema=False, dependencies=[NO_SCOPE])
@router.get("/readyz", dependencies=[NO_SCOPE])
async def get_readiness(services: ServicesDep) -> Health:
    """Report whether the process is ready to serve.

    It is ready when the model is loaded, the process is not draining, its GPU responds, and its store is the right one.
    An unreachable store does not end readiness, because the service then returns popular items. A store that was
    replaced, was removed or has lost acknowledged events answers 503 until an operator repairs it.
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
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}, "example": EXAMPLE}}}},
)
async def get_metrics(services: ServicesDep, caller: CallerDep) -> PlainTextResponse:
    """Return the metrics of all worker processes together, in the Prometheus text format."""
    await charge(services, caller, METRICS)
    services.sample()
    # In a thread, because the files of many workers take milliseconds to read.
    numbers = await asyncio.to_thread(services.metrics.exposition)
    return PlainTextResponse(numbers, media_type=CONTENT_TYPE_LATEST)

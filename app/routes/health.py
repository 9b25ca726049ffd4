"""For those who run the service: is it alive, does it want requests, how is it doing."""

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from app.dependencies import NO_QUERY, ServiceDep
from app.errors import Draining
from app.schemas import Health

EXAMPLE = 'lisarec_events_total{outcome="accepted"} 3.0'

router = APIRouter(tags=["operations"], dependencies=[NO_QUERY])


@router.head("/healthz", include_in_schema=False)  # some balancers probe with it
@router.get("/healthz")
async def get_health() -> Health:
    """The process lives."""
    return Health(status="ok")


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz")
async def get_readiness(service: ServiceDep) -> Health:
    """The model is loaded and the process is not shutting down. A lost store does not matter: popular items flow."""
    if service.draining:
        raise Draining
    return Health(status="ready")


@router.get("/metrics", responses={200: {"content": {"text/plain": {"example": EXAMPLE}}}})
async def get_metrics(service: ServiceDep) -> PlainTextResponse:
    """The numbers of this process, for Prometheus."""
    return PlainTextResponse(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

"""What is served."""

from fastapi import APIRouter

from app.access import needs
from app.dependencies import NO_QUERY, ServiceDep
from app.schemas import ServedModel

router = APIRouter(tags=["model"], dependencies=[needs("recs:read")])


@router.get("/v1/model", dependencies=[NO_QUERY])
async def get_model(service: ServiceDep) -> ServedModel:
    """The generation that answers: its configuration, and how training went."""
    return service.served_model

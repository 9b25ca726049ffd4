"""For operators: with a key for it, or without keys from the machine that the service runs on."""

from typing import Annotated

from fastapi import APIRouter, Path

from app.access import needs
from app.dependencies import NO_QUERY, ServiceDep
from app.openapi import errors
from app.schemas import Activated, Id

router = APIRouter(tags=["admin"], dependencies=[needs("admin"), NO_QUERY])


@router.post("/v1/admin/generations/{name}/activate", responses=errors(404, 409))
async def activate_generation(name: Annotated[Id, Path(examples=["shop-june"])], service: ServiceDep) -> Activated:
    """Serve the model of that name from the models folder: this process at once, all others within a second or so."""
    previous = service.served_model.generation
    serving = await service.switch.activate(name)
    return Activated(generation=serving.model.generation, tag=serving.model.tag, previous=previous)

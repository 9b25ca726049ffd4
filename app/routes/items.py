"""The catalogue: popular items, and search."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from app.access import needs
from app.dependencies import ServiceDep
from app.schemas import Items, PopularItems, PopularQuery, SearchQuery

router = APIRouter(tags=["items"], dependencies=[needs("recs:read")])


@router.get("/v1/items/popular")
async def get_popular_items(query: Annotated[PopularQuery, Query()], service: ServiceDep) -> PopularItems:
    """The items with the most training events."""
    return PopularItems(generation=service.served_model.generation, items=service.catalogue.popular(query.k))


@router.get("/v1/items")
async def search_items(query: Annotated[SearchQuery, Query()], service: ServiceDep) -> Items:
    """Items whose title or id contains the query, closest match first; all by popularity without a query."""
    # A thread, because a large catalogue takes milliseconds to look through.
    return Items(items=await asyncio.to_thread(service.catalogue.search, query.query, query.limit))

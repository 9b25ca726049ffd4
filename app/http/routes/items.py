"""The catalogue: popular and trending items, search, and the shop's updates of its items."""

from functools import partial
from typing import Annotated

import orjson
from fastapi import Query, Response
from pydantic import Field

from app.http import charged_calls
from app.http.access import charge, needs
from app.http.dependencies import NO_QUERY, CallerDep, ItemId, JsonBody, RawBody, ServiceDep, ServicesDep, StockedItemId
from app.http.openapi import errors, json_request
from app.http.routes.guarded_route import GuardedRouter
from app.recommendation import cost
from app.recommendation.personal_search import find_for_user
from app.schemas.items import (
    MAX_ITEMS,
    Item,
    Items,
    ItemsTaken,
    ItemWords,
    PopularItems,
    PopularQuery,
    PostedItem,
    SearchQuery,
    TrendingItems,
    TrendingQuery,
)
from app.schemas.recommendations import ItemListQuery, Recommendations, SimilarQuery
from model.artifact.word_index import Search

router = GuardedRouter(tags=["items"])
READS, WRITES = needs("recs:read"), needs("catalogue:write")

WORDS = {
    "title": "Green tea",
    "categories": ["tea", "organic"],
    "available": True,
    "properties": {"price": 4.5, "brand": "Hill", "discount": None},
}
PUT = json_request(ItemWords, {"all": WORDS, "sold out": {"available": False}})
POST = json_request(
    PostedItem | Annotated[list[PostedItem], Field(min_length=1, max_length=MAX_ITEMS)],
    {"one": {"item_id": "tea-2", **WORDS}, "several": [{"item_id": "tea-2", **WORDS}, {"item_id": "cup-1"}]},
)


@router.get("/v1/items/popular", dependencies=[READS])
async def get_popular_items(
    query: Annotated[PopularQuery, Query()], service: ServiceDep, services: ServicesDep, caller: CallerDep
) -> PopularItems:
    """List the items with the most training events. The score is that number."""
    await charge(services, caller, cost.list_charge(query.k))
    return PopularItems(generation=service.served_model.generation, items=service.catalogue.popular_items(query.k))


@router.get("/v1/items/trending", dependencies=[READS])
async def get_trending_items(
    query: Annotated[TrendingQuery, Query()], caller: CallerDep, services: ServicesDep
) -> TrendingItems:
    """List the items with the highest number of recent visitors in all processes, with a delay of a few seconds.

    The list is empty while no item has been used.
    """
    service, categories = services.by_tenant[caller.tenant], query.categories
    await charge(services, caller, cost.list_charge(query.k, len(categories)))
    find = partial(service.switcher.current.trending.items, query.k, categories)
    if len(categories) <= cost.FEW_CATEGORIES:
        items = find()
    else:
        items = await services.shared_thread.run(find, len(categories) + len(service.catalogue), caller.requester)
    return TrendingItems(generation=service.served_model.generation, items=items)


@router.get("/v1/items", response_model=Items, dependencies=[READS])
async def search_items(query: Annotated[SearchQuery, Query()], caller: CallerDep, services: ServicesDep) -> Response:
    """Search items by title or id, closest match first, or rank the closest matches for a user.

    Without a query, all items match. The words of a query may be in any order, and the last word may be incomplete.
    """
    service, thread = services.by_tenant[caller.tenant], services.shared_thread
    catalogue, words = service.catalogue, len(Search.of(query.query).words)
    await charge(
        services, caller, cost.search_charge(query, words, catalogue.searched_items, services.settings.max_cost)
    )
    if (request := query.for_user()) is not None:
        recommender = service.switcher.recommender
        found = await find_for_user(request, recommender, catalogue, thread, caller.requester)
    else:  # in a thread, because a large catalogue takes milliseconds to search
        search = partial(catalogue.search, query.query, query.limit)
        found = await thread.run(search, catalogue.searched_items, caller.requester)
    # The framework would traverse the list three more times, while all other requests wait.
    return Response(orjson.dumps({"items": found}), media_type="application/json")


@router.post("/v1/items", openapi_extra=POST, responses=errors(400, 408, 413, 415), dependencies=[WRITES, NO_QUERY])
async def post_items(body: RawBody, caller: CallerDep, services: ServicesDep) -> ItemsTaken:
    """Update one item, or an array of up to 1,000, durably.

    If one item is invalid, none is updated. After a 503, some may be updated: send all of them again. Fields that you
    leave out keep their values, whether an earlier update set them or the model learned them.
    """
    return await charged_calls.update_items(services, caller, body)


@router.get("/v1/items/{item_id}", responses=errors(404), dependencies=[READS, NO_QUERY])
async def get_item(item_id: ItemId, service: ServiceDep, services: ServicesDep, caller: CallerDep) -> Item:
    """Return the item as this process knows it, at most a second behind the others."""
    await charge(services, caller, cost.ITEM)
    return service.item_updates.item(item_id)


@router.put(
    "/v1/items/{item_id}",
    openapi_extra=PUT,
    responses=errors(400, 408, 413, 415),
    dependencies=[WRITES, NO_QUERY],
)
async def put_item(
    item_id: StockedItemId, body: JsonBody, service: ServiceDep, services: ServicesDep, caller: CallerDep
) -> Item:
    """Update an item, whether or not a model has learned it. Fields that you leave out keep their values."""
    await charge(services, caller, cost.update_charge([body]))
    return await service.item_updates.put(item_id, body)


@router.get("/v1/items/{item_id}/similar", response_model=Recommendations, responses=errors(404), dependencies=[READS])
async def get_similar_items(
    item_id: ItemId, query: Annotated[SimilarQuery, Query()], services: ServicesDep, caller: CallerDep
) -> Response:
    """List the items whose target and history codes are most similar."""
    return Response(await charged_calls.similar(services, caller, item_id, query), media_type="application/json")


@router.get("/v1/items/{item_id}/together", response_model=Recommendations, responses=errors(404), dependencies=[READS])
async def get_items_together(
    item_id: ItemId, query: Annotated[ItemListQuery, Query()], services: ServicesDep, caller: CallerDep
) -> Response:
    """List the items that were bought in one order with this item more often than their popularity predicts."""
    return Response(await charged_calls.together(services, caller, item_id, query), media_type="application/json")

"""The recommendation endpoints."""

from typing import Annotated

from fastapi import Query, Response

from app.http.access import needs
from app.http.charged_calls import recommend, recommend_body
from app.http.dependencies import NO_QUERY, CallerDep, RawBody, ServicesDep, UserId
from app.http.openapi import errors, json_request
from app.http.routes.guarded_route import GuardedRouter
from app.schemas.recommendations import (
    RecommendationBatch,
    RecommendationRequest,
    RecommendationResults,
    Recommendations,
    RecommendationUrlQuery,
)

router = GuardedRouter(tags=["recommendations"], dependencies=[needs("recs:read")])

BODY = json_request(
    RecommendationRequest | RecommendationBatch,
    {
        "user": {"user_id": "ada", "k": 5, "categories": ["tea"]},
        "history": {"history": ["cup-1", "tea-2"], "exclude_seen": "all"},
        "rules of the shop": {
            "user_id": "ada",
            "k": 5,
            "categories_none": ["gift cards"],
            "boost": {"organic": 0.7},
            "pin": [{"item_id": "tea-2", "place": 2}],
            "diversity": 0.5,
            "max_per_category": 2,
            "max_per": {"categories": 2},
        },
        "without recent purchases": {"user_id": "ada", "exclude_events": ["purchase"], "within": "90d"},
        "items that go with the cart": {"user_id": "ada", "basket": ["cup-1", "tea-2"], "basket_only": True},
        "items to buy again": {"user_id": "ada", "mode": "repeat", "k": 5},
        "the first page": {"user_id": "ada", "cursor": ""},
        "explained": {"user_id": "ada", "k": 3, "explain": True},
        "a page": {"requests": [{"user_id": "ada"}, {"user_id": "ada", "because": ""}]},
        "several": {"requests": [{"user_id": "ada"}, {"history": ["cup-1"], "candidates": ["tea-2", "tea-3"]}]},
    },
)


@router.get("/v1/users/{user_id}/recommendations", response_model=Recommendations)
async def get_recommendations(
    user_id: UserId, query: Annotated[RecommendationUrlQuery, Query()], services: ServicesDep, caller: CallerDep
) -> Response:
    """Recommend items for a user. An unknown user gets popular items."""
    request = RecommendationRequest(user_id=user_id, **query.model_dump(exclude_unset=True))
    return Response(await recommend(services, caller, request), media_type="application/json")


@router.post(
    "/v1/recommendations",
    response_model=Recommendations | RecommendationResults,
    openapi_extra=BODY,
    responses=errors(400, 408, 409, 413, 415),
    dependencies=[NO_QUERY],
)
async def post_recommendations(body: RawBody, services: ServicesDep, caller: CallerDep) -> Response:
    """Recommend items for a user, or for a history that is not stored; up to 100 such requests at once.

    The cost of a call depends on what the service has to compute. It is a number of plain requests for ten items, which
    counts against the key's rate. A call that costs too much is a 422 `too_costly`, which says what each part costs.
    """
    return Response(await recommend_body(services, caller, body), media_type="application/json")

"""The routes of visitors who keep their own states. Each call is charged like the corresponding call for a user."""

from functools import partial
from typing import Any

from fastapi import Response

from app.errors import ErrorDetail, Forbidden, InvalidRequest, validate
from app.events.portable_events import fold_portable
from app.http.access import Caller, needs
from app.http.auth.sealed_states import require_sealer
from app.http.charged_calls import ID_COST, INVALID, LONG_BODY, charged_sender, parsed_write, recommend, size_of
from app.http.dependencies import NO_QUERY, CallerDep, RawBody, ServicesDep, parsed_json
from app.http.openapi import COMPONENT, component_schemas, errors, json_request
from app.http.routes.guarded_route import GuardedRouter
from app.http.services import Services
from app.schemas.events import MAX_EVENTS, PortableEventCounts, PortableEventsRequest, PostedEvent
from app.schemas.recommendations import RecommendationRequest, Recommendations
from app.serving.lifespan import Service
from storage.state.portable_state import PortableState

router = GuardedRouter(prefix="/v1/portable", tags=["portable"], dependencies=[needs("portable"), NO_QUERY])
OF_USERS = frozenset({"user_id", "history", "requests"})  # fields for keys that can read users
CONDITIONS = frozenset({"if", "then", "else"})  # on the fields that are left out
RESPONSES = errors(400, 408, 409, 413, 415)


def _without(schema: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the schema of an object without these fields."""
    left = {name: one for name, one in schema["properties"].items() if name not in names}
    required = [name for name in schema.get("required", ()) if name not in names]
    return {name: one for name, one in schema.items() if name not in CONDITIONS} | {
        "properties": left,
        "required": required,
    }


SCHEMAS = component_schemas(PostedEvent, RecommendationRequest)
POSTED = SCHEMAS.pop("PostedEvent")
PORTABLE_EVENT = _without(POSTED, "user_id", "item_id", "items") | {"title": "PortableEvent", "required": ["item_id"]}
PORTABLE_EVENT["properties"]["item_id"] = POSTED["properties"]["user_id"] | {"title": "Item Id"}
PORTABLE_EVENT["description"] = "One interaction of the visitor with an item."
PORTABLE_EVENTS = {
    "title": "PortableEvents",
    "description": "A visitor's sealed state and new events.",
    "type": "object",
    "properties": {
        "state": {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "State"},
        "events": {
            "type": "array",
            "items": {"$ref": COMPONENT.format(model="PortableEvent")},
            "minItems": 1,
            "maxItems": MAX_EVENTS,
            "title": "Events",
        },
    },
    "required": ["events"],
    "additionalProperties": False,
}
PORTABLE_REQUEST = _without(SCHEMAS.pop("RecommendationRequest"), *OF_USERS) | {
    "title": "PortableRecommendationRequest",
    "description": "A request for recommendations for a sealed state.",
}
EVENT = {"event_id": "01932c07-5e00-7d4b-a1c3-2f8e6b9d0a11", "item_id": "tea-2"}
EVENTS = json_request(
    {"$ref": COMPONENT.format(model="PortableEvents")},
    {"a new visitor": {"events": [EVENT]}, "later": {"state": "AZ8...", "events": [EVENT]}},
    {"PortableEvent": PORTABLE_EVENT, "PortableEvents": PORTABLE_EVENTS},
)
REQUEST = json_request(
    {"$ref": COMPONENT.format(model="PortableRecommendationRequest")},
    {"a new visitor": {"k": 5}, "later": {"state": "AZ8...", "k": 5, "scenario": "product-page"}},
    {**SCHEMAS, "PortableRecommendationRequest": PORTABLE_REQUEST},
)


@router.post("/events", response_model=PortableEventCounts, openapi_extra=EVENTS, responses=RESPONSES)
async def post_portable_events(body: RawBody, services: ServicesDep, caller: CallerDep) -> Response:
    """Fold events into the sealed state that a visitor keeps, and return the new state. Nothing is logged.

    The events are those of `POST /v1/events` without `user_id`, and cost the same. An event is a duplicate if its id is
    one of the 20 newest in the state. The returned state has 4,996 characters, whatever the length of the history.

    A state that this key cannot open is a 422 `invalid_sealed_state`, whatever the reason; an expired one is a 422
    `sealed_state_expired`. In both cases, start again without a state. A service without seal keys answers 409
    `sealing_not_configured`.
    """
    return Response(await append_portable_events(services, caller, body), media_type="application/json")


@router.post("/recommendations", response_model=Recommendations, openapi_extra=REQUEST, responses=RESPONSES)
async def post_portable_recommendations(body: RawBody, services: ServicesDep, caller: CallerDep) -> Response:
    """Recommend items for a sealed state, or popular items without one.

    The body is that of `POST /v1/recommendations` for one user. A page key names a `scenario` and must not send
    `filter`, `max_per`, `objective`, `explain` or expressions in `boost`. If the scenario has an objective or such
    expressions, `score` is only the item's place, counted from the end of the list.

    `exclude_seen=all` and `exclude_events` use the events that the state carries. If there were more events,
    `seen_events_limit` says how many the state carries. A state has no log, so `mode` `repeat` is a 422.
    """
    return Response(await recommend_portable(services, caller, body), media_type="application/json")


async def append_portable_events(services: Services, caller: Caller, body: bytes) -> bytes:
    """Charge the caller for each event in the body of ``POST /v1/portable/events``, and fold them into its state.

    raises  SealingNotConfigured, InvalidJson, InvalidRequest, InvalidSealedState, SealedStateExpired
            TooManyEvents, TooManyRequests  when the request exceeds the caller's limits, and as `fold_portable`
    """
    sealer, service = require_sealer(services.sealer), services.by_tenant[caller.tenant]
    async with parsed_write(services, caller, body) as parsed:
        posted = validate(PortableEventsRequest, parsed, INVALID)
        sender = await charged_sender(services, caller, len(posted.events))
        generation = service.switcher.current.generation
        state = PortableState.empty(generation)
        if posted.state is not None:
            state = sealer.open(posted.state.text, caller.tenant, caller.audience)
        state, counts = await fold_portable(service.ingest, service.signals, posted.events, state, generation, sender)
        sealed = sealer.seal(state, caller.tenant, caller.audience)
    found = PortableEventCounts(state=sealed.text, expires=sealed.expires, **counts.model_dump())
    return found.model_dump_json().encode()


async def recommend_portable(services: Services, caller: Caller, body: bytes) -> bytes:
    """Charge the caller for the request in the body, and return the body of the response.

    raises  InvalidJson, SealingNotConfigured, InvalidRequest, Forbidden, and as `recommend`
    """
    posted = await parsed_json(services, caller, body)
    require_sealer(services.sealer)
    if not isinstance(posted, dict) or OF_USERS & posted.keys():
        reason = f"accepts one request with a sealed state, without {', '.join(sorted(OF_USERS))}"
        raise InvalidRequest(INVALID, [ErrorDetail(reason=reason)])
    is_first = posted.get("state") is None
    work = partial(validate, RecommendationRequest, {**posted, "state": ""} if is_first else posted, INVALID)
    size = size_of(posted)
    request = work() if size <= LONG_BODY else await services.shared_thread.run(work, ID_COST * size, caller.requester)
    if caller.key is not None and caller.key.is_public:
        _refuse_properties(request)
        if request.boost and request.scenario is not None:
            _refuse_comparison(services.by_tenant[caller.tenant], request)
    if is_first and request.state is not None:
        generation = services.by_tenant[caller.tenant].switcher.current.generation
        request.state.opened = PortableState.empty(generation)
    return await recommend(services, caller, request)


def _refuse_properties(request: RecommendationRequest) -> None:
    """Reject fields that would reveal item properties, such as margins, to anyone who reads a page's key."""
    if request.explain:
        raise Forbidden("with a page key, leave out `explain`, which shows what an objective or a boost adds")
    if request.filter is not None or request.max_per or request.weighs_properties:
        raise Forbidden(
            "with a page key, put filter, boost expressions, max_per and objective into a scenario, and pass its name"
        )


def _refuse_comparison(service: Service, request: RecommendationRequest) -> None:
    """Reject a boost beside what a scenario adds: it would reveal how much, by the order of two items."""
    if any(one.weighs_properties for one in service.scenarios.resolve([request], service.switcher.experiment)):
        raise Forbidden("with a page key, leave out `boost` where the scenario has an objective or boost expressions")

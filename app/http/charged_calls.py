"""The calls that the routes and the fast path share. Each charges its caller, then handles the parsed body."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from itertools import chain

from app.catalogue.trained_catalogue import EncodedItems, encode, encoded_pieces
from app.errors import ItemNotFound, TooManyEvents, validate
from app.events.ingest import FEW_EVENTS
from app.events.new_users import Sender
from app.events.user_data import visitor_of
from app.http.access import Caller, charge, charge_operation, operation_limit, require_scope
from app.http.auth.sealed_states import open_states
from app.http.dependencies import LONG_BODY_BYTES, parse_json, parsed_json
from app.http.services import Services
from app.recommendation import scenarios
from app.recommendation.cost import (
    CORRECTED_EVENTS,
    LOGGED_EVENTS,
    MERGED_EVENTS,
    SCENARIOS,
    archive_charge,
    charge_for,
    correction_charge,
    log_charge,
    scenario_charge,
    update_charge,
    user_properties_charge,
    vector_numbers,
)
from app.recommendation.state_reader import log_queries
from app.schemas.events import MAX_PUBLIC_EVENTS
from app.schemas.fields import LogPageQuery
from app.schemas.items import ItemsTaken
from app.schemas.properties import UserProperties
from app.schemas.recommendations import ItemListQuery, RecommendationBatch, RecommendationRequest, SimilarQuery
from app.schemas.scenarios import ScenarioPreview, ScenarioSettings, ScenarioVersion
from app.schemas.users import Erasure, Merged, Undone, UserEvents
from app.serving import property_types
from app.serving.item_updates import parse_items
from app.serving.lifespan import Service
from storage.protocol import UserStore

LONG_BODY = 2_000  # ids, categories and characters of cursors; validating more takes milliseconds
REQUEST_SIZE = 50  # validating a request takes as long as validating this number of ids
ID_COST = 30.0  # of validating an id, where parsing a byte of JSON costs 1
LARGE_COST = 16  # plain requests, about 3 ms
FEW_ENTRIES = 128  # log entries that take about a millisecond to read
NUMBERS_OF_ITEM = 25  # vector elements that take as long to parse as an item without a vector
SHORT_LIST = 100  # items, whose JSON takes some microseconds
FEW_ITEMS, ITEM_COST = 50, 500.0  # items parsed within half a millisecond; of parsing one, where a byte costs 1
INVALID = "the body is not a valid request"


async def append_events(services: Services, caller: Caller, body: bytes) -> bytes:
    """Charge the caller for each event in the body of ``POST /v1/events``, log and fold the events, and return counts.

    raises  InvalidJson, TooManyEvents, TooManyRequests, and as `Ingest.append`
    """
    async with parsed_write(services, caller, body) as parsed:
        sender = await charged_sender(services, caller, len(parsed) if isinstance(parsed, list) else 1)
        return (await services.by_tenant[caller.tenant].ingest.append(parsed, sender)).model_dump_json().encode()


async def charged_sender(services: Services, caller: Caller, events: int) -> Sender:
    """Charge the caller for a number of events, one of which was counted with the call, and return their sender.

    raises  TooManyEvents, TooManyRequests
    """
    key, run_apart = caller.key, partial(services.shared_thread.run, requester=caller.requester)
    if key is None:
        return Sender(run_apart=run_apart)
    rate = key.requests_per_minute
    if rate is not None and events > rate:
        raise TooManyEvents(
            f"the rate limit of this key is {rate:,} events per minute; nothing was applied, split the request"
        )
    if key.is_public and events > MAX_PUBLIC_EVENTS:
        raise TooManyEvents(
            f"a request with a page key may have at most {MAX_PUBLIC_EVENTS} events; nothing was applied, split it"
        )
    if events > 1:
        await services.rate_limiter.count(key, events - 1)  # one was counted with the request
    count = partial(services.rate_limiter.count_new_users, key, services.settings.new_users_per_hour)
    return Sender(key.is_public, key.event_types, count, run_apart)


async def update_items(services: Services, caller: Caller, body: bytes) -> ItemsTaken:
    """Charge the caller for the items in the body of ``POST /v1/items``, one or an array, then apply the updates.

    raises  InvalidJson, InvalidItems, TooCostly, TooManyRequests, and as `ItemUpdates.post`
    """
    updates = services.by_tenant[caller.tenant].item_updates
    async with parsed_write(services, caller, body) as parsed:
        bodies = parsed if isinstance(parsed, list) else [parsed]
        await charge(services, caller, update_charge(bodies))
        parse = partial(parse_items, bodies, await updates.types_for(bodies))
        size = len(bodies) + vector_numbers(bodies) // NUMBERS_OF_ITEM
        if size <= FEW_ITEMS:
            return await updates.post(parse())
        return await updates.post(await services.shared_thread.run(parse, ITEM_COST * size, caller.requester))


def parsed_write(services: Services, caller: Caller, body: bytes) -> AbstractAsyncContextManager[object]:
    """Parse a body of events or items; a large one in turn with the key's other ones. Raises InvalidJson."""
    if len(body) <= LONG_BODY_BYTES and body.count(b"{") <= FEW_EVENTS:
        return nullcontext(parse_json(body))
    return _parsed_in_turn(services, caller, body)


@asynccontextmanager
async def _parsed_in_turn(services: Services, caller: Caller, body: bytes) -> AsyncIterator[object]:
    """Parse a large body, only one of each key at a time.

    The others wait as bytes, which the garbage collector does not traverse. It stops every thread while it traverses
    parsed bodies, for 40 ms with 32 bodies of 1,000 items.
    """
    async with services.turn_of(caller.requester.flow, "write"):
        yield await services.shared_thread.run(partial(parse_json, body), len(body), caller.requester)


async def recommend(services: Services, caller: Caller, request: RecommendationRequest) -> bytes:
    """Charge the caller for the request, and return the body of the response.

    raises  TooCostly, TooManyRequests, and as `ScenarioRegistry.resolve` and `BaseRecommender.recommend`
    """
    return b"".join((await _recommend_as_json(services, caller, [request]))[0])


async def recommend_body(services: Services, caller: Caller, body: bytes) -> bytes:
    """Charge the caller for the body of ``POST /v1/recommendations``, and return the body of the response.

    raises  InvalidJson, InvalidRequest, and as `recommend`
    """
    posted = await parsed_json(services, caller, body)
    size = size_of(posted)
    if size <= LONG_BODY:
        return await _recommend_parsed(services, caller, parse_request(posted))
    async with services.turn_of(caller.requester.flow, "read"):
        parsed = await services.shared_thread.run(partial(parse_request, posted), ID_COST * size, caller.requester)
        return await _recommend_parsed(services, caller, parsed, has_turn=True)


async def _recommend_parsed(
    services: Services, caller: Caller, parsed: RecommendationBatch | RecommendationRequest, *, has_turn: bool = False
) -> bytes:
    if isinstance(parsed, RecommendationRequest):
        return b"".join((await _recommend_as_json(services, caller, [parsed], has_turn=has_turn))[0])
    first, *others = await _recommend_as_json(services, caller, parsed.requests, has_turn=has_turn)
    rest = chain.from_iterable((b",", *pieces) for pieces in others)
    return b"".join([b'{"results":[', *first, *rest, b"]}"])


async def similar(services: Services, caller: Caller, item_id: str, query: SimilarQuery) -> bytes:
    """Charge the caller, and return the response body with the items that are most similar to the item.

    raises  ItemNotFound, and as `recommend`
    """
    service = services.by_tenant[caller.tenant]
    (resolved,) = _resolve(service, [RecommendationRequest(history=[], **query.model_dump(exclude_unset=True))])
    is_large = await _charge(services, caller, [resolved]) >= LARGE_COST
    async with _turn_to_read(services, caller, is_large=is_large):
        return encode(await service.switcher.recommender.similar(item_id, resolved, caller.requester))


async def together(services: Services, caller: Caller, item_id: str, query: ItemListQuery) -> bytes:
    """Charge the caller, and return the response body with the items that were bought together with the item.

    raises  ItemNotFound, and as `recommend`
    """
    if item_id not in services.by_tenant[caller.tenant].catalogue.row_of:
        raise ItemNotFound("this item is in no model; check its id, or show popular items until it has codes")
    wishes = query.model_dump(exclude_unset=True)
    request = RecommendationRequest(history=[], basket=[item_id], basket_only=True, current_item=item_id, **wishes)
    return await recommend(services, caller, request)


async def put_scenario(services: Services, caller: Caller, name: str, body: object) -> ScenarioVersion:
    """Charge the caller, and store the settings in the parsed body as the scenario with this name.

    raises  InvalidRequest  when the settings are invalid; for an expression, it gives the position in the text
            and as `ScenarioRegistry.put`
    """
    settings = validate(ScenarioSettings, body, "the body is not a valid scenario; nothing changed")
    await charge_operation(services, caller, scenario_charge(settings))
    await _check(services, caller, settings)
    return await services.by_tenant[caller.tenant].scenarios.put(name, settings, caller.name)


async def restore_scenario(services: Services, caller: Caller, name: str, number: int | None) -> ScenarioVersion:
    """Charge the caller, and restore the settings of an earlier version, the previous one if None.

    raises  InvalidRequest  when the settings are no longer valid, because a property that they name was deleted
            and as `ScenarioRegistry.earlier` and `put`
    """
    await charge_operation(services, caller, SCENARIOS)
    registry = services.by_tenant[caller.tenant].scenarios
    settings = (await registry.earlier(name, number)).settings
    if settings is not None:
        await charge_operation(services, caller, scenario_charge(settings), SCENARIOS)
        await _check(services, caller, settings)
    return await registry.put(name, settings, caller.name)


async def preview_scenario(services: Services, caller: Caller, body: object) -> bytes:
    """Charge the caller, and return the response body for a request with settings that are not stored.

    raises  as `put_scenario` and `recommend`
    """
    service, whole = services.by_tenant[caller.tenant], await _with_kept_settings(services, caller, body)
    preview = validate(ScenarioPreview, whole, "the body is not a valid preview")
    service.signals.require_types(preview.request.exclude_events, "request.")
    plain = preview.request.model_copy(update={"scenario": None})
    request = scenarios.with_settings(plain, preview.settings, "request.")
    is_large = await _charge(services, caller, [request]) >= LARGE_COST
    async with _turn_to_read(services, caller, is_large=is_large):
        await _check(services, caller, preview.settings, "settings.")
        scenarios.require_known_params(preview.request, [preview.settings], "request.")
        open_states(services.sealer, [request], caller.tenant, caller.audience)
        (answer,) = await service.switcher.recommender.recommend([request], caller.requester)
        return encode(answer)


async def _with_kept_settings(services: Services, caller: Caller, body: object) -> object:
    """Return the body of a preview, with the named scenario's stored values for the settings that it omits."""
    if not isinstance(body, dict) or not isinstance(body.get("settings"), dict):
        return body
    if not isinstance(name := body.get("scenario"), str):
        return body
    kept = (await services.by_tenant[caller.tenant].scenarios.scenario(name)).settings or ScenarioSettings()
    return body | {"settings": kept.model_dump(mode="json", exclude_unset=True) | body["settings"]}


async def _check(services: Services, caller: Caller, settings: ScenarioSettings, path: str = "") -> None:
    service = services.by_tenant[caller.tenant]
    service.signals.require_types(settings.exclude_events, path)
    held = await service.store.properties.held(caller.tenant)
    service.switcher.hold(held)  # includes types that were declared a moment ago
    run = partial(services.shared_thread.run, requester=caller.requester)
    await scenarios.check(settings, held.types, service.catalogue, run, path)


async def user_events(services: Services, caller: Caller, user_id: str, query: LogPageQuery) -> UserEvents:
    """Charge the caller for the entries and archive files to read, and return the page; raises as `UserData.events`.

    Only one long page of each key is read at a time. Otherwise, thirty of them would each take a turn before the next
    turn of any other key.
    """
    await charge(services, caller, 1 + query.limit // LOGGED_EVENTS)
    service = services.by_tenant[caller.tenant]
    if operation_limit(caller) is not None:
        files = await service.store.archived_files(caller.tenant, user_id, after=query.after)
        await charge_operation(services, caller, archive_charge(files))
    turn = services.turn_of(caller.requester.flow, "read") if query.limit > FEW_ENTRIES else nullcontext()
    async with turn:
        return await service.users.events(user_id, query.after, query.limit)


async def undo(services: Services, caller: Caller, user_id: str, event_id: str) -> Undone:
    """Charge the caller for folding the log again, and undo the event; raises as `UserData.undo`."""
    await _charge_correction(services, caller, [user_id], CORRECTED_EVENTS)
    async with services.turn_of(caller.requester.flow, "correct"):  # undos of one user would contend for the log
        return await services.by_tenant[caller.tenant].users.undo(user_id, event_id)


async def merge(services: Services, caller: Caller, user_id: str, body: object) -> Merged:
    """Charge the caller for both logs, and merge the visitor that the body names; raises as `UserData.merge`."""
    visitor = visitor_of(body, user_id)
    await _charge_correction(services, caller, [user_id, visitor], MERGED_EVENTS)
    async with services.turn_of(caller.requester.flow, "correct"):
        return await services.by_tenant[caller.tenant].users.merge(user_id, visitor)


async def erase(services: Services, caller: Caller, user_id: str) -> Erasure:
    """Charge the caller for the log entries that are processed, and erase the user; raises as `UserData.erase`."""
    service = services.by_tenant[caller.tenant]
    if (limit := operation_limit(caller)) is not None:
        entries = await service.store.erasure_length(caller.tenant, user_id, limit=limit * CORRECTED_EVENTS)
        await charge_operation(services, caller, correction_charge(entries))
    async with services.turn_of(caller.requester.flow, "correct"):
        return await service.users.erase(user_id)


async def put_user_properties(services: Services, caller: Caller, user_id: str, body: object) -> UserProperties:
    """Charge the caller, count an unknown user as a new user, and set properties of the user.

    raises  TooManyNewUsers, TooManyNewUsersAtOnce, TooManyRequests, and as `property_types.put_user_properties`
    """
    await charge(services, caller, user_properties_charge(body))
    store, key = services.by_tenant[caller.tenant].store, caller.key
    if key is not None and await _is_unknown(store, caller.tenant, user_id):
        await services.rate_limiter.count_new_users(key, services.settings.new_users_per_hour, 1)
    return await property_types.put_user_properties(store, caller.tenant, user_id, body)


async def _is_unknown(store: UserStore, tenant: str, user_id: str) -> bool:
    without_log = await store.users_without_log(tenant, [user_id])
    return bool(without_log) and not await store.properties.of_user(tenant, user_id)


async def _charge_correction(services: Services, caller: Caller, users: Sequence[str], events: int) -> None:
    if (limit := operation_limit(caller)) is not None:
        log_lengths = services.by_tenant[caller.tenant].store.log_lengths
        entries = sum(await log_lengths(caller.tenant, users, limit=limit * events))
        await charge_operation(services, caller, correction_charge(entries, events))


async def _recommend_as_json(
    services: Services, caller: Caller, requests: Sequence[RecommendationRequest], *, has_turn: bool = False
) -> list[list[bytes]]:
    """Return the response to each request as JSON in pieces. Only one large call of each key runs at a time.

    has_turn  whether this call already holds the key's turn
    """
    service = services.by_tenant[caller.tenant]
    for place, request in enumerate(requests):
        if request.exclude_events:  # those of a scenario were checked when it was stored, maybe with another model
            service.signals.require_types(request.exclude_events, f"requests.{place}." if len(requests) > 1 else "")
    resolved, is_public = _resolve(service, requests), caller.key is not None and caller.key.is_public
    is_large = await _charge(services, caller, resolved) >= LARGE_COST
    for request in resolved:
        if request.state is not None:  # most lists have none, and need not ask
            open_states(services.sealer, resolved, caller.tenant, caller.audience)
            break
    # as _turn_to_read, which plain requests do without
    turn = services.turn_of(caller.requester.flow, "read") if is_large else services.key_turns.turn(caller.requester)
    answers = []
    async with nullcontext() if has_turn else turn:
        found = await service.switcher.recommender.recommend(resolved, caller.requester)
        for request, answer in zip(resolved, found, strict=True):
            if is_public and request.weighs_properties:
                answer["items"] = EncodedItems.without_scores(answer["items"])
            answers.append(encoded_pieces(answer))
            if len(answer["items"]) > SHORT_LIST:
                await asyncio.sleep(0)  # let other requests run
    return answers


def _turn_to_read(services: Services, caller: Caller, *, is_large: bool) -> AbstractAsyncContextManager[None]:
    """Return a block in which a call for recommendations can run, which waits until it is its key's turn."""
    return services.turn_of(caller.requester.flow, "read") if is_large else services.key_turns.turn(caller.requester)


def _resolve(service: Service, requests: Sequence[RecommendationRequest]) -> Sequence[RecommendationRequest]:
    if all(request.scenario is None for request in requests):
        return requests
    return service.scenarios.resolve(requests, service.switcher.experiment)


async def _charge(services: Services, caller: Caller, requests: Sequence[RecommendationRequest]) -> int:
    if any(request.debug for request in requests):
        require_scope(caller, "scenarios:write")
    cost = charge_for(requests, services.settings.max_cost)
    if cost > 1:  # rare; a cost of 1 was counted with the call
        await charge(services, caller, cost)
        if user_ids := [query.user_id for query in log_queries(requests)]:
            await _charge_logs(services, caller, requests, user_ids, cost)
    return cost


async def _charge_logs(
    services: Services, caller: Caller, requests: Sequence[RecommendationRequest], user_ids: Sequence[str], counted: int
) -> None:
    """Charge the caller for the length of the users' logs, which is read only if it can make a difference."""
    settings, reader = services.settings, services.by_tenant[caller.tenant].log_reader
    has_rate = operation_limit(caller) is not None
    if not has_rate and counted + log_charge(settings.max_seen_events) * len(user_ids) <= settings.max_cost:
        return  # the common case
    lengths = await reader.lengths(user_ids)
    await charge(services, caller, charge_for(requests, settings.max_cost, lengths), counted=counted)
    # a partly archived log is reported with the maximum length
    archived = [user for user, length in zip(user_ids, lengths, strict=False) if length >= settings.max_seen_events]
    if has_rate and archived:
        await charge_operation(services, caller, archive_charge(await reader.archived_files(archived)))


def parse_request(body: object) -> RecommendationBatch | RecommendationRequest:
    """Validate the parsed body of ``POST /v1/recommendations``, and return its requests.

    raises  InvalidRequest
    """
    if isinstance(body, dict) and "requests" in body:
        return validate(RecommendationBatch, body, INVALID)
    return validate(RecommendationRequest, body, INVALID)


def size_of(body: object) -> int:
    """Return the total length of the lists and texts in a body's requests, plus REQUEST_SIZE for each request."""
    requests = body.get("requests", [body]) if isinstance(body, dict) else ()
    if not isinstance(requests, list):
        return 0
    return REQUEST_SIZE * len(requests) + sum(
        len(value)
        for request in requests
        if isinstance(request, dict)
        for name, value in request.items()
        if isinstance(value, list | str) and name != "state"  # its length is checked before it is decoded
    )

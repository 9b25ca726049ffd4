"""The cost of a request, in plain requests. It is known before any work begins, and bounded per call.

A plain request asks for ten items for a user. `benchmarks/attack/amplification.py` measures the weights, which are
rounded up for a catalogue of a million items. Its law: no call takes more than four times the processor time that it
costs, including that of the store. The cost of reading a log follows from its length, which is known before the read.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from math import ceil, floor

from app.errors import ErrorDetail, TooCostly
from app.schemas.items import SearchQuery
from app.schemas.recommendations import PersonalSearch, RecommendationRequest
from app.schemas.scenarios import ScenarioRequest, ScenarioSettings

PLAIN = 1.0
LIGHT = 2.0  # below this cost, the time of one request predicts that of the next
FEW_CATEGORIES = 20  # in filters; to look up more takes too long for the event loop
PLAIN_FIELDS, PLAIN_K = frozenset({"user_id", "k"}), 10
LOG_FIELDS = PLAIN_FIELDS | {"mode", "exclude_seen", "exclude_events", "within"}

K = 1 / 250  # per item of the answer
EXPLAINED = 1 / 40  # per explained item
DIVERSE = 1 / 200  # per item selected for diversity
COMPARED = 1 / 500_000  # per item selected for diversity and item of earlier pages or pin, whose codes are compared
ROTATED = 1 / 4  # per list with rotation, which ranks a few more items than the answer has
CAPPED = 2.0  # per limit on a category or text, which ranks more items than the answer has
CAPPED_ITEM = 1 / 200  # more, per item of the answer: those that are ranked may have a hundred categories each
ITEM_ID = 1 / 350  # per id in a list or a cursor
PINNED = 1 / 100
CATEGORY = 1 / 100  # per category in a filter
BOOSTED_BY_CATEGORY = 1.0  # for a boost by categories, which may go through all items for a user without a history
BOOSTED_CATEGORY = 1 / 20  # per category of it
CHARACTER = 1 / 100  # per character of an expression
BOOSTED = 3.0  # per boost expression, whose value for each item the scan adds to its score
WEIGHED = 1.0  # per objective
COUNTED = 1.0  # for counting the items that each part of a request leaves out
SEARCHED = 2.0  # for a personal search, which adds to each item's score
BASKET = 1 / 4  # for a basket whose complements are boosted
PARAM = 1 / 350  # per text or number in the parameters of expressions
STATE = 1 / 4  # per sealed state that is opened
SEEN = 1.0  # per field that needs a log: reading the log's length, and a short log
SEEN_EVENT = 1 / 100  # per log entry read beyond `SHORT_LOG`
SHORT_LOG = 100

# Units per plain request, or whole plain requests, for calls that are not recommendations
FOUND_ITEMS = 50
ITEM = 2  # plain requests for one item with all its properties
SEARCHED_ITEMS = 100_000  # titles and ids compared with a word, per plain request
LOGGED_EVENTS = 100  # events read per plain request
ARCHIVED_FILE = 5  # plain requests per archive file that contains a user's log
UPDATED_ITEMS = 25
UPDATED_CATEGORIES = 50  # categories and properties of all updated items together, per plain request
UPDATED_NUMBERS = 1_000  # numbers of their vectors per plain request
USER_PROPERTIES = 4  # more, for properties of a user, which are read before and after
CORRECTED_EVENTS = 25  # events that an undo or an erasure processes, per plain request
MERGED_EVENTS = 12  # events of both logs that a merge processes, per plain request
LOADED_MODEL = 500
OPERATION = 5  # plain requests for declaring types of properties, or ending an experiment
SCENARIOS = 10  # plain requests for listing or changing scenarios, or listing the versions of one
METRICS = STATISTICS = 10
GENERATION_STATISTICS = 3  # more, for each generation in the store


def is_plain(request: RecommendationRequest) -> bool:
    """Return whether the request sets only its user and the length of its list."""
    return request.model_fields_set <= PLAIN_FIELDS


def cost_of(request: RecommendationRequest) -> float:
    """Return the cost of the request."""
    if is_plain(request) and request.k <= PLAIN_K:
        return PLAIN  # the common case
    return PLAIN + sum(parts_of(request).values())


def is_light(request: RecommendationRequest, cost: float) -> bool:
    """Return whether a request with this cost takes about as long as a plain one, for its cost."""
    if cost >= LIGHT:
        return False
    return request.model_fields_set <= LOG_FIELDS or filtered_categories(request) <= FEW_CATEGORIES


def filtered_categories(request: RecommendationRequest) -> int:
    """Return the number of categories in the request's filters."""
    return sum(map(len, (*request.category_groups, request.categories_all, request.categories_none)))


def cost_of_log(request: RecommendationRequest) -> float:
    """Return the part of the request's cost that pays for reading a short log."""
    return SEEN * sum((request.mode == "repeat", request.seen_rule == "all", bool(request.event_rules)))


def parts_of(request: RecommendationRequest) -> Mapping[str, float]:
    """Return what the fields of the request add to the cost of a plain request."""
    fields = request.model_fields_set | COSTS_UNSET[type(request)]
    return {field: cost(request) for field, cost in PARTS.items() if field in fields}  # in a fixed order, for their sum


def _cost_of_filters(request: RecommendationRequest) -> float:
    return CHARACTER * sum(map(len, request.filters))


def _cost_of_fallback(request: RecommendationRequest) -> float:
    """Return the cost of ranking the items that a fallback allows, under the same limits."""
    if request.fallback is None:
        return 0.0
    limits = len(request.max_per) + (request.max_per_category is not None)
    return PLAIN + CHARACTER * len(request.fallback) + _cost_of_limit(request) * limits


def _cost_of_diversity(request: RecommendationRequest) -> float:
    return request.k * (DIVERSE + COMPARED * (len(request.cursor or ()) + len(request.pin)))


def _cost_of_limit(request: RecommendationRequest) -> float:
    """Return the cost of one limit on a category or text."""
    return CAPPED + CAPPED_ITEM * request.k


def _cost_of_boost(boost: Mapping[str, float] | tuple[str, ...]) -> float:
    if isinstance(boost, tuple):
        return sum(BOOSTED + CHARACTER * len(text) for text in boost)
    return BOOSTED_BY_CATEGORY + BOOSTED_CATEGORY * len(boost) if boost else 0.0


PARTS: Mapping[str, Callable[[RecommendationRequest], float]] = {
    "k": lambda request: K * request.k,
    "explain": lambda request: EXPLAINED * request.k * request.explain,
    "diversity": lambda request: _cost_of_diversity(request) if request.diversity else 0.0,
    "rotation": lambda request: ROTATED * bool(request.rotation),
    "max_per_category": lambda request: _cost_of_limit(request) * (request.max_per_category is not None),
    "max_per": lambda request: _cost_of_limit(request) * len(request.max_per),
    "state": lambda request: STATE * (request.state is not None),
    "history": lambda request: ITEM_ID * len(request.history or ()),
    "candidates": lambda request: ITEM_ID * len(request.candidates or ()),
    "exclude": lambda request: ITEM_ID * len(request.exclude),
    "basket": lambda request: BASKET * bool(request.basket) + ITEM_ID * len(request.basket),
    "query": lambda request: SEARCHED * isinstance(request, PersonalSearch),
    "cursor": lambda request: ITEM_ID * len(request.cursor or ()),
    "pin": lambda request: PINNED * len(request.pin),
    "boost": lambda request: _cost_of_boost(request.boost),
    "objective": lambda request: WEIGHED * (request.objective is not None),
    "filter": _cost_of_filters,
    "fallback": _cost_of_fallback,
    "debug": lambda request: (COUNTED + _cost_of_filters(request)) * request.debug,
    "params": lambda request: PARAM * sum(len(p) if isinstance(p, tuple) else 1 for p in request.params.values()),
    "categories": lambda request: CATEGORY * sum(map(len, request.category_groups)),
    "categories_all": lambda request: CATEGORY * len(request.categories_all),
    "categories_none": lambda request: CATEGORY * len(request.categories_none),
    "mode": lambda request: SEEN * (request.mode == "repeat"),
    "exclude_seen": lambda request: SEEN * (request.seen_rule == "all"),
    "exclude_events": lambda request: SEEN * bool(request.event_rules),
}
"""What each field adds to the cost of a request."""


COSTS_UNSET: Mapping[type[RecommendationRequest], Set[str]] = {
    RecommendationRequest: {"k"},
    ScenarioRequest: {"k", "filter", "fallback", "categories", "exclude_events"},  # also those of the scenario
    PersonalSearch: {"k", "query"},
}
"""The fields that cost something although the request does not set them, by its class."""


def charge_for(requests: Sequence[RecommendationRequest], most: int, log_lengths: Sequence[int] = ()) -> int:
    """Return the total cost of a call's requests, in whole plain requests.

    log_lengths  the number of entries of each log that they read

    raises  TooCostly  when the cost exceeds `most`; the error has the cost of each part
    """
    logs = sum(map(cost_of_length, log_lengths))
    cost = max(1, floor(sum(map(cost_of, requests)) + logs))
    if cost > most:
        raise TooCostly(
            f"this call costs {cost:,} plain requests, but the limit is {most:,}; reduce the largest part, or split it",
            _details(requests, logs),
        )
    return cost


def log_charge(length: int) -> int:
    """Return the largest cost that a log with this number of entries adds to a call."""
    return ceil(cost_of_length(length))


def cost_of_length(length: int) -> float:
    """Return the cost of reading the entries of a log beyond `SHORT_LOG`."""
    return SEEN_EVENT * max(0, length - SHORT_LOG)


def list_charge(k: int, categories: int = 0) -> int:
    """Return the cost of a list of popular or trending items, by the number of categories that it is limited to."""
    return floor(PLAIN + K * k + CATEGORY * categories)


def search_charge(query: SearchQuery, words: int, items: int, most: int) -> int:
    """Return the cost of a search, from its number of words and the size of the catalogue.

    raises  TooCostly  as `charge_for`
    """
    request, gone_through = query.for_user(), items // SEARCHED_ITEMS if query.query.strip() else 0
    ranked = 1 if request is None else charge_for([request], most)
    return ranked + gone_through + query.limit // FOUND_ITEMS + max(0, words - 1) * (1 + gone_through)


def update_charge(items: Sequence[object]) -> int:
    """Return the cost of an item update, from its parsed items, valid or not."""
    fields = [one.get(name) for one in items if isinstance(one, dict) for name in ("categories", "properties")]
    labels = sum(len(one) for one in fields if isinstance(one, list | dict))
    numbers = vector_numbers(items) // UPDATED_NUMBERS
    return 1 + len(items) // UPDATED_ITEMS + labels // UPDATED_CATEGORIES + numbers


def user_properties_charge(body: object) -> int:
    """Return the cost of setting properties of a user, from the parsed body, valid or not."""
    return USER_PROPERTIES + update_charge([body])


def vector_numbers(items: Sequence[object]) -> int:
    """Return the total number of vector elements in these parsed items."""
    vectors = [one.get("vector") for one in items if isinstance(one, dict)]
    return sum(len(one) for one in vectors if isinstance(one, list))


def scenario_charge(settings: ScenarioSettings) -> int:
    """Return the cost of compiling a scenario's expressions and storing it."""
    filters = f"{settings.filter or ''}{settings.fallback or ''}"
    objective = WEIGHED * (settings.objective is not None)
    return floor(SCENARIOS + CHARACTER * len(filters) + _cost_of_boost(settings.boost) + objective)


def statistics_charge(generations: int) -> int:
    """Return the cost of the statistics of the lists of so many generations, and of scenarios."""
    return STATISTICS + GENERATION_STATISTICS * generations


def archive_charge(files: int) -> int:
    """Return the cost of reading a log from this number of archive files."""
    return 1 + ARCHIVED_FILE * files


def correction_charge(entries: int, per_request: int = CORRECTED_EVENTS) -> int:
    """Return the cost of a correction that processes this number of log entries, so many per plain request."""
    return 1 + entries // per_request


def _read_for(requests: Sequence[RecommendationRequest]) -> str:
    """Return the field that is charged for reading logs: one that a request sets."""
    if any(request.seen_rule == "all" for request in requests):
        return "exclude_seen"
    return "exclude_events" if any(request.event_rules for request in requests) else "mode"


def _details(requests: Sequence[RecommendationRequest], logs: float) -> list[ErrorDetail]:
    """Return the cost of each field in all requests together, highest first."""
    totals = {_read_for(requests): logs}
    if len(requests) > 1:
        totals["requests"] = PLAIN * len(requests)
    for request in requests:
        for field, cost in parts_of(request).items():
            totals[field] = totals.get(field, 0.0) + cost
    costly = sorted(((cost, field) for field, cost in totals.items() if cost >= PLAIN), reverse=True)
    return [ErrorDetail(field=field, reason=f"costs {cost:,.0f}") for cost, field in costly]

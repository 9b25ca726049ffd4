"""Filters, and the selection by properties: the allowed items, limits per value, and additions to the scores."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.catalogue.expressions.columns import ItemValue, pack
from app.catalogue.expressions.environment import InvalidExpression, ValueType
from app.catalogue.expressions.labels import LabelledItems
from app.catalogue.expressions.values import Scalar
from app.catalogue.filter_expressions import CURRENT, PARAMS, USER, Expression, Selected
from app.catalogue.item_properties import CATEGORIES
from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.trained_catalogue import Rows
from app.errors import ErrorDetail, InvalidRequest, NotYetRead
from app.recommendation.batching import Requester
from app.recommendation.fair_thread import FairThread
from app.recommendation.user_properties import UserPropertyReader
from app.schemas.fields import ParamType, param_type
from app.schemas.limits import Objective
from app.schemas.recommendations import PersonalSearch, RecommendationRequest
from app.schemas.scored_items import CurrentItem, Part, WithoutValue, WithoutValueReason
from model.artifact.string_table import NO_MATCH
from model.artifact.word_index import Search
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from storage.records import PropertyType


class Cap(NamedTuple):
    """A limit: at most `most` items of each label in a list, across all its pages."""

    items: LabelledItems
    most: int


class Selection(NamedTuple):
    """The items and scores that the expressions of a request select.

    allowed        the items that may be recommended; None for all
    gains          additions to each item's score; None for none
    fallback       the items that fill up a list when no allowed item is left; None for no items
    caps           the limits on the properties that `max_per` names
    conditions     the conditions that ``&&`` joins in the filter and their items, if they are counted one by one
    current_item   why filters know nothing about the current item; None if they do, or if they do not use it
    worth          what the objective adds to each item's score; None for nothing
    without_value  names in the expressions that have no value, if the parts are counted
    """

    allowed: Bitmap | None
    gains: NDArray[np.float32] | None
    fallback: Bitmap | None = None
    caps: Sequence[Cap] = ()
    conditions: Sequence[tuple[str, Bitmap]] = ()
    current_item: CurrentItem | None = None
    worth: NDArray[np.float32] | None = None
    without_value: Sequence[WithoutValue] = ()


EVERYTHING = Selection(None, None)
# Score penalty of a personal search for each level by which an item matches less closely: such an item needs odds
# that are e times as high to rank next to a closer match.
LEVEL_PENALTY = 1.0


class Selector:
    """Evaluates the expressions of requests for one catalogue, outside of batches, so that no other request waits.

    Cached results need no thread.
    """

    def __init__(self, catalogue: LiveCatalogue, users: UserPropertyReader, thread: FairThread) -> None:
        self._catalogue = catalogue
        self._users = users
        self._thread = thread

    async def select(self, requests: Sequence[RecommendationRequest], requester: Requester) -> list[Selection]:
        """Return the selection of each request, in order.

        raises  InvalidRequest                when an expression cannot be used; the error has the place and the reason
                StorageError                  when properties of a user or of items are needed and cannot be read
                Overloaded, ClientDisconnect  as `FairThread.run` does
        """
        return [
            await self._select(request, f"requests.{place}." if len(requests) > 1 else "", requester)
            for place, request in enumerate(requests)
        ]

    async def _select(self, request: RecommendationRequest, path: str, requester: Requester) -> Selection:
        if isinstance(request, PersonalSearch):
            work = partial(matches, self._catalogue, request.text, request.k)
            return await self._thread.run(work, len(self._catalogue), requester)
        if not self._catalogue.is_complete and _depends_on_items(request):
            raise NotYetRead("items")
        caps = [await self._cap(name, most, path, requester) for name, most in request.max_per.items()]
        worth = None if request.objective is None else await self._worth(request.objective, path, requester)
        if not request.filters and not isinstance(request.boost, tuple):
            return Selection(None, None, caps=caps, worth=worth)
        boosts = request.boost if isinstance(request.boost, tuple) else ()
        values: dict[str, Scalar] = {f"{PARAMS}{name}": value for name, value in request.params.items()}
        types = types_of({name: param_type(value) for name, value in request.params.items()}, self._users.types)
        texts = (*request.filters, *boosts, request.fallback or "")
        if request.user_id is not None and any(USER in text for text in texts):
            of_user = await self._users.read(request.user_id)
            values |= {f"{USER}{name}": value for name, value in of_user.items()}
        names_current, of_current = any(CURRENT in text for text in texts), dict[str, ItemValue]()
        if request.current_item is not None and names_current:
            of_current |= self._catalogue.properties_of(request.current_item)
            values |= {f"{CURRENT}{name}": value for name, value in of_current.items()}
        filters = [Expression(text, "boolean", values, types) for text in request.filters]
        fallbacks = [Expression(request.fallback, "boolean", values, types)] if request.fallback is not None else []
        gaining = [Expression(text, "number", values, types) for text in boosts]
        allowed = [await self._evaluate(one, f"{path}filter", requester) for one in filters]
        others = [await self._evaluate(one, f"{path}fallback", requester) for one in fallbacks]
        gains = [await self._evaluate(one, f"{path}boost", requester) for one in gaining]
        selection = Selection(
            _in_all(allowed),
            reduce(np.add, gains) if gains else None,
            _in_all([*others, *allowed[1:]]) if others else None,
            caps,
            worth=worth,
        )
        if names_current and not of_current and any(CURRENT in one.text for one in (*filters, *fallbacks)):
            selection = selection._replace(current_item="missing" if request.current_item is None else "unknown")
        if not request.debug:
            return selection
        return selection._replace(
            conditions=await self._conditions(filters, f"{path}filter", requester),
            without_value=self._without_value(request, [*filters, *fallbacks, *gaining], is_known=bool(of_current)),
        )

    async def _conditions(
        self, filters: Sequence[Expression], field: str, requester: Requester
    ) -> list[tuple[str, Bitmap]]:
        """Return the conditions that ``&&`` joins in the filters, and the items that meet each one."""
        found = []
        for one in filters:
            parts = await self._thread.run(partial(self._catalogue.expressions.split, one), 1.0, requester)
            found += [(part.text, await self._evaluate(part, field, requester)) for part in parts]
        return found

    def _without_value(
        self, request: RecommendationRequest, evaluated: Sequence[Expression], *, is_known: bool
    ) -> list[WithoutValue]:
        """Return the names that have no value and the reason, sorted by name.

        is_known  whether the current item is known
        """
        of_user: WithoutValueReason = "no user_id" if request.user_id is None else "not set"
        of_current: WithoutValueReason = "no current_item" if request.current_item is None else "unknown current_item"
        named = map(self._catalogue.expressions.names_without_value, evaluated)
        return [
            {"name": name, "reason": of_user if name.startswith(USER) else "not set" if is_known else of_current}
            for name in sorted({name for names in named for name in names})
        ]

    async def _cap(self, name: str, most: int, path: str, requester: Requester) -> Cap:
        if name == CATEGORIES:
            return Cap(self._catalogue.categories, most)
        require_labels(name, self._catalogue.properties.types.get(name), path)
        expressions = self._catalogue.expressions
        labels = expressions.find_labels(name)
        if labels is None:
            labels = await self._thread.run(partial(expressions.labels, name), len(self._catalogue), requester)
        return Cap(labels, most)

    async def _worth(self, objective: Objective, path: str, requester: Requester) -> Selected | None:
        name, strength = objective.property, objective.strength
        require_number(name, self._catalogue.properties.types.get(name), path)
        if not strength:
            return None
        expressions = self._catalogue.expressions
        found = expressions.find_value_gains(name, strength)
        if found is not None:
            return found
        work = partial(expressions.value_gains, name, strength)
        return await self._thread.run(work, len(self._catalogue), requester)

    async def _evaluate(self, expression: Expression, field: str, requester: Requester) -> Selected:
        expressions = self._catalogue.expressions
        found = expressions.find(expression)
        if found is not None:
            return found
        try:
            return await self._thread.run(partial(expressions.evaluate, expression), len(self._catalogue), requester)
        except InvalidExpression as exc:
            raise InvalidRequest("an expression cannot be used", [ErrorDetail(field=field, reason=str(exc))]) from None


def _depends_on_items(request: RecommendationRequest) -> bool:
    """Return whether the request depends on what the tenant says about items."""
    has_expressions = bool(request.filters) or isinstance(request.boost, tuple) or request.objective is not None
    has_categories = bool(request.categories or request.categories_all or request.categories_none)
    return has_expressions or has_categories or bool(request.max_per) or request.scenario is not None


def matches(catalogue: LiveCatalogue, query: str, enough: int) -> Selection:
    """Return the items that match a search; their scores lose a penalty for each level of `StringTable`.

    enough  if this many items match without a typo, matches with a typo are left out
    """
    levels = catalogue.match_levels(Search.of(query), enough)
    return Selection(pack(levels < NO_MATCH), np.multiply(levels, -LEVEL_PENALTY, dtype=np.float32))


def _in_all(bitmaps: Sequence[Bitmap]) -> Bitmap | None:
    """Return the intersection of the bitmaps, not a copy if there is only one; None if there are none."""
    return reduce(np.bitwise_and, bitmaps) if bitmaps else None


def filter_out(
    excluded: Bitmap,
    request: RecommendationRequest,
    selection: Selection,
    catalogue: LiveCatalogue,
    left_out: Rows,
    in_cart: Rows,
) -> Iterator[tuple[Part, str | None]]:
    """Add to `excluded` the items that the filters of a request leave out, pinned or not, one filter at a time.

    Yields each filter after its items are added; for a condition of a `filter` also its text.

    left_out  rows of the items that the user's events exclude
    in_cart   rows of the items in the basket
    """
    has_scenario = request.scenario is not None
    if request.exclude:
        bitmap.add(excluded, catalogue.rows(request.exclude))
        yield "exclude", None
    if request.basket:
        bitmap.add(excluded, in_cart)
        yield "basket", None
    if (request.exclude_events or has_scenario) and request.event_rules:
        bitmap.add(excluded, left_out)
        yield "exclude_events", None
    if request.categories or has_scenario:
        for categories in request.category_groups:
            excluded |= ~catalogue.in_categories(categories)
            yield "categories", None
    if request.categories_all:
        excluded |= ~catalogue.in_all_categories([*dict.fromkeys(request.categories_all)])
        yield "categories_all", None
    if request.categories_none:
        excluded |= catalogue.in_categories(request.categories_none)
        yield "categories_none", None
    for condition, allowed in selection.conditions:
        excluded |= ~allowed
        yield "filter", condition
    if selection.allowed is not None and not selection.conditions:
        excluded |= ~selection.allowed
        yield "filter", None


def require_number(name: str, type_: ValueType | None, path: str) -> None:
    """Raise InvalidRequest unless an objective can use an item property of this type."""
    if type_ != "number":
        reason = f"items have no property '{name}'" if type_ is None else f"'{name}' is a {type_}"
        raise InvalidRequest(
            "an objective cannot be used",
            [ErrorDetail(field=f"{path}objective", reason=f"{reason}; it takes a number")],
        )


def require_labels(name: str, type_: ValueType | None, path: str) -> None:
    """Raise InvalidRequest unless `max_per` can limit an item property of this type."""
    if type_ not in ("text", "set"):
        reason = f"items have no property '{name}'" if type_ is None else f"'{name}' is a {type_} and has no labels"
        raise InvalidRequest(
            "a limit cannot be used",
            [ErrorDetail(field=f"{path}max_per", reason=f"{reason}; it takes texts and sets of texts")],
        )


def types_of(
    params: Mapping[str, ParamType], of_users: Mapping[str, PropertyType]
) -> tuple[tuple[str, ValueType], ...]:
    """Return the types of parameters and user properties by their names in expressions, sorted by name."""
    types: dict[str, ValueType] = {f"{PARAMS}{name}": type_ for name, type_ in params.items()}
    return tuple(sorted((types | {f"{USER}{name}": type_ for name, type_ in of_users.items()}).items()))

"""Counts the items that each part of a request removes, to explain why a list is short and what a filter does."""

from collections.abc import Iterator, Sequence

import numpy as np

from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.trained_catalogue import NO_ROWS
from app.recommendation.filters import filter_out
from app.recommendation.ranking.query_builder import CatalogueQuery, page_rows, seen_rows
from app.schemas.scored_items import CurrentItem, Part, Removals, Removed, Short
from model.inference import bitmap
from model.inference.bitmap import Bitmap


def count_removals(catalogue: LiveCatalogue, query: CatalogueQuery, listed: Sequence[str]) -> Removals:
    """Return how many items each part removed from those that the parts before it had left.

    listed  ids of the items of the answer that the query's filters allow
    """
    items = before = len(catalogue)
    gone, removed = bitmap.empty(items), list[Removed]()
    for part, condition in _parts(catalogue, query, gone, listed):
        left = items - bitmap.count(gone, items)
        one: Removed = {"part": part, "items": before - left}
        removed.append(one if condition is None else {**one, "condition": condition})
        before = left
    removals: Removals = {"items": items, "removed": removed, "left": before}
    if query.selection.without_value:
        removals["without_value"] = [*query.selection.without_value]
    return removals


def _parts(
    catalogue: LiveCatalogue, query: CatalogueQuery, gone: Bitmap, listed: Sequence[str]
) -> Iterator[tuple[Part, str | None]]:
    """Add to `gone` the items that each part removes, and yield the part."""
    request, rules = query.request, query.rules
    gone |= ~catalogue.switched_on
    yield "available", None
    gone |= catalogue.unavailable
    yield "dates", None
    if request.candidates is not None:
        gone |= ~catalogue.bitmap_of(catalogue.rows(request.candidates))
        yield "candidates", None
    pins = NO_ROWS if rules is None else rules.pins  # shown even if they are the current item or were seen
    page = page_rows(request, catalogue)
    if request.current_item is not None and query.similar_to not in page.tolist():  # else `similar_to` removes it
        bitmap.add(gone, np.setdiff1d(page, pins))
        yield "current_item", None
    in_cart = NO_ROWS if query.basket is None else query.basket.rows
    yield from filter_out(gone, request, query.selection, catalogue, query.history.log.left_out, in_cart)
    if query.similar_to is not None:
        bitmap.add(gone, np.array([query.similar_to]))
        yield "because", None
    if query.is_together and query.basket is not None:
        gone |= ~catalogue.bitmap_of(query.basket.complements)
        bitmap.discard(gone, pins)
        yield "basket_only", None
    if query.due is not None:
        gone |= ~catalogue.bitmap_of(query.due.items)
        bitmap.discard(gone, pins)
        yield ("log" if query.history.log.bought is None else "mode"), None
    if request.seen_rule != "none":
        bitmap.add(gone, seen_rows(request, query.history))
        bitmap.discard(gone, pins)
        yield "exclude_seen", None
    if request.cursor:
        bitmap.add(gone, catalogue.rows(request.cursor))
        yield "cursor", None
    if rules is None:
        return
    rows = catalogue.rows(listed)
    limits: list[tuple[Part, str | None]] = [("max_per", name) for name in request.max_per]
    for place, limit in enumerate([*limits, ("max_per_category", None)][: len(rules.caps)]):
        gone |= rules.full(place, rows)
        bitmap.discard(gone, np.concatenate([rows, rules.pins]))
        yield limit


def short(removals: Removals, k: int, current_item: CurrentItem | None) -> Short:
    """Return why fewer than k items were left.

    current_item  why the filters know nothing about the current item; None if they do, or need not
    """
    reason: Part = "catalogue"
    left, by_limit = removals["items"], 0
    for one in removals["removed"]:
        if left >= k:
            reason = one["part"]
        left -= one["items"]
        by_limit += one["items"] if one["part"] in ("max_per", "max_per_category") else 0
    found: Short = {"reason": reason, "left": left + by_limit}
    if current_item is not None and reason == "filter":
        found["current_item"] = current_item
    return found

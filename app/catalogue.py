"""The items of one generation: ids, titles, categories and popularity, by their rows."""

from collections.abc import Iterable, Sequence
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from app.schemas import Item, ScoredItem
from model import bitmap
from model.artifact import Items
from model.bitmap import Bitmap

Rows = NDArray[np.int64]

UNLIKE = 4  # of a search, above every closeness that is one
LOOKED_AT_ONCE = 1024  # of the popular items, when most of them may be shown


class Catalogue:
    """N items; a row is an item's place in the generation's item order."""

    def __init__(self, items: Items) -> None:
        self.item_ids = items.ids
        self.row_of = {item_id: row for row, item_id in enumerate(items.ids)}
        self.counts = items.counts
        self.popular_rows: Rows = np.argsort(-items.counts, kind="stable")  # ties stay in item order
        self.unavailable = bitmap.empty(len(items))  # what nobody is shown
        self._titles = items.titles
        self._categories = items.categories
        self._rows_of_category = _rows_by_category(items.categories)
        self._search_texts = [
            f"{title}\n{item_id}".casefold() for title, item_id in zip(items.titles, items.ids, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.item_ids)

    def rows(self, item_ids: Iterable[str]) -> Rows:
        """Rows of those ids that are known, in the order given."""
        return np.array([self.row_of[item_id] for item_id in item_ids if item_id in self.row_of], np.int64)

    def bitmap_of(self, rows: Rows) -> Bitmap:
        filled = bitmap.empty(len(self))
        bitmap.add(filled, rows)
        return filled

    def in_categories(self, categories: Iterable[str]) -> Bitmap:
        """The items that have at least one of the categories; an unknown category has no items."""
        found = bitmap.empty(len(self))
        for category in set(categories) & self._rows_of_category.keys():
            bitmap.add(found, self._rows_of_category[category])
        return found

    def scored_item(self, row: int, score: float) -> ScoredItem:
        item: ScoredItem = {"item_id": self.item_ids[row], "score": score}
        if self._titles[row]:
            item["title"] = self._titles[row]
        return item

    def popular(self, k: int, excluded: Bitmap | None = None) -> list[ScoredItem]:
        """The k most popular items, without those excluded."""
        excluded = bitmap.empty(len(self)) if excluded is None else excluded
        found: list[int] = []
        for begin in range(0, len(self), LOOKED_AT_ONCE):
            rows = self.popular_rows[begin : begin + LOOKED_AT_ONCE]
            found += rows[~bitmap.has(excluded, rows)].tolist()
            if len(found) >= k:
                break
        return [self.scored_item(row, float(self.counts[row])) for row in found[:k]]

    def search(self, query: str, limit: int) -> list[Item]:
        """Items whose title or id contains the query, whatever the case; the most popular ones for an empty query.

        Whole titles and ids come first, then those that begin with the query, then those with a word that does, then
        the others; popular items first in each.
        """
        wanted = query.strip().casefold()
        if not wanted:
            return [self._item(row) for row in self.popular_rows[:limit].tolist()]
        popular_first = self._closeness(wanted)[self.popular_rows]
        places = chain.from_iterable(np.flatnonzero(popular_first == level)[:limit] for level in range(UNLIKE))
        return [self._item(int(self.popular_rows[place])) for place in islice(places, limit)]

    def _closeness(self, wanted: str) -> NDArray[np.uint8]:
        """How close title or id of each item come to the text, 0 the closest: (N,)."""
        return np.array([closeness(text, wanted) for text in self._search_texts], np.uint8)

    def _item(self, row: int) -> Item:
        return Item(item_id=self.item_ids[row], title=self._titles[row], categories=list(self._categories[row]))


def closeness(text: str, wanted: str) -> int:
    if wanted not in text:
        return UNLIKE
    if wanted in text.split("\n"):
        return 0
    if text.startswith(wanted) or f"\n{wanted}" in text:
        return 1
    return 2 if f" {wanted}" in text else 3


def _rows_by_category(categories: Sequence[Sequence[str]]) -> dict[str, Rows]:
    rows: dict[str, list[int]] = {}
    for row, names in enumerate(categories):
        for name in names:
            rows.setdefault(name, []).append(row)
    return {name: np.array(members, np.int64) for name, members in rows.items()}

"""The items of one generation: ids, titles, categories and popularity, by their rows."""

from collections.abc import Iterable
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from app.schemas import Item, NamedItem, ScoredItem
from model import bitmap
from model.bitmap import Bitmap
from model.items import Items
from model.names import UNLIKE
from storage.cold import COLD, cold_row

Rows = NDArray[np.int64]


class Catalogue:
    """N items; a row is an item's place in the generation's item order."""

    def __init__(self, items: Items) -> None:
        self.item_ids = items.ids
        self.counts = items.counts
        self.popular_rows = items.popular_first
        self.row_of = items.rows
        self.learned = items.learned  # rows from there on are of items that no model has learned
        self._cold_rows = {cold_row(self.item_ids[row]): row for row in range(items.learned, len(items))}
        self.unavailable = bitmap.empty(len(items))  # what nobody is shown
        self._titles = items.titles
        self._categories = items.categories
        self.popular(
            1, self.in_categories([""]) | self.bitmap_of(self.rows(["x"]))
        )  # compiles what requests would wait for

    def __len__(self) -> int:
        return len(self.item_ids)

    def rows(self, item_ids: Iterable[str]) -> Rows:
        """Rows of those ids that are known, in the order given."""
        return self.row_of.known(list(item_ids))

    def in_state(self, named: NDArray[np.int32]) -> NDArray[np.int32]:
        """Rows of what a state names; -1 for what this catalogue does not have, or not yet."""
        if named.max(initial=-1) < COLD:
            return named
        rows = [self._cold_rows.get(name, -1) if name >= COLD else name for name in named.ravel().tolist()]
        return np.array(rows, np.int32).reshape(named.shape)

    def known_in_state(self, named: NDArray[np.int32]) -> Rows:
        """Rows of what a state names, without what this catalogue does not have."""
        rows = self.in_state(named)
        return rows[rows >= 0].astype(np.int64)

    def bitmap_of(self, rows: Rows) -> Bitmap:
        filled = bitmap.empty(len(self))
        bitmap.add(filled, rows)
        return filled

    def in_categories(self, categories: Iterable[str]) -> Bitmap:
        """The items that have at least one of the categories; an unknown category has no items."""
        found = bitmap.empty(len(self))
        for category in set(categories):
            bitmap.add(found, self._categories.items_with(category))
        return found

    def scored_item(self, row: int, score: float) -> ScoredItem:
        item: ScoredItem = {"item_id": self.item_ids[row], "score": score}
        if title := self._titles[row]:
            item["title"] = title
        if row >= self.learned:
            item["cold"] = True
        return item

    def named_item(self, row: int) -> NamedItem:
        scored = self.scored_item(row, 0.0)
        named: NamedItem = {"item_id": scored["item_id"]}
        if "title" in scored:
            named["title"] = scored["title"]
        return named

    def popular(self, k: int, excluded: Bitmap | None = None) -> list[ScoredItem]:
        """The k most popular items, without those excluded."""
        excluded = bitmap.empty(len(self)) if excluded is None else excluded
        found = bitmap.first_outside(excluded, self.popular_rows, k).tolist()
        return [self.scored_item(row, float(self.counts[row])) for row in found]

    def search(self, query: str, limit: int) -> list[Item]:
        """Items whose title or id contains the query, whatever the case; the most popular ones for an empty query.

        Whole titles and ids come first, then those that begin with the query, then those with a word that does, then
        the others; popular items first in each. The first search of a large catalogue takes a second longer.
        """
        wanted = query.strip().casefold()
        if not wanted:
            return [self._item(row) for row in self.popular_rows[:limit].tolist()]
        popular_first = self._closeness(wanted)[self.popular_rows]
        places = chain.from_iterable(np.flatnonzero(popular_first == level)[:limit] for level in range(UNLIKE))
        return [self._item(int(self.popular_rows[place])) for place in islice(places, limit)]

    def _closeness(self, wanted: str) -> NDArray[np.uint8]:
        """How close title or id of each item come to the text: (N,), from WHOLE to UNLIKE."""
        return np.minimum(self._titles.closeness(wanted), self.item_ids.closeness(wanted))

    def _item(self, row: int) -> Item:
        return Item(
            item_id=self.item_ids[row],
            title=self._titles[row],
            categories=list(self._categories[row]),
            known=row < self.learned,
        )

"""The items of one generation as it was trained: ids, titles, categories and popularity, by row."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import add, attrgetter
from typing import NamedTuple, Self, overload

import numpy as np
import orjson
from numpy.typing import NDArray

from app.catalogue.boosted_counts import LEAST_COUNT, best_rows
from app.catalogue.category_column import CategoryColumn
from app.catalogue.expressions.columns import TextColumn
from app.catalogue.expressions.labels import LabelledItems
from app.schemas.items import FoundItem
from app.schemas.scored_items import NamedItem, ScoredItem
from model.artifact.item_table import ItemTable
from model.artifact.string_table import EXACT, NO_MATCH, TYPO
from model.artifact.word_index import Levels, Search, closest, compile_loops
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.scan import Boosts
from storage.state.cold_codes import FIRST_COLD_ROW, cold_row

Rows = NDArray[np.int64]
NO_ROWS: Rows = np.zeros(0, np.int64)
MAX_KEPT_ITEMS = 16_384  # items whose JSON is cached, about 8 MB
MAX_COPIED_BYTES = 1 << 16  # of a list
LEFT_OUT = b"\0"  # JSON has no such byte


class ItemJson(NamedTuple):
    """An item's JSON without the closing brace.

    head, tail  in a list: the parts before and after its score
    name        without a score, as a `NamedItem`
    """

    item_id: str
    head: bytes
    tail: bytes
    name: bytes

    @classmethod
    def of(cls, item_id: str, title: str, *, is_cold: bool) -> "ItemJson":
        """Return the JSON as orjson writes a `ScoredItem`."""
        named = b',"title":%s' % orjson.dumps(title) if title else b""
        head, tail = b'{"item_id":%s' % orjson.dumps(item_id), named + b',"cold":true' if is_cold else named
        return cls(item_id, head + b',"score":', tail, head + named)


class EncodedItems(Sequence[ScoredItem]):
    """Items of a list as JSON, converted to an object only on access.

    item_ids  the ids, in order
    texts     the JSON of each item, without the closing brace
    """

    def __init__(self, item_ids: list[str], texts: list[bytes]) -> None:
        self.item_ids = item_ids
        self.texts = texts

    @classmethod
    def scored(cls, items: Sequence[ItemJson], scores: Sequence[float]) -> Self:
        """Return the items with these scores."""
        if not items:
            return cls([], [])
        item_ids, heads, tails, _ = zip(*items, strict=True)
        numbers = orjson.dumps(scores)[1:-1].split(b",")  # each number in its shortest form
        return cls(list(item_ids), list(map(add, map(add, heads, numbers), tails)))

    @classmethod
    def of(cls, items: Sequence[ScoredItem]) -> Self:
        """Return the items as JSON."""
        return cls([item["item_id"] for item in items], [orjson.dumps(item)[:-1] for item in items])

    def __len__(self) -> int:
        return len(self.texts)

    @overload
    def __getitem__(self, place: int) -> ScoredItem: ...
    @overload
    def __getitem__(self, place: slice) -> list[ScoredItem]: ...
    def __getitem__(self, place: int | slice) -> ScoredItem | list[ScoredItem]:
        if isinstance(place, slice):
            return [orjson.loads(text + b"}") for text in self.texts[place]]
        item: ScoredItem = orjson.loads(self.texts[place] + b"}")
        return item

    @classmethod
    def without_scores(cls, items: Sequence[ScoredItem]) -> Self:
        """Return the items with their places, counted from the end of the list, in place of the scores."""
        return cls.of([{**item, "score": len(items) - place} for place, item in enumerate(items)])

    def add_field(self, place: int, name: bytes, value: bytes) -> None:
        """Add a field, whose value is JSON, to the item at that position."""
        self.texts[place] += b',"%b":%b' % (name, value)

    @property
    def is_long(self) -> bool:
        """Whether copying it takes a part of a millisecond, judged by its first item."""
        return bool(self.texts) and len(self.texts) * len(self.texts[0]) > MAX_COPIED_BYTES

    @property
    def fragment(self) -> orjson.Fragment:
        """The array, for orjson."""
        return orjson.Fragment(b"".join((b"[", b"},".join(self.texts), b"}]")) if self.texts else b"[]")

    @property
    def pieces(self) -> list[bytes]:
        """The array of at least one item in pieces, whose texts are not copied."""
        pieces = [b"},"] * (2 * len(self.texts) + 1)
        pieces[1::2] = self.texts
        pieces[0] = b"["
        pieces[-1] = b"}]"
        return pieces


encode = partial(orjson.dumps, default=attrgetter("fragment"))
"""Returns the JSON of an answer, whose items may already be encoded."""


def encoded_pieces(answer: object) -> list[bytes]:
    """Return the same in pieces: each copy of a megabyte takes a millisecond or more."""
    arrays: list[EncodedItems] = []

    def leave_out(items: EncodedItems) -> orjson.Fragment:
        if not items.is_long:
            return items.fragment
        arrays.append(items)
        return orjson.Fragment(LEFT_OUT)

    first, *others = orjson.dumps(answer, default=leave_out).split(LEFT_OUT)
    return [first, *chain.from_iterable((*array.pieces, text) for array, text in zip(arrays, others, strict=True))]


class TrainedCatalogue:
    """N items; a row is an item's position in the generation's item order.

    learned      the number of items that the model has learned; later rows are items with assigned codes
    unavailable  the items that may not be recommended
    """

    def __init__(self, items: ItemTable, categories: CategoryColumn) -> None:
        self.item_ids = items.ids
        self.counts = items.counts
        self.popular_rows = items.popular_first
        self.row_of = items.rows
        self.learned = items.learned
        names = np.fromiter((cold_row(self.item_ids[row]) for row in range(items.learned, len(items))), np.int32)
        self._cold_order = np.argsort(names, kind="stable")  # order of the unlearned rows by the names that
        self._cold_names = names[self._cold_order]  # states use for these items
        self.unavailable = bitmap.empty(len(items))
        self._titles = items.titles
        self._title_words = items.title_words
        self._titles_of: Callable[[NDArray[np.integer]], list[str]] = self._titles.at
        self._retitled = TextColumn.empty(0)  # titles that replace those of the table
        self._kept: tuple[int, dict[int, ItemJson]] = 0, {}  # by row, with the number of title changes at that time
        self._categories = categories
        # compile what the first requests would otherwise wait for
        self._categories.of_rows(NO_ROWS)
        self.popular_top_k(1, self.unavailable, self.build_boosts({"": 1.0}))
        self.popular_items(1, self.in_categories([""]) | self.bitmap_of(self.rows(["x"])))
        self._items(self.popular_rows[:1])
        compile_loops()

    def __len__(self) -> int:
        return len(self.item_ids)

    def rows(self, item_ids: Iterable[str]) -> Rows:
        """Return the rows of the known ids, in the order given."""
        return self.row_of.rows_of(list(item_ids))

    def rows_of_state_items(self, items: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the rows of the items that a state refers to; -1 for items that this catalogue lacks."""
        if not _has_cold_items(items):
            return items
        rows, is_cold = items.copy(), items >= FIRST_COLD_ROW
        places = np.searchsorted(self._cold_names, items[is_cold], side="right") - 1  # -1 if all names are greater
        is_known = np.append(self._cold_names, -1)[places] == items[is_cold]
        rows[is_cold] = np.where(is_known, self.learned + np.append(self._cold_order, 0)[places], -1)
        return rows

    def known_rows_of_state_items(self, items: NDArray[np.int32]) -> Rows:
        """Return the rows of the items that a state refers to, without items that this catalogue lacks."""
        rows = self.rows_of_state_items(items)
        return items.astype(np.int64) if rows is items else rows[rows >= 0].astype(np.int64)

    def bitmap_of(self, rows: Rows) -> Bitmap:
        """Return the bitmap of these rows."""
        items = bitmap.empty(len(self))
        bitmap.add(items, rows)
        return items

    def in_categories(self, categories: Sequence[str]) -> Bitmap:
        """Return the items that have at least one of the categories. The bitmap is shared: do not change it."""
        return self._categories.rows_with_names(categories)

    def in_all_categories(self, categories: Sequence[str]) -> Bitmap:
        """Return the items that have all of these distinct categories, at least one; the bitmap is shared, too."""
        return self._categories.rows_with_all_names(categories)

    @property
    def categories(self) -> LabelledItems:
        """The items by their categories, with numbers of categories that do not change meanwhile."""
        return self._categories.with_fixed_labels()

    def build_boosts(self, gains: Mapping[str, float]) -> Boosts | None:
        """Return boosts that add each category's gain to the scores of its items; None if every gain is 0."""
        nonzero = {category: gain for category, gain in gains.items() if gain}
        if not nonzero:
            return None
        sets = [self._categories.rows_with(category) for category in nonzero]
        return Boosts.of_sets(sets, [*nonzero.values()], len(self))

    def scored_items(self, rows: NDArray[np.integer], scores: Iterable[float]) -> list[ScoredItem]:
        """Return the items in these rows with their scores, in order."""
        items: list[ScoredItem] = []
        titles, item_ids = self._titles_of(rows), self.item_ids.at(rows)
        for row, item_id, title, score in zip(rows.tolist(), item_ids, titles, scores, strict=True):
            item: ScoredItem = {"item_id": item_id, "score": score}
            if title:
                item["title"] = title
            if row >= self.learned:
                item["cold"] = True
            items.append(item)
        return items

    def encoded_items(self, rows: NDArray[np.integer], scores: Sequence[float]) -> EncodedItems:
        """Return the same as JSON."""
        return EncodedItems.scored(self._encoded(rows), scores)

    def encoded_names(self, rows: NDArray[np.integer]) -> list[bytes]:
        """Return the JSON of `named_items`, without the closing braces."""
        return [item.name for item in self._encoded(rows)]

    def _encoded(self, rows: NDArray[np.integer]) -> list[ItemJson]:
        """Return the JSON of the items, which is cached for later lists."""
        changes, kept = self._kept
        if changes != self._retitled.changes or len(kept) > MAX_KEPT_ITEMS:
            changes, kept = self._retitled.changes, {}  # before reading titles, because one may change meanwhile
            self._kept = changes, kept
        places = rows.tolist()
        try:
            return list(map(kept.__getitem__, places))
        except KeyError:
            names = zip(places, self.item_ids.at(rows), self._titles_of(rows), strict=True)
            kept |= {row: ItemJson.of(name, title, is_cold=row >= self.learned) for row, name, title in names}
            return [kept[row] for row in places]

    def named_items(self, rows: NDArray[np.integer]) -> list[NamedItem]:
        """Return the items in these rows, in order."""
        return [
            {"item_id": item_id, "title": title} if title else {"item_id": item_id}
            for item_id, title in zip(self.item_ids.at(rows), self._titles_of(rows), strict=True)
        ]

    def popular_items(self, k: int, excluded: Bitmap | None = None) -> list[ScoredItem]:
        """Return the k most popular items that are not excluded."""
        excluded = bitmap.empty(len(self)) if excluded is None else excluded
        rows = bitmap.first_outside(excluded, self.popular_rows, k)
        return self.scored_items(rows, self.counts[rows].astype(np.float64).tolist())

    def popular_top_k(self, k: int, excluded: Bitmap, boosts: Boosts | None) -> tuple[Rows, NDArray[np.float64]]:
        """Return rows and scores of the k most popular items that are not excluded, ties by item order.

        A boost is added to the logarithm of an item's count, as it is to a model's score. The returned score is the
        boosted count.
        """
        if boosts is None:
            rows = bitmap.first_outside(excluded, self.popular_rows, k).astype(np.int64)
            return rows, self.boosted_counts(rows, None)
        rows = best_rows(self.counts, self.popular_rows, k, excluded, boosts)
        scores = self.boosted_counts(rows, boosts)
        best = np.lexsort((rows, -scores))
        return rows[best], scores[best]

    def boosted_counts(self, rows: Rows, boosts: Boosts | None) -> NDArray[np.float64]:
        """Return the counts of the rows, with boosts at least `LEAST_COUNT`, times e to the power of their boosts."""
        counts = self.counts[rows].astype(np.float64)
        return counts if boosts is None else np.maximum(counts, LEAST_COUNT) * np.exp(boosts.of(rows))

    def search(self, query: str, limit: int) -> list[FoundItem]:
        """Return items whose title or id matches the query, ignoring case; without a query, the most popular items.

        Matches are ordered by level, and by popularity within each level: equal titles and ids, those that start with
        the query, those with a word that does, those that contain it, titles with all words of the query in any order,
        and titles with one typo in each of these words. The first search of a large catalogue takes seconds longer.
        """
        search = Search.of(query)
        found = self._find(search, limit)
        if not search.may_have_typos or len(found) == limit:
            return found
        shown = {item["item_id"] for item in found}
        others = self._find_with_typos(search, limit)
        return [*found, *(item for item in others if item["item_id"] not in shown)][:limit]

    def match_levels(self, search: Search, enough: int) -> Levels:
        """Return how well the title or the id of each item matches: (N,), levels of `StringTable`.

        enough  if this many available items match without a typo, matches with a typo are left out
        """
        if not search.text:
            return np.full(len(self), EXACT, np.uint8)
        levels = self._match_levels(search)
        if not search.may_have_typos:
            return levels
        matching = np.flatnonzero(levels < NO_MATCH)
        if np.count_nonzero(~bitmap.has(self.unavailable, matching)) < enough:
            levels = np.minimum(levels, self._title_levels(search, with_typos=True))
        return levels

    def items_of(self, item_ids: Iterable[str]) -> list[FoundItem]:
        """Return the known items among these ids, in the order given."""
        return self._items(self.rows(item_ids))

    def _find(self, search: Search, limit: int) -> list[FoundItem]:
        """Return items that match without a typo, closest first."""
        if not search.text:
            return self._items(self.popular_rows[:limit])
        return self._closest(self._match_levels(search), range(TYPO), limit)

    def _find_with_typos(self, search: Search, limit: int) -> list[FoundItem]:
        """Return items whose titles match with a typo, even if their ids match."""
        return self._closest(self._title_levels(search, with_typos=True), range(TYPO, NO_MATCH), limit)

    def _closest(self, levels: Levels, wanted: range, limit: int) -> list[FoundItem]:
        """Return items of the closest wanted levels, popular items first within each level."""
        return self._items(closest(levels, self.popular_rows, wanted, limit))

    def _match_levels(self, search: Search) -> Levels:
        of_titles = self._title_levels(search, with_typos=False)
        return np.minimum(of_titles, self.item_ids.match_levels(search.text))

    def _title_levels(self, search: Search, *, with_typos: bool) -> Levels:
        levels = np.full(len(self), NO_MATCH, np.uint8)
        found = self._title_words.match_levels(search, with_typos=with_typos)
        levels[: len(found)] = found
        return levels

    def _items(self, rows: NDArray[np.signedinteger]) -> list[FoundItem]:
        """Return the items in these rows, in order."""
        categories_of = self._categories.values_at(rows.astype(np.int64))  # the only compiled type
        columns = self.item_ids.at(rows), self._titles_of(rows), categories_of, (rows < self.learned).tolist()
        return [
            {"item_id": item_id, "title": title, "categories": [*categories], "available": True, "known": known}
            for item_id, title, categories, known in zip(*columns, strict=True)
        ]


def _has_cold_items(items: NDArray[np.int32]) -> bool:
    """Return whether any item has no trained row. For so few numbers, Python's max is faster than numpy's."""
    return max(items.ravel().tolist(), default=-1) >= FIRST_COLD_ROW

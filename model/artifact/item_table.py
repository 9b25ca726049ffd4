"""The items of a model: their ids, titles, categories and training counts.

Processes map the table's tensors (``ItemTable.to_tensors``) from a file instead of reading them: loading takes no
time, and all processes of a machine share the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.artifact.string_table import FREE_SLOT, Labels, StringIndex, StringTable, is_ascending
from model.artifact.word_index import WordIndex

LAYOUT = "2"  # of the tensors; raise it with any change to them or to the index in ``model.artifact.string_table``
OTHER_INDEX = "1"  # the layout that differs only in the index of the ids
DTYPES = {"ids.rows": {"int32"}, "categories.items": {"int32"}, "categories.codes": {"uint8", "int32"}}
COLUMNS: dict[str, Any] = {
    "item_id": pl.String,
    "title": pl.String,
    "categories": pl.List(pl.String),
    "count": pl.Int64,
}


class ItemTable:
    """N items with distinct ids, in item order, which breaks ties.

    counts  (N,)  int32 or int64, training events of each item
    """

    cold = 0  # the number of items, the last ones, on which no model was trained

    def __init__(
        self,
        ids: Iterable[str] | pl.Series,
        titles: Iterable[str] | pl.Series,
        categories: Iterable[Sequence[str]] | pl.Series,
        counts: NDArray[np.integer],
    ) -> None:
        self.ids = StringTable.of(ids)
        self.titles = StringTable.of(titles)
        self.categories = Labels.of(categories)
        self.counts: NDArray[np.signedinteger] = counts.astype(np.int32 if counts.max(initial=0) < 2**31 else np.int64)

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def learned(self) -> int:
        """The number of items, the first ones, on which a model was trained."""
        return len(self) - self.cold

    def with_cold_items(self, ids: Sequence[str]) -> ItemTable:
        """Return these items, followed by cold ones, of which only the ids are known."""
        own, items = StringTable.of(ids), ItemTable.__new__(ItemTable)
        empty = np.zeros(len(ids), np.int64)
        items.ids = StringTable(
            np.concatenate([self.ids.buffer, own.buffer]), _extended_ends(self.ids.ends, own.ends[1:])
        )
        items.titles = StringTable(self.titles.buffer, _extended_ends(self.titles.ends, empty))
        labels = self.categories
        items.categories = Labels(labels.names, labels.codes, _extended_ends(labels.ends, empty), labels.items)
        items.counts = np.concatenate([self.counts, np.zeros(len(ids), self.counts.dtype)])
        items.popular_first = np.concatenate([self.popular_first, np.arange(len(self), len(items), dtype=np.int32)])
        items.title_words = self.title_words  # the others have no titles
        items.cold = self.cold + len(ids)
        return items

    @cached_property
    def rows(self) -> StringIndex:
        """The row of each id."""
        return StringIndex.of(self.ids)

    @cached_property
    def title_words(self) -> WordIndex:
        """The words of the titles. Items that `with_cold_items` adds have none."""
        return WordIndex(self.titles)

    @cached_property
    def popular_first(self) -> NDArray[np.int32]:
        """All rows by descending count; ties stay in item order."""
        return np.argsort(np.negative(self.counts), kind="stable").astype(np.int32)

    def to_frame(self) -> pl.DataFrame:
        """Return the items as a table, without the order by popularity."""
        columns = {"item_id": list(self.ids), "title": list(self.titles), "categories": list(self.categories)}
        return pl.DataFrame({**columns, "count": self.counts}, schema=COLUMNS)

    @classmethod
    def from_frame(cls, frame: pl.DataFrame) -> ItemTable:
        """Read the table that ``to_frame`` makes; raises ValueError for an invalid one."""
        names = frame["categories"].explode(empty_as_null=False)
        if frame.null_count().sum_horizontal().sum() or names.null_count() or frame["item_id"].is_duplicated().any():
            raise ValueError("an item has no id, or appears twice")
        return cls(frame["item_id"], frame["title"], frame["categories"], frame["count"].to_numpy())

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all columns as tensors, with the index of the ids and the order by popularity."""
        labels = self.categories
        parts = {
            "ids": self.ids.buffer,
            "ids.ends": _compact_ends(self.ids.ends),
            "ids.rows": self.rows.table,
            "titles": self.titles.buffer,
            "titles.ends": _compact_ends(self.titles.ends),
            "categories": labels.names.buffer,
            "categories.ends": labels.names.ends,
            "categories.codes": labels.codes,
            "categories.codes.ends": _compact_ends(labels.ends),
            "categories.items": labels.items,
            "counts": self.counts,
            "popular_first": self.popular_first,
        }
        return {name: _to_tensor(part) for name, part in parts.items()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], *, has_index: bool = True) -> ItemTable:
        """Use the tensors of ``to_tensors`` without a copy.

        has_index  whether to use their index of the ids, too; if not, it is computed when it is needed

        raises ValueError, KeyError, TypeError if a look-up could leave its bounds or never end
        """
        items, part = cls.__new__(cls), {name: tensor.numpy() for name, tensor in tensors.items()}
        items.counts, items.popular_first = part["counts"], part["popular_first"]

        _require_kinds(part)
        items.ids = StringTable(part["ids"], _full_ends(part["ids.ends"], len(items)))
        items.titles = StringTable(part["titles"], _full_ends(part["titles.ends"], len(items)))
        labels = StringTable(part["categories"], _as_unsigned(part["categories.ends"]))
        ends = _full_ends(part["categories.codes.ends"], len(items))
        for names in (items.ids, items.titles, labels):
            names.require_intact()
        for name, least, beyond in (
            ("ids.rows", FREE_SLOT, len(items)),
            ("popular_first", 0, len(items)),
            ("categories.items", 0, len(items)),
            ("categories.codes", 0, len(labels)),
        ):
            if part[name].size and not least <= part[name].min() <= part[name].max() < beyond:
                raise ValueError(f"{name} of the items points beyond the table")
        lengths = (len(items.ids), len(items.titles), len(ends) - 1, len(part["popular_first"]))
        are_labels = len(part["categories.codes"]) == len(part["categories.items"]) == ends[-1] and is_ascending(ends)
        if set(lengths) != {len(items)} or not are_labels or FREE_SLOT not in part["ids.rows"]:
            raise ValueError("the parts of the item table do not match")
        if has_index:
            items.rows = StringIndex(items.ids, part["ids.rows"])
        items.categories = Labels(labels, part["categories.codes"], ends, part["categories.items"])
        return items


def _require_kinds(part: dict[str, NDArray[np.generic]]) -> None:
    of_bytes = {"ids", "titles", "categories"}
    for name, array in part.items():
        kinds = {"uint8"} if name in of_bytes else DTYPES.get(name, {"int32", "int64"})
        if array.ndim != 1 or array.dtype.name not in kinds:
            raise TypeError(f"{name} of the items has the wrong type")


def _to_tensor(part: NDArray[np.generic]) -> Tensor:
    """Make a tensor. Unsigned numbers become signed ones of the same bits, because some versions of torch lack them."""
    copy = np.array(part)
    return torch.from_numpy(copy.view(f"i{copy.itemsize}") if copy.dtype.kind == "u" and copy.itemsize > 1 else copy)


def _as_unsigned(part: NDArray[np.signedinteger]) -> NDArray[np.unsignedinteger]:
    return part.view(f"u{part.itemsize}")


def _extended_ends(ends: NDArray[np.unsignedinteger], more: NDArray[np.integer]) -> NDArray[np.unsignedinteger]:
    """Append ends that count from the last of the given ones."""
    behind = int(ends[-1]) + more.astype(np.int64)
    last = int(behind[-1]) if len(behind) else int(ends[-1])
    return np.concatenate([ends, behind]).astype(np.uint32 if last < 2**32 else np.uint64)


def _compact_ends(ends: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Keep a single end if all are 0."""
    return ends if ends[-1] else ends[:1]


def _full_ends(part: NDArray[np.signedinteger], items: int) -> NDArray[np.unsignedinteger]:
    ends = _as_unsigned(part)
    return np.broadcast_to(ends[0], items + 1) if len(ends) == 1 else ends

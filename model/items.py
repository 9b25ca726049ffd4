"""The catalogue of a model: what is known of its items beside their codes.

As tensors of a file (``Items.packed``) it is mapped and not read, so that it is there at once and takes memory once for
all processes of a machine.
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

from model.names import FREE, Labels, Names, Rows, is_ascending

LAYOUT = "1"  # of what is packed; another number when anything below or the index in ``model.names`` changes
KINDS = {"ids.rows": {"int32"}, "categories.items": {"int32"}, "categories.codes": {"uint8", "int32"}}
COLUMNS: dict[str, Any] = {
    "item_id": pl.String,
    "title": pl.String,
    "categories": pl.List(pl.String),
    "count": pl.Int64,
}


class Items:
    """N items in item order, which breaks ties. Ids are all different.

    counts  (N,)  int32 or int64, training events of each item
    """

    _cold = 0

    def __init__(
        self,
        ids: Iterable[str] | pl.Series,
        titles: Iterable[str] | pl.Series,
        categories: Iterable[Sequence[str]] | pl.Series,
        counts: NDArray[np.integer],
    ) -> None:
        self.ids = Names.of(ids)
        self.titles = Names.of(titles)
        self.categories = Labels.of(categories)
        self.counts: NDArray[np.signedinteger] = counts.astype(np.int32 if counts.max(initial=0) < 2**31 else np.int64)

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def learned(self) -> int:
        """How many of them, the first ones, a model was trained on."""
        return len(self) - self._cold

    def with_cold(self, ids: Sequence[str]) -> Items:
        """These and items of other ids behind them, of which nothing else is known."""
        more, cold = Names.of(ids), Items.__new__(Items)
        cold.ids = Names(np.concatenate([self.ids.buffer, more.buffer]), _continued(self.ids.ends, more.ends[1:]))
        cold.titles = Names(self.titles.buffer, _continued(self.titles.ends, np.zeros(len(ids), np.int64)))
        labels = self.categories
        ends = _continued(labels.ends, np.zeros(len(ids), np.int64))
        cold.categories = Labels(labels.names, labels.codes, ends, labels.items)
        cold.counts = np.concatenate([self.counts, np.zeros(len(ids), self.counts.dtype)])
        cold.popular_first = np.concatenate([self.popular_first, np.arange(len(self), len(cold), dtype=np.int32)])
        cold._cold = self._cold + len(ids)
        return cold

    @cached_property
    def rows(self) -> Rows:
        """By id."""
        return Rows.of(self.ids)

    @cached_property
    def popular_first(self) -> NDArray[np.int32]:
        """All rows by their counts; ties stay in item order."""
        return np.argsort(np.negative(self.counts), kind="stable").astype(np.int32)

    def frame(self) -> pl.DataFrame:
        columns = {"item_id": list(self.ids), "title": list(self.titles), "categories": list(self.categories)}
        return pl.DataFrame({**columns, "count": self.counts}, schema=COLUMNS)

    @classmethod
    def of_frame(cls, frame: pl.DataFrame) -> Items:
        """raises ValueError for a table that `frame` has not made"""
        names = frame["categories"].explode(empty_as_null=False)
        if frame.null_count().sum_horizontal().sum() or names.null_count() or frame["item_id"].is_duplicated().any():
            raise ValueError("there is an item without an id, or twice")
        return cls(frame["item_id"], frame["title"], frame["categories"], frame["count"].to_numpy())

    def packed(self) -> dict[str, Tensor]:
        """All there is, and what would have to be made of it: the index and the order by popularity."""
        labels = self.categories
        parts = {
            "ids": self.ids.buffer,
            "ids.ends": _short(self.ids.ends),
            "ids.rows": self.rows.table,
            "titles": self.titles.buffer,
            "titles.ends": _short(self.titles.ends),
            "categories": labels.names.buffer,
            "categories.ends": labels.names.ends,
            "categories.codes": labels.codes,
            "categories.codes.ends": _short(labels.ends),
            "categories.items": labels.items,
            "counts": self.counts,
            "popular_first": self.popular_first,
        }
        return {name: _tensor(part) for name, part in parts.items()}

    @classmethod
    def unpacked(cls, tensors: dict[str, Tensor]) -> Items:
        """raises ValueError, KeyError, TypeError where a look-up could leave its bounds or never end"""
        items, part = cls.__new__(cls), {name: tensor.numpy() for name, tensor in tensors.items()}
        items.counts, items.popular_first = part["counts"], part["popular_first"]

        _require_kinds(part)
        items.ids = Names(part["ids"], _long(part["ids.ends"], len(items)))
        items.titles = Names(part["titles"], _long(part["titles.ends"], len(items)))
        labels = Names(part["categories"], _unsigned(part["categories.ends"]))
        ends = _long(part["categories.codes.ends"], len(items))
        for names in (items.ids, items.titles, labels):
            names.require_whole()
        for name, least, beyond in (
            ("ids.rows", FREE, len(items)),
            ("popular_first", 0, len(items)),
            ("categories.items", 0, len(items)),
            ("categories.codes", 0, len(labels)),
        ):
            if part[name].size and not least <= part[name].min() <= part[name].max() < beyond:
                raise ValueError(f"{name} of the items points beyond them")
        lengths = (len(items.ids), len(items.titles), len(ends) - 1, len(part["popular_first"]))
        are_labels = len(part["categories.codes"]) == len(part["categories.items"]) == ends[-1] and is_ascending(ends)
        if set(lengths) != {len(items)} or not are_labels or FREE not in part["ids.rows"]:
            raise ValueError("the parts of the items do not belong together")
        items.rows = Rows(items.ids, part["ids.rows"])
        items.categories = Labels(labels, part["categories.codes"], ends, part["categories.items"])
        return items


def _require_kinds(part: dict[str, NDArray[np.generic]]) -> None:
    of_bytes = {"ids", "titles", "categories"}
    for name, array in part.items():
        kinds = {"uint8"} if name in of_bytes else KINDS.get(name, {"int32", "int64"})
        if array.ndim != 1 or array.dtype.name not in kinds:
            raise TypeError(f"{name} of the items is of another type")


def _tensor(part: NDArray[np.generic]) -> Tensor:
    """Unsigned numbers as signed ones of the same bits, which every version of torch has."""
    copy = np.array(part)
    return torch.from_numpy(copy.view(f"i{copy.itemsize}") if copy.dtype.kind == "u" and copy.itemsize > 1 else copy)


def _unsigned(part: NDArray[np.signedinteger]) -> NDArray[np.unsignedinteger]:
    return part.view(f"u{part.itemsize}")


def _continued(ends: NDArray[np.unsignedinteger], more: NDArray[np.integer]) -> NDArray[np.unsignedinteger]:
    """Ends of parts that lie behind others, whose own ends are counted from there."""
    behind = int(ends[-1]) + more.astype(np.int64)
    last = int(behind[-1]) if len(behind) else int(ends[-1])
    return np.concatenate([ends, behind]).astype(np.uint32 if last < 2**32 else np.uint64)


def _short(ends: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """One where all are 0."""
    return ends if ends[-1] else ends[:1]


def _long(part: NDArray[np.signedinteger], items: int) -> NDArray[np.unsignedinteger]:
    ends = _unsigned(part)
    return np.broadcast_to(ends[0], items + 1) if len(ends) == 1 else ends

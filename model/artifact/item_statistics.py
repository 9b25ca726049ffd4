"""Statistics of items that training computes besides a model's weights, each in a separate, optional file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from model.artifact import repurchase_tensors
from model.content.content_map import NO_CONTENT, ContentMap, require_fit
from model.lisa.item_complements import NO_COMPLEMENTS, Complements
from model.lisa.item_intervals import NO_INTERVALS, Intervals

COMPLEMENTS, INTERVALS, CONTENT = "complements.safetensors", "intervals.safetensors", "content.safetensors"
FILES = (COMPLEMENTS, INTERVALS, CONTENT)
CONTENT_DTYPES = {
    "mean": torch.float32,
    "rarity": torch.float32,
    "of_texts": torch.float16,
    "centre": torch.float32,
    "of_vectors": torch.float16,
}


class ItemStatistics(NamedTuple):
    """Statistics of items. They change no state, and so do not change the generation.

    complements  the items that were bought together with each item, if the data have orders
    intervals    the interval after which each item is bought again, if the data have repurchases
    content      the map from titles, categories and the shop's vectors to vectors of items that were not learned
    """

    complements: Complements = NO_COMPLEMENTS
    intervals: Intervals = NO_INTERVALS
    content: ContentMap = NO_CONTENT

    def to_tensors(self) -> Mapping[str, dict[str, Tensor]]:
        """Return the tensors of the existing statistics, by file."""
        files: dict[str, dict[str, Tensor]] = {}
        if self.complements.exist:
            files[COMPLEMENTS] = {name: torch.from_numpy(part) for name, part in self.complements._asdict().items()}
        if self.intervals.exist:
            files[INTERVALS] = repurchase_tensors.to_tensors(self.intervals)
        if self.content.exists:
            files[CONTENT] = {name: torch.from_numpy(part) for name, part in self.content._asdict().items()}
        return files

    def with_file(self, name: str, tensors: dict[str, Tensor], items: int, width: int) -> ItemStatistics:
        """Return these statistics with those of a file, whose tensors are used without a copy.

        items, width  of the model

        raises  ValueError, KeyError, TypeError  when the tensors do not fit
        """
        if name == COMPLEMENTS:
            return self._replace(complements=_complements(tensors, items))
        if name == INTERVALS:
            return self._replace(intervals=repurchase_tensors.from_tensors(tensors, items))
        return self._replace(content=_content(tensors, width))


NO_STATISTICS = ItemStatistics()


def _complements(tensors: dict[str, Tensor], items: int) -> Complements:
    rows, scores = tensors["items"], tensors["scores"]
    if rows.dtype != torch.int32 or scores.dtype != torch.float32:
        raise TypeError("the complements have the wrong type")
    if rows.ndim != 2 or rows.shape != scores.shape or len(rows) != items:
        raise ValueError("the complements do not have the shape of the catalogue")
    if rows.numel() and not -1 <= int(rows.amin()) <= int(rows.amax()) < items:
        raise ValueError("complements point beyond the catalogue")
    if not scores.isfinite().all() or scores.lt(0).any():
        raise ValueError("a complement has no score")
    return Complements(rows.numpy(), scores.numpy())


def _content(tensors: dict[str, Tensor], width: int) -> ContentMap:
    parts = {name: tensors[name] for name in CONTENT_DTYPES}
    if any(part.dtype != CONTENT_DTYPES[name] for name, part in parts.items()):
        raise TypeError("the content map has the wrong type")
    content = ContentMap(**{name: part.numpy() for name, part in parts.items()})
    require_fit(content, width)
    return content

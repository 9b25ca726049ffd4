"""Ideas for the model that the service does not have: an idea is a preset, changed settings, and the extras below.

``lisa-recent,twice,recent_items=64,mix=2`` has a part of ``variants.py``, a setting, and an extra. Several numbers of a
setting have slashes: ``decay_rates=0.01/0.1/0.6/1.2``. ``average`` instead of a preset is the mean of its teachers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.quality.training.variants import PARTS, Variant
from model.config import ModelConfig, TrainConfig
from model.lisa.item_codes import FixedCodes
from model.lisa.lisa_mini import SMALLEST_MASS, LisaMini, attend, sum_of_codewords
from model.lisa.recent_attention import NEVER, RecentItems, _WindowAttention, window_rows

GAPS = 17  # buckets of the time between two events, the last one for none
CLOCK = 24 + 7 + GAPS  # hours, weekdays, and gaps
AVERAGE = "average"


@dataclass(frozen=True)
class Extras:
    """What an idea adds to a preset.

    free         a free vector of each item beside its target codewords
    mix          queries of a user; an item's score is their ``combine``: lse (gated sum) or max
    gaps         the time from each item of the window to the newest one
    clock        hour and weekday of the last event, and the time since the one before
    teacher      the name of the teachers whose scores are soft targets, with ``weight`` and ``temperature``
    smoothing    of labels, where the whole catalogue is in the softmax
    floor        the last learning rate, as a share of the first
    """

    free: bool = False
    mix: int = 1
    combine: str = "lse"
    gaps: bool = False
    clock: bool = False
    teacher: str = ""
    weight: float = 0.5
    temperature: float = 1.0
    smoothing: float = 0.0
    floor: float = 0.01


class Idea(NamedTuple):
    """A variant and its extras."""

    text: str
    variant: Variant
    extras: Extras

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse an idea; raise ValueError for settings that do not exist."""
        name, *changes = text.split(",")
        kinds: dict[str, Callable[[str], Any]] = {one.name: type(getattr(Extras(), one.name)) for one in fields(Extras)}
        extras: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        parts: list[str] = []
        for change in changes:
            key, has_value, value = change.partition("=")
            if key in kinds:
                extras[key] = kinds[key](value) if has_value else True
            elif has_value:
                settings[key] = tuple(map(float, value.split("/"))) if "/" in value else value
            else:
                parts.append(key)
        if unknown := set(parts) - set(PARTS):
            raise ValueError(f"no part {unknown}")
        idea = cls(text, Variant(text, "lisa-mini" if name == AVERAGE else name, settings, tuple(parts)), Extras())
        idea.variant.settings()
        return idea._replace(extras=replace(Extras(), **extras))

    @property
    def is_average(self) -> bool:
        """Whether nothing is trained."""
        return self.text.startswith(AVERAGE)

    def settings(self, epochs: int) -> tuple[ModelConfig, TrainConfig]:
        """Return the settings, with this number of epochs unless the idea has its own."""
        shape, training = self.variant.settings()
        own = "epochs" in self.variant.changes
        return shape, training if own else training.model_copy(update={"epochs": epochs})

    def model(self, shape: ModelConfig, codes: FixedCodes) -> IdeaModel:
        """Make a model with fresh weights."""
        history, target = torch.from_numpy(codes.history.codes), torch.from_numpy(codes.target.codes)
        with self.variant.parts():
            model = IdeaModel(shape, history, target, self.extras)
        means = torch.from_numpy(codes.history.codewords)
        scale = math.sqrt(shape.history_codebooks) * means.square().mean().sqrt().clamp_min(SMALLEST_MASS)
        with torch.no_grad():
            model.codebooks.copy_(means / scale)
        return model


class States(NamedTuple):
    """States after Q events: histogram (Q, R, B, W), last (Q,), recent (Q, K), gaps (Q, K) and clock (Q, 3)."""

    histogram: Tensor
    last: Tensor
    recent: Tensor
    gaps: Tensor
    clock: Tensor

    def at(self, rows: Tensor | slice) -> States:
        """Return some of the states, with a float32 histogram and int64 indices."""
        histogram, *indices = (part[rows] for part in self)
        return States(histogram.float(), *(part.long() for part in indices))


class Mixture(nn.Module):
    """Several queries of a user, and the logarithms of their gates."""

    def __init__(self, width: int, queries: int) -> None:
        super().__init__()
        self.more, self.gate = nn.Linear(width, queries * width), nn.Linear(width, queries)
        nn.init.normal_(self.more.weight, std=0.5 / math.sqrt(width))

    @override
    def forward(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """(Q, D) -> (Q, k, D) and (Q, k)."""
        added = self.more(queries).view(len(queries), -1, queries.shape[-1])
        return queries[:, None] + added, self.gate(queries).log_softmax(dim=-1)


class GapRecentItems(RecentItems):
    """Attention to the window that also knows how long before the newest event each one was."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.gaps = nn.Parameter(torch.randn(GAPS, config.width) * 0.02)
        self.gap_bias = nn.Parameter(torch.zeros(config.recent_heads, GAPS))

    def with_gaps(self, hidden: Tensor, vectors: Tensor, window: Tensor, gaps: Tensor) -> Tensor:
        """Attend as ``forward`` does; gaps (Q, K) are buckets."""
        queries = self._queries(hidden)
        by_gap = queries @ self.gaps.T + self.gap_bias  # (Q, H, G)
        places = gaps[:, None, :].expand(-1, self.heads, -1)
        logits = queries @ self.positions.T + self.age_bias + by_gap.gather(2, places)
        logits = logits.masked_fill((window < 0)[:, None, :], NEVER)
        attended, share = _WindowAttention.apply(  # type: ignore[no-untyped-call]
            queries, self.norm_memory(vectors), window.clamp_min(0), logits
        )
        of_gaps = torch.zeros_like(by_gap).scatter_add(2, places, share)
        return self._add(hidden, attended + share @ self.positions + of_gaps @ self.gaps)


class IdeaModel(LisaMini):
    """LISA-Mini with extras."""

    def __init__(self, config: ModelConfig, history_codes: Tensor, target_codes: Tensor, extras: Extras) -> None:
        super().__init__(config, history_codes, target_codes)
        items, width = len(target_codes), config.width
        self.combine = extras.combine
        self.free = nn.Parameter(torch.zeros(items, width)) if extras.free else None
        self.mixture = Mixture(width, extras.mix) if extras.mix > 1 else None
        self.clock = nn.Parameter(torch.randn(CLOCK, width) * 0.02) if extras.clock else None
        if extras.gaps:
            self.recent = GapRecentItems(config)

    def queries(self, states: States, every_item: bool) -> Tensor:
        """Turn states into queries (Q, D).

        every_item  embed the whole catalogue for the window, rather than its items: a device need not count them
        """
        attended = attend(states.histogram, self.history_codes[states.last], self.tables())
        embedded = sum_of_codewords(self.history_codes[states.last], self.codebooks)
        embedded = embedded + sum_of_codewords(self.target_codes[states.last], self.last_codebooks)
        if self.clock is not None:
            embedded = embedded + self.clock[states.clock].sum(dim=1)
        hidden = self.feed_forward(self.dropout(embedded) + self.dropout(attended))
        for hop in self.hops:
            hidden = hop(hidden, states.histogram)
        if self.recent is not None:
            if every_item:
                codes, window = self.target_codes, states.recent
            else:
                items, rows = window_rows(states.recent, is_capturable=False)
                codes, window = self.target_codes[items], rows.masked_fill(states.recent < 0, -1)
            vectors = sum_of_codewords(codes, self.recent.codebooks)
            if isinstance(self.recent, GapRecentItems):
                hidden = self.recent.with_gaps(hidden, vectors, window, states.gaps)
            else:
                hidden = self.recent(hidden, vectors, window)
        found: Tensor = self.norm(hidden)
        return found

    @override
    def item_vectors(self, items: Tensor | None = None) -> Tensor:
        vectors = super().item_vectors(items)
        if self.free is None:
            return vectors
        return vectors + (self.free if items is None else self.free[items])

    def logits(self, queries: Tensor, vectors: Tensor, bias: Tensor) -> Tensor:
        """Score items for queries: (Q, D), (N, D) and (N,) -> (Q, N)."""
        return self._combined(queries, lambda one: one @ vectors.T) + bias

    def own_logits(self, queries: Tensor, vectors: Tensor, bias: Tensor) -> Tensor:
        """Score one item for each query: (Q, D), (Q, D) and (Q,) -> (Q,)."""
        each = vectors[:, None] if self.mixture is not None else vectors
        return self._combined(queries, lambda one: (one * each).sum(dim=-1, keepdim=True))[:, 0] + bias

    def _combined(self, queries: Tensor, products: Callable[[Tensor], Tensor]) -> Tensor:
        if self.mixture is None:
            return products(queries)
        several, gates = self.mixture(queries)
        each = products(several)  # (Q, k, N)
        return each.amax(dim=1) if self.combine == "max" else (each + gates[:, :, None]).logsumexp(dim=1)

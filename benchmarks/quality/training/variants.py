"""Variants of a preset: other settings of the model or its training, and parts that the service does not have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self
from unittest import mock

import typer
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from model.config import ModelConfig, TrainConfig, preset
from model.lisa.feed_forward import FeedForward
from model.lisa.recent_attention import RecentItems


class GatedFeedForward(FeedForward):
    """SwiGLU (Shazeer, 2020) with as many weights: a SiLU of half of the inner vector gates the other half."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        inner = 2 * config.ffn_multiple * config.width // 3
        self.up, self.down = nn.Linear(config.width, 2 * inner), nn.Linear(inner, config.width)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        gate, value = self.up(self.norm(hidden)).chunk(2, dim=-1)
        added: Tensor = hidden + self.dropout(self.down(self.dropout(F.silu(gate) * value)))
        return added


class RepeatedRecentItems(RecentItems):
    """A second attention to the window, whose input is the result of the first one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.second = RecentItems(config)

    @override
    def forward(self, hidden: Tensor, vectors: Tensor, window: Tensor) -> Tensor:
        found: Tensor = self.second(super().forward(hidden, vectors, window), vectors, window)
        return found

    @override
    def fold_norms_and_round(self) -> None:
        super().fold_norms_and_round()
        self.second.fold_norms_and_round()


PARTS: dict[str, dict[str, type[nn.Module]]] = {
    "gated": {
        "model.lisa.lisa_mini.FeedForward": GatedFeedForward,
        "model.lisa.recent_attention.FeedForward": GatedFeedForward,
    },
    "twice": {"model.lisa.lisa_mini.RecentItems": RepeatedRecentItems},
}


class Variant(NamedTuple):
    """A preset and its changes. Each part is a key of ``PARTS``, and replaces classes of the model."""

    text: str
    preset: str
    changes: dict[str, Any]
    replaced: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse ``PRESET[,SETTING=VALUE or PART...]``; raise BadParameter if a name or value is not valid."""
        name, *changes = text.split(",")
        values = dict(change.split("=", 1) for change in changes if "=" in change)
        variant = cls(text, name, values, tuple(change for change in changes if "=" not in change))
        unknown = [part for part in variant.replaced if part not in PARTS]
        if unknown:
            raise typer.BadParameter(f"no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
        try:
            variant.settings()
        except ValueError as exc:
            raise typer.BadParameter(f"{text!r}: {exc}") from None
        return variant

    def settings(self) -> tuple[ModelConfig, TrainConfig]:
        """Return the settings; raise ValueError if the preset or a setting does not exist."""
        shape, training = preset(self.preset)
        of_model = {name: value for name, value in self.changes.items() if name in ModelConfig.model_fields}
        of_training = {name: value for name, value in self.changes.items() if name not in of_model}
        changed = ModelConfig.model_validate(shape.model_dump() | of_model)
        return changed, TrainConfig.model_validate(training.model_dump() | of_training)

    @contextmanager
    def parts(self) -> Iterator[None]:
        """Build new models with the variant's parts."""
        with ExitStack() as stack:
            for part in self.replaced:
                for name, kind in PARTS[part].items():
                    stack.enter_context(mock.patch(name, kind))
            yield

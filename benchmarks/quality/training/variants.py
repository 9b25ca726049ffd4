"""Variants of a preset: other settings of the model or its training, and parts that the service does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self
from unittest import mock

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from model.config import ModelConfig, TrainConfig, preset
from model.lisa import item_codes
from model.lisa.feed_forward import FeedForward
from model.lisa.item_codes import FixedCodes
from model.lisa.lisa_mini import LisaMini, sum_of_codewords
from model.lisa.recent_attention import RecentItems
from model.training.loop import BEST_CHECKPOINT


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


class GatedResidual(FeedForward):
    """A residual block whose output is gated by its input, as in LiGR (Borisyuk et al., 2025)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.gate = nn.Linear(config.width, config.width)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        found = super().forward(hidden) - hidden
        added: Tensor = hidden + 2 * torch.sigmoid(self.gate(self.norm(hidden))) * found
        return added


class FreeVectors(LisaMini):
    """Each item has a vector of its own beside its target codewords; the service could not scan them."""

    def __init__(self, config: ModelConfig, history_codes: Tensor, target_codes: Tensor) -> None:
        super().__init__(config, history_codes, target_codes)
        self.free = nn.Parameter(torch.zeros(len(target_codes), config.width))

    @override
    def item_vectors(self, items: Tensor | None = None) -> Tensor:
        return super().item_vectors(items) + (self.free if items is None else self.free[items])


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
    "gated-residual": {
        "model.lisa.lisa_mini.FeedForward": GatedResidual,
        "model.lisa.recent_attention.FeedForward": GatedResidual,
    },
    "free": {"model.lisa.lisa_mini.LisaMini": FreeVectors},
    "taught": {},
    "twice": {"model.lisa.lisa_mini.RecentItems": RepeatedRecentItems},
}


TEACHER = "lisa-recent,free"


def taught_codes(teacher: Path) -> Callable[[NDArray[np.float32], ModelConfig, int], FixedCodes]:
    """Return a function for ``codes_of`` that quantises the vectors of a trained variant with free ones for targets."""
    try:
        weights = load_file(teacher / BEST_CHECKPOINT)
    except FileNotFoundError:
        raise typer.BadParameter(f"train the variant {TEACHER} first, whose item vectors are quantised") from None
    vectors = sum_of_codewords(weights["target_codes"], weights["target_codebooks"]) + weights["free"]
    plain = item_codes.codes_of

    def codes_of(cooccurring: NDArray[np.float32], config: ModelConfig, seed: int) -> FixedCodes:
        return FixedCodes(plain(cooccurring, config, seed).history, plain(vectors.numpy(), config, seed).target)

    return codes_of


class Variant(NamedTuple):
    """A preset and its changes. Each part is a key of ``PARTS``, and replaces classes of the model.

    The part ``taught`` takes the targets' codes from the item vectors of the variant ``TEACHER``.
    """

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
    def parts(self, teacher: Path) -> Iterator[None]:
        """Build new models with the variant's parts.

        teacher  the folder of the training of ``TEACHER``
        """
        with ExitStack() as stack:
            if "taught" in self.replaced:
                stack.enter_context(mock.patch("model.lisa.item_codes.codes_of", taught_codes(teacher)))
            for part in self.replaced:
                for name, kind in PARTS[part].items():
                    stack.enter_context(mock.patch(name, kind))
            yield

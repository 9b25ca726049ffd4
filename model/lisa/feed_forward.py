"""The feed-forward block after every attention to the state."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import ModelConfig


class FeedForward(nn.Module):
    """A pre-norm residual block: (Q, D) -> (Q, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = config.ffn_multiple * config.width
        self.norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, inner)
        self.down = nn.Linear(inner, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add the block's output to the hidden vectors: (Q, D) -> (Q, D)."""
        found = self.down(self.dropout(F.gelu(self.up(self.norm(hidden)))))
        added: Tensor = hidden + self.dropout(found)
        return added

    def fold_norms_and_round(self) -> None:
        """Fold the norm into the matrix behind it, and round both matrices to bfloat16."""
        fold_norm_and_round(self.norm, self.up.weight, self.up.bias)
        round_to_bfloat16(self.down.weight)


@torch.no_grad()
def fold_norm_and_round(norm: nn.LayerNorm, matrix: Tensor, bias: Tensor) -> None:
    """Fold a norm's gain and bias into the matrix behind it, and round that to bfloat16, in place.

    matrix  (..., D)
    bias    (...,)
    """
    bias += matrix @ norm.bias
    matrix *= norm.weight
    norm.weight.fill_(1)
    norm.bias.zero_()
    round_to_bfloat16(matrix)


@torch.no_grad()
def round_to_bfloat16(weights: Tensor) -> None:
    """Round to the nearest number of bfloat16, in place."""
    weights.copy_(weights.bfloat16())

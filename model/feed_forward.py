"""The feed-forward block that follows every look at the state."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import ModelConfig


class FeedForward(nn.Module):
    """Pre-norm residual block: (Q, D) -> (Q, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = config.ffn_multiple * config.width
        self.norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, inner)
        self.down = nn.Linear(inner, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        found = self.down(self.dropout(F.gelu(self.up(self.norm(hidden)))))
        added: Tensor = hidden + self.dropout(found)
        return added

    def settle(self) -> None:
        settle(self.norm, self.up.weight, self.up.bias)
        in_sixteen_bits(self.down.weight)


@torch.no_grad()
def settle(norm: nn.LayerNorm, matrix: Tensor, bias: Tensor) -> None:
    """Take a norm's gain and bias into the matrix behind it, and keep that in sixteen bits.

    matrix  (..., D)  in place, as is its
    bias    (...,)
    """
    bias += matrix @ norm.bias
    matrix *= norm.weight
    norm.weight.fill_(1)
    norm.bias.zero_()
    in_sixteen_bits(matrix)


@torch.no_grad()
def in_sixteen_bits(weights: Tensor) -> None:
    """Round to the nearest number of bfloat16, in place."""
    weights.copy_(weights.bfloat16())

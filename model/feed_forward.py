"""The feed-forward block that follows every look at the state."""

from __future__ import annotations

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

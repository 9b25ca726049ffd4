"""SASRec as its paper describes it: causal self-attention over a user's newest items, with tied item vectors.

Source: Kang and McAuley, Self-attentive sequential recommendation, ICDM 2018.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, scaled_dot_product_attention

BLOCKS = 2
WINDOW = 50  # newest items that a list depends on


class SASRec(nn.Module):
    """Turns the newest items of users into queries, whose inner products with the item vectors are the scores.

    vectors  (N, D)  of the items
    """

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        width = vectors.shape[1]
        self.vectors = vectors
        self.positions = nn.Embedding(WINDOW, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(width)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the queries: rows (Q, L) of the items, oldest first, L at most WINDOW -> (Q, D)."""
        inputs = self.vectors[rows] * self.vectors.shape[1] ** 0.5 + self.positions.weight[: rows.shape[1]]
        queries: Tensor = self.norm(self.blocks(inputs)[:, -1])
        return queries


class Block(nn.Module):
    """Self-attention with one head, then two linear layers at each position: (Q, L, D) -> (Q, L, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.linear_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs of each position, which depend on no later one."""
        normed = self.attention_norm(inputs)
        attended = scaled_dot_product_attention(
            self.query(normed), self.key(inputs), self.value(inputs), is_causal=True
        )
        hidden = self.linear_norm(normed + attended)
        outputs: Tensor = hidden + self.outer(relu(self.inner(hidden)))
        return outputs


def with_random_weights(vectors: Tensor) -> SASRec:
    """Return the model in inference mode; its lists mean nothing, but cost what those of a trained one cost."""
    torch.manual_seed(0)
    return SASRec(vectors).eval().requires_grad_(False)

"""Softmax attention to all events so far, the reference for the other mechanisms; it has no state of constant size.

Source: Vaswani et al., Attention is all you need, 2017; in recommendation Kang and McAuley, SASRec, ICDM 2018.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from model.mechanisms.mechanism import Events, Mechanism


class Softmax(Mechanism):
    """Softmax attention of several heads, to all events so far."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    @override
    def forward(self, events: Events, tables: None = None) -> Tensor:
        parts = self.project(events.hidden).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)  # (S, L, 3, H, D / H) -> 3 (S, H, L, D / H)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        read: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return read

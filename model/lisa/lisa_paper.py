"""LISA-Base and LISA-Soft as they are served: the weights of ``model.mechanisms``, reading a stored state.

Source: Wu et al., LISA, WWW 2021, equations 9 to 11; the post-norm block of its published code. It has no positions:
a state decays, so it tells recent events from old ones, but not how many there were.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from model.config import ModelConfig
from model.lisa.lisa_mini import SMALLEST_MASS, AttentionTables, Lisa, attend, sum_of_codewords


class LisaPaper(Lisa):
    """A model whose items have one codeword of each codebook (Base) or shares of all codewords (Soft)."""

    def __init__(self, config: ModelConfig, history_codes: Tensor, target_codes: Tensor) -> None:
        super().__init__(config, history_codes, target_codes)
        width = config.width
        self.target_codebooks = nn.Parameter(torch.randn(config.target_codebooks, config.target_codewords, width))
        self.bias = nn.Parameter(torch.zeros(len(target_codes)))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.feed_forward = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    @override
    def read(self, histogram: Tensor, last: Tensor, recent: Tensor, tables: AttentionTables | None = None) -> Tensor:
        tables = self.tables() if tables is None else tables
        if self.shares is None:
            codes = self.history_codes[last]
            embedded, attended = sum_of_codewords(codes, self.codebooks), attend(histogram, codes, tables)
        else:
            shares = self.shares[last]
            embedded = shares.flatten(1) @ self.codebooks.flatten(0, 1)
            attended = attend_by_shares(histogram, shares, tables)
        hidden = self.norms[0](embedded + attended)
        queries: Tensor = self.norms[1](hidden + self.feed_forward(hidden))
        return queries

    @override
    def fold_norms_and_round(self) -> None:
        """Do nothing: these models keep their norms and full precision."""


def attend_by_shares(histogram: Tensor, last_shares: Tensor, tables: AttentionTables) -> Tensor:
    """Attend as ``attend`` does, for a last item of shares of the codewords: (Q, R, B, W) and (Q, B, W) -> (Q, D)."""
    logits = torch.einsum("qbv,rbvw->qrbw", last_shares, tables.match)
    mass = histogram * (logits - logits.amax(dim=-1, keepdim=True)).exp()
    share = mass / mass.sum(dim=-1, keepdim=True).clamp_min(SMALLEST_MASS)
    return share.flatten(1) @ tables.values.flatten(0, 2)

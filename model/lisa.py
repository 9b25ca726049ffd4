"""LISA-Mini, top to bottom: a user's history as a codeword histogram, attended by the last item's codes.

Source: Wu et al., LISA, WWW 2021, equations 9 to 11 and algorithm 1; decay as in the paper's published code.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.codes import ItemCodes
from model.config import ModelConfig

SMALLEST_MASS = 1e-30


class AttentionTables(NamedTuple):
    """All a step needs of the attention: computed once per generation.

    match   (R, B, W, W)  exp of the scaled inner products of all codeword pairs, row maximum taken out
    values  (R, B, W, D)  projected value codewords
    """

    match: Tensor
    values: Tensor


def attend(histogram: Tensor, last_codes: Tensor, tables: AttentionTables) -> Tensor:
    """Average the value codewords, weighted by how often the history used them and how well they match the last item.

    histogram   (Q, R, B, W)  float32, >= 0; every (r, b) row has a positive entry, its scale is free
    last_codes  (Q, B)        int64, codeword indices of each user's last item
    returns     (Q, D)        float32
    """
    rates, books, words, width = tables.values.shape
    # row (r, b, psi) of the flattened match table: one look-up per rate and codebook
    offsets = torch.arange(rates * books, device=last_codes.device).view(1, rates, books) * words
    match = F.embedding(last_codes[:, None, :] + offsets, tables.match.reshape(-1, words))  # (Q, R, B, W)
    mass = histogram * match
    share = mass / mass.sum(dim=-1, keepdim=True).clamp_min(SMALLEST_MASS)
    return share.flatten(1) @ tables.values.reshape(-1, width)  # (Q, R B W) -> (Q, D)


class LisaMini(nn.Module):
    """Hard codes for history and targets; the state of a user is the histogram and the last item's codes."""

    history_codes: Tensor  # (N, B)  int64
    target_codes: Tensor  # (N, B')  int64

    def __init__(self, config: ModelConfig, history_codes: Tensor, target_codes: Tensor) -> None:
        super().__init__()
        self.config = config
        rates, width = len(config.decay_rates), config.width
        books, words = config.history_codebooks, config.history_codewords
        self.register_buffer("history_codes", history_codes.long())
        self.register_buffer("target_codes", target_codes.long())
        self.codebooks = nn.Parameter(torch.randn(books, words, width) / math.sqrt(books))
        self.query = nn.Parameter(torch.randn(rates, books, width, width) / math.sqrt(width))
        self.key = nn.Parameter(torch.randn(rates, books, width, width) / math.sqrt(width))
        self.value = nn.Parameter(torch.randn(rates, books, width, width) / math.sqrt(width * rates))
        self.norm_in = nn.LayerNorm(width)
        self.norm_out = nn.LayerNorm(width)
        self.ffn = nn.Sequential(
            nn.Linear(width, config.ffn_multiple * width),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.ffn_multiple * width, width),
        )
        self.dropout = nn.Dropout(config.dropout)
        self.target_codebooks = nn.Parameter(
            torch.randn(config.target_codebooks, config.target_codewords, width) * 0.02
        )
        self.bias = nn.Parameter(torch.zeros(len(target_codes)))

    def tables(self) -> AttentionTables:
        """The inner products of all codeword pairs and the projected values, per rate and codebook."""
        similarity = (self.codebooks @ self.query) @ (self.codebooks @ self.key).mT / math.sqrt(self.config.width)
        peak = similarity.amax(dim=-1, keepdim=True).detach()
        return AttentionTables(torch.exp(similarity - peak), self.codebooks @ self.value)

    def read(self, histogram: Tensor, last_codes: Tensor, tables: AttentionTables | None = None) -> Tensor:
        """Turn states into queries.

        histogram   (Q, R, B, W)  float32
        last_codes  (Q, B)        int64
        returns     (Q, D)        float32
        """
        attention = attend(histogram, last_codes, self.tables() if tables is None else tables)
        return self._block(self._embed(last_codes), attention)

    def forward(self, items: Tensor, weights: Tensor | None = None) -> Tensor:
        """Queries after every item of one history, all positions at once, as softmax attention over the items.

        items    (L,)    int64, oldest first
        weights  (L,)    float32, weights of the events; None: all 1
        returns  (L, D)  float32; equals ``read`` of the histogram after each step
        """
        codes = self.history_codes[items]  # (L, B)
        length = len(codes)
        queries = torch.einsum("lbd,rbde->rble", self._codewords(codes), self.query)
        keys = torch.einsum("lbd,rbde->rble", self._codewords(codes), self.key)
        values = torch.einsum("lbd,rbde->rble", self._codewords(codes), self.value)
        position = torch.arange(length, device=items.device)
        age = (position[:, None] - position[None, :]).to(queries.dtype)  # (L, L), negative for the future
        rates = torch.tensor(self.config.decay_rates, dtype=queries.dtype, device=items.device)
        log_weight = 0.0 if weights is None else weights.to(queries.dtype).log()
        logits = queries @ keys.mT / math.sqrt(self.config.width)  # (R, B, L, L)
        logits = logits - rates[:, None, None, None] * age + log_weight
        share = logits.masked_fill(age < 0, -torch.inf).softmax(dim=-1)
        return self._block(self._embed(codes), (share @ values).sum(dim=(0, 1)))

    def item_vectors(self, items: Tensor | None = None) -> Tensor:
        """Sums of the items' target codewords: (N, D), or (len(items), D) for the items asked for."""
        codes = self.target_codes if items is None else self.target_codes[items]
        offsets = torch.arange(codes.shape[1], device=codes.device) * self.config.target_codewords
        return F.embedding_bag(codes + offsets, self.target_codebooks.flatten(0, 1), mode="sum")

    def _codewords(self, codes: Tensor) -> Tensor:
        return self.codebooks[torch.arange(codes.shape[1], device=codes.device), codes]  # (Q, B, D)

    def _embed(self, last_codes: Tensor) -> Tensor:
        """The last item as the sum of its history codewords: (Q, B) -> (Q, D)."""
        offsets = torch.arange(last_codes.shape[1], device=last_codes.device) * self.config.history_codewords
        return F.embedding_bag(last_codes + offsets, self.codebooks.flatten(0, 1), mode="sum")

    def _block(self, last: Tensor, attention: Tensor) -> Tensor:
        """Pre-norm residual block around the feed-forward: (Q, D), (Q, D) -> (Q, D)."""
        hidden = self.dropout(last) + self.dropout(attention)
        hidden = hidden + self.dropout(self.ffn(self.norm_in(hidden)))
        queries: Tensor = self.norm_out(hidden)
        return queries


def build(config: ModelConfig, codes: ItemCodes) -> LisaMini:
    """A model with fresh weights on fixed codes; its history codewords start as the means that the codes stand for."""
    model = LisaMini(config, torch.from_numpy(codes.history.codes), torch.from_numpy(codes.target.codes))
    means = torch.from_numpy(codes.history.codewords)
    scale = math.sqrt(config.history_codebooks) * means.square().mean().sqrt().clamp_min(SMALLEST_MASS)
    with torch.no_grad():
        model.codebooks.copy_(means / scale)
    return model

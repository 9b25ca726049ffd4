"""LISA with learned codes: the last item's codes attend to the codeword histogram of the history.

Source: Wu et al., LISA, WWW 2021, equations 9 to 11; the decay of 0.1 a step as in the paper's published code. Base,
Mini and Soft are this file with other codebooks: their histograms count codes that are hard, or shares that are soft.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from typing_extensions import override

from model.mechanisms import prefix
from model.mechanisms.mechanism import Events, Mechanism
from model.mechanisms.quantiser import Quantiser, code_product

DECAY_RATE = 0.1  # lambda, per step

Tables = tuple[Tensor, Tensor]


class Histograms(Mechanism):
    """Attention to a state of one histogram, (B, W), with projections of each codebook."""

    decay = math.exp(-DECAY_RATE)

    def __init__(self, width: int, quantiser: Quantiser) -> None:
        super().__init__()
        books, words = quantiser.codebooks.shape[:2]
        self.state_shape = books, words
        self.soft = quantiser.soft
        drawn = 1 / math.sqrt(width) if self.soft else math.sqrt(2 / (width * (books + width)))
        self.query, self.key, self.value = (nn.Parameter(torch.randn(books, width, width) * drawn) for _ in range(3))
        self._codebooks = [quantiser.codebooks]  # in a list, because it is already a parameter of the quantiser

    @override
    def inputs(self, events: Events) -> Tensor:
        assert events.codes is not None
        return events.codes[events.places]

    @override
    def feature(self, events: Tensor) -> Tensor:
        """Count the codes themselves: (Q, B, W) -> (Q, B, W)."""
        return events

    @override
    def read(self, state: Tensor, events: Tensor, tables: Tables | None = None) -> Tensor:
        """Attend by the codes of the newest events: (Q, B, W) and (Q, B, W) -> (Q, D)."""
        match, values = tables or self.tables()
        logits = self._logits(events, match)
        mass = state * (logits - logits.amax(dim=-1, keepdim=True)).exp()
        share = mass / mass.sum(dim=-1, keepdim=True).clamp_min(prefix.SMALLEST_MASS)
        return share.flatten(1) @ values

    @override
    def forward(self, events: Events, tables: Tables | None = None) -> Tensor:
        assert events.codes is not None
        match, values = tables or self.tables()
        logits = self._logits(events.codes, match)  # of distinct items, because there are many more events
        return prefix.shares(events.codes, logits, events.places, events.lengths, self.decay) @ values

    @override
    def tables(self) -> Tables:
        """Compute the inner products of all codeword pairs (B, W, W), and the projected values (B W, D)."""
        width = self.query.shape[-1]
        words = self._codebooks[0] * (math.sqrt(width) if self.soft else 1)  # like items, when they are read
        match = (words @ self.query) @ (words @ self.key).mT / math.sqrt(width)
        return match, (words @ self.value).flatten(0, 1)

    def _logits(self, codes: Tensor, match: Tensor) -> Tensor:
        """Score how well each codeword matches the items' codes: (U, B, W) -> (U, B, W)."""
        books = zip(codes.unbind(1), match, strict=True)
        return torch.stack([code_product(code, table, self.soft) for code, table in books], dim=1)

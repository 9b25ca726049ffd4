"""LightSANs: a history becomes k latent interests, and events attend to these instead of each other.

    interest_n[i] = sum of exp(a_i . x_m) x_m / sum of exp(a_i . x_m), over m <= n
    out_n         = softmax over i of (q_n . K interest_n[i]) @ V interest_n

Source: Fan et al., Lighter and better: low-rank decomposed self-attention networks for next-item recommendation, SIGIR
2021, sections 3.1 to 3.3. The original reads one whole history at a time. Here an event's interests are those of the
events so far, so numerator and denominator are sums, which form a state. The original's decoupled positions attend from
place to place, which needs every event again, so with them there is no state.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from model.mechanisms.mechanism import Events, Mechanism

LARGEST_LOGIT = 20.0  # of an event in an interest: bounded, because sums of exponentials are never rescaled


class Interests(Mechanism):
    """Attention to k interests. The state has their numerators (k, D) and, in one more column, their denominators.

    window  places of the decoupled positions; None without these
    """

    def __init__(self, width: int, interests: int, window: int | None = None) -> None:
        super().__init__()
        self.state_shape = (interests, width + 1) if window is None else None
        self.aggregate = nn.Parameter(torch.randn(interests, width) / math.sqrt(width))
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.places = None
        if window is not None:
            self.places = nn.Parameter(torch.randn(window, width) * 0.02)
            self.place_query, self.place_key = (nn.Linear(width, width, bias=False) for _ in range(2))

    @override
    def feature(self, events: Tensor) -> Tensor:
        """Weight each event in each interest: (Q, D) -> (Q, k, D + 1)."""
        extended = torch.cat([events, torch.ones_like(events[:, :1])], dim=1)
        return self._weights(events)[:, :, None] * extended[:, None, :]

    @override
    def read(self, state: Tensor, events: Tensor, tables: None = None) -> Tensor:
        interests = state[..., :-1] / state[..., -1:]
        logits = interests @ self._interest_query(events)[:, :, None]  # (Q, k, 1)
        read: Tensor = self.out(self.value((logits.softmax(dim=1) * interests).sum(dim=1)))
        return read

    @override
    def forward(self, events: Events, tables: None = None) -> Tensor:
        """Attend by way of the interests, as weighted sums of weighted sums: (S, L, k, D) is never computed."""
        hidden, weights = events.hidden, self._weights(events.hidden)
        totals = weights.cumsum(dim=1)  # (S, L, k)
        logits = (self._interest_query(hidden) @ hidden.mT).tril() @ weights / totals
        share = (logits.softmax(dim=-1) / totals @ weights.mT).tril()  # (S, L, L), of events by way of interests
        attended = self.value(share @ hidden)
        if self.places is not None:
            attended = attended + self._by_place(hidden.shape[1]) @ self.value(hidden)
        read: Tensor = self.out(attended)
        return read

    def _weights(self, events: Tensor) -> Tensor:
        """Compute the weight of an event in each interest: (..., D) -> (..., k)."""
        logits = events @ self.aggregate.T
        return (LARGEST_LOGIT * torch.tanh(logits / LARGEST_LOGIT)).exp()

    def _interest_query(self, events: Tensor) -> Tensor:
        """Compute ``K^T q / sqrt(D)``, which is multiplied with each interest: (..., D) -> (..., D)."""
        query: Tensor = self.query(events) @ self.key.weight / math.sqrt(events.shape[-1])
        return query

    def _by_place(self, length: int) -> Tensor:
        """Compute the attention from place to place, which does not depend on the events there: (L, L)."""
        assert self.places is not None
        places = self.places[:length]
        logits = self.place_query(places) @ self.place_key(places).T / math.sqrt(places.shape[1])
        future = torch.ones_like(logits, dtype=torch.bool).triu(1)
        return F.softmax(logits.masked_fill(future, -torch.inf), dim=-1)

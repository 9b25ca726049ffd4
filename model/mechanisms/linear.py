"""Linear attention, plain and gated: the state is a sum of outer products, and reading it one product with a matrix.

    C_n = C_{n-1} + f_n f_n^T       out_n = C_n q_n / n       f = h, or gated: f = sigmoid(W h + b) * h

Source: de Brebisson and Vincent, A cheap linear attention mechanism with fast lookups and fixed-size representations,
2016, sections 3 and 4. The original does not divide by n; here histories differ in length by a factor of a hundred.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from model.mechanisms.mechanism import Events, Mechanism

EVENTS_PER_CHUNK = 64


class Linear(Mechanism):
    """Linear attention. The state has C (K, K) and, in one more row, the number of events; K is the memory's width."""

    def __init__(self, width: int, memory: int, gated: bool) -> None:
        super().__init__()
        self.state_shape = memory + 1, memory
        self.hidden = nn.Linear(width, memory, bias=False)
        self.query = nn.Linear(width, memory, bias=False)
        self.gate = nn.Linear(memory, memory) if gated else None
        self.out = nn.Linear(memory, width)

    @override
    def feature(self, events: Tensor) -> Tensor:
        """Compute the outer product of each event: (Q, D) -> (Q, K + 1, K)."""
        added = self._added(events)
        return torch.cat([added[:, :, None] * added[:, None, :], torch.ones_like(added[:, None, :])], dim=1)

    @override
    def read(self, state: Tensor, events: Tensor, tables: None = None) -> Tensor:
        attended = (state[:, :-1] @ self.query(events)[:, :, None]).squeeze(-1)
        read: Tensor = self.out(attended / state[:, -1])
        return read

    @override
    def forward(self, events: Events, tables: None = None) -> Tensor:
        attended = prefix_lookups(self._added(events.hidden), self.query(events.hidden))
        count = torch.arange(1, attended.shape[1] + 1, device=attended.device, dtype=attended.dtype)
        read: Tensor = self.out(attended / count[:, None])
        return read

    def _added(self, events: Tensor) -> Tensor:
        hidden: Tensor = self.hidden(events)
        return hidden if self.gate is None else torch.sigmoid(self.gate(hidden)) * hidden


def prefix_lookups(added: Tensor, queries: Tensor) -> Tensor:
    """Compute ``C_n q_n`` with ``C_n = sum of f_m f_m^T over m <= n``: (S, L, K) and (S, L, K) -> (S, L, K)."""
    attended: Tensor = _PrefixLookups.apply(added, queries)  # type: ignore[no-untyped-call]
    return attended


class _PrefixLookups(torch.autograd.Function):
    """Lookups whose backward pass keeps no state: it computes C again forward, then sums the gradients in reverse.

    d q_n = C_n g_n         d f_m = (E_m + E_m^T) f_m with E_m = sum of g_n q_n^T over n >= m

    It multiplies sections of many events at once; within one, a triangle of inner products replaces the states.
    """

    @staticmethod
    def forward(ctx: Any, added: Tensor, queries: Tensor) -> Tensor:
        ctx.save_for_backward(added, queries)
        return _look_up(added, added, queries)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        added, queries = ctx.saved_tensors
        of_queries = _look_up(added, added, gradient)
        reverse = [tensor.flip(1) for tensor in (gradient, queries, added)]
        flowing = _look_up(*reverse) + _look_up(reverse[1], reverse[0], reverse[2])
        return flowing.flip(1), of_queries


def _look_up(values: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
    """Compute ``(sum of v_m k_m^T over m <= n) q_n`` by sections of events: three (S, L, K) -> (S, L, K)."""
    attended = torch.empty_like(values)
    state = values.new_zeros(len(values), values.shape[2], keys.shape[2])
    for section in _sections(values.shape[1]):
        value, key, query = values[:, section], keys[:, section], queries[:, section]
        attended[:, section] = query @ state.mT + (query @ key.mT).tril() @ value
        state += value.mT @ key
    return attended


def _sections(events: int) -> Iterator[slice]:
    return (slice(begin, begin + EVENTS_PER_CHUNK) for begin in range(0, events, EVENTS_PER_CHUNK))

"""Attention over a user's most recent items, whose order and identity a histogram blurs.

Single-layer softmax attention with relative positions (Shaw et al., 2018) over a window of constant size, so that a
state with the window beside the histogram is of constant size too.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model.config import ModelConfig
from model.lisa.feed_forward import FeedForward, fold_norm_and_round, round_to_bfloat16

NEVER = -1e9  # a logit whose share is exactly zero, yet finite where a whole row has no other
ROWS_PER_BLOCK = 64  # the window's vectors of a block stay in the processor's cache


def recent_windows(
    items: NDArray[np.int32], starts: NDArray[np.int64], at: NDArray[np.int64], length: int
) -> NDArray[np.int32]:
    """Return the newest items of packed histories at the chosen events.

    items    (events,)     users one behind the other
    starts   (users + 1,)  where each user's events begin, and the end
    at       (Q,)          places in ``items``
    returns  (Q, length)   newest first, that of the event itself; -1 before the user's first event
    """
    begins = np.repeat(starts[:-1], np.diff(starts))[at]
    places = at[:, None] - np.arange(length)
    found: NDArray[np.int32] = np.where(places >= begins[:, None], items[np.maximum(places, 0)], -1).astype(np.int32)
    return found


def window_rows(recent: Tensor, *, is_capturable: bool) -> tuple[Tensor, Tensor]:
    """Return the items (U,) of windows, and for each place of a window its row among them: (Q, K) -> (Q, K).

    is_capturable  list the item of every place, rather than each item once: how many differ is known to the device
                   alone, and a captured graph cannot wait for it
    """
    items = recent.clamp_min(0)
    if is_capturable:
        return items.flatten(), torch.arange(items.numel(), device=items.device).view_as(items)
    distinct, rows = torch.unique(items, return_inverse=True)
    return distinct, rows


class RecentItems(nn.Module):
    """Attention heads that compare the whole width of a query with each item of the window."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, heads, length = config.width, config.recent_heads, config.recent_items
        self.heads = heads
        self.codebooks = nn.Parameter(torch.randn(config.target_codebooks, config.target_codewords, width) * 0.1)
        self.norm_memory = nn.LayerNorm(width)
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, heads * width)
        self.out = nn.Linear(heads * width, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        slopes = 0.2 * 2.0 ** -torch.arange(heads)
        self.age_bias = nn.Parameter(-slopes[:, None] * torch.arange(length))  # heads start near- to far-sighted
        self.dropout = nn.Dropout(config.dropout)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden: Tensor, vectors: Tensor, window: Tensor) -> Tensor:
        """Add the attention to the window to the hidden vectors.

        hidden   (Q, D)
        vectors  (U, D)  one vector for each distinct item
        window   (Q, K)  int64 rows of ``vectors``, newest first; -1 for none
        returns  (Q, D)
        """
        queries = self._queries(hidden)  # (Q, H, D)
        logits = queries @ self.positions.T + self.age_bias  # (Q, H, K)
        logits = logits.masked_fill((window < 0)[:, None, :], NEVER)
        with torch.autocast(hidden.device.type, enabled=False):
            attended, share = _WindowAttention.apply(  # type: ignore[no-untyped-call]
                queries.float(), self.norm_memory(vectors.float()), window.clamp_min(0), logits.float()
            )
        return self._add(hidden, attended + share @ self.positions)

    def fold_norms_and_round(self) -> None:
        """Fold the norm of the queries into their matrix, and round the matrices to bfloat16."""
        fold_norm_and_round(self.norm, self.query.weight, self.query.bias)
        round_to_bfloat16(self.out.weight)
        self.feed_forward.fold_norms_and_round()

    def parallel(self, hidden: Tensor, vectors: Tensor) -> Tensor:
        """Attend after every event of one history: hidden (L, D) and the vectors of its items (L, D) -> (L, D)."""
        queries, memory = self._queries(hidden), self.norm_memory(vectors)
        place = torch.arange(len(hidden), device=hidden.device)
        age = place[:, None] - place[None, :]  # (L, L)
        inside = (age >= 0) & (age < len(self.positions))
        age = age.clamp(0, len(self.positions) - 1)
        keys = memory + self.positions[age]  # (L, L, D)
        logits = torch.einsum("qhd,qkd->qhk", queries, keys) + self.age_bias[:, age].transpose(0, 1)
        share = logits.masked_fill(~inside[:, None, :], -torch.inf).softmax(dim=-1)
        return self._add(hidden, share @ keys)

    def _queries(self, hidden: Tensor) -> Tensor:
        queries: Tensor = self.query(self.norm(hidden)) / math.sqrt(hidden.shape[-1])
        return queries.view(len(hidden), self.heads, hidden.shape[-1])

    def _add(self, hidden: Tensor, attended: Tensor) -> Tensor:
        added: Tensor = self.feed_forward(hidden + self.dropout(self.out(attended.flatten(1))))
        return added


class _WindowAttention(torch.autograd.Function):
    """Softmax attention to gathered rows, block by block.

    A (Q, K, D) array of the window's vectors and its gradient would be written and read many times, which costs several
    times as much as the products.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, queries: Tensor, memory: Tensor, window: Tensor, logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(Q, H, D), (U, D), (Q, K), (Q, H, K) -> averages (Q, H, D) and shares (Q, H, K)."""
        attended, shares = torch.empty_like(queries), torch.empty_like(logits)
        for block in _blocks(queries):
            gathered = memory[window[block]]
            shares[block] = torch.baddbmm(logits[block], queries[block], gathered.mT).softmax(dim=-1)
            attended[block] = shares[block] @ gathered
        ctx.save_for_backward(queries, memory, window, shares)
        return attended, shares

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, of_found: Tensor, of_shares: Tensor
    ) -> tuple[Tensor | None, ...]:
        queries, memory, window, shares = ctx.saved_tensors  # type: ignore[attr-defined]
        of_queries, of_memory, of_logits = torch.empty_like(queries), torch.zeros_like(memory), torch.empty_like(shares)
        for block in _blocks(queries):
            gathered, share = memory[window[block]], shares[block]
            of_share = of_found[block] @ gathered.mT + of_shares[block]
            of_logit = share * (of_share - (of_share * share).sum(dim=-1, keepdim=True))
            of_logits[block] = of_logit
            of_queries[block] = of_logit @ gathered
            of_gathered = torch.cat([of_logit, share], 1).mT @ torch.cat([queries[block], of_found[block]], 1)
            of_memory.index_add_(0, window[block].flatten(), of_gathered.flatten(0, 1))
        return of_queries, of_memory, None, of_logits


def _blocks(queries: Tensor) -> list[slice]:
    """Return the rows of each block; a GPU takes all of them at once."""
    size = ROWS_PER_BLOCK if queries.device.type == "cpu" else max(len(queries), 1)
    return [slice(begin, begin + size) for begin in range(0, len(queries), size)]

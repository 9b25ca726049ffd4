"""Cross-entropy of the next item against the whole catalogue, or against a sample of a large one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

ROWS_PER_BLOCK = 128  # the logits of a block stay in the processor's cache for the softmax


class _CatalogueCrossEntropy(torch.autograd.Function):
    """Cross-entropy that computes its gradient block by block, while the logits are in the cache.

    A (Q, N) array of float32 logits would be written and read six times, which costs more than the products.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        queries: Tensor,
        vectors: Tensor,
        bias: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        rows, catalogue = queries.to(dtype), vectors.to(dtype)
        surprise = torch.empty((len(queries), len(vectors)), dtype=dtype, device=queries.device)  # d loss / d logits
        bias_gradient = torch.zeros_like(bias)
        loss = torch.zeros((), device=queries.device)
        for begin in range(0, len(queries), ROWS_PER_BLOCK):
            block = slice(begin, begin + ROWS_PER_BLOCK)
            target = targets[block, None]
            logits = (rows[block] @ catalogue.T).float().add_(bias)
            peak = logits.amax(dim=1, keepdim=True)
            chosen = logits.gather(1, target)
            mass = logits.sub_(peak).exp_().sum(dim=1, keepdim=True)
            loss += (mass.log() + peak - chosen).sum()
            share = logits.div_(mass * len(queries))
            share.scatter_add_(1, target, torch.full_like(chosen, -1 / len(queries)))
            bias_gradient += share.sum(dim=0)
            surprise[block] = share
        ctx.save_for_backward((surprise @ catalogue).float(), (surprise.T @ rows).float(), bias_gradient)
        return loss / len(queries)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_queries, of_vectors, of_bias = ctx.saved_tensors  # type: ignore[attr-defined]
        return of_queries * gradient, of_vectors * gradient, of_bias * gradient, None, None


def full_softmax_loss(queries: Tensor, vectors: Tensor, bias: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the mean cross-entropy of the targets over the whole catalogue.

    queries  (Q, D)  float32
    vectors  (N, D)  float32
    bias     (N,)    float32
    targets  (Q,)    int64
    dtype    of the products; the softmax runs in float32
    """
    loss: Tensor = _CatalogueCrossEntropy.apply(queries, vectors, bias, targets, dtype)  # type: ignore[no-untyped-call]
    return loss


class Negatives(NamedTuple):
    """A sample of the catalogue.

    items      (S,)  int64, distinct
    log_counts (S,)  the logarithm of the number of catalogue items that each stands for; or one number for all
    """

    items: Tensor
    log_counts: Tensor | float


def uniform_negatives(drawn: Tensor, items: int) -> Negatives:
    """Return a uniform sample of the items."""
    return Negatives(drawn, math.log(items / len(drawn)))


def negative_shares(counts: Tensor) -> Tensor:
    """Return the probability of each item to be a negative, from its number of events: (N,) -> (N,) float32.

    The power 0.75 is that of Mikolov et al., Distributed Representations of Words and Phrases, 2013.
    """
    chances = (counts + 1.0) ** 0.75
    return (chances / chances.sum()).float()


def popular_negatives(shares: Tensor, count: int) -> Negatives:
    """Sample items, popular ones more often.

    Each stands for 1 / (count * share) items, but at least for itself. With replacement, it would be drawn
    count * share times on average.
    """
    drawn = torch.multinomial(shares, min(count, len(shares)))
    return Negatives(drawn, -torch.log((len(drawn) * shares[drawn]).clamp_max(1.0)))


def sampled_softmax_loss(
    queries: Tensor,
    item_vectors: Callable[[Tensor], Tensor],
    bias: Tensor,
    targets: Tensor,
    negatives: Negatives,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the mean cross-entropy against negatives, whose weighted sum estimates that of the whole catalogue.

    queries       (Q, D)  float32
    item_vectors  returns the vectors of items: (S,) -> (S, D)
    bias          (N,)    float32
    targets       (Q,)    int64
    negatives     S items; a position's own target is left out
    """
    drawn, log_counts = negatives
    positive = (queries * item_vectors(targets)).sum(dim=-1) + bias[targets]
    logits = (queries.to(dtype) @ item_vectors(drawn).to(dtype).T).float() + bias[drawn]
    logits = logits.masked_fill(targets[:, None] == drawn, -torch.inf) + log_counts
    return (torch.logsumexp(torch.cat([positive[:, None], logits], dim=1), dim=1) - positive).mean()


def matmul_dtype(device: torch.device) -> torch.dtype:
    """Return the type of products: bfloat16 if the hardware supports it, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    fast = any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return torch.bfloat16 if fast else torch.float32

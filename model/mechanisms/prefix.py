"""Attention over the histogram of every prefix of a history, in one pass forward and one back.

Histograms of all events would be written and read some twenty times, backward passes included, which takes several
times as long as all products of a training step. The backward pass only needs the shares, which are the result:

    F_n = decay F_{n-1} + code_n       mass_n = F_n exp(logit_n)       share_n = mass_n / sum of mass_n
    d logit_n = (d share_n - <d share_n, share_n>) share_n             d F_n = d logit_n / F_n, which needs no F_n
    d code_n = sum of decay^(m - n) d F_m over all m >= n

It runs on the CPU; tensors of another device are copied there.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SMALLEST_MASS = 1e-30


def shares(codes: Tensor, logits: Tensor, places: Tensor, lengths: Tensor, decay: float) -> Tensor:
    """Compute the attention of each event to the histogram of the events so far.

    codes    (U, B, W)   what an item adds to the histogram
    logits   (U, B, W)   scores of the codewords for an item
    places   (S, L)      int64, the items of histories, padded at the end
    lengths  (S,)        int64
    returns  (S, L, BW)  the shares of each codebook's codewords; 0 at padding
    """
    found: Tensor = _Shares.apply(codes, logits, places, lengths, decay)  # type: ignore[no-untyped-call]
    return found


class _Shares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, codes: Tensor, logits: Tensor, places: Tensor, lengths: Tensor, decay: float) -> Tensor:
        matches = (logits - logits.amax(dim=-1, keepdim=True)).exp()
        found = torch.empty(*places.shape, codes[0].numel(), dtype=codes.dtype)
        totals = torch.empty(*places.shape, codes.shape[1], dtype=codes.dtype)
        known = _arrays(codes, matches, places, lengths)
        _forward(known[0], known[1], known[2], known[3], known[0].dtype.type(decay), found.numpy(), totals.numpy())
        found = found.to(codes.device)
        ctx.save_for_backward(matches, places, lengths, found, totals)
        ctx.decay = decay
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        matches, places, lengths, found, totals = ctx.saved_tensors
        of_codes, of_logits = (torch.zeros_like(matches, device="cpu") for _ in range(2))
        known = _arrays(matches, places, lengths, found, totals, gradient)
        decay = known[0].dtype.type(ctx.decay)
        _backward(tuple(known[:3]), tuple(known[3:5]), known[5], decay, (of_codes.numpy(), of_logits.numpy()))
        return of_codes.to(matches.device), of_logits.to(matches.device), None, None, None


def _arrays(*tensors: Tensor) -> list[NDArray[Any]]:
    return [tensor.detach().cpu().contiguous().numpy() for tensor in tensors]


@numba.njit(cache=True, fastmath=True)
def _forward(codes, matches, places, lengths, decay, found, totals):  # type: ignore[no-untyped-def]
    _, books, words = codes.shape
    histogram = np.empty((books, words), codes.dtype)
    for row in range(len(lengths)):
        histogram[:] = 0
        for event in range(lengths[row]):
            item = places[row, event]
            out = found[row, event].reshape(books, words)
            for book in range(books):
                total = codes.dtype.type(0)
                for word in range(words):
                    count = histogram[book, word] * decay + codes[item, book, word]
                    histogram[book, word] = count
                    mass = count * matches[item, book, word]
                    out[book, word] = mass
                    total += mass
                total = max(total, codes.dtype.type(SMALLEST_MASS))
                totals[row, event, book] = total
                scale = 1 / total
                for word in range(words):
                    out[book, word] *= scale
        found[row, lengths[row] :] = 0


@numba.njit(cache=True, fastmath=True)
def _backward(histories, results, gradient, decay, gradients):  # type: ignore[no-untyped-def]
    matches, places, lengths = histories
    found, totals = results
    of_codes, of_logits = gradients
    _, books, words = matches.shape
    of_histogram = np.empty((books, words), matches.dtype)
    for row in range(len(lengths)):
        of_histogram[:] = 0
        for event in range(lengths[row] - 1, -1, -1):
            item = places[row, event]
            share, of_share = found[row, event].reshape(books, words), gradient[row, event].reshape(books, words)
            for book in range(books):
                mean = matches.dtype.type(0)
                for word in range(words):
                    mean += share[book, word] * of_share[book, word]
                scale = 1 / totals[row, event, book]
                for word in range(words):
                    surprise = of_share[book, word] - mean
                    of_logits[item, book, word] += surprise * share[book, word]
                    flow = of_histogram[book, word] * decay + surprise * scale * matches[item, book, word]
                    of_histogram[book, word] = flow
                    of_codes[item, book, word] += flow

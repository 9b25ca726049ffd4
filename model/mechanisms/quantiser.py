"""Encodes items as codes that are learned with the model: residual encoding by bilinear similarity, straight-through.

Source: Wu et al., LISA, WWW 2021, section 3; temperature, similarity and residual encoding as in the paper's published
code. There, ties of similarities make codes multi-hot; here the first codeword wins.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from model.lisa.item_codes import make_distinct, residual_kmeans

TEMPERATURE = 0.7


class Encoded(NamedTuple):
    """Encoded items.

    codes    (U, B, W)  share of each codeword, one-hot where hard; None without codebooks
    vectors  (U, D)     the sums of the codewords
    """

    codes: Tensor | None
    vectors: Tensor

    def indices(self) -> Tensor:
        """Return each item's largest codeword of each codebook: (U, B) uint8."""
        assert self.codes is not None
        return self.codes.argmax(dim=-1).byte()


class Quantiser(nn.Module):
    """Codebooks, each of which encodes the residual of the previous ones.

    Hard codes start as in the published code: small codewords, and one random similarity for all codebooks. They learn
    much better from there than from the identity (docs/measurements/mechanisms.md).
    """

    def __init__(self, width: int, books: int, words: int, soft: bool = False) -> None:
        super().__init__()
        self.soft = soft
        if soft:
            codebooks = torch.randn(books, words, width) / math.sqrt(books * width)
            similarity = torch.eye(width).repeat(books, 1, 1) * math.sqrt(width)
        else:
            codebooks = torch.randn(books, words, width) * math.sqrt(2 / (width * (books + words)))
            similarity = torch.randn(1, width, width) / math.sqrt(width)
        self.codebooks, self.similarity = nn.Parameter(codebooks), nn.Parameter(similarity)

    def forward(self, vectors: Tensor) -> Encoded:
        """Encode vectors: (U, D) -> their codes, and the vectors that the codes stand for."""
        left, codes = vectors, []
        similarities = self.similarity.expand(len(self.codebooks), -1, -1)
        for words, similarity in zip(self.codebooks, similarities, strict=True):
            share = (left @ (similarity @ words.T) / TEMPERATURE).softmax(dim=-1)
            code = share if self.soft else StraightThrough.apply(share)  # type: ignore[no-untyped-call]
            left = left - code_product(code, words, self.soft)
            codes.append(code)
        return Encoded(torch.stack(codes, dim=1), vectors - left)

    @torch.no_grad()
    def fit(self, vectors: Tensor) -> Tensor:
        """Set the codewords by residual k-means; returns the codes (U, B) uint8, made distinct."""
        books, words = self.codebooks.shape[:2]
        quantised = residual_kmeans(vectors.numpy(force=True), books, words, seed=0)
        self.codebooks.copy_(torch.from_numpy(quantised.codewords))
        return torch.from_numpy(make_distinct(quantised.codes, words)).to(vectors.device)

    def decode(self, codes: Tensor) -> Encoded:
        """Decode frozen codes, (U, B) integers."""
        one_hot = F.one_hot(codes.long(), self.codebooks.shape[1]).to(self.codebooks.dtype)
        books = torch.arange(len(self.codebooks), device=codes.device)
        return Encoded(one_hot, self.codebooks[books, codes.long()].sum(dim=1))


class StraightThrough(torch.autograd.Function):
    """One-hot rows of the largest share, with the gradient of the shares: (..., W) -> (..., W)."""

    @staticmethod
    @override
    def forward(ctx: Any, share: Tensor) -> Tensor:
        return torch.zeros_like(share).scatter_(-1, share.argmax(dim=-1, keepdim=True), 1.0)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def code_product(code: Tensor, table: Tensor, soft: bool) -> Tensor:
    """Compute ``code @ table``, a look-up where codes are one-hot: (U, W) and (W, K) -> (U, K)."""
    quantised: Tensor = code @ table if soft else _LookUp.apply(code, table)  # type: ignore[no-untyped-call]
    return quantised


class _LookUp(torch.autograd.Function):
    """A product with one-hot rows: only the gradient of the codes needs a multiplication."""

    @staticmethod
    def forward(ctx: Any, code: Tensor, table: Tensor) -> Tensor:
        chosen = code.argmax(dim=-1)
        ctx.save_for_backward(chosen, table)
        return table[chosen]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
        chosen, table = ctx.saved_tensors
        of_code = gradient @ table.T if ctx.needs_input_grad[0] else None
        return of_code, torch.zeros_like(table).index_add_(0, chosen, gradient)

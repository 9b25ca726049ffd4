"""LISA-Mini, top to bottom: the last item's codes attend to the user's codeword histogram, then further hops do.

Source: Wu et al., LISA, WWW 2021, equations 9 to 11 and algorithm 1; decay as in the paper's published code. The hops
are those of Sukhbaatar et al., End-To-End Memory Networks, 2015, with the histogram for a memory.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from typing import NamedTuple, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from model.config import ModelConfig
from model.lisa.feed_forward import FeedForward, fold_norm_and_round, round_to_bfloat16
from model.lisa.item_codes import FixedCodes
from model.lisa.item_followers import Followers, Lift, lifting_items
from model.lisa.recent_attention import RecentItems, window_rows

SMALLEST_MASS = 1e-30


class AttentionTables(NamedTuple):
    """Tables of the attention by codes, computed once per generation.

    match   (R, B, W, W)  exp of the scaled inner products of all codeword pairs, less the row's maximum; of a model
                          with soft codes the exponents, which it averages first
    values  (R, B, W, D)  projected value codewords
    """

    match: Tensor
    values: Tensor


def attend(histogram: Tensor, last_codes: Tensor, tables: AttentionTables) -> Tensor:
    """Average the value codewords, weighted by how often the history used them and how well they match the last item.

    histogram   (Q, R, B, W)  float32, >= 0; every (r, b) row has a positive entry, its scale is free
    last_codes  (Q, B)        integers, codeword indices of each user's last item
    returns     (Q, D)        float32
    """
    rates, books, words, width = tables.values.shape
    # row (r, b, psi) of the flattened match table: one look-up per rate and codebook
    offsets = torch.arange(rates * books, device=last_codes.device).view(1, rates, books) * words
    match = F.embedding(last_codes[:, None, :] + offsets, tables.match.reshape(-1, words))  # (Q, R, B, W)
    mass = histogram * match
    share = mass / mass.sum(dim=-1, keepdim=True).clamp_min(SMALLEST_MASS)
    return share.flatten(1) @ tables.values.reshape(-1, width)  # (Q, R B W) -> (Q, D)


class DecayedHistory(NamedTuple):
    """One history for the parallel form: codes (L, B), and log weights (R, 1, L, L) of every event at every step.

    The log weight of an event in a step's future is minus infinity.
    """

    codes: Tensor
    log_weights: Tensor

    def shares(self, logits: Tensor) -> Tensor:
        """Apply the softmax over the events up to each step: (R, B, L, L) -> (R, B, L, L)."""
        return (logits + self.log_weights).softmax(dim=-1)


class Hop(nn.Module):
    """Attention to the histogram by the hidden vector, instead of by the last item's codes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        rates, books, words = len(config.decay_rates), config.history_codebooks, config.history_codewords
        self.norm = nn.LayerNorm(config.width)
        self.keys = nn.Parameter(torch.randn(rates, books, words, config.width) * 0.02)
        self.prior = nn.Parameter(torch.zeros(rates, books, words))
        self.values = nn.Parameter(
            torch.randn(rates, books, words, config.width) / math.sqrt(4 * rates * books * config.width)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden: Tensor, histogram: Tensor) -> Tensor:
        """Attend once more: (Q, D) and (Q, R, B, W) -> (Q, D); the scale of a row of the histogram is free."""
        share = (self._logits(hidden) + histogram.log()).softmax(dim=-1)
        return self._add(hidden, share.flatten(1) @ self.values.flatten(0, 2))

    def parallel(self, hidden: Tensor, history: DecayedHistory) -> Tensor:
        """Attend after every event of one history, without its histograms: (L, D) -> (L, D)."""
        books = torch.arange(history.codes.shape[1], device=hidden.device)
        logits = self._logits(hidden)[:, :, books, history.codes]  # (L, R, L, B)
        share = history.shares(logits.permute(1, 3, 0, 2))
        values = self.values[:, books, history.codes].transpose(1, 2)  # (R, B, L, D)
        return self._add(hidden, (share @ values).sum(dim=(0, 1)))

    def fold_norms_and_round(self) -> None:
        """Fold the norm into the keys, and round keys, values and the feed-forward to bfloat16."""
        fold_norm_and_round(self.norm, self.keys, self.prior)
        round_to_bfloat16(self.values)
        self.feed_forward.fold_norms_and_round()

    def _logits(self, hidden: Tensor) -> Tensor:
        """Score each codeword: (Q, D) -> (Q, R, B, W)."""
        answers: Tensor = self.norm(hidden) @ self.keys.flatten(0, 2).T
        return answers.view(-1, *self.prior.shape) + self.prior

    def _add(self, hidden: Tensor, attended: Tensor) -> Tensor:
        added: Tensor = self.feed_forward(hidden + self.dropout(attended))
        return added


class Lisa(nn.Module, ABC):
    """A model that can be served: items are codes, and a step attends to a histogram by tables of codewords.

    A user's state is the histogram and the newest items.
    """

    history_codes: Tensor  # (N, B)  uint8
    target_codes: Tensor  # (N, B')  uint8
    shares: Tensor | None  # (N, B, W)  float32, shares of the codewords; None where an item has one of each book
    followers: Tensor  # (N, K')  int32, an item's strongest followers, -1 for none
    lift: Tensor  # (N, K')  float32, the followers' gain while the item is the newest
    target_codebooks: nn.Parameter  # (B', W', D)
    bias: nn.Parameter  # (N,)

    def __init__(self, config: ModelConfig, history_codes: Tensor, target_codes: Tensor) -> None:
        super().__init__()
        self.config = config
        rates, width = len(config.decay_rates), config.width
        books, words = config.history_codebooks, config.history_codewords
        self.register_buffer("history_codes", history_codes.byte())
        self.register_buffer("target_codes", target_codes.byte())
        self.register_buffer("shares", torch.zeros(len(target_codes), books, words) if config.soft else None)
        self.register_buffer("followers", torch.full((len(target_codes), config.followers), -1, dtype=torch.int32))
        self.register_buffer("lift", torch.zeros(len(target_codes), config.followers))
        self.codebooks = nn.Parameter(torch.randn(books, words, width) / math.sqrt(books))
        self.query = nn.Parameter(torch.randn(rates, books, width, width) / math.sqrt(width))
        self.key = nn.Parameter(torch.randn(rates, books, width, width) / math.sqrt(width))
        self.value = nn.Parameter(torch.randn(rates, books, width, width) / math.sqrt(width * rates))

    @abstractmethod
    def read(self, histogram: Tensor, last: Tensor, recent: Tensor, tables: AttentionTables | None = None) -> Tensor:
        """Turn states into queries.

        histogram   (Q, R, B, W)  float32
        last        (Q,)          int64, each user's last item
        recent      (Q, K)        int64, the newest items, newest first, -1 for none
        returns     (Q, D)        float32
        """

    @abstractmethod
    def fold_norms_and_round(self) -> None:
        """Prepare a trained model for evaluation and serving; a second call changes nothing."""

    def tables(self) -> AttentionTables:
        """Compute the inner products of all codeword pairs and the projected values, per rate and codebook."""
        similarity = (self.codebooks @ self.query) @ (self.codebooks @ self.key).mT / math.sqrt(self.config.width)
        similarity = similarity - similarity.amax(dim=-1, keepdim=True).detach()
        return AttentionTables(similarity if self.config.soft else torch.exp(similarity), self.codebooks @ self.value)

    def with_cold_items(
        self, history: NDArray[np.uint8], target: NDArray[np.uint8], bias: NDArray[np.floating]
    ) -> Self:
        """Return a model with n further items behind its own, whose weights it shares; they have no followers.

        history  (n, B)   their history codes
        target   (n, B')  their target codes
        bias     (n,)
        """
        wider = copy.copy(self)
        added = torch.from_numpy(history)
        wider.history_codes = torch.cat([self.history_codes, added])
        wider.target_codes = torch.cat([self.target_codes, torch.from_numpy(target)])
        if self.shares is not None:
            whole = F.one_hot(added.long(), self.config.history_codewords)
            wider.shares = torch.cat([self.shares, whole.to(self.shares.dtype)])
        wider.bias = nn.Parameter(torch.cat([self.bias.detach(), torch.from_numpy(bias).float()]), requires_grad=False)
        return wider

    def __copy__(self) -> Self:
        """Copy the model; the copy can have other tensors than the original, with which it shares those of now."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__, _buffers=dict(self._buffers), _parameters=dict(self._parameters))
        return other

    def item_vectors(self, items: Tensor | None = None) -> Tensor:
        """Sum the items' target codewords: (N, D), or (len(items), D) for the given items."""
        return sum_of_codewords(self.target_codes if items is None else self.target_codes[items], self.target_codebooks)

    def codeword_products(self, queries: Tensor) -> Tensor:
        """Compute the inner products of queries with all target codewords: (Q, D) -> (Q, B', W')."""
        products = torch.einsum("qd,bpd->bqp", queries, self.target_codebooks)
        return products.transpose(0, 1).contiguous()

    def set_followers(self, followers: Followers, lift: Lift) -> None:
        """Let each item lift these followers (N, K') by what they gain."""
        device = self.followers.device
        self.followers = torch.from_numpy(np.ascontiguousarray(followers.items)).to(device)
        self.lift = torch.from_numpy(followers.gains(lift)).to(device)
        about = {"followers": followers.items.shape[1], "lift_decay": lift.decay}
        if not self.config.recent_heads:  # nothing else reads them
            about["recent_items"] = max(self.config.recent_items, lifting_items(lift.decay))
        self.config = self.config.model_copy(update=about)

    def shares_of_followers(self, lift: Lift) -> Followers:
        """Return the followers and their shares, as they were set with this lift, of a strength above 0."""
        gains = self.lift.detach().cpu().numpy()
        shares = lift.faint_share * np.expm1(gains / lift.strength)
        return Followers(self.followers.cpu().numpy(), shares.astype(np.float32))

    def follower_gains(self, recent: Tensor) -> tuple[Tensor, Tensor]:
        """Look up the followers of the newest items: (Q, K) -> items (Q, F) int64, their gains (Q, F)."""
        fade = follower_decay(self.config, recent.device)
        newest = recent[:, : len(fade)]
        if len(self.followers) < len(self.target_codes):
            newest = newest.masked_fill(newest >= len(self.followers), -1)
        rows, faded = newest.clamp_min(0), fade[: newest.shape[1]] * (newest >= 0)
        followers = self.followers[rows].long().clamp_min(0)
        return followers.flatten(1), (self.lift[rows] * faded[:, :, None]).flatten(1)


class LisaMini(Lisa):
    """Hard codes for history and targets, in the block of this project."""

    def __init__(self, config: ModelConfig, history_codes: Tensor, target_codes: Tensor) -> None:
        super().__init__(config, history_codes, target_codes)
        width = config.width
        targets = config.target_codebooks, config.target_codewords, width
        self.last_codebooks = nn.Parameter(torch.randn(targets) * 0.1)
        self.target_codebooks = nn.Parameter(torch.randn(targets) * 0.02)
        self.bias = nn.Parameter(torch.zeros(len(target_codes)))
        self.dropout = nn.Dropout(config.dropout)
        self.feed_forward = FeedForward(config)
        self.hops = nn.ModuleList(Hop(config) for _ in range(config.hops))
        self.recent = RecentItems(config) if config.recent_heads else None
        self.norm = nn.LayerNorm(width)

    @override
    def read(self, histogram: Tensor, last: Tensor, recent: Tensor, tables: AttentionTables | None = None) -> Tensor:
        codes = self.history_codes[last]
        hidden = self._attend_first(last, attend(histogram, codes, self.tables() if tables is None else tables))
        for hop in self.hops:
            hidden = hop(hidden, histogram)
        if self.recent is not None:
            items, window = window_rows(recent, is_capturable=recent.is_cuda and torch.is_inference_mode_enabled())
            vectors = sum_of_codewords(self.target_codes[items], self.recent.codebooks)
            hidden = self.recent(hidden, vectors, window.masked_fill(recent < 0, -1))
        queries: Tensor = self.norm(hidden)
        return queries

    @override
    def forward(self, items: Tensor, weights: Tensor | None = None) -> Tensor:
        """Compute queries after every item of one history, all positions at once, as softmax attention over the items.

        items    (L,)    int64, oldest first
        weights  (L,)    float32, weights of the events; None: all 1
        returns  (L, D)  float32; equals ``read`` of the state after each step
        """
        history = self._decayed_history(items, weights)
        words = self.codebooks[torch.arange(history.codes.shape[1], device=items.device), history.codes]  # (L, B, D)
        queries, keys, values = (
            torch.einsum("lbd,rbde->rble", words, projection) for projection in (self.query, self.key, self.value)
        )
        share = history.shares(queries @ keys.mT / math.sqrt(self.config.width))
        hidden = self._attend_first(items, (share @ values).sum(dim=(0, 1)))
        hop: Hop
        for hop in self.hops:  # type: ignore[assignment]
            hidden = hop.parallel(hidden, history)
        if self.recent is not None:
            vectors = sum_of_codewords(self.target_codes[items], self.recent.codebooks)
            hidden = self.recent.parallel(hidden, vectors)
        vectors_of_queries: Tensor = self.norm(hidden)
        return vectors_of_queries

    @override
    def fold_norms_and_round(self) -> None:
        """Fold the norms into the matrices behind them, and round these to bfloat16; a second call changes nothing.

        A step's time is that of reading these matrices.
        """
        self.feed_forward.fold_norms_and_round()
        for hop in cast(list[Hop], list(self.hops)):
            hop.fold_norms_and_round()
        if self.recent is not None:
            self.recent.fold_norms_and_round()

    def _attend_first(self, last: Tensor, attention: Tensor) -> Tensor:
        """Combine the last item, by its history codes and its finer target codes, with what it attends to: (Q, D)."""
        embedded = sum_of_codewords(self.history_codes[last], self.codebooks)
        embedded = embedded + sum_of_codewords(self.target_codes[last], self.last_codebooks)
        hidden: Tensor = self.feed_forward(self.dropout(embedded) + self.dropout(attention))
        return hidden

    def _decayed_history(self, items: Tensor, weights: Tensor | None) -> DecayedHistory:
        position = torch.arange(len(items), device=items.device)
        age = position[:, None] - position[None, :]  # (L, L), negative for the future
        rates = torch.tensor(self.config.decay_rates, dtype=self.bias.dtype, device=items.device)
        log_weight = torch.zeros_like(self.bias[:1]) if weights is None else weights.to(self.bias.dtype).log()
        fading = log_weight - rates[:, None, None, None] * age
        return DecayedHistory(self.history_codes[items].long(), fading.masked_fill(age < 0, -torch.inf))


def follower_decay(config: ModelConfig, device: torch.device | None = None) -> Tensor:
    """Return the weight of each newest item's followers, the newest first: (n,)."""
    count = min(config.recent_items, lifting_items(config.lift_decay))
    return torch.exp(-config.lift_decay * torch.arange(count, device=device))


def sum_of_codewords(codes: Tensor, codebooks: Tensor) -> Tensor:
    """Sum the codewords that the codes point to: (Q, books), (books, words, D) -> (Q, D)."""
    books, words, _ = codebooks.shape
    offsets = torch.arange(books, device=codes.device) * words
    return F.embedding_bag(codes + offsets, codebooks.flatten(0, 1), mode="sum")


def build_lisa_mini(config: ModelConfig, codes: FixedCodes) -> LisaMini:
    """Make a model with fresh weights on fixed codes; its history codewords start as the clusters' means."""
    model = LisaMini(config, torch.from_numpy(codes.history.codes), torch.from_numpy(codes.target.codes))
    means = torch.from_numpy(codes.history.codewords)
    scale = math.sqrt(config.history_codebooks) * means.square().mean().sqrt().clamp_min(SMALLEST_MASS)
    with torch.no_grad():
        model.codebooks.copy_(means / scale)
    return model

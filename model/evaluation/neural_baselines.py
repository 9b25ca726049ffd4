"""Neural baselines: SASRec and GRU4Rec, both trained with cross-entropy on the next item at every position.

They are baselines like those of ``model.evaluation.baselines``, but train for tens of minutes instead of seconds. The
two read a history differently; training and scoring are the same.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from model.data.interactions import Histories
from model.holdout_ranks import Scorer
from model.training.batches.padding import PaddedBatch, padded_batches, padded_rows
from model.training.loop import learning_rate_factor
from model.training.loss import full_softmax_loss, matmul_dtype, sampled_softmax_loss, uniform_negatives

FULL_SOFTMAX_ITEMS = 20_000
SAMPLED_NEGATIVES = 4_096
DENSE_EVENTS_PER_USER = 30
WARMUP_SHARE = 0.05
CPU = torch.device("cpu")

Notify = Callable[[str], None]
Validate = Callable[[Scorer], float]


class SequenceNetwork(nn.Module):
    """A network from histories to queries; the same item vectors are read and scored."""

    dtype = torch.float32  # of the products when training

    def __init__(self, items: int, width: int, dropout: float) -> None:
        super().__init__()
        self.vectors = nn.Embedding(items, width)
        self.bias = nn.Parameter(torch.zeros(items))
        self.dropout = nn.Dropout(dropout)

    def forward(self, items: Tensor) -> Tensor:
        """Compute a query for the next item after each event, from no later event: (S, L) -> (S, L, D)."""
        raise NotImplementedError


class CausalSelfAttention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to all earlier events: (S, L, D) -> (S, L, D)."""
        parts = self.project(x).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)  # (S, L, 3, H, D / H) -> 3 (S, H, L, D / H)
        dropout = self.dropout if self.training else 0.0
        read = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(read.transpose(1, 2).flatten(2))
        return out


class TransformerBlock(nn.Module):
    """Attention, then a feed-forward layer at every position, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = CausalSelfAttention(width, heads, dropout)
        self.feed_forward = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block: (S, L, D) -> (S, L, D)."""
        x = x + self.dropout(self.attention(self.norms[0](x)))
        added: Tensor = x + self.dropout(self.feed_forward(self.norms[1](x)))
        return added


class Transformer(SequenceNetwork):
    """A transformer whose positions count from the first event of the window."""

    def __init__(self, items: int, width: int, dropout: float, window: int, layers: int, heads: int) -> None:
        super().__init__(items, width, dropout)
        self.dtype = matmul_dtype(CPU)
        self.positions = nn.Embedding(window, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    @override
    def forward(self, items: Tensor) -> Tensor:
        scale = math.sqrt(self.vectors.embedding_dim)
        x = self.vectors(items) * scale + self.positions.weight[: items.shape[1]]
        queries: Tensor = self.norm(self.blocks(self.dropout(x)))
        return queries


class RecurrentNetwork(SequenceNetwork):
    """One layer of gated recurrent units."""

    def __init__(self, items: int, width: int, dropout: float) -> None:
        super().__init__(items, width, dropout)
        nn.init.normal_(self.vectors.weight, std=1 / math.sqrt(width))
        self.units = nn.GRU(width, width, batch_first=True)

    @override
    def forward(self, items: Tensor) -> Tensor:
        states, _ = self.units(self.dropout(self.vectors(items)))
        queries: Tensor = self.dropout(states)
        return queries


@dataclass(frozen=True, kw_only=True)
class NeuralBaseline:
    """Hyperparameters and training that both neural baselines share.

    window          the maximum number of events that are read, the newest ones
    dropout         for data with an average of 30 or more training events per user
    sparse_dropout  for data with fewer

    Source: both rates, and the density of the data that each was chosen for, are those of Kang and McAuley.
    """

    width: int = 128
    window: int = 200
    dropout: float = 0.2
    sparse_dropout: float = 0.5
    epochs: int = 30
    learning_rate: float = 0.001
    seed: int = 0

    def network(self, items: int, dropout: float) -> SequenceNetwork:
        """Make an untrained network."""
        raise NotImplementedError

    def fit(
        self, histories: Histories, items: int, notify: Notify = lambda _: None, validate: Validate | None = None
    ) -> Scorer:
        """Learn from training histories, and keep the best epoch by ``validate``: the last of equally good ones.

        notify    receives a line about every epoch
        validate  returns a scorer's quality on validation events; without it, the last epoch is kept
        """
        started = time.monotonic()
        best, best_quality = None, -math.inf
        for epoch, (network, loss) in enumerate(self.training(histories, items), start=1):
            quality = validate(network_scorer(network, self.window)) if validate else 0.0
            if quality >= best_quality:
                best, best_quality = copy.deepcopy(network), quality
            about = f"epoch {epoch} of {self.epochs}, loss {loss:.3f}"
            if validate:
                about += f", validation NDCG@10 {quality:.4f}"
            notify(f"{type(self).__name__}: {about}, {(time.monotonic() - started) / 60:.1f} minutes")
        assert best is not None
        return network_scorer(best, self.window)

    def training(self, histories: Histories, items: int) -> Iterator[tuple[SequenceNetwork, float]]:
        """Train, and yield the network, which training then continues to change, and its mean loss after every epoch.

        All randomness of an epoch comes from (seed, epoch); torch's own generator does not change.
        """
        events_per_user = len(histories.item) / max(int(np.count_nonzero(histories.lengths)), 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            dropout = self.dropout if events_per_user >= DENSE_EVENTS_PER_USER else self.sparse_dropout
            network = self.network(items, dropout)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        for epoch in range(self.epochs):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed * 100_003 + epoch)
                loss = self._epoch(network.train(), optimizer, histories, epoch)
            yield network, loss

    def _epoch(
        self, network: SequenceNetwork, optimizer: torch.optim.Optimizer, histories: Histories, epoch: int
    ) -> float:
        done, total = 0, 0.0
        for batch in padded_batches(histories, self.window, np.random.default_rng((self.seed, epoch))):
            share = (epoch + done / histories.positions) / self.epochs
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * learning_rate_factor(share, WARMUP_SHARE)
            loss = batch_loss(network, batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            done += len(batch.targets)
            total += float(loss.detach()) * len(batch.targets)
        return total / max(done, 1)


@dataclass(frozen=True, kw_only=True)
class SasRec(NeuralBaseline):
    """A causal transformer.

    Source: Kang and McAuley, Self-attentive sequential recommendation, ICDM 2018, with the norms before the layers;
    the cross-entropy over the catalogue of Klenitskiy and Vasilev, Turning dross into gold loss, RecSys 2023.
    """

    layers: int = 2
    heads: int = 2

    @override
    def network(self, items: int, dropout: float) -> SequenceNetwork:
        return Transformer(items, self.width, dropout, self.window, self.layers, self.heads)


@dataclass(frozen=True, kw_only=True)
class Gru4Rec(NeuralBaseline):
    """A recurrent network.

    Source: Hidasi and Karatzoglou, Recurrent neural networks with top-k gains, CIKM 2018, with cross-entropy over the
    catalogue and the items' vectors shared by input and output.
    """

    @override
    def network(self, items: int, dropout: float) -> SequenceNetwork:
        return RecurrentNetwork(items, self.width, dropout)


NEURAL_GRIDS: Mapping[str, Sequence[NeuralBaseline]] = {"sasrec": [SasRec()], "gru4rec": [Gru4Rec()]}


def batch_loss(network: SequenceNetwork, batch: PaddedBatch) -> Tensor:
    """Compute the mean cross-entropy over the real positions of a batch."""
    dtype, vectors = matmul_dtype(CPU), network.vectors
    with torch.autocast("cpu", torch.bfloat16, enabled=network.dtype is torch.bfloat16):
        read = network(batch.items)
    queries = read[batch.real].float()
    if vectors.num_embeddings <= FULL_SOFTMAX_ITEMS:
        return full_softmax_loss(queries, vectors.weight, network.bias, batch.targets, dtype)
    items = vectors.num_embeddings
    negatives = uniform_negatives(torch.randperm(items)[:SAMPLED_NEGATIVES], items)
    return sampled_softmax_loss(queries, vectors, network.bias, batch.targets, negatives, dtype)


def network_scorer(network: SequenceNetwork, window: int) -> Scorer:
    """Return a scorer by the query after each history's last event.

    It computes in float32: at lower precision, a score would depend on the other histories of its block.
    """

    @torch.inference_mode()
    def scorer(prefixes: Histories) -> NDArray[np.float32]:
        lengths = np.minimum(prefixes.lengths, window)
        items = padded_rows(prefixes.item, prefixes.starts[1:] - lengths, lengths)
        read = network.eval()(torch.from_numpy(items))
        queries = read[torch.arange(len(lengths)), torch.from_numpy(lengths - 1)]
        scores: NDArray[np.float32] = (queries @ network.vectors.weight.T + network.bias).numpy()
        return scores

    return scorer

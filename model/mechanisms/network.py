"""The recommender around a mechanism: embeddings, positions, one post-norm block, and items as targets.

Source: what Wu et al., LISA, WWW 2021, and its published code have in common for all mechanisms they compare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from model.config import MechanismConfig
from model.mechanisms.histograms import Histograms
from model.mechanisms.interests import Interests
from model.mechanisms.linear import Linear
from model.mechanisms.mechanism import Events, Mechanism
from model.mechanisms.quantiser import Encoded, Quantiser
from model.mechanisms.softmax import Softmax


class DistinctItems:
    """The distinct items of a batch, each encoded once.

    items    (U,)     int64, sorted
    history           the items as a history reads them
    targets  (U, D)   the items as they are scored
    tables            of the mechanism
    """

    def __init__(self, items: Tensor, history: Encoded, targets: Tensor, tables: Any) -> None:
        self.items, self.history, self.targets, self.tables = items, history, targets, tables

    def places(self, items: Tensor) -> Tensor:
        """Return the rows of items that are among these."""
        return torch.searchsorted(self.items, items.contiguous())


class MechanismNetwork(nn.Module):
    """A network from histories to queries: (S, L) items, padded at the end -> (S, L, D)."""

    frozen_codes: Tensor | None  # (N, B) uint8, history codes that are no longer learned
    frozen_target_codes: Tensor | None  # (N, B') uint8, the same for targets with their own codebooks
    mechanism: Mechanism

    def __init__(self, config: MechanismConfig, items: int) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.has_hard_codes = config.codewords > 0 and not config.soft
        self.embedding = nn.Embedding(items, width)
        of_items, of_places = 1 / math.sqrt(width), 0.02
        if self.has_hard_codes:
            of_items, of_places = (math.sqrt(2 / (width + rows)) for rows in (items, config.window))
        nn.init.normal_(self.embedding.weight, std=of_items)
        self.position = nn.Parameter(torch.randn(config.window, width) * of_places) if config.positions else None
        self.quantiser = self.target_quantiser = None
        if config.codewords:
            self.quantiser = Quantiser(width, config.codebooks, config.codewords, config.soft)
        if config.target_codewords:
            self.target_quantiser = Quantiser(width, config.target_codebooks, config.target_codewords)
        self.register_buffer("frozen_codes", None)
        self.register_buffer("frozen_target_codes", None)
        self.mechanism = self._mechanism()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.feed_forward = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.dropout = nn.Dropout(config.dropout)

    def _mechanism(self) -> Mechanism:
        config = self.config
        match config.mechanism:
            case "softmax":
                return Softmax(config.width, config.heads)
            case "linear":
                return Linear(config.width, config.memory, gated=False)
            case "gated-linear":
                return Linear(config.width, config.memory, gated=True)
            case "interests":
                return Interests(config.width, config.interests, config.window if config.decoupled_positions else None)
            case "histograms":
                assert self.quantiser is not None
                return Histograms(config.width, self.quantiser)

    def distinct(self, *items: Tensor) -> DistinctItems:
        """Encode all items of the given tensors; without tensors, all items of the catalogue."""
        if items:
            rows = torch.unique(torch.cat([part.flatten() for part in items]))
        else:
            rows = torch.arange(self.embedding.num_embeddings, device=self.embedding.weight.device)
        vectors = self.vectors(rows)
        history = Encoded(None, vectors)
        if self.quantiser is not None:
            history = _encode(self.quantiser, vectors, self.frozen_codes, rows)
        targets = vectors
        if self.target_quantiser is not None:
            targets = _encode(self.target_quantiser, vectors, self.frozen_target_codes, rows).vectors
        elif self.config.quantised_targets:
            targets = history.vectors
        return DistinctItems(rows, history, targets, self.mechanism.tables())

    def vectors(self, rows: Tensor | None = None) -> Tensor:
        """Return the vectors of the given items, or of all, which are encoded and scored: (U, D).

        As in the published code, hard codes encode vectors at the scale at which histories are read, so codewords are
        learned at that scale.
        """
        found = self.embedding.weight if rows is None else self.embedding(rows)
        return found * math.sqrt(self.config.width) if self.has_hard_codes else found

    @property
    def read_scale(self) -> float:
        """The factor by which encoded vectors are scaled when a history is read."""
        return 1.0 if self.has_hard_codes else math.sqrt(self.config.width)

    @torch.no_grad()
    def migrate(self, other: MechanismNetwork) -> None:
        """Copy all weights of another network except its mechanism's, and freeze the codes.

        The codes are those of the other network; if it has none, those of residual k-means over its item vectors. Soft
        codes are not frozen, only those of the targets.

        raises  ValueError  when this network has no codes, either of two networks with codes has soft ones, or the
                            codebooks or items differ
        """
        own, source = self.quantiser, other.quantiser
        if own is None or (source is not None and (source.soft or own.soft)):
            raise ValueError("this model needs codes of its histories, and the other one hard codes or none")
        fit = source is None or source.codebooks.shape == own.codebooks.shape
        if not fit or other.embedding.weight.shape != self.embedding.weight.shape:
            raise ValueError("its codebooks or items differ; train it with the same numbers of both")
        theirs = {name: tensor for name, tensor in other.state_dict().items() if not name.startswith("mechanism.")}
        self.load_state_dict(theirs, strict=False)
        if source is not None:
            self.frozen_codes = other.distinct().history.indices()
            return
        vectors = self.vectors()
        if self.has_hard_codes:
            self.frozen_codes = own.fit(vectors)
            for weights in self.norms[1].parameters():  # its targets were not scaled, and the scores must stay the same
                weights.div_(math.sqrt(self.config.width))
        if self.target_quantiser is not None:
            self.frozen_target_codes = self.target_quantiser.fit(vectors)

    @torch.no_grad()
    def freeze_codes(self) -> None:
        """Freeze the hard codes, if they are not frozen yet. The codewords continue to learn."""
        if self.quantiser is not None and self.has_hard_codes and self.frozen_codes is None:
            self.frozen_codes = self.quantiser(self.vectors()).indices()
        if self.target_quantiser is not None and self.frozen_target_codes is None:
            self.frozen_target_codes = self.target_codes()

    def target_codes(self) -> Tensor:
        """Return the target codes of all items, if targets have their own codebooks: (N, B') uint8."""
        assert self.target_quantiser is not None
        if self.frozen_target_codes is not None:
            return self.frozen_target_codes
        encoded: Encoded = self.target_quantiser(self.vectors())
        return encoded.indices()

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        for name in ("frozen_codes", "frozen_target_codes"):  # absent before they are frozen
            codes, device = state_dict.get(name), self.embedding.weight.device
            setattr(self, name, None if codes is None else torch.empty_like(codes, device=device))
        return super().load_state_dict(state_dict, strict, assign)

    @override
    def forward(self, items: Tensor, lengths: Tensor, distinct: DistinctItems) -> Tensor:
        """Compute a query for the next item after each event, from no later event.

        items    (S, L)     int64, padded at the end with any item of ``distinct``
        lengths  (S,)       int64
        returns  (S, L, D)
        """
        places = distinct.places(items)
        hidden = self._hidden(distinct, places, torch.arange(items.shape[1], device=items.device))
        return self._block(
            hidden, self.mechanism(Events(hidden, distinct.history.codes, places, lengths), distinct.tables)
        )

    def step(self, state: Tensor, count: Tensor, items: Tensor, distinct: DistinctItems) -> tuple[Tensor, Tensor]:
        """Process one event of each user. Return the new states, and the queries for the next item.

        state    (Q, *state_shape)  all 0 before the first event
        count    (Q,)               int64, events before this one; beyond the last position, that one is used again
        items    (Q,)               int64
        returns  (Q, *state_shape) and (Q, D)
        """
        places = distinct.places(items)
        hidden = self._hidden(distinct, places, count)
        seen = self.mechanism.inputs(Events(hidden, distinct.history.codes, places, torch.ones_like(items)))
        state = self.mechanism.decay * state + self.mechanism.feature(seen)
        return state, self._block(hidden, self.mechanism.read(state, seen, distinct.tables))

    def _hidden(self, distinct: DistinctItems, places: Tensor, before: Tensor) -> Tensor:
        """Embed items that follow `before` earlier events."""
        hidden = F.embedding(places, distinct.history.vectors) * self.read_scale
        if self.position is not None:
            hidden = hidden + self.position[before.clamp_max(self.config.window - 1)]
        dropped: Tensor = self.dropout(hidden)
        return dropped

    def _block(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = self.norms[0](hidden + self.dropout(attended))
        added: Tensor = self.norms[1](hidden + self.dropout(self.feed_forward(hidden)))
        return added


def _encode(quantiser: Quantiser, vectors: Tensor, frozen: Tensor | None, rows: Tensor) -> Encoded:
    return quantiser(vectors) if frozen is None else quantiser.decode(frozen[rows])

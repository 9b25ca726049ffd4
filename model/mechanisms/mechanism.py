"""What every way to read a history has in common.

    state_n = decay * state_{n-1} + feature(event_n)        out_n = read(state_n, event_n)

``forward`` gives ``out`` for all events of many histories at once, and equals that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn


class Events(NamedTuple):
    """Histories as a mechanism sees them. A mechanism reads either the hidden vectors or the codes.

    hidden   (S, L, D)  item vectors with their positions; of single events (Q, D)
    codes    (U, B, W)  share of each codeword in each distinct item, one-hot for hard codes; None without codes
    places   (S, L)     int64, rows of ``codes``; of single events (Q,)
    lengths  (S,)       int64, events of each history; what stands behind is padding
    """

    hidden: Tensor
    codes: Tensor | None
    places: Tensor
    lengths: Tensor


class Mechanism(nn.Module):
    """Causal: what is read at an event knows nothing of later ones.

    decay        of the state at every event
    state_shape  of one user's state; None where a state of constant size does not exist
    """

    decay = 1.0
    state_shape: tuple[int, ...] | None = None

    def feature(self, events: Tensor) -> Tensor:
        """What events add to the state: (Q, ...) of ``seen`` -> (Q, *state_shape)."""
        raise NotImplementedError

    def read(self, state: Tensor, events: Tensor, tables: Any = None) -> Tensor:
        """What the newest events find in the states: (Q, *state_shape) and (Q, ...) of ``seen`` -> (Q, D)."""
        raise NotImplementedError

    def seen(self, events: Events) -> Tensor:
        """What ``feature`` and ``read`` are given of events: their hidden vectors, unless a mechanism reads codes."""
        return events.hidden

    def tables(self) -> Any:
        """What is the same for all events while the weights are: made once, handed to ``read`` and ``forward``."""
        return None

    def forward(self, events: Events, tables: Any = None) -> Tensor:
        """(S, L, D); what stands at padding means nothing."""
        raise NotImplementedError

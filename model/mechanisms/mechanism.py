"""The interface of the mechanisms that read a history.

    state_n = decay * state_{n-1} + feature(event_n)        out_n = read(state_n, event_n)

``forward`` gives ``out`` for all events of many histories at once, and equals that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn


class Events(NamedTuple):
    """The input of a mechanism, which reads either the hidden vectors or the codes.

    hidden   (S, L, D)  item vectors with their positions; of single events (Q, D)
    codes    (U, B, W)  share of each codeword in each distinct item, one-hot for hard codes; None without codes
    places   (S, L)     int64, rows of ``codes``; of single events (Q,)
    lengths  (S,)       int64, events of each history, before the padding
    """

    hidden: Tensor
    codes: Tensor | None
    places: Tensor
    lengths: Tensor


class Mechanism(nn.Module):
    """A causal mechanism: its output at an event does not depend on later events.

    decay        of the state at every event
    state_shape  of one user's state; None for a mechanism without a state of constant size
    """

    decay = 1.0
    state_shape: tuple[int, ...] | None = None

    def feature(self, events: Tensor) -> Tensor:
        """Compute what events add to the state: (Q, ...) of ``inputs`` -> (Q, *state_shape)."""
        raise NotImplementedError

    def read(self, state: Tensor, events: Tensor, tables: Any = None) -> Tensor:
        """Attend from the newest events to the states: (Q, *state_shape) and (Q, ...) of ``inputs`` -> (Q, D)."""
        raise NotImplementedError

    def inputs(self, events: Events) -> Tensor:
        """Return the input of ``feature`` and ``read``: the hidden vectors, unless a mechanism reads codes."""
        return events.hidden

    def tables(self) -> Any:
        """Compute the part of ``read`` and ``forward`` that only depends on the weights."""
        return None

    def forward(self, events: Events, tables: Any = None) -> Tensor:
        """Compute ``out`` for all events: (S, L, D), with arbitrary values at padding."""
        raise NotImplementedError

"""Histories of users from lists of items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from model.data.interactions import Histories


def packed(histories: Sequence[Any], weights: Any = None) -> Histories:
    """Histories concatenated, each event with its weight or 1."""
    item = np.array([item for history in histories for item in history], np.int32)
    starts = np.cumsum([0, *map(len, histories)])
    return Histories(item, np.ones(len(item), np.float32) if weights is None else weights, starts)

"""Rank fusion: for users with few events, the personal ranking is blended with the trending items.

After n events, an item scores ``w / (1 + personal rank) + (1 - w) / (1 + trending rank)`` with
``w = n / (n + SMOOTHING)``. `benchmarks/quality/cold/users.py` shows that a trained model needs little help, so the
smoothing is small.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from app.catalogue.trained_catalogue import Rows

MAX_EVENTS = 3  # users with more events get only the personal ranking
SMOOTHING = 0.1
EXTRA_DEPTH = 20  # items beyond the requested k that each ranking contributes


def fuse(personal: Rows, trending: Rows, events: int, k: int) -> tuple[Rows, NDArray[np.float64]]:
    """Return the k best items of two rankings and their scores, best first; ties in the personal order."""
    weight = events / (events + SMOOTHING)
    scores = defaultdict[int, float](float)
    for share, ranking in ((weight, personal), (1 - weight, trending)):
        for rank, row in enumerate(ranking.tolist(), 1):
            scores[row] += share / (1 + rank)
    best = sorted(scores.items(), key=lambda item: -item[1])[:k]
    return np.array([row for row, _ in best], np.int64), np.array([score for _, score in best])

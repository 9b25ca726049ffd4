"""Rank fusion: the model's ranking for a user of few events, blended with what is trending.

An item scores ``w / (1 + its rank for the user) + (1 - w) / (1 + its rank just now)`` with ``w = n / (n + CONSTANT)``
after n events. `benchmarks/quality/cold_users.py` measures it: a trained model needs little help, so the constant is
small.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from app.catalogue.trained_catalogue import Rows

EVENTS = 3  # that a user has at most
CONSTANT = 0.1
DEEPER = 20  # places that both lists have beyond those that are asked for


def blended(own: Rows, now: Rows, events: int, k: int) -> tuple[Rows, NDArray[np.float64]]:
    """Return the k best items of two rankings, best first, and their scores; ties in the user's order."""
    weight = events / (events + CONSTANT)
    scores = defaultdict[int, float](float)
    for share, ranking in ((weight, own), (1 - weight, now)):
        for rank, row in enumerate(ranking.tolist(), 1):
            scores[row] += share / (1 + rank)
    best = sorted(scores.items(), key=lambda item: -item[1])[:k]
    return np.array([row for row, _ in best], np.int64), np.array([score for _, score in best])

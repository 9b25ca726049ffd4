"""Codeword histograms of whole histories: the state of LISA-Mini, computed without the service's fold.

``F[r, b, w] = sum over events j of weight_j * exp(-lambda_r * (n - j)) * [codes_j[b] == w]``, n the number of events.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import NDArray


def history_histogram(
    codes: NDArray[np.uint8] | NDArray[np.float32],
    decay_rates: Sequence[float],
    codewords: int,
    weights: NDArray[np.floating] | None = None,
) -> NDArray[np.float32]:
    """Compute the histogram of one history, oldest event first, as one weighted count.

    codes     (L, B)     codeword indices of the items; or (L, B, W) float32, their shares of the codewords
    weights   (L,)       weights of the events; None: all 1
    returns   (R, B, W)  float32
    """
    length, books = codes.shape[:2]
    event_weights = np.exp(-np.multiply.outer(decay_rates, np.arange(length - 1, -1, -1)))  # (R, L)
    if weights is not None:
        event_weights = event_weights * weights
    if codes.ndim == 3:
        shared: NDArray[np.float32] = np.tensordot(event_weights, codes, axes=1).astype(np.float32)
        return shared
    bins = (codes + np.arange(books) * codewords).ravel()
    counts = [np.bincount(bins, np.repeat(each, books), minlength=books * codewords) for each in event_weights]
    return np.array(counts, np.float32).reshape(len(decay_rates), books, codewords)


@numba.njit(cache=True, nogil=True)
def _fold(codes, weights, starts, decays, histograms):  # type: ignore[no-untyped-def]
    rates, books, codewords = histograms.shape[1:]
    running = np.empty((rates, books, codewords), np.float32)
    for user in range(len(starts) - 1):
        running[:] = 0
        for position in range(starts[user], starts[user + 1]):
            for rate in range(rates):
                decay = decays[rate]
                for book in range(books):
                    row = running[rate, book]
                    for word in range(codewords):
                        row[word] *= decay
                    row[codes[position, book]] += weights[position]
            histograms[position] = running


def running_histograms(
    codes: NDArray[np.uint8],
    weights: NDArray[np.float32],
    starts: NDArray[np.int64],
    decay_rates: Sequence[float],
    codewords: int,
) -> NDArray[np.float32]:
    """Compute the histograms after every event of many histories, packed one behind the other.

    codes     (Q, B)        codeword indices, Q events of all users together
    weights   (Q,)          weights of the events
    starts    (users + 1,)  where each user's events begin, and the end
    returns   (Q, R, B, W)  float32; entry q is the histogram after event q of its user
    """
    decays = np.exp(-np.asarray(decay_rates, np.float64)).astype(np.float32)
    histograms = np.empty((len(codes), len(decay_rates), codes.shape[1], codewords), np.float32)
    _fold(codes, weights, starts, decays, histograms)
    return histograms

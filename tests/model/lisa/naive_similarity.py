"""Item similarity in numpy, in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from model.lisa.lisa_mini import Lisa

Floats = NDArray[np.float64]


def similarities(model: Lisa) -> Floats:
    """Similarity of each item (rows) to each other one (columns): (N, N)."""
    target, history = (one.numpy(force=True).astype(float) for one in (model.target_codebooks, model.codebooks))
    codes = [one.numpy(force=True) for one in (model.target_codes, model.history_codes)]
    vectors = np.hstack([_centred_sums(codes[0], target, 1.0), _centred_sums(codes[1], history, 0.5)])
    found: Floats = vectors @ vectors.T - np.square(vectors).sum(axis=1) / 5
    return found


def _centred_sums(codes: NDArray[np.uint8], codebooks: Floats, mean_square: float) -> Floats:
    """Sum each item's codewords; return the sums less their mean, with this mean square of their lengths: (N, D)."""
    sums = np.array([sum(codebook[code] for codebook, code in zip(codebooks, row, strict=True)) for row in codes])
    centred = sums - sums.mean(axis=0)
    scaled: Floats = centred * np.sqrt(mean_square / np.square(centred).sum(axis=1).mean())
    return scaled

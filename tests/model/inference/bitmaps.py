"""Oracle for ``model.inference.bitmap``: bits packed by numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from model.inference import bitmap


def from_mask(mask: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """(..., N) -> (..., words)"""
    words = np.zeros((*mask.shape[:-1], len(bitmap.empty(mask.shape[-1]))), np.uint64)
    packed = np.packbits(mask, axis=-1, bitorder="little")
    words.view(np.uint8)[..., : packed.shape[-1]] = packed
    return words

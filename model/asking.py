"""What queries ask of the catalogue on a CPU, in one compiled call that equals ``Lisa.lifts`` and a product."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from model import step_kernel
from model.lisa import Lisa, follower_decay
from model.step import COMPILE_LOCK, aligned_copy, panels
from model.step_kernel import ASKING


class QueryProducts:
    """Of one model, whose target codewords it copies. Several threads may ask at once; it releases the GIL."""

    def __init__(self, model: Lisa) -> None:
        self._books, self._words, self._width = model.target_codebooks.shape
        with torch.no_grad():
            self._codebooks = aligned_copy(panels(model.target_codebooks.flatten(0, 1).T).flatten())
        self._padded = len(self._codebooks) // self._width
        self._followers, self._lift = model.followers.numpy(), model.lift.numpy()
        self._fading = follower_decay(model.config.recent_items).numpy()
        _compile()

    def __call__(
        self, queries: NDArray[np.float32], recent: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
        """Inner products with all codewords, and which items' scores gain what.

        queries  (Q, D)
        recent   (Q, K)        rows, newest first, -1 for none
        returns  (Q, B', W'), items (Q, F) and gains (Q, F); an item may stand there several times
        """
        users, newest = len(queries), min(recent.shape[1], len(self._fading))
        products = np.zeros((users, self._padded), np.float32)
        lifts = users, newest * self._followers.shape[1]
        items, gains = np.empty(lifts, np.int64), np.empty(lifts, np.float32)
        step_kernel.ask(
            self._codebooks,
            self._followers,
            self._lift,
            self._fading[:newest],
            queries,
            recent,
            products,
            items,
            gains,
        )
        whole = np.ascontiguousarray(products[:, : self._books * self._words])
        return whole.reshape(users, self._books, self._words), items, gains


def _compile() -> None:
    """Before the first user waits for it; and never for another type of array, which numba would do unasked."""
    with COMPILE_LOCK:
        if not step_kernel.ask.signatures:
            step_kernel.ask.compile(ASKING)
            step_kernel.ask.disable_compile()

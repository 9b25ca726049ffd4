"""The scan reads no memory past the last item, which a guard page checks."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing

import numpy as np

from model.inference import bitmap
from model.inference.scan import NO_GAINS, Boosts, Lifted, Scan
from tests.waiting import PATIENCE_S

WORDS = 64


def gains_before_a_guard_page(items: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """A gain of 0.01 for each item, in memory that ends with the last item."""
    size = -(-items * 4 // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin + size), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    gains = np.frombuffer(memory, np.float32, items, size - items * 4)
    gains[:] = 0.01
    return gains


def scan() -> None:
    """Request more items than other blocks have, so that the last item is read without a bound."""
    rng, items, k = np.random.default_rng(0), 1_000, 900
    codes = rng.integers(0, WORDS, (items, 8), np.uint8)
    products = rng.standard_normal((1, 8, WORDS)).astype(np.float32)
    nothing = Lifted(np.zeros((1, 0), np.int64), np.zeros((1, 0), np.float32))
    excluded = bitmap.empty(items)[None]
    boosts = Boosts(excluded[:0], NO_GAINS, gains_before_a_guard_page(items), 0.01)
    found, _ = Scan(codes, rng.standard_normal(items).astype(np.float32)).top_k(products, nothing, k, excluded, boosts)
    assert found.min() >= 0


def test_no_gain_is_read_past_the_last_item() -> None:
    process = multiprocessing.get_context("spawn").Process(target=scan)
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0

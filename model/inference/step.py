"""The step on a CPU: states to queries in one compiled call, equal to ``LisaMini.read``.

A single user's step consists of vector-matrix products, so its time is that of reading the weights: 2.2 MB at the
default preset. The weights are stored on a *tape*, in the order of reading, as panels of 32 outputs. A batch multiplies
64 users with each panel while it is cached, so its time is that of the multiplications. Gain and bias of a norm are
folded into the matrix that follows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model.inference import step_kernel
from model.inference.step_kernel import EMPTY_ROW, PANEL, STEP_SIGNATURE, UNKNOWN_ITEM, Sizes
from model.lisa.feed_forward import FeedForward
from model.lisa.lisa_mini import AttentionTables, Hop, LisaMini
from model.lisa.recent_attention import RecentItems

CACHE_LINE = 64
COMPILE_LOCK = Lock()


class Step:
    """The step of one model, whose weights it copies. Thread-safe; releases the GIL."""

    def __init__(self, model: LisaMini, tables: AttentionTables) -> None:
        shape = model.config
        self._sizes = sizes = Sizes(
            items=len(model.target_codes),
            rates=len(shape.decay_rates),
            books=shape.history_codebooks,
            words=shape.history_codewords,
            last_books=shape.target_codebooks,
            last_words=shape.target_codewords,
            width=shape.width,
            inner=shape.ffn_multiple * shape.width,
            hops=shape.hops,
            heads=shape.recent_heads,
            places=shape.recent_items,
        )
        self._cells = sizes.rates, sizes.books, sizes.words
        self._sizes_array = np.array(sizes, np.int64)
        with torch.no_grad():
            self._tape = aligned_copy(torch.cat([part.flatten() for part in _tape(model, tables)]))
        self._codes, self._last_codes = (codes.numpy().ravel() for codes in (model.history_codes, model.target_codes))
        _compile()

    def __call__(
        self, histograms: NDArray[np.float32], last: NDArray[np.integer], recent: NDArray[np.integer]
    ) -> NDArray[np.float32]:
        """Turn states into queries.

        histograms  (Q, R, B, W)  the scale of each row is free
        last        (Q,)          rows of the catalogue
        recent      (Q, K)        rows, newest first, -1 for none
        returns     (Q, D)
        raises      ValueError    when a row of a histogram is empty, or the shapes are not the model's
                    IndexError    for items beyond the catalogue
        """
        bins = np.ascontiguousarray(histograms, np.float32)
        newest, window = np.ascontiguousarray(last, np.int64), np.ascontiguousarray(recent, np.int64)
        users, sizes = len(bins), self._sizes
        windows = (users, sizes.places) if sizes.heads else (users, *window.shape[1:])
        if bins.shape != (users, *self._cells) or newest.shape != (users,) or window.shape != windows:
            raise ValueError(
                f"a step takes histograms (Q, {sizes.rates}, {sizes.books}, {sizes.words}), last items (Q,) and "
                f"recent items (Q, {sizes.places}), not {bins.shape}, {newest.shape} and {window.shape}"
            )
        queries = np.empty((users, sizes.width), np.float32)
        status = step_kernel.step(
            self._sizes_array, self._tape, self._codes, self._last_codes, bins, newest, window, queries
        )
        if status == EMPTY_ROW:
            raise ValueError("a state without a single step has no query")
        if status == UNKNOWN_ITEM:
            raise IndexError(f"a state has an item beyond the catalogue of {sizes.items} items")
        return queries


def _compile() -> None:
    """Compile before the first request, for the only types of arrays in use."""
    with COMPILE_LOCK:
        if not step_kernel.step.signatures:
            step_kernel.step.compile(STEP_SIGNATURE)
            step_kernel.step.disable_compile()


def _tape(model: LisaMini, tables: AttentionTables) -> Iterator[Tensor]:
    """Yield the tables, then the matrices in the order in which ``step_kernel.step`` reads them."""
    looked_up = [tables.match, model.codebooks, model.last_codebooks]
    if model.recent is not None:
        looked_up.append(model.recent.codebooks)
    yield _padded_to_panels(torch.cat([table.flatten() for table in looked_up]))
    yield panels(tables.values.flatten(0, 2))
    yield from _feed_forward(model.feed_forward)
    for hop in cast(list[Hop], list(model.hops)):
        yield from _matrix(hop.keys.flatten(0, 2).T, hop.prior.flatten())
        yield _packed_bfloat16(panels(hop.values.flatten(0, 2)))
        yield from _feed_forward(hop.feed_forward)
    if model.recent is not None:
        yield from _recent(model.recent)
    yield from (model.norm.weight, model.norm.bias)


def _recent(recent: RecentItems) -> Iterator[Tensor]:
    yield from _matrix(recent.query.weight.T, recent.query.bias)
    yield recent.norm_memory.weight
    yield recent.positions + recent.norm_memory.bias
    yield recent.age_bias
    yield _padded_to_panels(recent.out.bias)
    yield _packed_bfloat16(panels(recent.out.weight.T))
    yield from _feed_forward(recent.feed_forward)


def _feed_forward(block: FeedForward) -> Iterator[Tensor]:
    yield from _matrix(block.up.weight.T, block.up.bias)
    yield _padded_to_panels(block.down.bias)
    yield _packed_bfloat16(panels(block.down.weight.T))


def _matrix(matrix: Tensor, bias: Tensor) -> Iterator[Tensor]:
    """Yield a matrix whose outputs are not added to existing values: matrix (inputs, outputs), bias (outputs,)."""
    yield _padded_to_panels(bias)
    yield _packed_bfloat16(panels(matrix))


def _packed_bfloat16(panels: Tensor) -> Tensor:
    """Pack bfloat16 weights in pairs, (..., 2 n) -> (..., n): a row's first half is in the lower bits."""
    bits = panels.contiguous().view(torch.int32)
    if (bits & 0xFFFF).any():
        raise ValueError("a step takes weights of sixteen bits; 'LisaMini.fold_norms_and_round' makes them so")
    first, second = bits.chunk(2, dim=-1)
    return ((first >> 16) & 0xFFFF | second).view(torch.float32)


def panels(matrix: Tensor) -> Tensor:
    """Cut a matrix into panels, with zeros behind the last output: (inputs, outputs) -> (panels, inputs, 32)."""
    return _padded_to_panels(matrix).reshape(len(matrix), -1, PANEL).transpose(0, 1)


def _padded_to_panels(rows: Tensor) -> Tensor:
    """Pad outputs to whole panels: (..., outputs) -> (..., padded outputs)."""
    return nn.functional.pad(rows, (0, -rows.shape[-1] % PANEL))


def aligned_copy(tensor: Tensor) -> NDArray[np.float32]:
    """Copy a tensor so that its panels begin with a cache line."""
    space = np.empty(tensor.numel() + CACHE_LINE // 4, np.float32)
    begin = -space.ctypes.data % CACHE_LINE // 4
    copy = space[begin : begin + tensor.numel()].reshape(tensor.shape)
    copy[...] = tensor.numpy()
    return copy

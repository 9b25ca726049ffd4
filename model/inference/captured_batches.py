"""Step and scan of a batch as one captured CUDA graph: states go up, the best items and their scores come down.

A graph has fixed shapes, so there is one for each size of batch and each power of two of k. Codes, tables and weights
stay on the device. A batch of another size is padded, or divided where much of it would be padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.inference.scan import Lifted, Ranked
from model.lisa.lisa_mini import AttentionTables, LisaMini

SIZES = (1, 8, 64, 256)  # of batches
LARGEST_K = 128
MASK_BYTES = 1 << 30  # of the bitmaps of one batch, pinned and on the device; larger batches are divided
WARM_UPS = 3  # before a capture: they compile kernels and allocate what libraries keep


@runtime_checkable
class DeviceScan(Protocol):
    """A scan that never waits for its device, as ``TritonScan``, which is there where Triton is."""

    items: int

    def bounds_blocks(self, k: int) -> bool:
        """Return whether ``top_k_on_device`` finds this many items."""
        ...

    def top_k_on_device(self, products: Tensor, lifted: Lifted, k: int, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Find the k best items of each query: items (Q, k) int64 and scores (Q, k) float32."""
        ...


class Resident(NamedTuple):
    """What stays on the device."""

    model: LisaMini
    tables: AttentionTables
    scan: DeviceScan


class States(NamedTuple):
    """The states of Q users, as ``Engine.step`` takes them."""

    histograms: NDArray[np.float32] | Sequence[NDArray[np.float32]]
    last_items: NDArray[np.integer] | Sequence[int]
    recent_items: NDArray[np.integer] | Sequence[NDArray[np.integer]]

    def part(self, begin: int, end: int) -> States:
        """Return the states of some of the users."""
        users = slice(begin, end)
        return States(self.histograms[users], self.last_items[users], self.recent_items[users])


class RankedStates(NamedTuple):
    """The queries of Q states, on the device, and the k best items of each.

    vectors  (Q, D)  float32
    recent   (Q, K)  int64
    ranked   items (Q, k) int64 and scores (Q, k) float32
    """

    vectors: Tensor
    recent: Tensor
    ranked: Ranked


class MirroredArrays:
    """Arrays that lie one behind the other, in pinned memory and on the device: one copy moves them all."""

    def __init__(self, device: torch.device, *layout: tuple[tuple[int, ...], torch.dtype]) -> None:
        sizes = [-(-math.prod(shape) * kind.itemsize // 8) * 8 for shape, kind in layout]  # each begins with a word
        self._host = torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        begins = np.cumsum([0, *sizes[:-1]]).tolist()
        self.on_host, self.on_device = (
            [
                buffer[begin : begin + math.prod(shape) * kind.itemsize].view(kind).view(shape)
                for begin, (shape, kind) in zip(begins, layout, strict=True)
            ]
            for buffer in (self._host, self._device)
        )

    def upload(self) -> None:
        """Copy all arrays to the device, without a wait for it."""
        self._device.copy_(self._host, non_blocking=True)

    def download(self) -> None:
        """Copy all arrays from the device, without a wait for it."""
        self._host.copy_(self._device, non_blocking=True)


class CapturedBatch:
    """One size of batch and one k: buffers that stay where they are, and the graph between them."""

    def __init__(self, resident: Resident, masks: Tensor, k: int) -> None:
        self._resident, self._masks, self._k = resident, masks, k
        config, users = resident.model.config, len(masks)
        bins = users, len(config.decay_rates), config.history_codebooks, config.history_codewords
        self._states = MirroredArrays(
            masks.device,
            ((users,), torch.int64),
            ((users, config.recent_items), torch.int64),
            (bins, torch.float32),
        )
        for part, padding in zip(self._states.on_host, (0, -1, 1), strict=True):  # of places that no state has used
            part.fill_(padding)
        self._answers = MirroredArrays(
            masks.device,
            ((users, k), torch.int64),
            ((users, k), torch.float32),
            ((users,), torch.bool),
            ((users,), torch.bool),
        )
        self._vectors = torch.zeros((users, config.width), device=masks.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self) -> None:
        """Capture the graph; until then, a batch is computed operation by operation."""
        side = torch.cuda.Stream(self._masks.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # other threads may allocate meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._compute()
        self._graph = graph

    @torch.inference_mode()
    def rank(self, states: States) -> RankedStates:
        """Rank the states of at most so many users as the batch has places; raises as ``Engine.top_k``."""
        users = len(states.last_items)
        last, recent, bins = (part.numpy()[:users] for part in self._states.on_host)
        last[:], recent[:] = states.last_items, np.asarray(states.recent_items)
        np.stack(list(states.histograms), out=bins)
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()
        if self._masks.is_cuda:
            torch.cuda.current_stream().synchronize()
        items, scores, has_steps, is_finite = (part.numpy()[:users] for part in self._answers.on_host)
        if not has_steps.all():
            raise ValueError("a state without a single step has no query")
        if not is_finite.all():
            raise ValueError("a query's scores are not finite, or beyond float32; train the model again")
        kept = self._states.on_device[1][:users].clone()
        return RankedStates(self._vectors[:users].clone(), kept, (items.copy(), scores.copy()))

    @torch.inference_mode()
    def _compute(self) -> None:
        """Enqueue everything between the buffers; nothing in it waits for the device."""
        model, tables, scan = self._resident
        self._states.upload()
        last, recent, bins = self._states.on_device
        vectors = model.read(bins, last, recent, tables)
        products = model.codeword_products(vectors)
        is_finite = products.isfinite().flatten(1).all(dim=1)
        products.masked_fill_(~is_finite[:, None, None], 0)  # a scan takes finite ones; `rank` refuses the list
        lifted = Lifted(*model.follower_gains(recent))
        items, scores = scan.top_k_on_device(products, lifted, self._k, self._masks)
        has_steps = (bins.sum(dim=-1) > 0).flatten(1).all(dim=1)
        for kept, found in zip(self._answers.on_device, (items, scores, has_steps, is_finite), strict=True):
            kept.copy_(found)
        self._vectors.copy_(vectors)
        self._answers.download()


class CapturedBatches:
    """Ranks states on a device, batch by batch. Several threads may call it at once; they take turns.

    resident     all on the same device
    words        of a user's bitmap
    is_captured  whether graphs are captured; otherwise each operation is enqueued by itself, as everywhere but on CUDA
    """

    def __init__(self, resident: Resident, words: int, *, is_captured: bool = True) -> None:
        device = resident.model.target_codes.device
        self._resident = resident
        self._is_captured = is_captured and device.type == "cuda"
        self.sizes = [size for size in SIZES if size == 1 or size * words * 8 <= MASK_BYTES]
        shape = self.sizes[-1], words * 2
        self._masks = torch.zeros(shape, dtype=torch.int32, device=device)
        self._mask_buffer = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._has_masks = False
        self._batches: dict[tuple[int, int], CapturedBatch] = {}
        self._lock = Lock()

    def takes(self, k: int) -> bool:
        """Return whether lists of this length are ranked by captured batches."""
        return 1 <= k <= LARGEST_K and self._resident.scan.bounds_blocks(_power_of_two(k))

    def prepare(self, k: int) -> None:
        """Capture the graphs for lists of this length, before the first request waits for them."""
        with self._lock:
            for size in self.sizes:
                self._batch(size, k)

    def rank(self, states: States, k: int, excluded: NDArray[np.uint64] | None = None) -> RankedStates:
        """Step and find the k best items of each user, as ``Engine.step`` and ``Engine.top_k`` do.

        states    of Q users, at least one
        k         that ``takes`` accepts
        excluded  (Q, words)  bitmaps of what must not be shown
        raises    ValueError  when a row of a histogram is empty, or scores are not finite
                  IndexError  for items beyond the catalogue
        """
        self._require_items(states)
        with self._lock:
            parts = [
                self._rank_part(states, (begin, end), size, k, excluded)
                for begin, end, size in divided(len(states.last_items), self.sizes)
            ]
        items, scores = (np.concatenate([part.ranked[place] for part in parts])[:, :k] for place in (0, 1))
        vectors, recent = torch.cat([part.vectors for part in parts]), torch.cat([part.recent for part in parts])
        return RankedStates(vectors, recent, (items, scores))

    def _rank_part(
        self, states: States, part: tuple[int, int], size: int, k: int, excluded: NDArray[np.uint64] | None
    ) -> RankedStates:
        batch, (begin, end) = self._batch(size, k), part
        self._exclude(None if excluded is None else excluded[begin:end])
        return batch.rank(states.part(begin, end))

    def _batch(self, size: int, k: int) -> CapturedBatch:
        key = size, _power_of_two(k)
        if key not in self._batches:
            batch = CapturedBatch(self._resident, self._masks[:size], key[1])
            if self._is_captured:
                batch.capture()
            self._batches[key] = batch
        return self._batches[key]

    def _exclude(self, excluded: NDArray[np.uint64] | None) -> None:
        """Put the bitmaps of a batch on the device; the batch before has ended, so the buffer is free."""
        if excluded is not None:
            users = len(excluded)
            self._mask_buffer[:users].numpy()[:] = excluded.view(np.int32)
            self._masks[:users].copy_(self._mask_buffer[:users], non_blocking=True)
        elif self._has_masks:
            self._masks.zero_()
        self._has_masks = excluded is not None

    def _require_items(self, states: States) -> None:
        """Raise IndexError for rows beyond the catalogue, which would end all work on a device."""
        items = self._resident.scan.items
        last, recent = np.asarray(states.last_items), np.asarray(states.recent_items)
        if last.min() < 0 or max(last.max(), recent.max(initial=-1)) >= items:
            raise IndexError(f"a state has an item beyond the catalogue of {items} items")


def divided(users: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Divide a batch: yield begin and end of each part, and the size that it is padded to.

    sizes  ascending, from 1 on. A part is padded to less than twice its size.
    """
    begin = 0
    while begin < users:
        rest = users - begin
        size = next((size for size in sizes if size >= rest), sizes[-1])
        if size >= 2 * rest:
            size = max(smaller for smaller in sizes if smaller <= rest)
        end = min(begin + size, users)
        yield begin, end, size
        begin = end


def _power_of_two(k: int) -> int:
    return 1 << (k - 1).bit_length()

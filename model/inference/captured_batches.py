"""Step and scan of a batch as one captured CUDA graph: it uploads states, and downloads the best items and scores.

A graph has fixed shapes, so there is one for each batch size and each power of two of k. Codes, tables and weights
stay on the device. Batches of other sizes are padded, or divided if too much of them would be padding.

Two slots alternate. Each has its own pinned memory, device buffers and graphs, so that one batch uploads its states
and another downloads its lists while a graph runs (``model.inference.pipeline``). A slot belongs to the thread that
took it until its lists are read.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.inference.pipeline import Pipeline, RunningBatch, Stages, StageSeconds, pipeline_of
from model.inference.scan import Lifted, Ranked
from model.lisa.lisa_mini import AttentionTables, LisaMini

logger = logging.getLogger(__name__)

SIZES = (1, 8, 64, 256)  # of batches
SLOTS = 2  # batches that run at the same time
LARGEST_K = 128
MASK_BYTES = 1 << 30  # for the bitmaps of one slot, pinned and on the device; larger batches are divided
WARM_UPS = 3  # before a capture, to compile kernels and allocate the memory that libraries keep
CAPTURE_LOCK = Lock()  # torch captures on one stream per process, and no thread may synchronize the device meanwhile

Bitmaps = Sequence[NDArray[np.uint64]] | NDArray[np.uint64]
"""(Q, words), or a sequence with each user's bitmap: the items to exclude."""


@runtime_checkable
class DeviceScan(Protocol):
    """A scan that never waits for its device, such as ``TritonScan``, which requires Triton."""

    items: int

    def bounds_blocks(self, k: int) -> bool:
        """Return whether ``top_k_on_device`` supports this number of items."""
        ...

    def top_k_on_device(self, products: Tensor, lifted: Lifted[Tensor], k: int, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Find the k best items of each query: items (Q, k) int64 and scores (Q, k) float32."""
        ...


class Resident(NamedTuple):
    """The data that stays on the device."""

    model: LisaMini
    tables: AttentionTables
    scan: DeviceScan


class States(NamedTuple):
    """The states of Q users, in the format of ``Engine.step``."""

    histograms: NDArray[np.float32] | Sequence[NDArray[np.float32]]
    last_items: NDArray[np.integer] | Sequence[int]
    recent_items: NDArray[np.integer] | Sequence[NDArray[np.integer]]

    def part(self, begin: int, end: int) -> States:
        """Return the states of a range of users."""
        users = slice(begin, end)
        return States(self.histograms[users], self.last_items[users], self.recent_items[users])


class RankedStates(NamedTuple):
    """The queries of Q states, and the k best items of each.

    vectors   (Q, D)  float32
    ranked    items (Q, k) int64 and scores (Q, k) float32
    device_s  device time of all parts of the batch, by stage
    """

    vectors: NDArray[np.float32]
    ranked: Ranked
    device_s: StageSeconds


class MirroredArrays:
    """Arrays stored back to back in pinned memory and on the device, so that one copy transfers all of them."""

    def __init__(self, device: torch.device, *layout: tuple[tuple[int, ...], torch.dtype]) -> None:
        sizes = [-(-math.prod(shape) * kind.itemsize // 8) * 8 for shape, kind in layout]  # each array starts at a word
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
        """Start copying all arrays to the device, without waiting."""
        self._device.copy_(self._host, non_blocking=True)

    def download(self) -> None:
        """Start copying all arrays from the device, without waiting."""
        self._host.copy_(self._device, non_blocking=True)


class CapturedBatch:
    """One batch size and one k: buffers at fixed addresses, and the graph that connects them."""

    def __init__(self, resident: Resident, masks: Tensor, k: int) -> None:
        self._resident, self._masks, self._k = resident, masks, k
        config, users = resident.model.config, len(masks)
        bins = users, len(config.decay_rates), config.history_codebooks, config.history_codewords
        self.states = MirroredArrays(
            masks.device,
            ((users,), torch.int64),
            ((users, config.recent_items), torch.int64),
            (bins, torch.float32),
        )
        for part, padding in zip(self.states.on_host, (0, -1, 1), strict=True):  # for positions that no state has used
            part.fill_(padding)
        self.answers = MirroredArrays(
            masks.device,
            ((users, k), torch.int64),
            ((users, k), torch.float32),
            ((users, config.width), torch.float32),
            ((users,), torch.bool),
            ((users,), torch.bool),
        )
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self, pool: Any) -> None:
        """Capture the graph; until then, a batch is computed operation by operation.

        pool  torch's pool for intermediate memory. Graphs that never run at the same time may share it, because nothing
              in it outlives a run
        """
        device = self._masks.device
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._enqueue_operations()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # other threads may allocate during the capture
        with torch.cuda.graph(graph, pool=pool, stream=capture_stream(device), capture_error_mode="thread_local"):
            self._enqueue_operations()
        self._graph = graph

    def fill(self, states: States) -> None:
        """Write the states of users, at most the batch size, to pinned memory."""
        users = len(states.last_items)
        last, recent, bins = (part.numpy()[:users] for part in self.states.on_host)
        last[:], recent[:] = states.last_items, np.asarray(states.recent_items)
        np.stack(list(states.histograms), out=bins)

    def compute(self) -> None:
        """Enqueue the computation between the buffers on the device."""
        if self._graph is None:
            self._enqueue_operations()
        else:
            self._graph.replay()

    def lists(self, users: int, device_s: StageSeconds) -> RankedStates:
        """Return a copy of the answers for the first users; raises as ``Engine.top_k``."""
        items, scores, vectors, has_steps, is_finite = (part.numpy()[:users] for part in self.answers.on_host)
        if not has_steps.all():
            raise ValueError("a state without a single step has no query")
        if not is_finite.all():
            raise ValueError("a query's scores are not finite, or beyond float32; train the model again")
        return RankedStates(vectors.copy(), (items.copy(), scores.copy()), device_s)

    @torch.inference_mode()
    def _enqueue_operations(self) -> None:
        model, tables, scan = self._resident
        last, recent, bins = self.states.on_device
        vectors = model.read(bins, last, recent, tables)
        products = model.codeword_products(vectors)
        is_finite = products.isfinite().flatten(1).all(dim=1)
        products.masked_fill_(~is_finite[:, None, None], 0)  # scans require finite products; `lists` reports the others
        lifted = Lifted(*model.follower_gains(recent))
        items, scores = scan.top_k_on_device(products, lifted, self._k, self._masks)
        has_steps = (bins.sum(dim=-1) > 0).flatten(1).all(dim=1)
        found = items, scores, vectors, has_steps, is_finite
        for kept, part in zip(self.answers.on_device, found, strict=True):
            kept.copy_(part)


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the device's stream to capture on, which no pipeline has.

    torch lends the same 32 streams of a priority in turn. Another thread's batch on the stream of a capture would fail,
    or become part of the graph. Graphs share their pool's memory only if all are captured on one stream.
    """
    return torch.cuda.Stream(device, priority=-1)


class Slot:
    """The buffers of one batch at a time, which only their owner uses, and the graphs between them.

    masks    (users, 2 words) int32, on the device
    batches  by size and k
    """

    def __init__(self, users: int, words: int, device: torch.device) -> None:
        shape = users, 2 * words
        self.masks = torch.zeros(shape, dtype=torch.int32, device=device)
        self.batches: dict[tuple[int, int], CapturedBatch] = {}
        self._mask_buffer = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._masked_users = 0  # only the first rows, up to this number, have bits set
        self._current: tuple[CapturedBatch, int, RunningBatch] | None = None

    def begin(self, batch: CapturedBatch, states: States, excluded: Bitmaps, pipeline: Pipeline) -> None:
        """Start ranking these states on the device; without bitmaps nothing is excluded."""
        batch.fill(states)
        masked = self._fill_masks(excluded)

        def upload() -> None:
            batch.states.upload()
            self.masks[:masked].copy_(self._mask_buffer[:masked], non_blocking=True)

        running = pipeline.enqueue(Stages(upload, batch.compute, batch.answers.download))
        self._current = batch, len(states.last_items), running

    def end(self) -> RankedStates:
        """Wait for the lists of the batch begun last, and return them."""
        if self._current is None:
            raise RuntimeError("a slot ends what it has begun")
        (batch, users, running), self._current = self._current, None
        return batch.lists(users, running.wait())

    def abandon(self) -> None:
        """Wait for a batch that was begun but not ended, because it still uses the buffers."""
        if self._current is not None:
            (_, _, running), self._current = self._current, None
            running.wait()

    def _fill_masks(self, excluded: Bitmaps) -> int:
        """Write bitmaps to pinned memory, and return the number of users whose bitmaps must be uploaded."""
        rows = self._mask_buffer.numpy().view(np.uint64)
        if not len(excluded):
            rows[: self._masked_users] = 0
            changed, self._masked_users = self._masked_users, 0
            return changed
        for row, bits in zip(rows, excluded, strict=False):
            row[:] = bits
        self._masked_users = max(self._masked_users, len(excluded))
        return len(excluded)


class CapturedBatches:
    """Ranks states on a device in batches; thread-safe.

    resident     all on the same device
    words        of a user's bitmap
    is_captured  whether graphs are captured, as on CUDA only; otherwise each operation is enqueued separately
    pipeline     of the device
    """

    def __init__(
        self, resident: Resident, words: int, *, is_captured: bool = True, pipeline: Pipeline | None = None
    ) -> None:
        device = resident.model.target_codes.device
        self._resident = resident
        self._pool = torch.cuda.graph_pool_handle() if is_captured and device.type == "cuda" else None
        self._pipeline = pipeline_of(device) if pipeline is None else pipeline
        self._without_memory: set[int] = set()
        self.sizes = [size for size in SIZES if size == 1 or size * words * 8 <= MASK_BYTES]
        self._slots = [Slot(self.sizes[-1], words, device) for _ in range(SLOTS)]
        self._free: SimpleQueue[Slot] = SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)

    def takes(self, k: int) -> bool:
        """Return whether captured batches can rank lists of this length."""
        if not 1 <= k <= LARGEST_K:
            return False
        length = _power_of_two(k)
        return length not in self._without_memory and self._resident.scan.bounds_blocks(length)

    def prepare(self, k: int) -> None:
        """Capture the graphs for lists of this length in one thread, before the first request."""
        for slot in self._slots:
            for size in self.sizes:
                self._batch(slot, size, k)

    @classmethod
    def prepared(cls, resident: Resident, words: int, k: int) -> Self | None:
        """Return batches that are ready for lists of this length; None, with a warning, if they cannot be captured."""
        try:
            captured = cls(resident, words)
            if captured.takes(k):
                captured.prepare(k)
        except RuntimeError as exc:  # out of memory, or the driver is too old
            logger.warning("running step and scan one after the other, because capturing a graph failed: %s", exc)
            return None
        return captured

    def rank(self, states: States, k: int, excluded: Bitmaps | None = None) -> RankedStates:
        """Step and find the k best items of each user, as ``Engine.step`` and ``Engine.top_k`` do.

        states    of Q users, at least one
        k         a length that ``takes`` accepts
        excluded  for the same users
        raises    ValueError        when a row of a histogram is empty, or scores are not finite
                  IndexError        for items beyond the catalogue
                  OutOfMemoryError  when another graph does not fit; ``takes`` returns False from then on
        """
        self._require_items(states)
        masks: Bitmaps = () if excluded is None else excluded
        parts: list[RankedStates] = []
        running: deque[Slot] = deque()
        with ExitStack() as taken:
            for begin, end, size in divided(len(states.last_items), self.sizes):
                # a thread that waits for a slot holds none, which prevents deadlocks
                slot = self._take_slot(taken, is_patient=not running)
                if slot is None:
                    slot = running.popleft()
                    parts.append(slot.end())
                batch = self._batch(slot, size, k)
                slot.begin(batch, states.part(begin, end), masks[begin:end], self._pipeline)
                running.append(slot)
            parts += [slot.end() for slot in running]
        items, scores = (np.concatenate([part.ranked[place] for part in parts])[:, :k] for place in (0, 1))
        device_s = StageSeconds(*np.sum([part.device_s for part in parts], axis=0).tolist())
        return RankedStates(np.concatenate([part.vectors for part in parts]), (items, scores), device_s)

    def _take_slot(self, taken: ExitStack, *, is_patient: bool) -> Slot | None:
        """Take a free slot, which is released with the others; None if no slot is free and the caller does not wait."""
        try:
            slot = self._free.get(block=is_patient)
        except Empty:
            return None
        taken.callback(self._free.put, slot)
        taken.callback(slot.abandon)
        return slot

    def _batch(self, slot: Slot, size: int, k: int) -> CapturedBatch:
        key = size, _power_of_two(k)
        if key not in slot.batches:
            try:
                with CAPTURE_LOCK:
                    slot.batches[key] = self._made_batch(slot.masks[:size], key[1])
            except torch.OutOfMemoryError:
                self._without_memory.add(key[1])
                raise
        return slot.batches[key]

    def _made_batch(self, masks: Tensor, k: int) -> CapturedBatch:
        batch = CapturedBatch(self._resident, masks, k)
        if self._pool is not None:
            batch.capture(self._pool)
        if masks.is_cuda:
            torch.cuda.synchronize(masks.device)  # because the buffers were filled on another stream
        return batch

    def _require_items(self, states: States) -> None:
        """Raise IndexError for rows beyond the catalogue, which would make the device fail for good."""
        items = self._resident.scan.items
        last, recent = np.asarray(states.last_items), np.asarray(states.recent_items)
        if last.min() < 0 or max(last.max(), recent.max(initial=-1)) >= items:
            raise IndexError(f"a state has an item beyond the catalogue of {items} items")


def divided(users: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Divide a batch: yield begin and end of each part, and its padded size.

    sizes  ascending, starting with 1. A part is padded to less than twice its size.
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

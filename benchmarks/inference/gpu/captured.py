"""Step and scan as one captured graph: the time of a batch, from states on the CPU to lists on the CPU, and memory.

The results include the device time of each stage: upload, graph, download. With two callers the copies of one overlap
with the graph of the other, which increases the queries a second.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.inference.gpu import synthetic_model
from benchmarks.inference.gpu.device import (
    forget_peak,
    is_cuda,
    peak_bytes,
    percentiles_ms,
    wall_seconds_of,
)
from benchmarks.inference.gpu.stage import StageOptions, StageRecorder
from model.config import ModelConfig
from model.inference import bitmap
from model.inference.captured_batches import SIZES, SLOTS, CapturedBatches, Resident
from model.inference.pipeline import StageSeconds
from model.inference.scan_gpu import TritonScan
from model.lisa.lisa_mini import LisaMini

ITEMS = 10_000_000, 20_000_000, 100_000_000
QUICK_ITEMS = 2_048  # the smallest catalogue whose best two are found in one pass
K, QUICK_K = 10, 2
ROUNDS, FEWEST_ROUNDS, QUICK_ROUNDS = 100, 5, 1
MOST_SECONDS = 2.0  # for the rounds of one batch
WARM_UPS = 3
SECONDS_PER_MILLION = 0.5  # for a model and its measurements, on a device
AIMS_MS = {1: 0.3, 64: 0.1}  # milliseconds per query, with ten million items
AIMED_ITEMS = 10_000_000
SHAPE = ModelConfig()
INTERPRETED_SHAPE = ModelConfig(width=16, history_codewords=8, target_codewords=16, followers=2)


def measure(options: StageOptions, recorder: StageRecorder) -> None:
    """Time each batch size with each catalogue size, captured and operation by operation."""
    for items in options.sizes(*ITEMS, quick=(QUICK_ITEMS,)):
        if not recorder.fits(f"{items:,} items", 10 + items / 1e6 * SECONDS_PER_MILLION):
            continue
        try:
            measure_catalogue(items, options, recorder)
        except torch.OutOfMemoryError as exc:
            recorder.add(f"{items:,} items", skipped=f"the device's memory is too small: {str(exc)[:200]}")
        forget_peak(options.device)


def measure_catalogue(items: int, options: StageOptions, recorder: StageRecorder) -> None:
    """Time each batch size with one catalogue size."""
    forget_peak(options.device)
    shape = SHAPE if is_cuda(options.device) else INTERPRETED_SHAPE
    model = synthetic_model.untrained(items, options.device, shape)
    synthetic_model.add_followers(model)
    scan = TritonScan(model.target_codes, model.bias)
    resident = Resident(model, synthetic_model.tables_of(model), scan)
    words = len(bitmap.empty(items))
    scanned = model.target_codes.nbytes + model.bias.nbytes
    counted, peak = resident_bytes(model), peak_bytes(options.device)
    recorder.add(f"{items:,} items, resident", scanned_bytes=scanned, counted_bytes=counted, peak_bytes=peak)
    captured, one_by_one = CapturedBatches(resident, words), CapturedBatches(resident, words, is_captured=False)
    rounds, k = (QUICK_ROUNDS, QUICK_K) if options.is_quick else (ROUNDS, K)
    for users in captured.sizes[: 2 if options.is_quick else None]:
        for name, batches in (("captured", captured), ("operation by operation", one_by_one)):
            for is_masked in (False, True):
                timed = timed_batch(batches, shape, (items, users, k), rounds, is_masked=is_masked)
                masks = ", with bitmaps" if is_masked else ""
                meets = _meets_aim(items, users, timed) if name == "captured" and not is_masked else {}
                recorder.add(f"{items:,} items, batch of {users}, {name}{masks}", k=k, **timed, **meets)
    for users in sorted(set(SIZES) - set(captured.sizes)):
        recorder.add(f"{items:,} items, batch of {users}", skipped="its bitmaps exceed MASK_BYTES; it is divided")
    recorder.add(f"{items:,} items, memory", peak_bytes=peak_bytes(options.device))


def timed_batch(
    batches: CapturedBatches, shape: ModelConfig, size: tuple[int, int, int], rounds: int, *, is_masked: bool
) -> dict[str, Any]:
    """Time a batch as its caller sees it, for a number of rounds or seconds; ``size`` is (items, users, k).

    Also returns the device time by stage, and the rate with as many callers as batches can run concurrently.
    """
    items, users, k = size
    states = synthetic_model.random_states(shape, items, users)
    masks = synthetic_model.random_bitmaps(users, len(bitmap.empty(items)), share=0.1) if is_masked else None
    if rounds > FEWEST_ROUNDS:
        for _ in range(WARM_UPS):
            batches.rank(states, k, masks)
        (once,) = wall_seconds_of(lambda: batches.rank(states, k, masks), 1)
        rounds = min(rounds, max(FEWEST_ROUNDS, int(MOST_SECONDS / once)))
    worked: list[StageSeconds] = []
    seconds = wall_seconds_of(lambda: worked.append(batches.rank(states, k, masks).device_s), rounds)
    upload_ms, graph_ms, download_ms = (np.median(worked, axis=0) * 1e3).tolist()
    begin_s = time.perf_counter()
    with ThreadPoolExecutor(SLOTS) as callers:
        list(callers.map(lambda _: batches.rank(states, k, masks), range(SLOTS * rounds)))
    overlapping_s = time.perf_counter() - begin_s
    return {
        "users": users,
        "rounds": rounds,
        **percentiles_ms(seconds),
        "ms_per_query": median(seconds) * 1e3 / users,
        "upload_ms": upload_ms,
        "graph_ms": graph_ms,
        "download_ms": download_ms,
        "queries_per_s": users * rounds / sum(seconds),
        "queries_per_s_of_two_callers": users * SLOTS * rounds / overlapping_s,
    }


def resident_bytes(model: LisaMini) -> int:
    """Return the bytes of the items on a device; the scan has a second copy of the target codes, book by book."""
    parts = model.history_codes, model.target_codes, model.target_codes, model.bias, model.followers, model.lift
    return sum(part.nbytes for part in parts)


def _meets_aim(items: int, users: int, timed: dict[str, Any]) -> dict[str, Any]:
    if items != AIMED_ITEMS or users not in AIMS_MS:
        return {}
    return {"aim_ms_per_query": AIMS_MS[users], "meets_aim": timed["ms_per_query"] <= AIMS_MS[users]}

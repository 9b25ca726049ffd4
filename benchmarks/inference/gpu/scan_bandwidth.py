"""The exact top k in one pass: the bytes that the scan has to read, as a share of the device's bandwidth.

The bandwidth is that of a copy on the device, and that of the data sheet. For each item, a query has to read eight
bytes of codes, a bias of four bytes, and one bit of its bitmap; a batch has to read codes and biases once.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.inference.gpu.device import (
    copy_bandwidth,
    forget_peak,
    is_cuda,
    percentiles_ms,
    published_bandwidth,
    seconds_of,
)
from benchmarks.inference.gpu.stage import StageOptions, StageRecorder
from model.inference import bitmap
from model.inference.scan import Lifted
from model.inference.scan_gpu import BLOCK, TritonScan

ITEMS = 1_000_000, 10_000_000, 100_000_000
BOOKS, WORDS = 8, 256
KS = 1, 10, 100
DENSE_K = 1000
BATCHES = 1, 8, 64
ROUNDS, QUICK_ROUNDS = 50, 2
QUICK_COPY_BYTES = 1 << 20
SECONDS_PER_MILLION = 0.3
AIMED_ITEMS, AIMED_SHARE = 10_000_000, 0.6  # of the bandwidth, for a single query and one item
LIFTED = 80  # sixteen followers of each of five items


def measure(options: StageOptions, recorder: StageRecorder) -> None:
    """Measure the bandwidth, then the scan for each size of catalogue, batch and list."""
    copied = copy_bandwidth(options.device, QUICK_COPY_BYTES) if options.is_quick else copy_bandwidth(options.device)
    name = torch.cuda.get_device_name() if is_cuda(options.device) else "no device"
    published = published_bandwidth(name)
    recorder.add("bandwidth", device=name, copied_bytes_per_s=copied, published_bytes_per_s=published)
    for items in options.sizes(*ITEMS, quick=(20_000,)):
        if recorder.fits(f"{items:,} items", 5 + items / 1e6 * SECONDS_PER_MILLION):
            try:
                measure_catalogue(items, (copied, published), options, recorder)
            except torch.OutOfMemoryError as exc:
                recorder.add(f"{items:,} items", skipped=f"the device's memory is too small: {str(exc)[:200]}")
            forget_peak(options.device)


def measure_catalogue(
    items: int, bandwidths: tuple[float, float | None], options: StageOptions, recorder: StageRecorder
) -> None:
    """Time the scan of one catalogue size, then all scores with their order, which large k needs."""
    device, rounds = options.device, QUICK_ROUNDS if options.is_quick else ROUNDS
    codes = torch.randint(WORDS, (items, BOOKS), dtype=torch.uint8, device=device)
    scan = TritonScan(codes, torch.randn(items, device=device))
    words = len(bitmap.empty(items)) * 2
    copied, published = bandwidths
    for users in BATCHES[:1] if options.is_quick else BATCHES:
        products, lifted = _queries(users, items, device)
        masks = torch.zeros((users, words), dtype=torch.int32, device=device)
        for k in KS:
            if not scan.bounds_blocks(k):
                continue
            scanning = partial(scan.top_k_on_device, products, lifted, k, masks)
            seconds = seconds_of(scanning, device, rounds)
            needed = items * (BOOKS + 4 + users / 8)
            rate = needed / median(seconds)
            recorder.add(
                f"{items:,} items, batch of {users}, k {k}",
                **percentiles_ms(seconds),
                bytes=needed,
                share_of_copy=rate / copied,
                share_of_published=rate / published if published else None,
                look_ups_per_s=items * users * BOOKS / median(seconds),
                **_meets_aim(items, users, k, rate / (published or copied)),
            )
    recorder.add(f"{items:,} items, largest k in one pass", k=items // BLOCK)
    products, _ = _queries(1, items, device)
    seconds = seconds_of(lambda: scan.plain_scores(products).topk(min(DENSE_K, items)), device, rounds)
    recorder.add(f"{items:,} items, all scores and their best {DENSE_K}, batch of 1", **percentiles_ms(seconds))


def _meets_aim(items: int, users: int, k: int, share: float) -> dict[str, Any]:
    if (items, users, k) != (AIMED_ITEMS, 1, 1):
        return {}
    return {"aim_share": AIMED_SHARE, "meets_aim": share >= AIMED_SHARE}


def _queries(users: int, items: int, device: str) -> tuple[torch.Tensor, Lifted[torch.Tensor]]:
    """Return the products of random queries with the codewords, and random lifted items."""
    products = torch.randn((users, BOOKS, WORDS), device=device)
    lifted = torch.randint(items, (users, LIFTED), device=device), torch.rand((users, LIFTED), device=device)
    return products, Lifted(*lifted)

"""Correctness on the device: the tests marked `gpu`, and scan, step and loss compared with the CPU.

Without a device Triton's interpreter runs the same kernels, at small sizes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from benchmarks.inference.gpu import synthetic_model
from benchmarks.inference.gpu.device import is_cuda
from benchmarks.inference.gpu.stage import StageOptions, StageRecorder
from model.config import ModelConfig
from model.inference import bitmap
from model.inference.captured_batches import CapturedBatches, Resident, States
from model.inference.scan import Lifted, Ranked
from model.inference.scan_gpu import BLOCK, TritonScan
from model.training.loss import full_softmax_loss

ROOT = Path(__file__).parents[3]
SIZES = 1_000, 10_000, 100_000, 1_000_000, 10_000_000
INTERPRETED_SIZES = 1_000, 5_000, 20_000
SECONDS_PER_MILLION = 3.0  # of brute force, with a margin for a slow processor
QUERIES = 3
LIFTED = 20
K = 10
GPU_TESTS = (
    "tests/model/inference/test_engine.py",
    "tests/model/inference/test_captured_batches.py",
    "tests/model/inference/test_scan_gpu.py",
)
TESTS_TIMEOUT_S = 180.0
STEP_TOLERANCE = 1e-4
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # relative
SHAPE = ModelConfig()
INTERPRETED_SHAPE = ModelConfig(width=16, history_codewords=8, target_codewords=16, followers=2)
TAIL_LINES = 15


def measure(options: StageOptions, recorder: StageRecorder) -> None:
    """Run all comparisons; each is a row with ``holds``."""
    if is_cuda(options.device) and not options.is_quick:
        run_tests(recorder)
    is_small = options.is_quick or not is_cuda(options.device)
    for items in options.sizes(*(INTERPRETED_SIZES if is_small else SIZES), quick=INTERPRETED_SIZES):
        name = f"scan against brute force, {items:,} items"
        if recorder.fits(name, items / 1e6 * SECONDS_PER_MILLION):
            recorder.add(name, k=K, queries=QUERIES, holds=scan_equals_brute_force(items, options.device))
    shape = SHAPE if is_cuda(options.device) else INTERPRETED_SHAPE
    for users in (1, 3) if is_small else (1, 3, 100):
        error = largest_step_error(shape, options.device, users)
        recorder.add(f"step against LisaMini.read, {users} users", largest_error=error, holds=error <= STEP_TOLERANCE)
    for dtype, tolerance in LOSS_TOLERANCE.items():
        error = loss_error(options.device, dtype)
        recorder.add(f"training loss in {dtype} against float64", relative_error=error, holds=error <= tolerance)


def run_tests(recorder: StageRecorder) -> None:
    """Run the tests that need the device, and those that the interpreter can run too."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *GPU_TESTS]
    try:
        timeout_s = min(TESTS_TIMEOUT_S, recorder.left_s)
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        recorder.add("tests of the device", holds=False, output="they took too long")
        return
    tail = (ended.stdout + ended.stderr).splitlines()[-TAIL_LINES:]
    recorder.add("tests of the device", holds=ended.returncode == 0, output="\n".join(tail))


def scan_equals_brute_force(items: int, device: str) -> bool:
    """Return whether the fused scan finds exactly the same items and scores, with exclusions and lifted items."""
    rng = np.random.default_rng(items)
    codes = rng.integers(0, 256, (items, 8), np.uint8)
    bias = rng.standard_normal(items, np.float32)
    products = rng.standard_normal((QUERIES, 8, 256), np.float32)
    lifted = np.stack([rng.choice(items, LIFTED, replace=False) for _ in range(QUERIES)])
    if items >= K * BLOCK:  # smaller catalogues add an item's gains in any order, which changes the rounding
        lifted[:, 1] = lifted[:, 0]
    gains = rng.choice(np.array([0.0, 0.5, 3.0], np.float32), (QUERIES, LIFTED))
    words = len(bitmap.empty(items))
    excluded = synthetic_model.random_bitmaps(QUERIES, words, share=0.3)
    scan = TritonScan(torch.from_numpy(codes).to(device), torch.from_numpy(bias).to(device))
    tables = torch.from_numpy(products).to(device)
    gaining = Lifted(torch.from_numpy(lifted).to(device), torch.from_numpy(gains).to(device))
    rows, found = scan.top_k(tables, gaining, K, excluded)
    masks = bitmap.to_mask(excluded, items)
    for query in range(QUERIES):
        scores = bias.copy()
        for book, table in enumerate(products[query]):
            scores += table[codes[:, book]]
        for item, gain in zip(lifted[query], gains[query], strict=True):
            scores[item] += gain
        scores[masks[query]] = -np.inf
        expected, values = sorted_best(scores, K)
        if not (np.array_equal(rows[query], expected) and np.array_equal(found[query], values)):
            return False
    return True


def sorted_best(scores: NDArray[np.float32], k: int) -> Ranked:
    """Return the k best items and their scores by a stable sort; -1 and -inf if there are fewer."""
    threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
    reaching = np.flatnonzero(scores >= threshold)
    order = reaching[np.argsort(-scores[reaching], kind="stable")][:k]
    return np.where(np.isneginf(scores[order]), -1, order), scores[order]


def largest_step_error(shape: ModelConfig, device: str, users: int) -> float:
    """Return the largest difference between queries of a captured batch and ``LisaMini.read`` on the CPU."""
    items = 4096
    model = synthetic_model.untrained(items, "cpu", shape)
    synthetic_model.add_followers(model)
    states = synthetic_model.random_states(shape, items, users)
    with torch.inference_mode():
        expected = model.read(*_tensors(states))
    on_device = model.to(device)
    scan = TritonScan(on_device.target_codes, on_device.bias)
    resident = Resident(on_device, synthetic_model.tables_of(on_device), scan)
    found = CapturedBatches(resident, len(bitmap.empty(items))).rank(states, 4)
    return float(np.abs(found.vectors - expected.numpy()).max())


def _tensors(states: States) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    histograms, last, recent = (torch.from_numpy(np.array(part)) for part in states)
    return histograms, last, recent


def loss_error(device: str, dtype: torch.dtype) -> float:
    """Return the relative error of the training loss against the cross-entropy in float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    queries, vectors = (torch.randn((count, 32), generator=generator) for count in (300, 2_000))
    bias, targets = torch.randn(2_000, generator=generator), torch.randint(2_000, (300,), generator=generator)
    expected = F.cross_entropy(queries.double() @ vectors.double().T + bias.double(), targets)
    rows, catalogue, biases, wanted = (part.to(device) for part in (queries, vectors, bias, targets))
    found = full_softmax_loss(rows, catalogue, biases, wanted, dtype).double().cpu()
    return float((found - expected).abs() / expected)

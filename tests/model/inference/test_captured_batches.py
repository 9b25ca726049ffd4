"""Captured batches against the CPU's step and scan: operation by operation on a CPU, as CUDA graphs on a GPU."""

from __future__ import annotations

import copy
import importlib.util
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model.artifact.model_directory import Artifact
from model.config import ModelConfig
from model.inference import captured_batches
from model.inference.captured_batches import (
    SIZES,
    SLOTS,
    CapturedBatches,
    Resident,
    States,
    capture_stream,
    divided,
)
from model.inference.engine import Engine
from model.inference.pipeline import CudaPipeline, RunningBatch, SerialPipeline, Stages, StageSeconds
from model.inference.scan import Lifted
from model.inference.scan_torch import TorchScan
from model.lisa.lisa_mini import AttentionTables, LisaMini, sum_of_codewords
from model.lisa.recent_attention import window_rows
from tests.model.inference.bitmaps import from_mask

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not there", allow_module_level=True)

from model.inference.scan_gpu import BLOCK, TritonScan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = ModelConfig(
    width=16,
    decay_rates=(0.0, 0.7),
    history_codebooks=3,
    history_codewords=6,
    target_codebooks=2,
    target_codewords=16,
    followers=4,
    dropout=0.3,
)
ITEMS = 5 * BLOCK + 77
K = 3
Wrap = Callable[[LisaMini], Artifact]


def random_model(shape: ModelConfig) -> LisaMini:
    torch.manual_seed(0)
    history = torch.randint(shape.history_codewords, (ITEMS, shape.history_codebooks))
    target = torch.randint(shape.target_codewords, (ITEMS, shape.target_codebooks))
    model = LisaMini(shape, history, target)
    with torch.no_grad():
        model.bias.normal_()
        model.target_codebooks.normal_()
        model.followers.copy_(torch.randint(-1, ITEMS, model.followers.shape))
        model.lift.copy_(3 * torch.rand(model.lift.shape) * (model.followers >= 0))
    model.fold_norms_and_round()
    return model.eval()


def random_states(users: int, seed: int = 0) -> States:
    rng = np.random.default_rng(seed)
    shape = users, len(SHAPE.decay_rates), SHAPE.history_codebooks, SHAPE.history_codewords
    histograms = rng.random(shape) * (rng.random(shape) < 0.5)
    histograms[..., 0] += 0.01
    recent = rng.integers(-1, ITEMS, (users, SHAPE.recent_items))
    return States(histograms.astype(np.float32), rng.integers(0, ITEMS, users), recent)


def random_bitmaps(users: int, share: float = 0.3) -> np.ndarray:
    return from_mask(np.random.default_rng(users).random((users, ITEMS)) < share)


def batches_of(model: LisaMini, *, is_captured: bool = True) -> CapturedBatches:
    with torch.no_grad():
        tables = AttentionTables(*(table.to(DEVICE) for table in model.tables()))
    on_device = copy.deepcopy(model).to(DEVICE)
    scan = TritonScan(on_device.target_codes, on_device.bias)
    words = random_bitmaps(1).shape[1]
    return CapturedBatches(Resident(on_device, tables, scan), words, is_captured=is_captured)


@pytest.fixture(scope="module", params=[0, 2], ids=["mini", "recent"])
def model(request: pytest.FixtureRequest) -> LisaMini:
    return random_model(SHAPE.model_copy(update={"recent_heads": request.param}))


@pytest.fixture(scope="module")
def batches(model: LisaMini) -> CapturedBatches:
    return batches_of(model)


@pytest.fixture(scope="module")
def on_cpu(model: LisaMini, in_memory: Wrap) -> Engine:
    return Engine(in_memory(model))


@pytest.mark.parametrize("users", [1, 3, 10])
@pytest.mark.parametrize("is_masked", [False, True])
def test_batches_equal_step_and_scan(batches: CapturedBatches, on_cpu: Engine, users: int, is_masked: bool) -> None:
    states, excluded = random_states(users), random_bitmaps(users) if is_masked else None
    found = batches.rank(states, K, excluded)
    queries = on_cpu.step(*states)
    items, scores = on_cpu.top_k(queries, K, excluded)
    np.testing.assert_allclose(found.vectors, queries.vectors, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found.ranked[0], items)
    np.testing.assert_allclose(found.ranked[1], scores, rtol=0, atol=1e-4)


def test_batches_do_not_affect_each_other(batches: CapturedBatches) -> None:
    states = random_states(8)
    plain = batches.rank(states, K).ranked
    nothing, scores = batches.rank(states, K, random_bitmaps(8, share=1.0)).ranked
    assert (nothing == -1).all()
    assert np.isneginf(scores).all()
    for _ in range(2):
        again = batches.rank(states, K).ranked
        np.testing.assert_array_equal(again[0], plain[0])
        np.testing.assert_array_equal(again[1], plain[1])


def test_a_follower_of_several_items_is_listed_once(batches: CapturedBatches, model: LisaMini) -> None:
    states = random_states(1)
    rows = np.unique(model.followers[states.recent_items[0]][model.followers[states.recent_items[0]] >= 0].numpy())
    wanted = np.ones((1, ITEMS), bool)
    wanted[0, rows[:K]] = False  # nothing but these may be shown
    found, _ = batches.rank(states, K + 1, from_mask(wanted)).ranked
    assert sorted(found[0].tolist()) == sorted([-1] * (K + 1 - len(rows[:K])) + rows[:K].tolist())


def test_states_without_a_step_and_unknown_items_are_refused(batches: CapturedBatches) -> None:
    states = random_states(3)
    empty = np.array(states.histograms)
    empty[1, 0, 2] = 0
    with pytest.raises(ValueError, match="without a single step"):
        batches.rank(states._replace(histograms=empty), K)
    with pytest.raises(IndexError, match=f"beyond the catalogue of {ITEMS} items"):
        batches.rank(states._replace(last_items=np.array([0, ITEMS, 1])), K)
    assert batches.rank(states, K).ranked[0].shape == (3, K)


def test_long_lists_are_not_captured(batches: CapturedBatches) -> None:
    assert [batches.takes(k) for k in (0, 1, 4, 5, 1000)] == [False, True, True, False, False]


class PlainScan(TorchScan):
    """Equivalent of ``TritonScan`` without Triton's slow interpreter."""

    def bounds_blocks(self, k: int) -> bool:
        return k <= self.items

    def top_k_on_device(self, products: Tensor, lifted: Lifted[Tensor], k: int, masks: Tensor) -> tuple[Tensor, Tensor]:
        items, scores = self.top_k(products, lifted, k, masks.numpy().view(np.uint64))
        return torch.from_numpy(items), torch.from_numpy(scores)


def plain_resident(model: LisaMini) -> Resident:
    with torch.no_grad():
        return Resident(model, model.tables(), PlainScan(model.target_codes, model.bias))


WORDS = random_bitmaps(1).shape[1]


class DelayedBatch:
    """A batch of ``AnyOrder`` with this many finished stages."""

    def __init__(self, pipeline: AnyOrder, stages: Stages) -> None:
        self.pipeline, self.stages, self.done = pipeline, stages, 0

    def wait(self) -> StageSeconds:
        self.pipeline.run_until_ended(self)
        return StageSeconds(0.0, 0.0, 0.0)


class AnyOrder:
    """A fake device that starts work only when waited for, in any order that streams allow."""

    def __init__(self, seed: int) -> None:
        self.order: list[int] = []  # of the streams whose turn it was
        self._random = random.Random(seed)
        self._streams: list[deque[DelayedBatch]] = [deque() for _ in range(3)]
        self._lock = Lock()

    def enqueue(self, stages: Stages) -> RunningBatch:
        batch = DelayedBatch(self, stages)
        with self._lock:
            for stream in self._streams:
                stream.append(batch)
        return batch

    def run_until_ended(self, batch: DelayedBatch) -> None:
        while True:
            with self._lock:  # of one stage: others may enqueue between two
                if batch.done == len(self._streams):
                    return
                ready = [n for n, stream in enumerate(self._streams) if stream and stream[0].done == n]
                turn = self._random.choice(ready)
                one = self._streams[turn].popleft()
                one.stages[turn]()
                one.done += 1
                self.order.append(turn)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("callers", [1, 4])
def test_concurrent_batches_do_not_affect_each_other(model: LisaMini, callers: int, seed: int) -> None:
    device = AnyOrder(seed)
    overlapping = CapturedBatches(plain_resident(model), WORDS, pipeline=device)
    one_by_one = CapturedBatches(plain_resident(model), WORDS)
    asked = [
        (random_states(users, users), k, random_bitmaps(users) if is_masked else None)
        for users, k, is_masked in [(1, 3, True), (20, 3, False), (8, 2, True), (70, 3, True), (3, 4, False)]
    ] * 3
    expected = [one_by_one.rank(*one) for one in asked]
    with ThreadPoolExecutor(callers) as threads:
        found = list(threads.map(lambda one: overlapping.rank(*one), asked))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.vectors, other.vectors)
        np.testing.assert_array_equal(one.ranked[0], other.ranked[0])
        np.testing.assert_array_equal(one.ranked[1], other.ranked[1])
    if callers == 1:  # who has both slots, so that parts of a batch overlap
        assert device.order != [0, 1, 2] * (len(device.order) // 3)


class Protocolled(SerialPipeline):
    """Records which batches were started and waited for, by number."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[str, int]] = []
        self.is_lost = False

    def enqueue(self, stages: Stages) -> RunningBatch:
        running, number = super().enqueue(stages), sum(kind == "begun" for kind, _ in self.notes)
        self.notes.append(("begun", number))
        return Noted(self, running, number)


class Noted:
    def __init__(self, pipeline: Protocolled, running: RunningBatch, number: int) -> None:
        self.pipeline, self.running, self.number = pipeline, running, number

    def wait(self) -> StageSeconds:
        self.pipeline.notes.append(("ended", self.number))
        if self.pipeline.is_lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self.running.wait()


def test_upload_of_the_next_part_overlaps_with_the_previous_one(model: LisaMini) -> None:
    pipeline = Protocolled()
    ranked = CapturedBatches(plain_resident(model), WORDS, pipeline=pipeline).rank(random_states(24), K)
    begun, ended = "begun", "ended"
    assert pipeline.notes == [(begun, 0), (begun, 1), (ended, 0), (begun, 2), (ended, 1), (ended, 2)]
    assert min(ranked.device_s) > 0


def test_a_failed_batch_returns_its_buffers_after_the_device_is_done(model: LisaMini) -> None:
    pipeline, states = Protocolled(), random_states(24)
    batches = CapturedBatches(plain_resident(model), WORDS, pipeline=pipeline)
    empty = np.array(states.histograms)
    empty[1, 0, 2] = 0
    for _ in range(SLOTS + 1):
        pipeline.notes.clear()
        with pytest.raises(ValueError, match="without a single step"):
            batches.rank(states._replace(histograms=empty), K)
        assert sorted(pipeline.notes) == [("begun", 0), ("begun", 1), ("ended", 0), ("ended", 1)]
    pipeline.is_lost = True
    for _ in range(SLOTS + 1):
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            batches.rank(states, K)
    pipeline.is_lost = False
    assert batches.rank(states, K).ranked[0].shape == (24, K)


def test_lengths_whose_graph_exceeds_memory_are_not_captured_again(
    model: LisaMini, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = captured_batches.CapturedBatch

    def make(resident: Resident, masks: Tensor, k: int) -> captured_batches.CapturedBatch:
        if k > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made(resident, masks, k)

    monkeypatch.setattr(captured_batches, "CapturedBatch", make)
    batches = CapturedBatches.prepared(plain_resident(model), WORDS, 4)
    assert batches is not None
    assert (batches.takes(4), batches.takes(5)) == (True, True)
    with pytest.raises(torch.OutOfMemoryError):
        batches.rank(random_states(3), 5)
    assert (batches.takes(4), batches.takes(5)) == (True, False)
    assert batches.rank(random_states(3), 4).ranked[0].shape == (3, 4)
    assert not caplog.messages
    assert CapturedBatches.prepared(plain_resident(model), WORDS, 5) is None
    assert "capturing a graph failed: CUDA out of memory" in caplog.text


@given(users=st.integers(0, 2000), sizes=st.sampled_from([SIZES, SIZES[:1], SIZES[:2]]))
def test_a_batch_is_divided_into_parts_more_than_half_full(users: int, sizes: tuple[int, ...]) -> None:
    parts = list(divided(users, sizes))
    assert [begin for begin, _, _ in parts] == [0, *(end for _, end, _ in parts)][: len(parts)]
    assert sum(end - begin for begin, end, _ in parts) == users
    assert all(size in sizes and end - begin <= size < 2 * (end - begin) for begin, end, size in parts)


def test_attention_to_a_window_equals_attention_to_distinct_items() -> None:
    model = random_model(SHAPE.model_copy(update={"recent_heads": 2}))
    assert model.recent is not None
    recent, hidden = torch.from_numpy(np.array(random_states(9).recent_items)), torch.randn(9, SHAPE.width)
    recent[0, 1] = recent[0, 0]
    found = []
    for is_capturable in (False, True):
        items, window = window_rows(recent, is_capturable=is_capturable)
        vectors = sum_of_codewords(model.target_codes[items], model.recent.codebooks)
        found.append(model.recent(hidden, vectors, window.masked_fill(recent < 0, -1)))
    torch.testing.assert_close(*found)


def test_an_engine_without_graphs_steps_and_scans(on_cpu: Engine) -> None:
    states, excluded = random_states(4), random_bitmaps(4)
    assert not on_cpu.captures(K)
    queries, (items, scores), _, device_s = on_cpu.rank_states(states, K, list(excluded))
    expected = on_cpu.top_k(on_cpu.step(*states), K, excluded)
    np.testing.assert_array_equal(items, expected[0])
    np.testing.assert_array_equal(scores, expected[1])
    assert (len(queries), device_s) == (4, None)
    for wrong in (excluded[:3], excluded[:, 1:]):
        with pytest.raises(ValueError, match="no top 3 of 4 states with other bitmaps"):
            on_cpu.rank_states(states, K, wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("users", SIZES)
def test_graphs_equal_their_operations_one_by_one(model: LisaMini, users: int) -> None:
    if DEVICE == "cpu":
        pytest.skip("torch finds no GPU")
    graphs, one_by_one = batches_of(model), batches_of(model, is_captured=False)
    for seed in range(3):
        states, excluded = random_states(users, seed), None if seed == 1 else random_bitmaps(users)
        found, expected = (batches.rank(states, K, excluded) for batches in (graphs, one_by_one))
        np.testing.assert_allclose(found.vectors, expected.vectors, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found.ranked[0], expected.ranked[0])


@pytest.mark.gpu
def test_an_engine_on_a_gpu_ranks_as_on_a_cpu(model: LisaMini, on_cpu: Engine, in_memory: Wrap) -> None:
    if DEVICE == "cpu":
        pytest.skip("torch finds no GPU")
    on_gpu, states, excluded = Engine(in_memory(model), "cuda"), random_states(70), random_bitmaps(70)
    assert on_gpu.captures(K)
    queries, (items, scores), _, device_s = on_gpu.rank_states(states, K, excluded)
    expected = on_cpu.rank_states(states, K, excluded).ranked
    np.testing.assert_array_equal(items, expected[0])
    np.testing.assert_allclose(scores, expected[1], rtol=0, atol=1e-4)
    assert device_s is not None
    assert min(device_s) > 0
    np.testing.assert_array_equal(on_gpu.top_k(queries, K, excluded)[0], items)


@pytest.mark.gpu
def test_graphs_of_several_threads_equal_those_of_one(model: LisaMini) -> None:
    if DEVICE == "cpu":
        pytest.skip("torch finds no GPU")
    graphs = batches_of(model)
    asked = [(random_states(users, users), K, random_bitmaps(users)) for users in (1, 20, 64, 70, 8, 300)] * 3
    expected = [graphs.rank(*one).ranked for one in asked]
    with ThreadPoolExecutor(4) as threads:
        for found, one in zip(threads.map(lambda one: graphs.rank(*one), asked), expected, strict=True):
            np.testing.assert_array_equal(found.ranked[0], one[0])
            np.testing.assert_array_equal(found.ranked[1], one[1])


@pytest.mark.gpu
def test_no_batch_runs_on_a_stream_that_captures() -> None:
    if DEVICE == "cpu":
        pytest.skip("torch finds no GPU")
    device = torch.device(DEVICE)
    pipelines = [CudaPipeline(device) for _ in range(30)]  # more streams than torch has
    capturing = capture_stream(device)
    assert capturing is capture_stream(torch.device(DEVICE))
    assert capturing.cuda_stream not in {stream.cuda_stream for pipeline in pipelines for stream in pipeline.streams}

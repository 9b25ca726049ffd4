"""The engine against a dense product and a stable sort, on every device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.artifact.model_directory import Artifact
from model.config import ModelConfig
from model.inference import bitmap
from model.inference.engine import DeviceUnavailable, Engine, gpu_scan_class, open_engine
from model.inference.query_products import Queries
from model.lisa.lisa_mini import LisaMini
from tests.model.inference.bitmaps import from_mask

SHAPE = ModelConfig(
    width=16,
    decay_rates=(0.0, 0.7),
    history_codebooks=3,
    history_codewords=6,
    target_codebooks=2,
    target_codewords=4,
    dropout=0.3,
)
ITEMS = 60  # on sixteen codes, so that many items tie where the bias does not tell them apart
Make = Callable[..., LisaMini]
Wrap = Callable[[LisaMini], Artifact]


@pytest.fixture(scope="module", params=[0, 2], ids=["mini", "recent"])
def model(random_model: Make, request: pytest.FixtureRequest) -> LisaMini:
    return random_model(SHAPE.model_copy(update={"recent_heads": request.param}), ITEMS)


@pytest.fixture(scope="module")
def engine(model: LisaMini, in_memory: Wrap, device: str) -> Engine:
    return Engine(in_memory(model), device)


@pytest.fixture(scope="module")
def tying(random_model: Make, in_memory: Wrap, device: str) -> Engine:
    """An engine whose items tie except by their codes."""
    model = random_model(SHAPE, ITEMS)
    with torch.no_grad():
        model.bias.zero_()
        model.lift.zero_()
    return Engine(in_memory(model), device)


def random_states(engine: Engine, count: int, seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    shape = count, len(SHAPE.decay_rates), SHAPE.history_codebooks, SHAPE.history_codewords
    histograms = rng.random(shape) * (rng.random(shape) < 0.5)
    histograms[..., 0] += 0.01
    last_items = rng.integers(0, ITEMS, count)
    return histograms.astype(np.float32), last_items, rng.integers(-1, ITEMS, (count, engine.window))


def random_queries(engine: Engine, count: int, seed: int = 0) -> Queries:
    rng = np.random.default_rng(seed)
    vectors = torch.from_numpy(rng.standard_normal((count, SHAPE.width), np.float32))
    return Queries(vectors.to(engine.device), torch.from_numpy(rng.integers(-1, ITEMS, (count, 7))).to(engine.device))


def lifted(
    scores: torch.Tensor, recent: torch.Tensor, model: LisaMini, decay: float = 0.7, count: int = 5
) -> torch.Tensor:
    """Scores (Q, N) plus the lift by the newest items, one follower at a time."""
    scores = scores.clone()
    for row, newest in zip(scores, recent.tolist(), strict=True):
        for steps_ago, item in enumerate(newest[:count]):
            if item >= 0:
                for follower, lift in zip(model.followers[item].tolist(), model.lift[item], strict=True):
                    row[follower] += math.exp(-decay * steps_ago) * lift if follower >= 0 else 0
    return scores


def sorted_best(scores: Any, allowed: Any, k: int) -> list[int]:
    return sorted(allowed, key=lambda item: (-scores[item], item))[:k]


def test_step_equals_the_model(engine: Engine, model: LisaMini) -> None:
    state = random_states(engine, 7)
    with torch.inference_mode():
        histogram, last, recent = map(torch.from_numpy, state)
        expected = model.cpu().read(histogram, last, recent)
    found = engine.step(*state)
    assert torch.as_tensor(found.vectors).device.type == engine.device.type
    torch.testing.assert_close(found.vectors_on_cpu, expected, rtol=0, atol=1e-5)


def test_scores_equal_the_dense_product(engine: Engine, model: LisaMini) -> None:
    queries = random_queries(engine, 9)
    with torch.inference_mode():
        expected = queries.vectors_on_cpu @ model.cpu().item_vectors().T + model.bias
    lifted_scores = lifted(expected, torch.as_tensor(queries.recent), model)
    assert (lifted_scores != expected).any()
    torch.testing.assert_close(engine.scores(queries).cpu(), lifted_scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("decay", "count"), [(0.2, 18), (0.05, 24)])
def test_slow_lift_decay_includes_more_recent_items(
    random_model: Make, in_memory: Wrap, device: str, decay: float, count: int
) -> None:
    slow = random_model(SHAPE.model_copy(update={"lift_decay": decay, "recent_items": 24}), ITEMS)
    engine, rng = Engine(in_memory(slow), device), np.random.default_rng(3)
    vectors = torch.from_numpy(rng.standard_normal((4, SHAPE.width), np.float32)).to(engine.device)
    queries = Queries(vectors, torch.from_numpy(rng.integers(-1, ITEMS, (4, 24))).to(engine.device))
    with torch.inference_mode():
        plain = queries.vectors_on_cpu @ slow.cpu().item_vectors().T + slow.bias
    expected = lifted(plain, torch.as_tensor(queries.recent), slow, decay, count)
    torch.testing.assert_close(engine.scores(queries).cpu(), expected, rtol=0, atol=1e-4)
    parts = engine.explain(Queries(queries.vectors[:1], queries.recent[:1]), np.arange(ITEMS))
    assert parts.lifts.shape == (ITEMS, count)
    total = parts.codewords.sum(axis=1) + parts.bias + parts.lifts.sum(axis=1)
    np.testing.assert_allclose(total, expected[0], rtol=0, atol=1e-4)


def test_items_with_equal_codes_have_equal_scores(tying: Engine, model: LisaMini) -> None:
    scores = tying.scores(random_queries(tying, 20)).cpu().numpy()
    codes = model.target_codes.cpu().numpy()
    twins = [(one, two) for one in range(ITEMS) for two in range(one) if (codes[one] == codes[two]).all()]
    assert len(twins) > 50
    assert all((scores[:, one] == scores[:, two]).all() for one, two in twins)


@settings(max_examples=40)
@given(
    ties=st.booleans(),
    k=st.sampled_from([1, 5, ITEMS - 1, ITEMS, ITEMS + 50]),
    excluded_share=st.sampled_from([None, 0.0, 0.5, 0.95, 1.0]),
    seed=st.integers(0, 1000),
)
def test_top_k_equals_a_stable_sort(
    engine: Engine, tying: Engine, ties: bool, k: int, excluded_share: float | None, seed: int
) -> None:
    chosen = tying if ties else engine
    queries = random_queries(chosen, 3, seed)
    excluded = None if excluded_share is None else np.random.default_rng(seed).random((3, ITEMS)) < excluded_share
    items, scores = chosen.top_k(queries, k, None if excluded is None else from_mask(excluded))
    assert items.shape == scores.shape == (3, min(k, ITEMS))
    assert (items.dtype, scores.dtype) == (np.dtype(np.int64), np.dtype(np.float32))
    every_score = chosen.scores(queries).cpu().numpy()
    for row in range(3):
        allowed = range(ITEMS) if excluded is None else np.flatnonzero(~excluded[row]).tolist()
        expected = sorted_best(every_score[row], allowed, k)
        shown = len(expected)
        assert items[row, :shown].tolist() == expected
        assert scores[row, :shown].tolist() == every_score[row, expected].tolist()
        assert (items[row, shown:] == -1).all()
        assert np.isneginf(scores[row, shown:]).all()


def test_masks_are_independent_between_users(engine: Engine) -> None:
    queries = random_queries(engine, 2)
    plain, _ = engine.top_k(queries, 5)
    excluded = from_mask(np.array([[True], [False]]).repeat(ITEMS, axis=1))
    items, _ = engine.top_k(queries, 5, excluded)
    assert items[0].tolist() == [-1] * 5
    assert items[1].tolist() == plain[1].tolist()
    assert not excluded[1].any()


@settings(max_examples=40)
@given(
    ties=st.booleans(),
    candidates=st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=20), min_size=1, max_size=4),
    k=st.sampled_from([1, 3, 100]),
)
def test_ranked_candidates_equal_a_restricted_top_k(
    engine: Engine, tying: Engine, ties: bool, candidates: list[list[int]], k: int
) -> None:
    chosen = tying if ties else engine
    queries = random_queries(chosen, len(candidates), seed=k)
    excluded = np.ones((len(candidates), ITEMS), bool)
    for row, allowed in enumerate(candidates):
        excluded[row, allowed] = False
    expected_items, expected_scores = chosen.top_k(queries, k, from_mask(excluded))
    ranked = chosen.rank_candidates(queries, [np.array(items, np.int64) for items in candidates], k)
    for row, (items, scores) in enumerate(ranked):
        shown = min(k, len(set(candidates[row])))
        assert len(items) == len(scores) == shown
        assert items.tolist() == expected_items[row, :shown].tolist()
        assert scores.tolist() == expected_scores[row, :shown].tolist()


def test_a_score_is_the_sum_of_its_parts(engine: Engine, model: LisaMini) -> None:
    state = random_states(engine, 4)
    for queries in (engine.step(*state), random_queries(engine, 4), engine.neighbours_of([1, 2, 3, 4])):
        every_score = engine.scores(queries).cpu().numpy()
        for row in range(4):
            parts = engine.explain(queries[[row]], np.arange(ITEMS))
            total = parts.codewords.sum(axis=1) + parts.history.sum(axis=1) + parts.bias + parts.lifts.sum(axis=1)
            np.testing.assert_allclose(total, every_score[row], atol=1e-5)
            assert parts.lifts.shape == (ITEMS, 0 if queries.similarity else 5)
            assert parts.history.shape == (ITEMS, 3 if queries.similarity else 0)
            if queries.similarity:  # of other codewords
                continue
            words = model.cpu().target_codebooks[torch.arange(2), model.target_codes.long()]  # (N, B', D)
            np.testing.assert_allclose(
                parts.codewords, words.detach().numpy() @ queries.vectors_on_cpu[row].detach().numpy(), atol=1e-5
            )
    assert engine.explain(queries[[0]], np.arange(0)).codewords.shape == (0, 2)


def test_a_batch_equals_single_users(engine: Engine) -> None:
    state = random_states(engine, 33, seed=2)
    queries = engine.step(*state)
    items, scores = engine.top_k(queries, 10)
    for row in range(33):
        alone = engine.step(*(part[row : row + 1] for part in state))
        torch.testing.assert_close(alone.vectors_on_cpu[0], queries.vectors_on_cpu[row], rtol=0, atol=1e-5)
        own_items, own_scores = engine.top_k(alone, 10)
        np.testing.assert_allclose(own_scores[0], scores[row], rtol=0, atol=1e-5)
        assert own_items[0].tolist() == items[row].tolist()


def test_an_empty_batch_works(engine: Engine) -> None:
    queries = engine.step(*random_states(engine, 0))
    assert queries.vectors.shape == (0, SHAPE.width)
    items, scores = engine.top_k(queries, 5)
    assert items.shape == scores.shape == (0, 5)
    assert engine.rank_candidates(queries, [], 5) == []


def test_scores_are_invariant_to_the_scale_of_stored_rows(engine: Engine) -> None:
    histograms, *items = random_states(engine, 5)
    scale = 10 ** np.random.default_rng(0).uniform(-6, 6, (*histograms.shape[:3], 1)).astype(np.float32)
    torch.testing.assert_close(
        engine.step(histograms * scale, *items).vectors_on_cpu,
        engine.step(histograms, *items).vectors_on_cpu,
        rtol=0,
        atol=1e-5,
    )


@pytest.mark.parametrize("bad", [0.0, np.nan])
def test_a_state_without_weighted_events_is_refused(engine: Engine, bad: float) -> None:
    histograms, *items = random_states(engine, 3)
    histograms[1, 0, 2] = bad
    with pytest.raises(ValueError, match="without a single step"):
        engine.step(histograms, *items)


def test_arguments_are_not_modified(engine: Engine) -> None:
    state = random_states(engine, 3)
    before = [part.copy() for part in state]
    for part in state:
        part.flags.writeable = False  # as numpy.frombuffer gives them
    engine.top_k(engine.step(*state), 5, np.zeros((3, len(bitmap.empty(ITEMS))), np.uint64))
    for part, original in zip(state, before, strict=True):
        np.testing.assert_array_equal(part, original)


def test_without_a_gpu_the_cpu_ranks_with_a_warning(
    model: LisaMini, in_memory: Wrap, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceUnavailable, match="torch finds no GPU"):
        Engine(in_memory(model), "cuda")
    assert open_engine(in_memory(model), "cpu").device.type == "cpu"
    assert not caplog.messages
    engine = open_engine(in_memory(model), "cuda")
    assert (engine.device.type, engine.has_graphs) == ("cpu", False)
    assert caplog.messages == ["ranking model 'random' on the CPU: device 'cuda' is not available: torch finds no GPU"]
    assert (engine.top_k(engine.step(*random_states(engine, 2)), 3)[0] >= 0).all()


@pytest.mark.parametrize("full", ["model", "scan"])
def test_a_too_small_gpu_falls_back_to_the_cpu_with_a_warning(
    model: LisaMini, in_memory: Wrap, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, full: str
) -> None:
    def fill_up(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(LisaMini, "to", fill_up if full == "model" else lambda model, _: model)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor)
    monkeypatch.setattr("model.inference.engine.gpu_scan_class", lambda _: fill_up)
    with pytest.raises(DeviceUnavailable, match=f"too little memory for {ITEMS} items"):
        Engine(in_memory(model), "cuda")
    assert open_engine(in_memory(model), "cuda").device.type == "cpu"
    assert f"device 'cuda' has too little memory for {ITEMS} items" in caplog.text


@pytest.mark.parametrize(
    ("capability", "scan"), [((7, 5), "TorchScan"), ((8, 0), "TritonScan"), ((9, 0), "TritonScan")]
)
def test_a_too_old_gpu_falls_back_to_torch_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capability: tuple[int, int], scan: str
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    found = gpu_scan_class(torch.device("cuda"))
    assert found.__name__ == scan
    assert hasattr(found, "top_k_on_device") == (scan == "TritonScan")  # without it, no graph is captured
    assert ["too old for Triton" in message for message in caplog.messages] == [True] * (scan == "TorchScan")


def test_an_unresponsive_gpu_is_reported_as_lost(
    model: LisaMini, in_memory: Wrap, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    engine = Engine(in_memory(model))
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert not engine.has_lost_device()  # a CPU is no device to lose
    engine.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    assert not engine.has_lost_device()
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert engine.has_lost_device()
    assert engine.is_lost
    assert "lost cuda until this process restarts" in caplog.text
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    assert engine.has_lost_device()  # CUDA does not recover in the same process


def test_queries_on_the_cpu_equal_those_on_the_device(engine: Engine) -> None:
    queries = random_queries(engine, 4)
    moved = Queries(queries.vectors_on_cpu, torch.as_tensor(queries.recent).cpu())
    np.testing.assert_array_equal(engine.top_k(moved, 5)[0], engine.top_k(queries, 5)[0])


@pytest.mark.gpu
def test_the_artifact_stays_on_the_cpu(model: LisaMini, in_memory: Wrap) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    made = in_memory(model)
    on_cpu, on_gpu = Engine(made, "cpu"), Engine(made, "cuda")
    states = random_states(on_cpu, 5)
    torch.testing.assert_close(
        on_cpu.step(*states).vectors_on_cpu, on_gpu.step(*states).vectors_on_cpu, rtol=0, atol=1e-5
    )
    assert made.history_codes.shape == (ITEMS, SHAPE.history_codebooks)


def test_lift_adds_the_given_gains(engine: Engine) -> None:
    rng = np.random.default_rng(5)
    lifted = [(rng.permutation(ITEMS)[:count], rng.random(count).astype(np.float32)) for count in (4, 0, ITEMS)]
    before = engine.scores(random_queries(engine, 3)).clone()
    queries = random_queries(engine, 3)
    engine.lift(queries, lifted)
    for row, (items, gains) in enumerate(lifted):
        before[row, torch.from_numpy(items).to(before.device)] += torch.from_numpy(gains).to(before.device)
    torch.testing.assert_close(engine.scores(queries), before)
    rows, scores = engine.top_k(queries, 7)
    best = torch.sort(before, dim=1, descending=True, stable=True)
    np.testing.assert_array_equal(rows, best.indices[:, :7].cpu())
    np.testing.assert_allclose(scores, best.values[:, :7].cpu(), rtol=1e-5)

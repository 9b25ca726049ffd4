"""Every scan path against brute force, on data designed to expose too tight bounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.inference import bitmap
from model.inference.scan import Boosts, Lifted, Scan, ScanPath, supported_paths
from model.inference.scan_kernel import BLOCK, SAMPLED_BLOCKS
from model.inference.scan_torch import TorchScan
from tests.model.inference.bitmaps import from_mask
from tests.model.inference.scan_cases import BIASES, TABLES, ScanCase, boosted, scores_one_by_one, sorted_best

PORTABLE, *OF_SOME_CPUS = get_args(ScanPath)


@pytest.fixture(
    scope="module", params=[PORTABLE, *(pytest.param(path, marks=pytest.mark.vector) for path in OF_SOME_CPUS)]
)
def path(request: pytest.FixtureRequest) -> ScanPath:
    if request.param not in supported_paths():
        pytest.skip(f"this CPU does not support {request.param}")
    return request.param  # type: ignore[no-any-return]


@settings(max_examples=100)
@given(
    seed=st.integers(0, 10_000),
    items=st.sampled_from([1, 2, 63, 64, 65, 255, 256, 257, 1000, 2048]),
    books=st.integers(1, 17),
    words=st.sampled_from([2, 3, 16, 128, 255, 256]),
    queries=st.sampled_from([1, 3]),
    table=st.sampled_from(sorted(TABLES)),
    bias=st.sampled_from(sorted(BIASES)),
    distinct=st.sampled_from([1, 5, 10_000]),
    k=st.sampled_from([1, 2, 10, 100, 3000]),
)
@pytest.mark.slow
def test_top_k_equals_brute_force(path: ScanPath, seed: int, items: int, k: int, **shape: Any) -> None:
    codes, bias, products, lifted, mask = ScanCase(items, **shape).draw(seed)
    expected = scores_one_by_one(codes, bias, products, lifted)
    scan = Scan(codes, bias, path)
    assert np.array_equal(scan.scores(products, lifted).numpy(), expected)
    found, scores = scan.top_k(products, lifted, k, from_mask(mask))
    assert (found.dtype, scores.dtype) == (np.dtype(np.int64), np.dtype(np.float32))
    for row in range(len(products)):
        assert (found[row].tolist(), scores[row].tolist()) == sorted_best(expected[row], mask[row], k)


@given(
    members=st.lists(st.lists(st.booleans(), min_size=300, max_size=300), max_size=9),
    gains=st.lists(st.sampled_from([0.25, 1.0, -1.0, 100.0]), min_size=9, max_size=9),
)
def test_gains_of_several_sets_add_up(members: list[list[bool]], gains: list[float]) -> None:
    members = [[*of_set[:-1], True] for of_set in members]
    expected = np.array(gains[: len(members)]) @ np.array(members).reshape(-1, 300)
    sets = [from_mask(np.array(of_set)) for of_set in members]
    boosts = Boosts.of_sets(sets, gains[: len(sets)], 299)  # bits past the last item have no meaning
    assert boosts.of(np.arange(299)).tolist() == expected[:299].tolist()
    with_more = boosts.plus(np.arange(299, dtype=np.float32))
    assert with_more.of(np.arange(299)).tolist() == (expected[:299] + np.arange(299)).tolist()
    highest = np.maximum(with_more.gains, 0).sum() + with_more.highest
    assert highest >= (expected[:299] + np.arange(299)).max()


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    items=st.sampled_from([1, 65, 257, 2048, 40_000]),
    queries=st.sampled_from([1, 3]),
    table=st.sampled_from(["normal", "all equal", "whole numbers", "one dominates", "hardly different", "far below"]),
    bias=st.sampled_from(sorted(BIASES)),
    distinct=st.sampled_from([5, 10_000]),
    ordered=st.booleans(),
    k=st.sampled_from([1, 10, 100]),
    gains=st.lists(st.sampled_from([0.0, 0.1, 1.0, -1.0, 100.0, -100.0, 1e-3]), max_size=4),
)
def test_boosted_top_k_equals_brute_force(
    path: ScanPath, seed: int, items: int, k: int, gains: list[float], **shape: Any
) -> None:
    codes, bias, products, lifted, mask = ScanCase(items, books=4, words=128, **shape).draw(seed)
    boosts, expected = boosted(scores_one_by_one(codes, bias, products, lifted), gains, seed)
    scan = Scan(codes, bias, path)
    found, scores = scan.top_k(products, lifted, k, from_mask(mask), boosts)
    dense = TorchScan(torch.from_numpy(codes), torch.from_numpy(bias)).top_k(
        products, lifted, min(k, items), from_mask(mask), boosts
    )
    candidates = [np.flatnonzero(~row) for row in mask]
    narrow = scan.rank(products, lifted, k, candidates, boosts)
    for row in range(len(products)):
        best = sorted_best(expected[row], mask[row], k)
        assert (found[row].tolist(), scores[row].tolist()) == best
        assert dense[0][row].tolist() == best[0][:items]
        shown = len(narrow[row][0])
        assert (narrow[row][0].tolist(), narrow[row][1].tolist()) == (best[0][:shown], best[1][:shown])
        assert shown == min(k, len(candidates[row]))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    table=st.sampled_from(["normal", "whole numbers", "one dominates", "hardly different"]),
    bias=st.sampled_from(sorted(BIASES)),
    words=st.sampled_from([16, 64, 256]),
    distinct=st.sampled_from([300, 10**6]),
    ordered=st.booleans(),
    by_block=st.booleans(),
    k=st.sampled_from([1, 10, 200]),
)
def test_block_order_and_pruning_do_not_change_results(path: ScanPath, seed: int, k: int, **shape: Any) -> None:
    codes, bias, products, lifted, mask = ScanCase(70_000, books=4, queries=2, **shape).draw(seed)
    expected = scores_one_by_one(codes, bias, products, lifted)
    found, _ = Scan(codes, bias, path).top_k(products, lifted, k, from_mask(mask))
    for row in range(len(products)):
        order = np.lexsort((np.arange(len(codes)), -expected[row]))
        best = order[~mask[row, order]][:k].tolist()
        assert found[row].tolist() == best + [-1] * (k - len(best))


@pytest.mark.parametrize("below", [253, 254, 255, 256, 300])
def test_an_item_at_the_pruning_bound_is_kept(path: ScanPath, below: int) -> None:
    """With integers, exact in float32, two items tie for the last place at the full budget."""
    products = torch.zeros(1, 2, 256)
    products[0, 0] = -torch.arange(256.0)
    products[0, 1, 1] = -below + 100
    items = 10_000
    codes = np.zeros((items, 2), np.uint8)
    codes[:, 0], codes[:, 1] = 255, 1  # far below
    codes[[0, 5000, 9000]] = [[0, 0], [100, 1], [100, 1]]
    nothing = Lifted(torch.zeros((1, 0), dtype=torch.int64), torch.zeros(1, 0))
    found, scores = Scan(codes, np.zeros(items, np.float32), path).top_k(
        products, nothing, 2, bitmap.empty(items)[None]
    )
    assert (found.tolist(), scores.tolist()) == ([[0, 5000]], [[0, -below]])


def test_ties_with_lifted_items_go_to_earlier_rows(path: ScanPath) -> None:
    """The best scores and the margin for rounding errors are 0."""
    items, words = 70_000, 256
    codes = np.sort(np.random.default_rng(0).integers(0, words, (items, 2), np.uint8), axis=0)
    products = torch.zeros(1, 2, words)
    products[0, 0] = -torch.arange(float(words))
    late = torch.arange(items - 3, items)[None]
    lifted = Lifted(late, torch.from_numpy(codes[late.numpy(), 0].astype(np.float32)))
    found, scores = Scan(codes, np.zeros(items, np.float32), path).top_k(products, lifted, 3, bitmap.empty(items)[None])
    assert (found.tolist(), scores.tolist()) == ([[0, 1, 2]], [[0, 0, 0]])


@pytest.mark.parametrize("words", [64, 256])
def test_a_sample_without_allowed_items_prunes_nothing(path: ScanPath, words: int) -> None:
    """Few biases leave bias levels empty, and few codewords leave a part of the deficits unused."""
    items, rng = 70_000, np.random.default_rng(words)
    codes = rng.integers(0, words, (items, 4), np.uint8)
    codes = codes[np.lexsort(codes.T[::-1])]
    bias = np.where(np.arange(items) < 300, 1, 0).astype(np.float32)
    products = torch.from_numpy(rng.standard_normal((2, 4, words), np.float32))
    block = np.arange(items) // BLOCK
    is_sampled = block % (-(-items // BLOCK) // SAMPLED_BLOCKS) == 0
    mask = np.tile(is_sampled | (block < 150) & (block > 3) | (block > 210), (2, 1))
    nothing = Lifted(torch.zeros((2, 0), dtype=torch.int64), torch.zeros(2, 0))
    expected = scores_one_by_one(codes, bias, products, nothing)
    found, scores = Scan(codes, bias, path).top_k(products, nothing, 10, from_mask(mask))
    for row in range(2):
        assert (found[row].tolist(), scores[row].tolist()) == sorted_best(expected[row], mask[row], 10)


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), table=st.sampled_from(sorted(TABLES)), k=st.sampled_from([1, 4, 100]))
def test_candidates_are_ranked_exclusively(path: ScanPath, seed: int, table: str, k: int) -> None:
    codes, bias, products, lifted, _ = ScanCase(500, 5, 64, 3, table, distinct=50).draw(seed)
    rng = np.random.default_rng(seed)
    candidates = [rng.integers(0, 500, rng.integers(0, 20)) for _ in range(3)]
    expected = scores_one_by_one(codes, bias, products, lifted)
    scan = Scan(codes, bias, path)
    for row, (found, scores) in enumerate(scan.rank(products, lifted, k, candidates)):
        mask = np.ones(500, bool)
        mask[candidates[row]] = False
        shown = min(k, int((~mask).sum()))
        assert (found.tolist(), scores.tolist()) == sorted_best(expected[row], mask, shown)


def test_a_batch_equals_single_queries(path: ScanPath) -> None:
    codes, bias, products, lifted, mask = ScanCase(40_000, 8, 256, 20).draw(3)
    scan, excluded = Scan(codes, bias, path), from_mask(mask)
    items, scores = scan.top_k(products, lifted, 10, excluded)
    for row in range(20):
        one = slice(row, row + 1)
        alone = scan.top_k(products[one], Lifted(*(part[one] for part in lifted)), 10, excluded[one])
        assert (alone[0].tolist(), alone[1].tolist()) == (items[one].tolist(), scores[one].tolist())


def test_threads_do_not_disturb_each_other(path: ScanPath) -> None:
    codes, bias, products, lifted, mask = ScanCase(40_000, 8, 256, 64).draw(4)
    scan, excluded = Scan(codes, bias, path), from_mask(mask)
    expected, _ = scan.top_k(products, lifted, 10, excluded)

    def alone(row: int) -> list[int]:
        one = slice(row, row + 1)
        found: list[int] = scan.top_k(products[one], Lifted(*(part[one] for part in lifted)), 10, excluded[one])[0][
            0
        ].tolist()
        return found

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(alone, range(64))) == expected.tolist()


def test_the_paths_and_torch_agree() -> None:
    codes, bias, products, lifted, mask = ScanCase(5_000, 8, 256, 7).draw(5)
    catalogues: list[Scan | TorchScan] = [
        TorchScan(torch.from_numpy(codes).long(), torch.from_numpy(bias)),
        *(Scan(codes, bias, p) for p in supported_paths()),
    ]
    answers = [catalogue.top_k(products, lifted, 50, from_mask(mask)) for catalogue in catalogues]
    for (items, scores), (other_items, other_scores) in pairwise(answers):
        assert np.array_equal(items, other_items)
        assert np.array_equal(scores, other_scores)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf, 3e38])
def test_non_finite_models_are_refused(path: ScanPath, broken: float) -> None:
    codes, bias, products, lifted, _ = ScanCase(300, 3, 16, 2).draw(6)
    products[1, 2, 7] = broken
    with pytest.raises(ValueError, match="train the model again"):
        Scan(codes, bias, path).top_k(products, lifted, 5, from_mask(np.zeros((2, 300), bool)))
    if not np.isfinite(broken):
        with pytest.raises(ValueError, match="train the model again"):
            Scan(codes, bias, path).rank(products, lifted, 5, [np.arange(300)] * 2)


def test_the_bias_of_a_model_is_used() -> None:
    codes, bias = torch.zeros((3, 2), dtype=torch.uint8), torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    assert TorchScan(codes, bias).bias_of(np.array([2, 0])).tolist() == [3.0, 1.0]


def test_an_unsupported_path_is_refused() -> None:
    with pytest.raises(ValueError, match="this CPU does not support abacus; it supports: portable"):
        Scan(np.zeros((1, 1), np.uint8), np.zeros(1, np.float32), "abacus")  # type: ignore[arg-type]
    assert supported_paths()[0] == "portable"


@pytest.mark.parametrize(
    ("triple", "features", "paths"),
    [
        ("x86_64-unknown-linux-gnu", "+sse4.2,-avx2", ("portable",)),
        ("x86_64-unknown-linux-gnu", "+avx2,+avx512bw", ("portable", "avx2")),
        ("x86_64-unknown-linux-gnu", "+avx2,+avx512bw,+avx512vbmi", ("portable", "avx2", "vbmi")),
        ("aarch64-unknown-linux-gnu", "+neon,+sve", ("portable", "neon")),
        ("aarch64-unknown-linux-gnu", "", ("portable", "neon")),  # an emulated one tells no features
        ("arm64-apple-darwin24.6.0", "+neon", ("portable", "neon")),
    ],
)
def test_supported_paths_match_the_processor(
    monkeypatch: pytest.MonkeyPatch, triple: str, features: str, paths: tuple[ScanPath, ...]
) -> None:
    codegen = SimpleNamespace(magic_tuple=lambda: (triple, "generic", features))
    target = SimpleNamespace(target_context=SimpleNamespace(codegen=lambda: codegen))
    monkeypatch.setattr("model.inference.scan.cpu_target", target)
    assert supported_paths() == paths

"""The GPU scan, on a GPU or on Triton's interpreter, against brute force."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from model.inference.scan import Lifted
from tests.model.inference.bitmaps import from_mask
from tests.model.inference.scan_cases import ScanCase, boosted, scores_one_by_one, sorted_best

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not there", allow_module_level=True)

from model.inference.scan_gpu import BLOCK, TritonScan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def fused(codes: np.ndarray, bias: np.ndarray) -> TritonScan:
    return TritonScan(torch.from_numpy(codes).to(DEVICE), torch.from_numpy(bias).to(DEVICE))


@pytest.mark.parametrize("k", [1, 3, 9])
@pytest.mark.parametrize("distinct", [5, 10**6])
@pytest.mark.parametrize(
    ("table", "bias"), [("normal", "normal"), ("whole numbers", "whole numbers"), ("normal", "rising")]
)
def test_top_k_equals_brute_force(table: str, bias: str, distinct: int, k: int) -> None:
    codes, bias_of, products, lifted, mask = ScanCase(9 * BLOCK + 77, 8, 256, 2, table, bias, distinct).draw(k)
    expected = scores_one_by_one(codes, bias_of, products, lifted)
    asked = products.to(DEVICE), Lifted(*(part.to(DEVICE) for part in lifted)), k, from_mask(mask)
    found, scores = fused(codes, bias_of).top_k(*asked)
    for row in range(len(products)):
        assert (found[row].tolist(), scores[row].tolist()) == sorted_best(expected[row], mask[row], k)


@pytest.mark.parametrize("k", [1, 9, 10, 500, 9 * BLOCK + 77])
def test_lists_around_the_single_pass_limit_equal_brute_force(k: int) -> None:
    codes, bias, products, lifted, mask = ScanCase(9 * BLOCK + 77, 8, 256, 2).draw(2)
    scan = fused(codes, bias)
    assert scan.bounds_blocks(k) == (k <= 9)  # longer lists: all scores, sorted
    expected = scores_one_by_one(codes, bias, products, lifted)
    found, scores = scan.top_k(products.to(DEVICE), Lifted(*(part.to(DEVICE) for part in lifted)), k, from_mask(mask))
    for row in range(len(products)):
        items, values = sorted_best(expected[row], mask[row], k)
        assert found[row].tolist() == items
        np.testing.assert_allclose(scores[row], values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [3, 20])
def test_boosted_top_k_equals_brute_force(seed: int, k: int) -> None:
    codes, bias, products, lifted, mask = ScanCase(9 * BLOCK + 77, 8, 256, 2).draw(seed)
    boosts, expected = boosted(scores_one_by_one(codes, bias, products, lifted), [2.0, -1.0], seed)
    asked = products.to(DEVICE), Lifted(*(part.to(DEVICE) for part in lifted)), k, from_mask(mask)
    found, scores = fused(codes, bias).top_k(*asked, boosts)
    for row in range(len(products)):
        items, values = sorted_best(expected[row], mask[row], k)
        assert found[row].tolist() == items
        np.testing.assert_allclose(scores[row], values, rtol=1e-5, atol=1e-5)


def test_a_lifted_item_is_listed_once() -> None:
    codes, bias, products, _, mask = ScanCase(9 * BLOCK, 8, 256, 1).draw(1)
    lifted = Lifted(torch.tensor([[5, 4000, 5]]), torch.tensor([[50.0, 60.0, 40.0]]))
    expected = scores_one_by_one(codes, bias, products, lifted)
    _, without = fused(codes, bias).top_k(products.to(DEVICE), lifted, 9, from_mask(mask & False))
    assert without[0].tolist() == sorted_best(expected[0], mask[0] & False, 9)[1]
    nobody = Lifted(lifted.items[:, :0], lifted.gains[:, :0])
    best = int(scores_one_by_one(codes, bias, products, nobody)[0].argmax())
    again = Lifted(torch.tensor([[best]]), torch.tensor([[0.5]]))
    found, _ = fused(codes, bias).top_k(products.to(DEVICE), again, 9, from_mask(mask & False))
    assert found[0].tolist().count(best) == 1


def test_non_finite_models_are_refused() -> None:
    codes, bias, products, lifted, mask = ScanCase(2 * BLOCK, 3, 16, 1).draw(0)
    products[0, 2, 7] = np.nan
    with pytest.raises(ValueError, match="train the model again"):
        fused(codes, bias).top_k(products.to(DEVICE), lifted, 1, from_mask(mask))

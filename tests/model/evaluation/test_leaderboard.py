"""The winner of an evaluation, on hand-made ranks, and its sentence."""

from __future__ import annotations

import numpy as np
import pytest

from model.evaluation.comparison import Variant
from model.evaluation.leaderboard import Leaderboard
from model.evaluation.trial import Result

GOOD, FAIR, POOR = [1, 2, 1, 1, 3] * 40, [2, 3, 2, 4, 1] * 40, [11, 12, 9, 20, 11] * 40


def variant(name: str, *ranks: list[int]) -> Variant:
    return Variant(name, [Result("lisa-mini", {}, np.array(one, np.int64), None) for one in ranks])


def baseline(name: str, ranks: list[int], **settings: object) -> Result:
    return Result(name, settings, np.array(ranks, np.int64), None)


def ndcg(ranks: list[int]) -> float:
    return float(np.mean([1 / np.log2(rank + 1) if rank <= 10 else 0 for rank in ranks]))


def test_a_model_wins_against_the_best_baseline() -> None:
    board = Leaderboard.of([variant("shop", GOOD)], [baseline("markov", POOR), baseline("ease", FAIR)])
    margin = ndcg(GOOD) - ndcg(FAIR)
    assert board.verdict.startswith(
        f"shop (lisa-mini) beats ease, the best of 2 baselines: NDCG@10 is {margin:.4f} higher (95% interval 0."
    )
    assert [standing.name for standing in board.standings] == ["shop", "ease", "markov"]
    assert [standing.metrics["ndcg_at_10"] for standing in board.standings] == pytest.approx(
        [ndcg(GOOD), ndcg(FAIR), ndcg(POOR)]
    )
    assert board.in_plain_words == (
        "shop lists the item that came next among its first ten for 100.0% of 200 users, ease for 100.0%."
    )


def test_a_baseline_may_win_against_all_models() -> None:
    board = Leaderboard.of([variant("one", POOR), variant("two", FAIR, FAIR)], [baseline("ease", GOOD, l2=250)])
    margin = ndcg(GOOD) - ndcg(FAIR)
    assert board.verdict.startswith(
        "ease, the only baseline, beats two (lisa-mini, 2 seeds), the best of 2 models: "
        f"NDCG@10 is {margin:.4f} higher (95% interval 0."
    )
    assert board.standings[0].about == "l2 250"
    found = board.standings[0].best_minus
    assert found is not None
    low, high = found["ndcg_at_10"].interval_95
    assert low < -margin < high < 0


def test_a_difference_by_chance_is_not_significant() -> None:
    turned = [GOOD[-1], *GOOD[:-1]]
    verdict = Leaderboard.of([variant("shop", GOOD)], [baseline("ease", turned)]).verdict
    assert verdict.startswith(
        "No certain difference between shop (lisa-mini) and ease, the only baseline: NDCG@10 differs by +0.0000, "
        "and the 95% interval, -0."
    )
    assert verdict.endswith(", contains 0.")


def test_without_baselines_models_are_compared_with_each_other() -> None:
    board = Leaderboard.of([variant("one", POOR), variant("two", GOOD), variant("three", FAIR)], [])
    assert board.verdict.startswith("two (lisa-mini) beats three, the second best of 3 models: NDCG@10 is ")
    assert Leaderboard.of([variant("one", POOR), variant("two", GOOD)], []).verdict.startswith(
        "two (lisa-mini) beats one, the other model: "
    )


def test_a_single_model_is_not_compared() -> None:
    board = Leaderboard.of([variant("shop", GOOD)], [])
    assert board.rival is None
    assert board.verdict.startswith(f"shop (lisa-mini) has an NDCG@10 of {ndcg(GOOD):.4f} (95% interval 0.")
    assert board.verdict.endswith(", with nothing to compare it with.")
    assert board.in_plain_words.endswith("100.0% of 200 users.")


def test_seeds_are_averaged() -> None:
    board = Leaderboard.of([variant("two seeds", GOOD, POOR)], [baseline("ease", FAIR)])
    rival = board.rival
    assert rival is not None
    assert rival.best_minus is not None
    assert rival.best_minus["ndcg_at_10"].difference == pytest.approx((ndcg(GOOD) + ndcg(POOR)) / 2 - ndcg(FAIR))

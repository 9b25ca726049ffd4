"""The gate of retraining: on what it decides, and how it reports the decision."""

from __future__ import annotations

import numpy as np
import pytest

from app.jobs.retraining.gate import MIN_VALUED_EVENTS, Criterion, Gate

MISS = 99
CHEAP, DEAR = np.arange(200) < 190, np.arange(200) >= 190
VALUES = np.where(DEAR, 1_000.0, 1.0)
FINDS_MANY, FINDS_DEAR = np.where(CHEAP, 1, MISS), np.where(DEAR, 1, MISS)


def test_the_operator_chooses_hit_rate_or_value() -> None:
    by_hits, by_value = Gate(VALUES, "ndcg", 0.1), Gate(VALUES, "value", 0.1)
    for gate, passes in ((by_hits, False), (by_value, True)):
        found = gate.compare(FINDS_DEAR, FINDS_MANY, is_first=False)
        assert found.passes is passes
        assert gate.compare(FINDS_MANY, FINDS_DEAR, is_first=False).passes is not passes
        assert gate.compare(FINDS_DEAR, FINDS_MANY, is_first=True).passes is passes
        assert (found.ndcg_at_10, found.served_ndcg_at_10) == (0.05, 0.95)
        assert found.value_hr_at_10 == pytest.approx(10_000 / 10_190)
        assert found.served_value_hr_at_10 == pytest.approx(190 / 10_190)
        assert found.value_difference_interval_95 is not None
        assert found.value_difference_interval_95[0] > 0.9
        assert "value-weighted HR@10 0.9814, the active model 0.0186, on 200 events with a value" in found.reason
        assert (found.valued_events, found.decided_by) == (200, gate.criterion)
    assert "decided" not in by_hits.compare(FINDS_DEAR, FINDS_MANY, is_first=False).reason
    assert by_value.compare(FINDS_DEAR, FINDS_MANY, is_first=False).reason.endswith("; decided by value-weighted HR@10")


def test_equal_models_pass_but_the_first_one_must_be_better() -> None:
    for criterion in ("ndcg", "value"):
        gate = Gate(VALUES, criterion, 0.1)
        assert gate.compare(FINDS_MANY, FINDS_MANY, is_first=False).passes
        assert not gate.compare(FINDS_MANY, FINDS_MANY, is_first=True).passes


@pytest.mark.parametrize("criterion", ["ndcg", "value"])
def test_a_certain_loss_within_the_limit_is_refused(criterion: Criterion) -> None:
    for questions, passes in ((100, True), (10_000, False)):
        served = np.ones(questions, np.int64)
        new = np.where(np.arange(questions) % 50 == 0, MISS, served)  # a loss of 2 %
        gate = Gate(np.ones(questions), criterion, max_loss=0.1)
        assert gate.compare(new, served, is_first=False).passes is passes
        assert not Gate(np.ones(questions), criterion, max_loss=0.01).compare(new, served, is_first=False).passes


def test_the_value_decides_with_enough_valued_events() -> None:
    values = np.where(np.arange(2 * MIN_VALUED_EVENTS) < MIN_VALUED_EVENTS, 1.0, np.nan)
    ranks = np.ones(len(values), np.int64)
    assert Gate(values, "value", 0.1).compare(ranks, ranks, is_first=False).decided_by == "value"


@pytest.mark.parametrize("valued", [0, MIN_VALUED_EVENTS - 1])
def test_few_valued_events_do_not_decide(valued: int) -> None:
    values = np.where(np.arange(200) >= 200 - valued, 1_000.0, np.nan)
    gate = Gate(values, "value", 0.1)
    found = gate.compare(FINDS_DEAR, FINDS_MANY, is_first=False)
    assert (found.passes, found.decided_by, found.valued_events) == (False, "ndcg", valued)
    assert found.reason.endswith("; decided by NDCG@10, because a decision by value needs 200 events with a value")
    assert (found.value_hr_at_10 is None) == (not valued)
    assert gate.fell(FINDS_DEAR, FINDS_MANY) == "its NDCG@10 fell to 0.0500"


def test_the_final_model_is_checked_by_the_deciding_metric() -> None:
    gate = Gate(VALUES, "value", 0.1)
    assert gate.fell(FINDS_DEAR, FINDS_MANY) is None
    assert gate.fell(FINDS_MANY, FINDS_DEAR) == "its value-weighted HR@10 fell to 0.0186"

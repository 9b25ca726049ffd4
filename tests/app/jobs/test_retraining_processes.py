"""The loop closed by real processes: a shop without a model, its events, a trainer that is killed, its first model."""

from __future__ import annotations

from benchmarks.rollout.retraining import LoopSizes, measure


def test_the_first_generation_comes_by_itself_and_no_request_fails() -> None:
    tally = measure(
        "redis", LoopSizes(shoppers=170, test_shoppers=60, epochs=1, kills=1, kill_within_s=1), all_seasons=False
    )
    assert tally.kills == 1
    assert not tally.failures
    assert not tally.faults, (tally.faults, tally.findings)
    found = tally.findings["spring"]
    assert found["first"] > found["popular"]
    assert tally.findings["first generation"]["outcome"] == "activated"
    assert {name.split()[1] for name in tally.generations} == {"popular", "personalised"}

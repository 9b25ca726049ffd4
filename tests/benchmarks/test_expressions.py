"""Benchmarks of expressions, in short."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.attack.hostile_expressions import attack
from benchmarks.service.expression_cost import measure, requests


def test_no_hostile_expression_is_a_fault_of_the_service(model: Path, tmp_path: Path) -> None:
    answers, _ = asyncio.run(attack(model, tmp_path, 200, seed=0))
    assert {answer.status for answer in answers} == {200, 422}


def test_every_kind_of_request_is_measured(model: Path, tmp_path: Path) -> None:
    seconds, took, change_s = asyncio.run(measure(model, tmp_path, 10))
    assert seconds.keys() == requests().keys()
    assert min(seconds.values()) > 0
    assert took.keys() == {"price", "brand", "sold_out", "labels"}
    assert change_s > 0

"""Benchmarks of expressions, shortened."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.attack.hostile_expressions import attack
from benchmarks.service.catalogue_updates import MAX_NUMBER_BYTES, MAX_OBJECTS, measure_values
from benchmarks.service.expression_cost import measure, requests


def test_hostile_expressions_cause_no_server_error(model: Path, tmp_path: Path) -> None:
    answers, _ = asyncio.run(attack(model, tmp_path, 200, seed=0))
    assert {answer.status for answer in answers} == {200, 422}


def test_every_kind_of_request_is_measured(model: Path, tmp_path: Path) -> None:
    seconds, took, change_s = asyncio.run(measure(model, tmp_path, 10))
    assert seconds.keys() == requests().keys()
    assert min(seconds.values()) > 0
    assert took.keys() == {"price", "brand", "sold_out", "labels", "margin"}
    assert change_s > 0


@pytest.mark.parametrize("learned", [16_000, 0])
def test_item_properties_create_no_python_objects(learned: int) -> None:
    found, _ = measure_values(16_000, learned)
    assert 8 <= found["price, bytes"] <= MAX_NUMBER_BYTES
    assert found["Python objects"] <= MAX_OBJECTS
    assert min(found[name] for name in ("all items, s", "another model, s", "a change of one, ms")) > 0

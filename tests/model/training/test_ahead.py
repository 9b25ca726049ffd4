"""Batches that another thread makes ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from model.training.batches.ahead import AHEAD, made_ahead


def test_the_same_batches_come_in_the_same_order_from_another_thread() -> None:
    makers = set()

    def prepared(batch: int) -> int:
        makers.add(threading.current_thread())
        return batch * 2

    assert list(made_ahead(iter(range(50)), prepared)) == list(range(0, 100, 2))
    assert len(makers) == 1
    assert threading.current_thread() not in makers
    assert not any(maker.is_alive() for maker in makers)
    assert list(made_ahead(iter(()), prepared)) == []


def test_no_more_than_a_few_are_made_before_they_are_wanted() -> None:
    made = []
    enough = threading.Event()

    def batches() -> Iterator[int]:
        for number in range(20):
            made.append(number)
            if len(made) > AHEAD:
                enough.set()
            yield number

    wanted = made_ahead(batches(), lambda batch: batch)
    assert next(wanted) == 0
    assert enough.wait(60)
    assert len(made) == AHEAD + 1
    wanted.close()
    assert len(made) <= AHEAD + 1


def test_an_error_reaches_who_iterates() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    wanted = made_ahead(batches(), lambda batch: batch)
    assert next(wanted) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(wanted)

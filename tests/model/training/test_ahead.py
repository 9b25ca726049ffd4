"""Prefetching of batches in a thread, and a training with it in bfloat16 as on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from model.artifact import model_directory
from model.training import train, trainer
from model.training.batches.ahead import AHEAD, made_ahead
from model.training.batches.positions import PositionBatch
from model.training.trainer import Trainer

Make = Callable[..., Any]


def test_prefetched_batches_are_the_same_in_order() -> None:
    makers = set()

    def prepared(batch: int) -> int:
        makers.add(threading.current_thread())
        return batch * 2

    assert list(made_ahead(iter(range(50)), prepared)) == list(range(0, 100, 2))
    assert len(makers) == 1
    assert threading.current_thread() not in makers
    assert not any(maker.is_alive() for maker in makers)
    assert list(made_ahead(iter(()), prepared)) == []


def test_prefetching_is_bounded() -> None:
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


def test_an_error_reaches_the_consumer() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    wanted = made_ahead(batches(), lambda batch: batch)
    assert next(wanted) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(wanted)


def test_training_with_prefetching_in_bfloat16_learns_the_same(
    shop: Path, tmp_path: Path, tiny_config: Make, silent: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of a GPU training that also run on a CPU."""
    pinned: list[str] = []

    def pin(batch: PositionBatch) -> PositionBatch:
        pinned.append(threading.current_thread().name)
        return batch

    def trained(name: str, dtype: torch.dtype) -> tuple[float, bytes]:
        monkeypatch.setattr(trainer, "matmul_dtype", lambda _: dtype)
        made = train.train(shop, tmp_path / name, tiny_config(epochs=1), progress=silent())
        return made.metrics["epochs"][0]["loss"], (tmp_path / name / model_directory.WEIGHTS).read_bytes()

    (in_float32, _), in_bfloat16 = trained("float32", torch.float32), trained("bfloat16", torch.bfloat16)
    assert in_bfloat16[0] != in_float32
    assert in_bfloat16[0] == pytest.approx(in_float32, rel=0.02)
    monkeypatch.setattr(Trainer, "_makes_ahead", True)
    monkeypatch.setattr(PositionBatch, "pinned", pin)
    assert trained("ahead", torch.bfloat16) == in_bfloat16
    assert pinned
    assert all(name.startswith("batches") for name in pinned)

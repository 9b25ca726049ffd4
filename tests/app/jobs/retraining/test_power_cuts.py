"""Durability of a retraining round: files are synced before anything depends on them."""

from __future__ import annotations

import os
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from app.jobs import generations
from app.jobs.retraining import round as retraining_round
from app.jobs.retraining.loop import run_trainer
from model.training.train import train as train_model
from tests.app.jobs.retraining.shops import PLAN, Shop
from tests.storage.folders.durability import Disk


def test_a_round_is_synced_before_it_takes_effect(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data are synced before the state file marks them complete, and the model before its activation."""
    synced: set[int] = set()
    fsync, activate = os.fsync, generations.activate
    checked: list[str] = []

    def recorded(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def lost(folder: Path) -> list[Path]:
        return [path for path in (folder, *folder.rglob("*")) if path.stat().st_ino not in synced]

    def train(data: Path, out: Path, *arguments: Any, **options: Any) -> Any:
        if data.parent.name == "past":
            assert [path for path in lost(shop.models / ".retraining") if out not in (path, *path.parents)] == []
            checked.append("data")
        return train_model(data, out, *arguments, **options)

    async def activated(settings: Any, name: str, *arguments: Any, **options: Any) -> Any:
        assert shop.models.stat().st_ino in synced
        assert lost(shop.models / name) == []
        checked.append("model")
        return await activate(settings, name, *arguments, **options)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(retraining_round, "train", train)
    monkeypatch.setattr(generations, "activate", activated)
    shop.collect(200)
    assert shop.retrain().outcome == "activated"
    assert checked == ["data", "model"]


def test_the_state_file_of_a_round_is_deleted_before_its_data(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state file that reappears after a power cut would mark the data as complete."""
    work, disk, remove = shop.models / ".retraining", Disk(monkeypatch), shutil.rmtree
    names: list[dict[str, int] | None] = []
    work.mkdir(parents=True)
    (work / "events").mkdir()
    (work / "round.json").write_text("{}")

    def checked(folder: Path, **options: Any) -> None:
        if folder == work and work.exists():
            names.append(disk.names(work))
        remove(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", checked)
    assert shop.retrain().outcome == "waiting"
    assert [[*(found or ["never synced"])] for found in names] == [["events"]]


@pytest.mark.parametrize("torn", [b"", b'{"name": "20', b"\0\0\0\0", b"\xff"])
def test_a_torn_state_file_restarts_the_round(shop: Shop, torn: bytes) -> None:
    notes = shop.models / ".retraining" / "round.json"
    notes.parent.mkdir(parents=True)
    notes.write_bytes(torn)
    lines = StringIO()
    outcome = run_trainer(shop.settings, PLAN, None, Console(file=lines), shop.trainer)
    assert (outcome.outcome, notes.exists()) == ("waiting", False)
    assert lines.getvalue().count("round.json' is damaged") == 1

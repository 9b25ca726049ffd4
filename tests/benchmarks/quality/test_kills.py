"""Killed trainings, shortened; and detection of a different model."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.harness.training_workers import POLL_S, Worker
from benchmarks.quality.training import kills
from model.artifact import model_directory
from tests.model.conftest import shop_rows, write_rows

COUNTS = """
import sys, time
from pathlib import Path
out, difference = Path(sys.argv[1]), sys.argv[2]
out.mkdir(exist_ok=True)
was_begun = (out / "begun").exists()
(out / "begun").touch()
until_s = time.process_time() + 0.2
while time.process_time() < until_s:
    pass
for name in sys.argv[3:]:
    (out / name).write_text(difference if was_begun else "")
"""


def test_killed_trainings_give_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows(tmp_path / "shop", shop_rows()[:600])
    kills.main(alone=1, together=1, torchrun=0, data=data, epochs=2)
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [(row[0].strip(), row[1].strip(), row[5].strip()) for row in rows] == [
        ("one process", "1", "0"),
        ("two processes", "1", "0"),
    ]


class CountingTraining:
    """A process that counts to a number and writes its argument."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        log.touch()
        self.log = log
        self._process = subprocess.Popen([sys.executable, "-S", "-c", COUNTS, *arguments])
        self.workers = [Worker(self._process.pid)]

    def wait(self) -> None:
        while self.workers[0].is_running():
            time.sleep(POLL_S)
        assert self._process.wait() == 0

    def end_others(self) -> None:
        self._process.wait()


@dataclass
class CountingWay(kills.Way):
    """Trainings whose result depends on this after a kill."""

    difference: str = ""
    name: str = "counting"
    count: int = 1
    is_torchrun: bool = False
    options: Sequence[str] = field(default_factory=list)
    folder: Path = Path()

    def start(self, name: str) -> kills.RunningTraining:
        files = (*kills.COMPARED, model_directory.MANIFEST)
        return CountingTraining([str(self.folder / name), self.difference, *files], self.folder / "log")


@pytest.mark.parametrize("difference", ["", "x"])
def test_a_different_model_is_detected(tmp_path: Path, difference: str) -> None:
    way = CountingWay(folder=tmp_path, difference=difference)
    outcome = kills.disturb(way, 3, random.Random(0))
    assert outcome.kills == 3
    assert outcome.trainings <= 3
    assert bool(outcome.different) == bool(difference)

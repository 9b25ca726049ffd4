"""Progress lines of jobs without a terminal: regular, and with the state of the job."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import BarColumn, TextColumn

from app.jobs.reports import training_progress
from app.jobs.reports.job_progress import SILENCE_S, JobProgress, ShareColumn, TimeLeftColumn, announced, counted
from app.jobs.reports.phase_times import MIB
from app.jobs.reports.training_progress import TrainingProgress
from model.training.loop import EpochReport
from tests.app.conftest import write_model
from tests.waiting import wait_until


class Clock:
    """A clock that moves only when set."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class Output:
    """Captured output of a job without a terminal."""

    def __init__(self, *, is_terminal: bool = False) -> None:
        self._file = io.StringIO()
        self.console = Console(file=self._file, force_terminal=is_terminal, width=40)

    @property
    def lines(self) -> list[str]:
        return self._file.getvalue().splitlines()


def progress_of(output: Output, clock: Clock) -> JobProgress:
    columns = TextColumn("{task.description}"), BarColumn(), ShareColumn(), TimeLeftColumn()
    return JobProgress(*columns, console=output.console, get_time=clock)


class TestLines:
    def test_are_printed_after_a_silence(self) -> None:
        output, clock = Output(), Clock()
        progress = progress_of(output, clock)
        progress.add_task("reading", total=None)
        clock.now_s += SILENCE_S - 1
        progress.break_silence()
        assert output.lines == []
        clock.now_s += 1
        progress.break_silence()
        progress.break_silence()
        assert output.lines == ["reading"]
        clock.now_s += SILENCE_S - 1
        progress.say("something else [as it is]")
        clock.now_s += SILENCE_S - 1
        progress.break_silence()
        assert output.lines == ["reading", "something else [as it is]"]
        clock.now_s += 1
        progress.break_silence()
        assert output.lines[2:] == ["reading"]

    def test_show_the_share_done_and_the_remaining_time(self) -> None:
        output, clock = Output(), Clock()
        progress = progress_of(output, clock)
        task = progress.add_task("items", total=400)
        clock.now_s += 50
        progress.update(task, completed=100)
        progress.break_silence()
        clock.now_s += 150
        progress.update(task, completed=400)
        progress.break_silence()
        assert output.lines == ["items, 25% done, 0:02:30 left", "items, 100% done"]

    def test_are_printed_while_the_job_is_busy(self) -> None:
        output = Output()
        with JobProgress(TextColumn("{task.description}"), console=output.console, silence_s=0.01) as progress:
            progress.add_task("reading", total=None)
            wait_until(lambda: output.lines.count("reading") >= 3)
        assert "progress" not in {thread.name for thread in threading.enumerate()}

    def test_are_not_printed_on_a_terminal(self) -> None:
        output = Output(is_terminal=True)
        with JobProgress(TextColumn("{task.description}"), console=output.console, silence_s=0.0) as progress:
            progress.add_task("reading", total=None)
            assert "progress" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_progress, "resident_bytes", lambda: 1_234 * MIB)


@pytest.mark.usefixtures("_memory")
class TestTraining:
    def test_shows_stage_epoch_share_time_rate_and_memory(self) -> None:
        output, clock = Output(), Clock()
        progress = TrainingProgress(4, 2, output.console, clock)

        def line() -> str:
            clock.now_s += SILENCE_S
            progress.break_silence()
            return output.lines[-1]

        progress.stage("reading data")
        assert line() == "reading data, 1,234 MiB"
        progress.stage("computing the codes of 2,000 items")
        assert line() == "computing the codes of 2,000 items, 1,234 MiB"
        progress.batch(0, 0.1, 7.5, 10_000)
        clock.now_s += 80
        progress.batch(0, 0.6, 7.25, 10_000)  # half an epoch in 80 s, and 20 s later a line; the reading is not counted
        assert line() == "epoch 1 of 4, loss 7.250, 15% done, 0:11:20 left, 50 events/s, 1,234 MiB"
        progress.stage("validating epoch 1, 50%, 0:00:10 to go")
        assert line().startswith("validating epoch 1, 50%, 0:00:10 to go, 15% done, 0:")
        progress.epoch(EpochReport(0, 7.0, 0.125, 0.25, 160.0))
        assert output.lines[-1] == "epoch 1 of 4: loss 7.0000, validation HR@10 0.2500 NDCG@10 0.1250 (160 s)"
        progress.epoch(EpochReport(1, 7.0, 0.125, 0.25, 160.0, {"strength": 3.0}))
        assert output.lines[-1].endswith(" NDCG@10 0.1250 with lift 3 (160 s)")
        progress.batch(3, 1.0, 6.0, 10_000)
        progress.stage("writing the model")
        assert line() == "writing the model, 100% done, 325 events/s, 1,234 MiB"

    def test_estimates_the_remaining_time_after_a_resume(self) -> None:
        output, clock = Output(), Clock()
        progress = TrainingProgress(4, 2, output.console, clock)
        progress.batch(2, 0.5, 7.0, 10_000)
        clock.now_s += 100
        progress.batch(3, 0.0, 7.0, 10_000)
        progress.break_silence()
        assert output.lines == ["epoch 4 of 4, loss 7.000, 75% done, 0:03:20 left, 50 events/s, 1,234 MiB"]

    def test_names_the_reason_for_early_stopping(self) -> None:
        output = Output()
        with TrainingProgress(4, 2, output.console) as progress:
            for epoch in range(3):
                progress.epoch(EpochReport(epoch, 7.0, 0.125 - epoch / 100, 0.25, 1.0))
        assert output.lines[3] == "stopped early after epoch 3: no improvement on validation for 2 epochs"
        with TrainingProgress(3, 2, output.console) as progress:
            progress.epoch(EpochReport(2, 7.0, 0.125, 0.25, 1.0))
        assert sum("stopped" in line for line in output.lines) == 1


def test_announcements_and_counts_are_printed_as_lines() -> None:
    output = Output()
    with announced("reading [1]", output.console) as announce:
        announce("fitting [2]")
    with counted("users", output.console) as on_progress:
        on_progress(12_345)
    assert any(line.startswith("12,345 users") for line in output.lines)
    assert "" not in output.lines


def test_an_interruption_after_the_end_says_that_the_model_is_complete(tmp_path: Path) -> None:
    out = write_model(tmp_path / "model")
    assert training_progress.after_interruption(out) == "interrupted after the model was complete"

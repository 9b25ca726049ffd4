"""The progress of long jobs: a bar on a terminal; elsewhere a line whenever nothing was printed for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text
from typing_extensions import override

SILENCE_S = 20.0  # the longest one of a job whose output is not a terminal, so that 30 s of a log always have a line


class ShareColumn(ProgressColumn):
    """The completed share of the task; empty at 0, or if the total is unknown."""

    @override
    def render(self, task: Task) -> Text:
        return Text(f"{task.percentage:.0f}% done" if task.total and task.completed else "")


class TimeLeftColumn(ProgressColumn):
    """The estimated time left, from the progress since the start. Empty if no estimate is possible.

    The field ``done_before`` of a task is the part that an earlier run of the job had completed.
    """

    @override
    def render(self, task: Task) -> Text:
        done = task.completed - task.fields.get("done_before", 0.0)
        if not (task.total and task.elapsed and done > 0) or task.finished:
            return Text("")
        left_s = task.elapsed * (task.total - task.completed) / done
        return Text(f"{timedelta(seconds=round(left_s))} left")


class RateColumn(ProgressColumn):
    """The progress per second since the start. Empty if there is none yet.

    The field ``each`` of a task is the number of units in one of its steps, such as the events of an epoch.
    """

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    @override
    def render(self, task: Task) -> Text:
        done = (task.completed - task.fields.get("done_before", 0.0)) * task.fields.get("each", 1)
        elapsed_s = task.finished_time or task.elapsed
        return Text(f"{done / elapsed_s:,.0f} {self._unit}/s" if done > 0 and elapsed_s else "")


class JobProgress(Progress):
    """Shows a bar for every task on a terminal.

    Elsewhere it prints the texts of the columns as a line for every task, whenever nothing was printed for
    ``silence_s`` seconds. Lines of ``say`` count as printed.
    """

    def __init__(
        self,
        *columns: ProgressColumn,
        console: Console,
        is_transient: bool = False,
        silence_s: float = SILENCE_S,
        get_time: Callable[[], float] | None = None,
    ) -> None:
        self._writes_lines = not console.is_terminal
        super().__init__(
            *columns, console=console, transient=is_transient, auto_refresh=not self._writes_lines, get_time=get_time
        )
        self._silence_s = silence_s
        self._spoke_s = self.get_time()
        self._stopped = threading.Event()
        self._writer = threading.Thread(target=self._write_lines, name="progress", daemon=True)

    @override
    def start(self) -> None:
        super().start()
        if self._writes_lines:
            self._spoke_s = self.get_time()
            self._writer.start()

    @override
    def stop(self) -> None:
        self._stopped.set()
        if self._writer.is_alive():
            self._writer.join()
        if self._writes_lines and self.live.transient:
            self.live.stop()  # the base class would print an empty line
        else:
            super().stop()

    def say(self, line: str) -> None:
        """Print a line verbatim, without markup or colours."""
        self._spoke_s = self.get_time()
        print_line(self.console, line)

    def break_silence(self) -> None:
        """Print the progress of the tasks, if nothing was printed for ``silence_s`` seconds."""
        if self.get_time() - self._spoke_s < self._silence_s:
            return
        for task in self.tasks:
            self.say(self._line(task))

    def _line(self, task: Task) -> str:
        rendered = [column(task) for column in self.columns if isinstance(column, ProgressColumn)]
        return ", ".join(text.plain.strip() for text in rendered if isinstance(text, Text) and text.plain.strip())

    def _write_lines(self) -> None:
        while not self._stopped.wait(min(1.0, self._silence_s)):
            self.break_silence()


def print_line(console: Console, text: str) -> None:
    """Print a line verbatim, without markup, colours or added line breaks."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def announced(what: str, console: Console) -> Iterator[Callable[[str], None]]:
    """Show the current step of a job and its duration. Yields a function that announces the next step."""
    columns = TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with JobProgress(*columns, console=console, is_transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda now: progress.update(task, description=now)


@contextmanager
def counted(noun: str, console: Console) -> Iterator[Callable[[int], None]]:
    """Show a count of a job's progress, such as users, and its duration. Yields a function that sets the count.

    Nothing is left of it when the job fails before it counts anything.
    """
    columns = TextColumn(f"{{task.completed:,}} {noun}"), TimeElapsedColumn(), RateColumn(noun.split()[0])
    with JobProgress(*columns, console=console) as progress:
        task = progress.add_task(noun, total=None)
        try:
            yield lambda done: progress.update(task, completed=done)
        except BaseException:
            progress.live.transient = progress.tasks[0].completed == 0
            raise

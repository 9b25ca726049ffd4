"""The consoles of the commands: results go to standard output, errors to standard error."""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from typing_extensions import override

from app.jobs.reports.job_progress import print_line

if TYPE_CHECKING:
    from app.settings import StoreSettings

WIDEST_TABLE = 1_000

console = Console()
error_console = Console(stderr=True)


class LogLines(io.StringIO):
    """A text file whose lines go to a logger."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger

    @override
    def write(self, text: str) -> int:
        for line in filter(None, text.splitlines()):
            self._logger.info("%s", line)
        return len(text)


class CommandWarnings(logging.Handler):
    """Prints warnings as errors of commands are printed, while the log is not configured.

    printed  the messages so far
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.printed: set[str] = set()

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.printed.add(record.getMessage())
        say(f"lisarec: {self.format(record)}", error_console)


def job_console(settings: StoreSettings, job: str) -> Console:
    """Return the console of a long-running job. With LISAREC_LOG_FORMAT=json, its lines go to the log.

    job  the module of the job; names its logger
    """
    from app.observability import log_format

    log_format.configure(settings.log_level, settings.log_format)
    if settings.log_format == "text":
        return console
    return Console(file=LogLines(logging.getLogger(job)), force_terminal=False)


def print_table(table: Table, to: Console = console) -> None:
    """Print a table in full: where the console is narrower, such as in a pipe, its lines are longer."""
    table.width = to.measure(table, options=to.options.update(width=WIDEST_TABLE)).maximum
    to.print(table, crop=False)


def say(text: str, to: Console = console) -> None:
    """Print a line verbatim, without markup or colours."""
    print_line(to, text)

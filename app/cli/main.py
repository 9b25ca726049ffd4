"""The command line. Commands import modules when they run, because importing torch takes seconds."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from app.cli import data, event_log, generations, items, kafka, keys, models, service
from app.cli.console import CommandWarnings, error_console, say
from app.cli.option_groups import ungrouped

COMMANDS: dict[str, Callable[..., None]] = {
    "train": models.train,
    "evaluate": models.evaluate,
    "sign": keys.sign,
    "verify": keys.verify,
    "serve": service.serve,
    "rebuild": generations.rebuild,
    "activate": generations.activate,
    "experiment": generations.experiment,
    "compare": generations.compare,
    "drop": generations.drop,
    "archive": event_log.archive,
    "retrain": generations.retrain,
    "backup": event_log.backup,
    "restore": event_log.restore,
    "repair": event_log.repair,
    "erase-tenant": event_log.erase_tenant,
    "audit": event_log.audit,
    "consume": kafka.consume,
    "publish": kafka.publish,
    "recommend": data.recommend,
    "replay": data.replay,
    "check": data.check,
    "data": data.download_data,
    "demo": service.demo,
    "mcp": service.mcp,
    "bench": service.bench,
}

cli = typer.Typer(
    help="lisarec: real-time recommendations for online shops.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for name, command in COMMANDS.items():
    cli.command(name)(ungrouped(command))


def _print_version(wanted: bool) -> None:
    if wanted:
        from app.observability.version import own_version

        say(f"lisarec {own_version()}")
        raise typer.Exit


@cli.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Handle the options that precede a command."""


cli.add_typer(items.cli, name="items")
cli.add_typer(keys.cli, name="keys")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. A failure prints one line that says what to do and exits 1; a usage error exits 2."""
    given = sys.argv[1:] if arguments is None else [*arguments]
    logging.lastResort = warnings = CommandWarnings()
    try:
        cli(given, prog_name="lisarec", obj=given)
    except Exception as exc:
        if not isinstance(exc, _expected_failures()):
            raise
        if str(exc) not in warnings.printed:
            error_console.print(f"lisarec: {exc}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(1) from None


def _expected_failures() -> tuple[type[Exception], ...]:
    """Return the exceptions whose message says what to do. Those of data, model and training are ValueErrors."""
    from app.jobs.datasets.download import DownloadError
    from app.jobs.kafka.failures import KafkaFailure
    from app.jobs.replay import ReplayError
    from storage.errors import StorageError

    return DownloadError, KafkaFailure, ReplayError, StorageError, ValueError, OSError

"""Commands about the event log and the audit log: archive, backup, restore, repair, audit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from app.cli.console import console, job_console, say
from app.cli.options import LogOptions, MetricsOption, ModelOption, StoreOptions, place_of
from app.jobs.reports.job_progress import counted


@dataclass(frozen=True)
class ArchiveOptions(LogOptions):
    """Which log goes into which archive."""

    redis_url: Annotated[str | None, typer.Option(help="Redis whose log is moved.", metavar="URL")] = None
    data_dir: Annotated[
        Path | None, typer.Option(help="Directory of the SQLite store whose log is copied.", metavar="DIR")
    ] = None
    archive_dir: Annotated[
        str | None, typer.Option(help="Archive to write. It is created if it does not exist.", metavar="DIR|URL")
    ] = None


def archive(
    log: ArchiveOptions,
    once: Annotated[bool, typer.Option("--once", help="One turn, in place of a turn every --every seconds.")] = False,
    every: Annotated[float, typer.Option(min=0, help="Seconds between two turns.")] = 60,
    keep_tail: Annotated[
        float, typer.Option(min=0, help="Seconds for which an archived event stays in Redis at least.")
    ] = 3600,
    keep_days: Annotated[
        int | None,
        typer.Option(min=1, help="Whole days after which archived events are dropped. Default: never.", metavar="DAYS"),
    ] = None,
    metrics: MetricsOption = None,
) -> None:
    """Move the event log into Parquet files, each event once.

    It can be killed at any time and continues where it stopped. Options that are missing come from the environment.
    Services on Redis need the same archive as --archive-dir, and 'lisarec train --data DIR' trains on it.
    """
    from app.jobs.archive import ArchiverMetrics, ArchiverPlan, run_archiver

    settings = log.settings()
    if settings.archive_dir is None:
        raise typer.BadParameter("give the archive with --archive-dir DIR, or LISAREC_ARCHIVE_DIR in the environment")
    numbers = ArchiverMetrics()
    if metrics is not None:
        numbers.listen(metrics.host, metrics.port)
    lines = job_console(settings, run_archiver.__module__)
    plan = ArchiverPlan(None if once else every, keep_tail, keep_days)
    run_archiver(settings, plan, partial(say, to=lines), numbers)


def backup(
    out: Annotated[str, typer.Option(help="File to write, such as log.jsonl.gz.", metavar="FILE|URL")],
    log: LogOptions,
) -> None:
    """Write the whole log, archived events included, to one file, from which 'lisarec restore' fills any store.

    The service keeps running. The file appears when all of it is on disk.
    """
    from app.jobs import backup as backups

    settings = log.settings()
    with counted("entries", console) as on_progress:
        entries = asyncio.run(backups.backup(settings, place_of(out), on_progress))
    say(f"{out}: {entries:,} entries of the log")


def restore(
    file: Annotated[str, typer.Argument(help="Back-up that 'lisarec backup' wrote.", metavar="FILE|URL")],
    model: ModelOption,
    store: StoreOptions,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue after an interruption. Nothing counts twice.")
    ] = False,
) -> None:
    """Fill an empty store from a back-up, and fold its events for a model."""
    from app.jobs import backup as backups

    settings = store.settings()
    with counted("entries", console) as on_progress:
        entries = asyncio.run(
            backups.restore(settings, place_of(file), place_of(model), resume=resume, on_progress=on_progress)
        )
    serve = store.command(f"lisarec serve --model {quote(model)}")
    say(f"{entries:,} entries restored; try {serve}")


def repair(
    log: LogOptions,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Continue without acknowledged events that the store has lost.")
    ] = False,
) -> None:
    """Rebuild damaged heads and indexes of users in Redis from log and archive.

    Services keep running. A store that has lost acknowledged events takes none until the loss is accepted.
    """
    from app.jobs import backup as backups

    settings = log.settings()
    users = asyncio.run(backups.repair(settings, accept_loss=accept_loss))
    say(f"{users:,} users repaired")
    if accept_loss:
        say("what the store holds now counts; services go on within a second or so")


def audit(
    store: StoreOptions,
    user: Annotated[
        str | None,
        typer.Option(help="Only actions on this user. The log has a keyed hash in place of the id.", metavar="ID"),
    ] = None,
) -> None:
    """Print the audit log as lines of JSON, oldest first: who has done what, and when."""
    from app.jobs.backup import audit_log
    from app.schemas.operations import AuditedAction

    async def print_all() -> None:
        async for one in audit_log(store.settings(), user):
            say(AuditedAction.of(one).model_dump_json())

    asyncio.run(print_all())

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

    redis_url: Annotated[str | None, typer.Option(help="Move the log of this Redis.", metavar="URL")] = None
    data_dir: Annotated[
        Path | None, typer.Option(help="Copy the log of the SQLite store in this directory.", metavar="DIR")
    ] = None
    archive_dir: Annotated[
        str | None, typer.Option(help="Where the archive is, or will be made.", metavar="DIR|URL")
    ] = None


def archive(
    log: ArchiveOptions,
    once: Annotated[bool, typer.Option("--once", help="One turn, instead of a turn every --every seconds.")] = False,
    every: Annotated[float, typer.Option(min=0, help="Seconds between two turns.")] = 60,
    keep_tail: Annotated[
        float, typer.Option(min=0, help="Seconds that an archived event stays in Redis at least.")
    ] = 3600,
    keep_days: Annotated[
        int | None,
        typer.Option(min=1, help="Forget archived events after so many whole days; default: never.", metavar="DAYS"),
    ] = None,
    metrics: MetricsOption = None,
) -> None:
    """Move the event log into Parquet files, each event once; it may be killed at any time and goes on where it was.

    What is not given comes from LISAREC_* in the environment. Afterwards 'lisarec train --data DIR' trains on it, and
    services on Redis need the same directory as --archive-dir.
    """
    from app.jobs.archive import ArchiverMetrics, ArchiverPlan, run_archiver

    settings = log.settings()
    if settings.archive_dir is None:
        raise typer.BadParameter("give the archive with --archive-dir DIR, or LISAREC_ARCHIVE_DIR in the environment")
    numbers = ArchiverMetrics()
    if metrics is not None:
        numbers.listen(metrics.host, metrics.port)
    lines = job_console(settings, "app.jobs.archive")
    plan = ArchiverPlan(None if once else every, keep_tail, keep_days)
    run_archiver(settings, plan, partial(say, to=lines), numbers)


def backup(
    out: Annotated[str, typer.Option(help="File to write, such as log.jsonl.gz.", metavar="FILE|URL")],
    log: LogOptions,
) -> None:
    """Write the whole log, archived events included, to one file, from which 'restore' fills any store.

    The service goes on meanwhile. The file appears when all of it is on disk.
    """
    from app.jobs import backup as backups

    settings = log.settings()
    with counted("entries", console) as on_progress:
        entries = asyncio.run(backups.backup(settings, place_of(out), on_progress))
    say(f"{out}: {entries:,} entries of the log")


def restore(
    file: Annotated[str, typer.Argument(help="That 'backup' wrote.", metavar="FILE|URL")],
    model: ModelOption,
    store: StoreOptions,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on after an interruption; nothing counts twice.")
    ] = False,
) -> None:
    """Fill an empty store with a back-up, and fold its events for a model."""
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
        bool, typer.Option("--accept-loss", help="Go on without acknowledged events that the store has lost.")
    ] = False,
) -> None:
    """Make again, from log and archive, what tells where users' logs are, where it is damaged.

    Services may go on meanwhile. A store that has lost acknowledged events takes none until that is accepted.
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
        str | None, typer.Option(help="Only what was done to this user, whose id is nowhere in the log.", metavar="ID")
    ] = None,
) -> None:
    """Print who has done what, oldest first, as lines of JSON: keys, models, experiments, scenarios, users, exports."""
    from app.jobs.backup import audit_log
    from app.schemas.operations import AuditedAction

    async def print_all() -> None:
        async for one in audit_log(store.settings(), user):
            say(AuditedAction.of(one).model_dump_json())

    asyncio.run(print_all())

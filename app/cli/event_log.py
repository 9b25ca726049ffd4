"""Commands for the event log and the audit log: archive, backup, restore, repair, erase-tenant, audit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from app.cli.console import console, job_console, say
from app.cli.options import (
    LogOptions,
    MetricsOption,
    ModelOption,
    StoreOptions,
    TenantsOption,
    models_of_tenants,
    place_of,
)
from app.jobs.reports.job_progress import counted


@dataclass(frozen=True)
class ArchiveOptions(LogOptions):
    """Options that name the log and the archive."""

    redis_url: Annotated[
        str | None,
        typer.Option(help="Redis whose event log is moved. Default: LISAREC_REDIS_URL, else SQLite.", metavar="URL"),
    ] = None
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the SQLite store whose event log is copied. Default: LISAREC_DATA_DIR, else state.",
            metavar="DIR",
        ),
    ] = None
    archive_dir: Annotated[
        str | None, typer.Option(help="Archive to write. It is created if it doesn't exist.", metavar="DIR|URL")
    ] = None


def archive(
    log: ArchiveOptions,
    once: Annotated[
        bool, typer.Option("--once", help="Archive once and exit, instead of every --every seconds.")
    ] = False,
    every: Annotated[float, typer.Option(min=0, help="Seconds between two runs.")] = 60,
    keep_tail: Annotated[
        float, typer.Option(min=0, help="Minimum number of seconds that an archived event stays in Redis.")
    ] = 3600,
    keep_days: Annotated[
        int | None,
        typer.Option(
            min=1, help="Retention in days: older archived events are deleted. Default: unlimited.", metavar="DAYS"
        ),
    ] = None,
    metrics: MetricsOption = None,
) -> None:
    """Move the event log into Parquet files, each event once.

    The command is safe to kill: the next run continues. Missing options come from the environment.
    Services on Redis need the same archive in --archive-dir. To train on it, run 'lisarec train --data DIR'.
    """
    from app.jobs.archive import ArchiverMetrics, ArchiverPlan, run_archiver

    settings = log.settings()
    if settings.archive_dir is None:
        raise typer.BadParameter("no archive; pass --archive-dir DIR or set LISAREC_ARCHIVE_DIR")
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
    """Back up the whole event log, archived events included, to one file for 'lisarec restore'.

    The service keeps running. The file appears once it is complete and synced to disk.
    """
    from app.jobs import event_log

    settings = log.settings()
    with counted("entries", console) as on_progress:
        entries = asyncio.run(event_log.backup(settings, place_of(out), on_progress))
    say(f"{out}: {entries:,} log entries")


def restore(
    file: Annotated[str, typer.Argument(help="Backup file that 'lisarec backup' wrote.", metavar="FILE|URL")],
    model: ModelOption,
    tenant: TenantsOption = None,
    *,
    store: StoreOptions,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted restore. No event counts twice.")
    ] = False,
) -> None:
    """Restore a backup into an empty store, and fold the events of each tenant for its model."""
    from app.jobs import event_log

    settings = store.settings()
    others = models_of_tenants(tenant or ())
    if settings.tenant in others:
        raise typer.BadParameter(f"tenant {settings.tenant!r} has two models; --model is the model of LISAREC_TENANT")
    models = {name: place_of(text) for name, text in {settings.tenant: model, **others}.items()}
    with counted("entries", console) as on_progress:
        entries = asyncio.run(
            event_log.restore(settings, place_of(file), models, resume=resume, on_progress=on_progress)
        )
    options = "".join(f" --tenant {quote(one)}" for one in tenant or ())
    serve = store.command(f"lisarec serve --model {quote(model)}{options}{' --keys FILE' if options else ''}")
    say(f"{entries:,} entries restored. Next: {serve}")


def repair(
    log: LogOptions,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss", help="Accept that the store has lost acknowledged events, and continue without them."
        ),
    ] = False,
) -> None:
    """Rebuild users' damaged heads and indexes in Redis from the event log and the archive.

    Services keep running. A store that has lost acknowledged events rejects new ones until you accept the loss.
    """
    from app.jobs import event_log

    settings = log.settings()
    users = asyncio.run(event_log.repair(settings, accept_loss=accept_loss))
    say(f"{users:,} users repaired")
    if accept_loss:
        say("loss accepted; services continue with the remaining events within about a second")
    if accept_loss and settings.redis_url is not None:
        say(
            "if Redis came back empty, activate the model again, and restore what no log has: "
            "see 'Recover from lost data' in docs/how-to/operate/repair.md"
        )


def erase_tenant(
    tenant: Annotated[str, typer.Argument(help="Tenant that no service serves any more.", metavar="TENANT")],
    log: LogOptions,
    yes: Annotated[bool, typer.Option("--yes", help="Erase without asking.")] = False,
) -> None:
    """Erase a tenant: its users, events, items, scenarios, experiments and statistics.

    The command is safe to kill: run it again. The tenant's audit log stays, and so do copies elsewhere, such as
    backups, keys and models.
    """
    from app.jobs import event_log

    settings = log.settings(tenant=tenant)
    if not yes:
        typer.confirm(f"Erase all users and items of {tenant} for ever?", abort=True)
    with counted("users", console) as on_progress:
        erased = asyncio.run(event_log.erase_tenant(settings, on_progress))
    say(f"{tenant} is erased, with {erased:,} users; the archiver's next run removes archived events")
    say(
        "not erased: the audit log; keys, models, backups and other copies: see 'Remove a tenant' in "
        "docs/how-to/operate/tenants.md"
    )


def audit(
    store: StoreOptions,
    user: Annotated[
        str | None,
        typer.Option(help="Show only actions on this user. The log has a keyed hash in place of the id.", metavar="ID"),
    ] = None,
) -> None:
    """Print the audit log, oldest first: who did what, and when. Each line is a JSON object."""
    from app.jobs import event_log
    from app.schemas.operations import AuditedAction

    async def print_all() -> None:
        async for one in event_log.audit_log(store.settings(), user):
            say(AuditedAction.of(one).model_dump_json())

    asyncio.run(print_all())

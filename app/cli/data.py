"""Commands about tables: download a data set, post it to a running service, write the lists of all users."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn

from app.cli.console import console, say
from app.cli.options import (
    DataOptions,
    EventsKeyOption,
    LogOptions,
    MappingOptions,
    UrlOption,
    bad_values,
    service_settings,
)
from app.jobs.reports.job_progress import JobProgress, TimeLeftColumn, counted

if TYPE_CHECKING:
    from app.jobs.replay import ReplayCounts


def download_data(
    name: Annotated[str, typer.Argument(help="Data set: ml-1m, beauty or ml-latest-small.", metavar="NAME")],
    out: Annotated[
        Path | None, typer.Option(help="Data directory to write. Default: data/NAME.", metavar="DIR")
    ] = None,
) -> None:
    """Download a public data set and check its hash."""
    from app.jobs.datasets.download import download, find

    public_set = find(name)
    target = out or Path("data") / name
    say(f"{public_set.title}\nTerms of use: {public_set.terms}; {public_set.terms_url}")
    with JobProgress(TextColumn(name), BarColumn(), DownloadColumn(), TimeLeftColumn(), console=console) as bar:
        task = bar.add_task(name, total=None)
        download(name, target, lambda done, size: bar.update(task, completed=done, total=size))
    say(f"{target} is ready; try 'lisarec train --data {target} --out models/{name}'")


def check(
    data: Annotated[Path, typer.Argument(help="Data directory, or a shop's table of events.", metavar="DIR|FILE")],
    options: MappingOptions,
) -> None:
    """Check a shop's tables: list every problem and its fix.

    The exit status is 1 when the tables cannot be read.
    """
    from app.jobs.datasets.mapped_copy import blocking, in_words, warnings
    from model.data.exports.checks import examine

    mapping = options.mapping()
    tables = examine(data, mapping)
    stops = {stem: blocking(table, mapping) for stem, table in tables.items()}
    for stem, table in tables.items():
        readable = int((~table.bad).sum())
        known = "" if table.stops and readable else f", {readable:,} of which can be read"  # not without columns
        say(f"{table.path}: {len(table.bad):,} lines of {stem}{known}")
        for finding in table.findings:
            kind = "error" if finding in stops[stem] else "left out" if finding.stops else "note"
            say(f"  {kind}: {in_words(finding)}")
    if any(stops.values()):
        raise typer.Exit(1)
    for line in warnings(tables.values()):
        say(line)
    arguments = f"--data {quote(str(data))}{options.arguments()}"
    say(f"these tables can be read; try 'lisarec train {arguments} --out models/shop'")


def replay(
    source: DataOptions,
    url: UrlOption = "http://127.0.0.1:8000",
    batch: Annotated[int, typer.Option(min=1, max=1000, help="Events in one request.")] = 500,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time, never two for one user.")] = 4,
    hold_out: Annotated[int, typer.Option(min=0, help="Last events of each user to leave out.")] = 0,
    key_file: EventsKeyOption = None,
) -> None:
    """Post a data set as events to a running service. Repeating it counts nothing twice."""
    from app.jobs.replay import histories, wait_for_service
    from app.jobs.replay import replay as replay_events
    from model.data.readers import read_interactions

    interactions = read_interactions(source.directory())
    lengths = interactions.starts[1:] - interactions.starts[:-1]
    events = int((lengths - hold_out).clip(0).sum())
    wait_for_service(url, say)
    with JobProgress(TextColumn("events"), BarColumn(), MofNCompleteColumn(), TimeLeftColumn(), console=console) as bar:
        task = bar.add_task("events", total=events)
        counts = asyncio.run(
            replay_events(
                histories(interactions, hold_out),
                url,
                batch_size=batch,
                concurrency=concurrency,
                key=None if key_file is None else key_file.read_text(encoding="utf-8").strip(),
                on_sent=lambda sent: bar.advance(task, sent),
            )
        )
    say(_replay_summary(counts))


def _replay_summary(counts: ReplayCounts) -> str:
    return (
        f"{counts.accepted:,} events accepted, {counts.duplicates:,} known before, "
        f"{counts.unknown_items:,} of unknown items; {counts.requests:,} requests, {counts.retries:,} sent again"
    )


def _time(text: str) -> int:
    """Return microseconds since the epoch."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time such as 2026-11-01 or 2026-11-01T08:00:00+01:00") from None
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1e6)


@dataclass(frozen=True)
class WishOptions:
    """Which lists are made."""

    scenario: Annotated[str | None, typer.Option(help="Scenario whose settings the lists have.")] = None
    k: Annotated[int | None, typer.Option("--k", min=1, help="Items of a list. Default: the scenario's, or 10.")] = None
    params: Annotated[
        str | None, typer.Option(help="Parameters of the scenario, such as '{\"max_price\": 50}'.", metavar="JSON")
    ] = None

    def wishes(self) -> dict[str, object]:
        """Return the fields of requests that the options stand for; raise BadParameter."""
        from pydantic import ValidationError

        from app.schemas.recommendations import RecommendationRequest

        try:
            given = {**vars(self), "params": None if self.params is None else json.loads(self.params)}
            wishes = {name: value for name, value in given.items() if value is not None}
            RecommendationRequest.model_validate({**wishes, "user_id": "0"})
        except json.JSONDecodeError as exc:
            raise typer.BadParameter(f"--params is no JSON: {exc}") from None
        except ValidationError as exc:
            raise bad_values(exc) from None
        return wishes


def recommend(
    out: Annotated[Path, typer.Option(help="Parquet file to write, such as lists.parquet.", metavar="FILE")],
    log: LogOptions,
    wishes: WishOptions,
    *,
    users: Annotated[
        str, typer.Option(help="All users, or those of a file with one id a line.", metavar="all|FILE")
    ] = "all",
    since: Annotated[
        int | None, typer.Option(parser=_time, help="Only users with an event since this time.", metavar="TIME")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to use if none was activated.", metavar="DIR|URL")] = None,
    models_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder of the active model. Default: the folder of --model, else models.", metavar="DIR|URL"
        ),
    ] = None,
) -> None:
    """Write the lists of all users to a Parquet file, one row a user, such as for an e-mail.

    It reads the store beside the service at low priority. After an interruption, the same command continues.
    """
    from app.jobs.lists.user_lists import ListPlan, write_lists

    settings = service_settings({**vars(log), "model_dir": model, "models_dir": models_dir})
    user_ids = None if users == "all" else frozenset(Path(users).read_text(encoding="utf-8").splitlines())
    plan = ListPlan(wishes.wishes(), since or 0, user_ids)
    os.nice(10)  # requests have priority
    with counted("users", console) as on_progress:
        counts = asyncio.run(write_lists(settings, plan, out, on_progress))
    short = f"; {counts.short:,} of them are shorter than wanted" if counts.short else ""
    say(f"{out}: lists of {counts.users:,} users{short}")

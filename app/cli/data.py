"""Commands for tables: download a data set, check tables, replay events, export recommendations."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from datetime import datetime
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
    moment,
    read_key,
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
    """Download a public data set and verify its hash."""
    from app.jobs.datasets.download import download, find

    public_set = find(name)
    target = out or Path("data") / name
    say(f"{public_set.title}\nTerms of use: {public_set.terms}; {public_set.terms_url}")
    with JobProgress(TextColumn(name), BarColumn(), DownloadColumn(), TimeLeftColumn(), console=console) as bar:
        task = bar.add_task(name, total=None)
        download(name, target, lambda done, size: bar.update(task, completed=done, total=size))
    say(f"{target} is ready. Next: 'lisarec train --data {target} --out models/{name}'")


def check(
    data: Annotated[Path, typer.Argument(help="Data directory, or a shop's table of events.", metavar="DIR|FILE")],
    options: MappingOptions,
) -> None:
    """Check a shop's tables, and list every problem with its fix.

    The exit status is 1 if the tables can't be used for training.
    """
    from app.jobs.datasets.mapped_copy import blocking, in_words, warnings
    from model.data.exports.checks import examine
    from model.data.exports.event_types import translations_and_weights, types_option
    from model.data.interactions import weight_options

    mapping = options.mapping()
    tables = examine(data, mapping)
    stops = {stem: blocking(table, mapping) for stem, table in tables.items()}
    for stem, table in tables.items():
        readable = int((~table.bad).sum())
        known = (
            "" if table.stops and readable else f", {readable:,} of them readable"
        )  # a table without its columns has no readable lines
        say(f"{table.path}: {len(table.bad):,} lines of {stem}{known}")
        for finding in table.findings:
            kind = "error" if finding in stops[stem] else "left out" if finding.stops else "note"
            say(f"  {kind}: {in_words(finding)}")
    if any(stops.values()):
        raise typer.Exit(1)
    for line in warnings(tables.values()):
        say(line)
    types, weights = translations_and_weights(tables["interactions"])
    of_types = " ".join((*([types_option(types)] if types else ()), weight_options(weights)))
    arguments = f"--data {quote(str(data))}{options.arguments()} {of_types}".rstrip()
    say(f"these tables are ready for training. Next: 'lisarec train {arguments} --out models/shop'")


def replay(
    source: DataOptions,
    url: UrlOption = "http://127.0.0.1:8000",
    batch: Annotated[int, typer.Option(min=1, max=1000, help="Events per request.")] = 500,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Concurrent requests. Events of one user are never sent concurrently.")
    ] = 4,
    hold_out: Annotated[int, typer.Option(min=0, help="Number of each user's last events to omit.")] = 0,
    key_file: EventsKeyOption = None,
) -> None:
    """Send a data set as events to a running service. While a quota of the key is used up, the command waits.

    It is safe to repeat, also with a longer table: lines with the same user, item, type and time count as often as the
    table has them.
    """
    from app.jobs.replay import acceptable_events, histories, wait_for_service
    from app.jobs.replay import replay as replay_events
    from model.data.readers import read_interactions

    key = read_key(key_file)
    found = read_interactions(source.directory())
    interactions = acceptable_events(found, hold_out, say, skips_bad_lines=source.skip_bad_lines)
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
                key=key,
                on_sent=lambda sent: bar.advance(task, sent),
            )
        )
    say(_replay_summary(counts))


def _replay_summary(counts: ReplayCounts) -> str:
    return (
        f"{counts.accepted:,} events accepted, {counts.duplicates:,} duplicates, "
        f"{counts.unknown_items:,} for unknown items; {counts.requests:,} requests, {counts.retries:,} retries"
    )


@dataclass(frozen=True)
class WishOptions:
    """Options that describe the lists."""

    scenario: Annotated[str | None, typer.Option(help="Scenario whose settings apply to the lists.")] = None
    k: Annotated[
        int | None, typer.Option("--k", min=1, help="Length of each list. Default: that of the scenario, or 10.")
    ] = None
    params: Annotated[
        str | None, typer.Option(help="Parameters of the scenario, such as '{\"max_price\": 50}'.", metavar="JSON")
    ] = None

    def wishes(self) -> dict[str, object]:
        """Return the options as fields of a request. Raise BadParameter if they are invalid."""
        from pydantic import ValidationError

        from app.schemas.recommendations import RecommendationRequest

        try:
            given = {**vars(self), "params": None if self.params is None else json.loads(self.params)}
            wishes = {name: value for name, value in given.items() if value is not None}
            RecommendationRequest.model_validate({**wishes, "user_id": "0"})
        except json.JSONDecodeError as exc:
            raise typer.BadParameter(f"--params is not valid JSON: {exc}") from None
        except ValidationError as exc:
            raise bad_values(exc) from None
        return wishes


def recommend(
    out: Annotated[Path, typer.Option(help="Parquet file to write, such as lists.parquet.", metavar="FILE")],
    log: LogOptions,
    wishes: WishOptions,
    *,
    users: Annotated[str, typer.Option(help="'all', or a file with one user id per line.", metavar="all|FILE")] = "all",
    since: Annotated[
        datetime | None,
        typer.Option(
            parser=moment,
            help="Include only users with an event since this time, in UTC unless it has an offset.",
            metavar="TIME",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to use if no model is active.", metavar="DIR|URL")] = None,
    models_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder of the active model. Default: the folder of --model, else models.", metavar="DIR|URL"
        ),
    ] = None,
) -> None:
    """Export recommendations for all users to a Parquet file, one row per user, for example for e-mails.

    The command reads the store directly, at low priority. After an interruption, run it again to continue.
    """
    from app.jobs.lists.user_lists import ListPlan, write_lists

    settings = service_settings(**vars(log), model_dir=model, models_dir=models_dir)
    user_ids = None if users == "all" else frozenset(Path(users).read_text(encoding="utf-8").split("\n")) - {""}
    plan = ListPlan(wishes.wishes(), 0 if since is None else int(since.timestamp() * 1e6), user_ids)
    os.nice(10)  # requests have priority
    with counted("users", console) as on_progress:
        counts = asyncio.run(write_lists(settings, plan, out, on_progress))
    short = f"; {counts.short:,} of them are shorter than requested" if counts.short else ""
    damaged = f"; {counts.damaged:,} users have no list, because their data are damaged" if counts.damaged else ""
    unknown = 0 if user_ids is None else len(user_ids) - counts.users - counts.damaged
    no_list = f"; {unknown:,} users of {users!r} have no list: no events, or merged, or erased" if unknown else ""
    say(f"{out}: recommendations for {counts.users:,} users{short}{damaged}{no_list}")

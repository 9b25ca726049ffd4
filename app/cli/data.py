"""Commands that download data sets, and post them to a running service."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from app.cli.console import console, say
from app.cli.options import DataOption, EventsKeyOption, UrlOption

if TYPE_CHECKING:
    from app.jobs.replay import ReplayCounts


def download_data(
    name: Annotated[str, typer.Argument(help="ml-1m, beauty or ml-latest-small.")],
    out: Annotated[
        Path | None, typer.Option(help="Data directory to write; default: data/NAME.", metavar="DIR")
    ] = None,
) -> None:
    """Download a public data set and check its hash."""
    from app.jobs.datasets.download import download, find

    public_set = find(name)
    target = out or Path("data") / name
    say(f"{public_set.title}\nTerms of use: {public_set.terms}; {public_set.terms_url}")
    with Progress(TextColumn(name), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(name, total=None)
        download(name, target, lambda done, size: bar.update(task, completed=done, total=size))
    say(f"{target} is ready; try 'lisarec train --data {target} --out models/{name}'")


def replay(
    data: DataOption,
    url: UrlOption = "http://127.0.0.1:8000",
    batch: Annotated[int, typer.Option(min=1, max=1000, help="Events in one request.")] = 500,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time, never two of one user.")] = 4,
    hold_out: Annotated[int, typer.Option(min=0, help="How many last events of each user to leave out.")] = 0,
    key_file: EventsKeyOption = None,
) -> None:
    """Post a data set as events into a running service. Repeating it counts nothing twice."""
    from app.jobs.replay import histories
    from app.jobs.replay import replay as replay_events
    from model.data.readers import read_interactions

    interactions = read_interactions(data)
    lengths = interactions.starts[1:] - interactions.starts[:-1]
    events = int((lengths - hold_out).clip(0).sum())
    with Progress(
        TextColumn("events"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    ) as bar:
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

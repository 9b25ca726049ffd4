"""The command that imports a shop's items."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

from app.cli.console import console, say
from app.cli.options import UrlOption
from app.jobs.reports.job_progress import JobProgress, TimeLeftColumn

cli = typer.Typer(help="The items of a running service.", no_args_is_help=True)


@cli.command("import")
def import_items(
    file: Annotated[
        Path,
        typer.Argument(
            help="Table with item_id and any of title, categories (a|b), available, vector and properties.",
            metavar="FILE",
        ),
    ],
    url: UrlOption = "http://127.0.0.1:8000",
    key_file: Annotated[
        Path | None,
        typer.Option(help="File with a key that may write the catalogue, where keys are on.", metavar="FILE"),
    ] = None,
) -> None:
    """Say something of many items: .tsv, .csv (.gz) or .parquet.

    An empty cell, like a column that is missing, leaves what was said before. It can be done again.
    The column vector has lists of numbers (.parquet), or JSON arrays: as many numbers for all items.
    Each other column is a property: of its declared type (which a key with the scope admin can read), or of the type
    that all of its cells fit: boolean (true, false), number, time (RFC 3339 with a zone), set (a|b) or text.
    """
    from app.jobs.import_items import held_types, read, send
    from app.jobs.replay import wait_for_service

    key = None if key_file is None else key_file.read_text(encoding="utf-8").strip()
    wait_for_service(url, say)
    items = read(file, held_types(url, key))
    with JobProgress(TextColumn("items"), BarColumn(), MofNCompleteColumn(), TimeLeftColumn(), console=console) as bar:
        task = bar.add_task("items", total=len(items))
        unknown = send(items, url, key, on_sent=lambda sent: bar.advance(task, sent))
    rest = f"; {unknown:,} of them no model has learned yet" if unknown else ""
    say(f"{len(items):,} items noted{rest}")

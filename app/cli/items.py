"""Commands about a shop's items: import them, and drop their vectors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

from app.cli.console import console, say
from app.cli.option_groups import ungrouped
from app.cli.options import MappingOptions, StoreOptions, UrlOption
from app.jobs.reports.job_progress import JobProgress, TimeLeftColumn

cli = typer.Typer(help="The items of a shop.", no_args_is_help=True)


@cli.command("import")
@ungrouped
def import_items(
    file: Annotated[
        Path,
        typer.Argument(
            help="Table with item_id and any of title, categories (a|b), available, vector and properties.",
            metavar="FILE",
        ),
    ],
    options: MappingOptions,
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
    from app.jobs.datasets.mapped_copy import table_of_items
    from app.jobs.import_items import held_types, read, send
    from app.jobs.replay import wait_for_service
    from app.settings import StoreSettings

    table, left_out = table_of_items(file, options.mapping(), StoreSettings().cache_dir)
    for line in left_out:
        say(line)
    key = None if key_file is None else key_file.read_text(encoding="utf-8").strip()
    wait_for_service(url, say)
    items = read(table, held_types(url, key))
    with JobProgress(TextColumn("items"), BarColumn(), MofNCompleteColumn(), TimeLeftColumn(), console=console) as bar:
        task = bar.add_task("items", total=len(items))
        unknown = send(items, url, key, on_sent=lambda sent: bar.advance(task, sent))
    rest = f"; {unknown:,} of them no model has learned yet" if unknown else ""
    say(f"{len(items):,} items noted{rest}")


@cli.command("drop-vectors")
@ungrouped
def drop_vectors(store: StoreOptions) -> None:
    """Take the vectors of all items away: vectors with another number of numbers may be put then.

    Services may go on. New items go by their titles and categories until there are vectors again, and a model that has
    learned these. It can be done again.
    """
    from app.serving.store_factory import opened_store
    from storage.items.audit import COMMAND_LINE, AuditEntry
    from storage.maintenance import vectors

    settings = store.settings()

    async def drop() -> int:
        async with opened_store(settings) as opened:
            dropped = await vectors.drop_vectors(opened, settings.tenant)
            entry = AuditEntry.now(COMMAND_LINE, "items.drop_vectors", details={"vectors": dropped})
            await opened.audit.append(settings.tenant, [entry])
            return dropped

    say(f"{asyncio.run(drop()):,} vectors dropped")

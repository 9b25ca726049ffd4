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

cli = typer.Typer(help="Import items, and drop their vectors.", no_args_is_help=True)


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
        typer.Option(help="File with a key of the scope catalogue:write, if the service has keys.", metavar="FILE"),
    ] = None,
) -> None:
    """Import items from a table (.tsv, .csv, .gz or .parquet) into a running service.

    An empty cell, like a missing column, leaves what was set before. Repeating the import is safe.

    The column vector has lists of numbers (.parquet) or JSON arrays, the same number of numbers for all items.

    Every other column is a property. Its type is the declared one, which a key with the scope admin can read. Otherwise
    it is the first that all cells fit: boolean (true, false), number, time (RFC 3339 with a zone), set (a|b) or text.
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
    """Drop the vectors of all items, so that vectors of another length can be put.

    Services keep running. New items go by titles and categories until there are vectors again, and a model that has
    learned them. Repeating it is safe.
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

"""Commands for a shop's items: import them, and delete their vectors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

from app.cli.console import console, say
from app.cli.option_groups import ungrouped
from app.cli.options import MappingOptions, StoreOptions, UrlOption, read_key, store_settings
from app.jobs.reports.job_progress import JobProgress, TimeLeftColumn

cli = typer.Typer(help="Import items, and delete their live counts or vectors.", no_args_is_help=True)


@cli.command("import")
@ungrouped
def import_items(
    file: Annotated[
        Path,
        typer.Argument(
            help="Table with the column item_id and any of title, categories (a|b), available, vector and properties.",
            metavar="FILE",
        ),
    ],
    options: MappingOptions,
    url: UrlOption = "http://127.0.0.1:8000",
    key_file: Annotated[
        Path | None,
        typer.Option(help="File with a key of the scope catalogue:write, if the service has keys.", metavar="FILE"),
    ] = None,
    empty_removes: Annotated[
        bool,
        typer.Option("--empty-removes", help="Let an empty cell remove a property, a date or the categories."),
    ] = False,
) -> None:
    """Import items from a table (.tsv, .csv, .jsonl, .json, .gz or .parquet) into a running service.

    An empty cell leaves the value unchanged, unless you pass --empty-removes, and so does a missing column. The import
    is safe to repeat.

    The column vector contains lists of numbers (.parquet, .jsonl) or JSON arrays. All vectors have the same length.

    Every other column is a property. A key with the scope admin uses the property's declared type. Otherwise the type
    is the first that fits all cells: boolean (true, false), number, time (RFC 3339 with a zone), set (a|b) or text.

    The mapping of a shop's other tables may be passed as it is: items have no types of events, so --types does nothing.
    """
    from app.jobs.datasets.mapped_copy import table_of_items
    from app.jobs.import_items import held_types, read, send
    from app.jobs.replay import wait_for_service
    from model.data.interactions import DataError

    key = read_key(key_file)
    mapping = options.mapping()
    table, left_out = table_of_items(file, mapping, store_settings().cache_dir)
    for line in left_out:
        say(line)
    wait_for_service(url, say)
    try:
        items = read(table, held_types(url, key), mapping, empty_removes=empty_removes)
    except DataError as exc:
        raise DataError(str(exc).replace(str(table), str(file))) from None  # not the copy, which is temporary
    with JobProgress(TextColumn("items"), BarColumn(), MofNCompleteColumn(), TimeLeftColumn(), console=console) as bar:
        task = bar.add_task("items", total=len(items))
        unknown = send(items, url, key, on_sent=lambda sent: bar.advance(task, sent))
    rest = f"; {unknown:,} of them are in no model yet" if unknown else ""
    say(f"{len(items):,} items imported{rest}")


@cli.command("drop-counts")
@ungrouped
def drop_counts(
    items: Annotated[list[str], typer.Argument(help="Ids of the items.", metavar="ITEM")], store: StoreOptions
) -> None:
    """Delete the live counts of items, such as those that a bot has made: their trends, and orders with them.

    Services keep running, follow within seconds, and count anew. The command is safe to repeat.
    """
    from app.serving.store_factory import audit_command, opened_tenant

    settings = store.settings()

    async def drop() -> set[str]:
        async with opened_tenant(settings) as opened:
            counted = await opened.orders.drop_counts(settings.tenant, items)
            await audit_command(opened, settings, "items.drop_counts", items=len(counted))
            return counted

    counted = asyncio.run(drop())
    say(f"the live counts of {len(counted):,} items are deleted")
    if none := [item for item in items if item not in counted]:
        say(f"no live counts: {', '.join(map(repr, none))}")


@cli.command("drop-vectors")
@ungrouped
def drop_vectors(store: StoreOptions) -> None:
    """Delete the vectors of all items, so that you can import vectors of another length.

    Services keep running. Until you import vectors again and train a model with them, titles and categories
    stand in for new items. The command is safe to repeat.
    """
    from app.serving.store_factory import audit_command, opened_tenant
    from storage.maintenance import vectors

    settings = store.settings()

    async def drop() -> int:
        async with opened_tenant(settings) as opened:
            dropped = await vectors.drop_vectors(opened, settings.tenant)
            await audit_command(opened, settings, "items.drop_vectors", vectors=dropped)
            return dropped

    say(f"{asyncio.run(drop()):,} vectors deleted")

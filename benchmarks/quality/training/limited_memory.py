"""Train with and without a limit of memory, and compare the files of both models, byte by byte.

The events are copied to Parquet before, which a limited training reads piece by piece. Exit status 1 where a file
differs. What the training costs is of no interest here: `memory.py` measures it.

    python -m benchmarks.quality.training.limited_memory --data $LISAREC_DATA/beauty --memory 2GiB
"""

from __future__ import annotations

import filecmp
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import polars as pl
import typer
from rich.console import Console

from app.cli.options import MemoryOption
from benchmarks.quality.training.memory import TrainingRun, train_apart
from model.artifact import item_statistics, model_directory
from model.config import Protocol
from model.data.table import find_table

COMPARED = {model_directory.WEIGHTS, model_directory.CONFIG, model_directory.ITEMS, *item_statistics.FILES}
IDS = dict.fromkeys(("user_id", "item_id", "order_id"), pl.String)

console = Console(soft_wrap=True)


def differing_files(run: TrainingRun, scratch: Path) -> list[str]:
    """Train with and without the limit of the run; return the names of the files that differ."""
    table = find_table(Path(run.data), "interactions")
    assert table is not None
    data = scratch / "data"
    data.mkdir()
    pl.read_csv(table, separator="\t", schema_overrides=IDS).write_parquet(data / "interactions.parquet")
    models = [scratch / name for name in ("limited", "unlimited")]
    for model, memory in zip(models, (run.memory, None), strict=True):
        train_apart(replace(run, data=str(data), memory=memory), model)
    return compare(*models)


def compare(one: Path, other: Path) -> list[str]:
    """Return the names of the files that differ, or that one of the models lacks."""
    names = COMPARED & {path.name for model in (one, other) for path in model.iterdir()}
    _, differing, missing = filecmp.cmpfiles(one, other, names, shallow=False)
    return sorted(differing + missing)


def main(
    data: Annotated[list[Path], typer.Option(help="Data directory with a table of tabs; repeatable.")],
    memory: MemoryOption = 3 << 30,
    protocol: Protocol = "loo_full",
    epochs: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Say for each table which files differ."""
    found = {}
    for directory in data:
        with TemporaryDirectory(prefix="lisarec-limited-") as scratch:
            run = TrainingRun(str(directory.resolve()), protocol, epochs, 2.0, memory)
            found[directory.name] = differing_files(run, Path(scratch))
        console.print(f"{directory.name}: {', '.join(found[directory.name]) or 'no file'} differs")
    raise typer.Exit(any(found.values()))


if __name__ == "__main__":
    typer.run(main)

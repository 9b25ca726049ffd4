"""Measure the bytes of encoded states after the histories of real users, by the number of their events.

python -m benchmarks.storage.state_sizes --model models/beauty --data $LISAREC_DATA/beauty
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from app.serving.served_generation import generation_of
from model.artifact import model_directory
from model.data.readers import read_interactions
from storage.state.compiled_fold import fold_encoded
from storage.state.event import Event

GROUPS = (1, 2, 5, 10, 20, 50, 200, 1_000_000_000)  # the least events of each; the last one ends the others


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    data: Annotated[Path, typer.Option(help="The table that it was trained on.")],
    users: Annotated[int, typer.Option(min=1, help="Drawn at random.")] = 5_000,
) -> None:
    """Print the mean and the largest number of bytes for each group of users."""
    generation, table = generation_of(model_directory.load(model)), read_interactions(data)
    by_user = np.argsort(table.user, kind="stable")
    starts = np.append(np.unique(table.user[by_user], return_index=True)[1], len(table))
    drawn = np.random.default_rng(0).permutation(len(starts) - 1)[:users]
    counts, sizes = np.zeros(len(drawn), np.int64), np.zeros(len(drawn), np.int64)
    for place, user in enumerate(drawn):
        items = table.item[by_user[starts[user] : starts[user + 1]]].tolist()
        events = [Event(f"{n}", "u", table.item_ids[item], "click", n, None) for n, item in enumerate(items)]
        (value,) = fold_encoded(generation, [generation.encoded_empty], [0] * len(events), events).states
        counts[place], sizes[place] = len(events), len(value)
    printed = Table("events of a user", "users", "mean bytes", "most bytes", title=f"of {generation.dtype.itemsize:,}")
    groups = {f"{least:,} or more": (counts >= least) & (counts < beyond) for least, beyond in pairwise(GROUPS)}
    for name, members in (groups | {f"all, {counts.mean():.1f} on average": counts > 0}).items():
        if members.any():
            own = sizes[members]
            printed.add_row(name, f"{len(own):,}", f"{own.mean():,.0f}", f"{own.max():,}")
    Console().print(printed)


if __name__ == "__main__":
    typer.run(main)

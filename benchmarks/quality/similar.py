"""Measure similar items: how alike the labels of an item and of the ten items most similar to it are.

Two items' labels agree by their cosine, where a label weighs the more the fewer items have it. Labels are categories or
the words of titles, of which the models compared know nothing: they learn from histories alone. Without ``--test``, it
judges a half of the items, on which to choose; with it, the other half.

``served``               what ``GET /v1/items/{item_id}/similar`` lists
``other shares``         the same with other values of the constants in ``model.lisa.item_similarity``
``distance of targets``  the items nearest by the sums of their target codewords, which was served until 2026-11-29
``users in common``      the cosine of the sets of users who chose the items, which needs a row for each item

    python -m benchmarks.quality.similar --model models/retail --data $LISAREC_DATA/online-retail --labels words
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy import sparse

from benchmarks.machine import cpu
from benchmarks.quality.rotation import interval_95
from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from model.data.readers import read_interactions
from model.inference.engine import Engine
from model.lisa import item_similarity

K = 10
MOST_ITEMS = 4_000
AT_ONCE = 256
SHORTEST_WORD = 3
OTHERS = ((0.0, 0.2), (0.25, 0.2), (1.0, 0.2), (0.5, 0.1), (0.5, 0.3), (0.5, 0.5))  # shares of history and length

console = Console()
Lists = NDArray[np.int64]
"""(Q, K) the rows of the items listed for each of Q items, without itself; -1 for none"""


class Labels(StrEnum):
    """What makes two items alike."""

    CATEGORIES = "categories"
    WORDS = "words"


def label_vectors(artifact: Artifact, kind: Labels) -> sparse.csr_array:
    """Return each item's labels as a vector of length 1, or 0 without labels: (N, labels)."""
    items = artifact.items
    texts = [re.findall(rf"\w{{{SHORTEST_WORD},}}", title.lower()) for title in items.titles]
    labels = items.categories if kind is Labels.CATEGORIES else texts
    numbers: dict[str, int] = {}
    pairs = np.array(
        [(row, numbers.setdefault(one, len(numbers))) for row, own in enumerate(labels) for one in set(own)]
    )
    counts = np.bincount(pairs[:, 1])
    weights = np.sqrt(np.log(len(items) / counts))[pairs[:, 1]]
    lengths = np.sqrt(np.bincount(pairs[:, 0], weights**2, len(items)))[pairs[:, 0]]
    values = np.divide(weights, lengths, out=np.zeros_like(weights), where=lengths > 0)
    return sparse.csr_array((values, pairs.T), shape=(len(items), len(numbers)))


def served(artifact: Artifact, wanted: NDArray[np.int64]) -> Lists:
    """Return the most similar items, as the service finds them."""
    engine = Engine(artifact)
    found = [engine.top_k(engine.neighbours_of(part.tolist()), K + 1)[0] for part in parts_of(wanted)]
    return without_itself(np.concatenate(found), wanted)


def by_distance(artifact: Artifact, wanted: NDArray[np.int64]) -> Lists:
    """Return the items whose target codewords have the nearest sums."""
    with torch.inference_mode():
        vectors = artifact.model.item_vectors()
        half_squares = vectors.square().sum(dim=1) / 2
        parts = [(vectors[part] @ vectors.T - half_squares).topk(K + 1).indices for part in parts_of(wanted)]
    return without_itself(torch.cat(parts).numpy(), wanted)


def by_users(artifact: Artifact, data: Path, wanted: NDArray[np.int64]) -> Lists:
    """Return the items of the most similar sets of users."""
    events = read_interactions(data)
    row_of = {item_id: row for row, item_id in enumerate(artifact.items.ids)}
    rows = np.array([row_of.get(one, -1) for one in events.item_ids])[events.item]
    known = rows >= 0
    shape = len(artifact.items), len(events.user_ids)
    chosen = sparse.csr_array((np.ones(known.sum()), (rows[known], events.user[known])), shape=shape)
    chosen.data[:] = 1
    lengths = np.sqrt(np.maximum(chosen.sum(axis=1), 1))
    unit = sparse.csr_array(chosen / lengths[:, None])
    found = [
        np.argsort(-(unit[part] @ unit.T).toarray(), axis=1, kind="stable")[:, : K + 1] for part in parts_of(wanted)
    ]
    return without_itself(np.concatenate(found), wanted)


def parts_of(rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Split rows into batches."""
    for begin in range(0, len(rows), AT_ONCE):
        yield rows[begin : begin + AT_ONCE]


def without_itself(lists: Lists, wanted: NDArray[np.int64]) -> Lists:
    """Drop the item itself from each list of K + 1, or the last item."""
    is_itself = lists == wanted[:, None]
    is_itself[~is_itself.any(axis=1), K] = True
    found: Lists = lists[~is_itself].reshape(len(lists), K)
    return found


@contextmanager
def shares(history: float, length: float) -> Iterator[None]:
    """Use other constants."""
    with patch.multiple(item_similarity, HISTORY_SHARE=history, LENGTH_SHARE=length):
        yield


def agreement(vectors: sparse.csr_array, wanted: NDArray[np.int64], lists: Lists) -> NDArray[np.float64]:
    """Return the mean cosine of each item's labels with those of its list: (Q,)."""
    sums = [vectors[wanted].multiply(vectors[column]).sum(axis=1) for column in lists.T]
    means: NDArray[np.float64] = np.asarray(sums).mean(axis=0)
    return means


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    data: Annotated[Path, typer.Option(help="The data directory from which it was trained.")],
    labels: Annotated[Labels, typer.Option(help="What makes two items alike.")] = Labels.CATEGORIES,
    test: Annotated[bool, typer.Option("--test", help="Judge the items on which nothing was chosen.")] = False,
) -> None:
    """Print how well each way to find similar items agrees with the labels."""
    artifact = model_directory.load(model)
    vectors = label_vectors(artifact, labels)
    labelled = np.random.default_rng(0).permutation(np.flatnonzero(vectors.sum(axis=1)))
    wanted = labelled[test::2][:MOST_ITEMS]
    ways: dict[str, Callable[[], Lists]] = {
        "served": lambda: served(artifact, wanted),
        "distance of targets": lambda: by_distance(artifact, wanted),
        "users in common": lambda: by_users(artifact, data, wanted),
    }
    found = {name: way() for name, way in ways.items()}
    if not test:
        for history, length in OTHERS:
            with shares(history, length):
                found[f"other shares: history {history:g}, length {length:g}"] = served(artifact, wanted)
    agreements = {name: agreement(vectors, wanted, lists) for name, lists in found.items()}
    table = Table(
        f"{len(wanted):,} of {len(labelled):,} items",
        "agreement",
        "less than served",
        "nothing alike",
        "most frequent item in",
    )
    for name, lists in found.items():
        own = agreements[name]
        low, high = interval_95(agreements["served"] - own)
        most = np.unique(lists, return_counts=True)[1].max() / len(lists)
        table.add_row(name, f"{own.mean():.4f}", f"{low:.4f} to {high:.4f}", f"{np.mean(own == 0):.1%}", f"{most:.1%}")
    console.print(table, cpu())


if __name__ == "__main__":
    typer.run(main)

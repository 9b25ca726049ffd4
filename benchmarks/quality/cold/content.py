"""Measure whether items of which only the content is known are recommended to the right users.

Every tenth item is held out of training. Each then gets codes from its content: from its title and categories, from a
vector that a shop might compute (a truncated SVD of the titles' TF-IDF), or from its categories alone. These items and
all learned ones are ranked for users who chose one of them, from the events before: one question for each user. Choices
are made on the first half of the events after training; the second half is the test, which is read once.

    python -m benchmarks.quality.cold.content --data $LISAREC_DATA/online-retail --model models/tenth        # chooses
    python -m benchmarks.quality.cold.content --data $LISAREC_DATA/online-retail --model models/tenth --test

The command trains the model if it does not exist. Popularity counts all earlier events, including those of held-out
items: more than a shop knows about a new item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated
from unittest.mock import patch

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy import sparse
from scipy.sparse.linalg import svds

from app.catalogue.description_codes import sample_audience
from benchmarks.machine import cpu
from benchmarks.quality.cold.items import K
from benchmarks.quality.cold.questions import (
    BLOCK,
    CodesByRow,
    World,
    by_popularity,
    positions_of,
    prepare,
    questions_at,
    ranks,
)
from model import cold_items
from model.cold_items import (
    MAX_SIMILAR_ITEMS,
    Neighbours,
    QuerySample,
    codes_of_nearest_items,
    codes_of_similar_items,
    drawn,
)
from model.content import content_map, text_features
from model.content.content_map import ContentMap, learned_content
from model.content.text_features import Description, features, rarities, term_counts
from model.inference.engine import Engine
from model.metrics import difference, difference_interval_95, interval_95, metrics

VECTOR_NUMBERS = 128  # dimension of a vector that a shop might compute
VARIANTS: tuple[tuple[str, Mapping[str, object]], ...] = (
    ("as served", {}),
    ("the nearest alone", {"NEAREST_ITEMS": 1}),
    ("2 nearest", {"NEAREST_ITEMS": 2}),
    ("5 nearest", {"NEAREST_ITEMS": 5}),
    ("10 nearest", {"NEAREST_ITEMS": 10}),
    ("penalty 1", {"TEXT_PENALTY": 1.0, "VECTOR_PENALTY": 0.3}),
    ("penalty 10", {"TEXT_PENALTY": 10.0, "VECTOR_PENALTY": 3.0}),
    ("words alone", {"PART_WEIGHT": 0.0}),
    ("parts count as words", {"PART_WEIGHT": 1.0}),
    ("as likely as the lower quarter", {"DESCRIBED_QUANTILE": 0.25}),
    ("as likely as the upper quarter", {"DESCRIBED_QUANTILE": 0.75}),
)

console = Console()


def by_map(
    world: World, sample: QuerySample, content: ContentMap, predicted: NDArray[np.float32], items: NDArray[np.int64]
) -> CodesByRow:
    """Return the codes of the items (n,) from the vectors (n, D) that a map predicts for them."""
    if not content.exists:
        return {}
    neighbours, found = Neighbours(replace(world.trained, content=content)), {}
    for row, vector in zip(items.tolist(), predicted, strict=True):
        nearest = neighbours.nearest(vector, cold_items.NEAREST_ITEMS)
        found[row] = codes_of_nearest_items(world.trained, nearest, sample)
    return found


def learned_map(
    world: World, described: Sequence[Description], vectors: NDArray[np.floating] | None = None
) -> ContentMap:
    """Learn a map from the descriptions of all items of the data, or from these vectors, to the learned items."""
    items = world.trained.items
    rows = items.popular_first[: content_map.MAX_ITEMS].astype(np.int64)
    rows = rows[items.counts[rows] > 0]
    with torch.inference_mode():
        targets = world.trained.model.item_vectors(torch.from_numpy(rows)).numpy()
    own = world.learned[rows]
    texts = [described[row] for row in own.tolist()]
    return learned_content(targets, items.counts[rows], texts, None if vectors is None else vectors[own])


def by_texts(world: World, sample: QuerySample, described: Sequence[Description]) -> CodesByRow:
    """Return the codes from titles and categories."""
    content = learned_map(world, described)
    predicted, is_known = content.of_descriptions([described[row] for row in world.new.tolist()])
    return by_map(world, sample, content, predicted[is_known], world.new[is_known])


def shop_vectors(world: World) -> NDArray[np.float64]:
    """Return vectors as a shop might compute them, (items, VECTOR_NUMBERS); NaN for items without a known word."""
    counts = term_counts([Description(one.title) for one in world.described])
    x = features(counts, rarities(counts[world.learned]))
    known = x[world.learned]
    _, _, directions = svds(known, k=min(VECTOR_NUMBERS, min(known.shape) - 1), v0=np.ones(min(known.shape)))
    found: NDArray[np.float64] = x @ directions.T.astype(np.float64)
    found[np.linalg.norm(found, axis=1) < 1e-6] = np.nan
    return found


def by_vectors(world: World, sample: QuerySample, vectors: NDArray[np.float64]) -> CodesByRow:
    """Return the codes from a shop's vectors."""
    content = learned_map(world, [Description("")] * len(world.described), vectors)
    items = world.new[np.isfinite(vectors[world.new]).all(axis=1)]
    return by_map(world, sample, content, content.of_shop_vectors(vectors[items]), items)


def by_categories(world: World, sample: QuerySample) -> CodesByRow:
    """Return the codes typical of the learned items that share the most categories, without a map."""
    names = {name: n for n, name in enumerate(sorted({name for one in world.described for name in one.categories}))}
    cells = [(row, names[name]) for row, one in enumerate(world.described) for name in one.categories]
    if not cells:
        return {}
    own, of = np.array(cells).T
    table = sparse.csr_array((np.ones(len(own), np.int32), (own, of)), shape=(len(world.described), len(names)))
    found = {}
    for begin in range(0, len(world.new), BLOCK):
        items = world.new[begin : begin + BLOCK]
        shared = (table[items] @ table[world.learned].T).toarray()
        for row, of_one in zip(items.tolist(), shared, strict=True):
            if of_one.max(initial=0):
                rows = np.flatnonzero(of_one == of_one.max())
                voters = drawn(rows, MAX_SIMILAR_ITEMS, world.interactions.item_ids[row])
                found[row] = codes_of_similar_items(world.trained, voters, sample)
    return found


def by_nearest_titles(world: World, sample: QuerySample) -> CodesByRow:
    """Return the codes typical of the items with the most similar titles and categories, without a map."""
    counts = term_counts(world.described)
    x = features(counts, rarities(counts[world.learned]))
    known, found, wanted = x[world.learned].T.tocsr(), {}, cold_items.NEAREST_ITEMS
    for begin in range(0, len(world.new), BLOCK):
        items = world.new[begin : begin + BLOCK]
        likeness = (x[items] @ known).toarray()
        for row, of_one in zip(items.tolist(), likeness, strict=True):
            nearest = np.argpartition(-of_one, wanted)[:wanted]
            nearest = nearest[np.argsort(-of_one[nearest], kind="stable")]
            nearest = nearest[of_one[nearest] > 0]
            if len(nearest):
                found[row] = codes_of_nearest_items(world.trained, nearest, sample)
    return found


def by_nearest_codewords(world: World, sample: QuerySample) -> CodesByRow:
    """Return the target codes whose sum is nearest to the prediction; the other codes are as by texts."""
    content = learned_map(world, world.described)
    predicted, is_known = content.of_descriptions([world.described[row] for row in world.new.tolist()])
    items, books = world.new[is_known], world.trained.model.target_codebooks.detach().numpy()
    squares, codes = (books**2).sum(axis=2), np.zeros((len(items), len(books)), np.int64)
    rest = predicted[is_known].copy()
    for sweep in range(4):
        for book, words in enumerate(books):
            rest += words[codes[:, book]] if sweep else 0
            codes[:, book] = np.argmin(squares[book] - 2 * rest @ words.T, axis=1)
            rest -= words[codes[:, book]]
    voted = by_map(world, sample, content, predicted[is_known], items)
    own = codes.astype(np.uint8)
    shares = sample.log_shares(own) - sample.log_shares(np.stack([voted[row].target for row in items.tolist()]))
    return {
        row: voted[row]._replace(target=own[place], bias=voted[row].bias - float(shares[place]))
        for place, row in enumerate(items.tolist())
    }


@contextmanager
def changed(values: Mapping[str, object]) -> Iterator[None]:
    """Temporarily change constants of the modules."""
    modules: Sequence[ModuleType] = (cold_items, content_map, text_features)
    with ExitStack() as stack:
        for name, value in values.items():
            (module,) = (one for one in modules if hasattr(one, name))
            stack.enter_context(patch.object(module, name, value))
        yield


def methods(world: World, sample: QuerySample) -> Mapping[str, Callable[[], CodesByRow]]:
    """Return the methods that create codes, by name; the first one is that of the service."""
    vectors = shop_vectors(world)
    return {
        "titles and categories": lambda: by_texts(world, sample, world.described),
        "titles": lambda: by_texts(world, sample, [Description(one.title) for one in world.described]),
        "vectors": lambda: by_vectors(world, sample, vectors),
        "categories, by the map": lambda: by_texts(
            world, sample, [Description("", one.categories) for one in world.described]
        ),
        "categories": lambda: by_categories(world, sample),
    }


def main(
    data_dir: Annotated[Path, typer.Option("--data", help="Data directory with titles.")],
    model: Annotated[Path, typer.Option(help="Model without every tenth item; trained where it is missing.")],
    epochs: Annotated[int | None, typer.Option(help="Of that training.")] = None,
    seed: Annotated[int, typer.Option(help="Of the events that are taken.")] = 0,
    test: Annotated[bool, typer.Option("--test", help="Read the test, which is for once.")] = False,
) -> None:
    """Choose on validation, or compare on the test."""
    world = prepare(data_dir, model, epochs)
    engine = Engine(world.trained)
    sample, part = sample_audience(world.trained, engine), "test" if test else "validation"
    of_new, of_learned = (questions_at(world, engine, one) for one in positions_of(world, part, seed))
    console.print(
        f"{data_dir.name}, table {world.interactions.sha256[:16]}, {len(world.new):,} of {len(world.rows):,} items "
        f"new, trained in {len(world.trained.metrics.get('epochs', ())) or 'some'} epochs, seen rule none, ties against"
        f" the method, seed {seed}"
    )
    table = Table(part, "items with codes", "HR@10, new items", "HR@10, learned items", "new among the ten")
    table.title = f"{cpu()}, {len(of_new.target):,} users of new items, {len(of_learned.target):,} of learned ones"
    popular, found = by_popularity(world, of_new, part), dict[str, NDArray[np.int64]]()

    def add(name: str, codes: CodesByRow) -> None:
        if codes:
            found[name], (beside, shown) = ranks(world, of_new, codes)[0], ranks(world, of_learned, codes)
            rows = with_interval(found[name]), with_interval(beside), f"{shown.mean() / K:.1%}"
            table.add_row(name, f"{len(codes):,}", *rows)

    for name, make in methods(world, sample).items():
        add(name, make())
    if not test:
        add("nearest titles", by_nearest_titles(world, sample))
        add("nearest codewords", by_nearest_codewords(world, sample))
        for name, values in VARIANTS[1:]:
            with changed(values):
                add(f"titles and categories, {name}", by_texts(world, sample, world.described))
    table.add_row("popularity", "", with_interval(popular), "", "")
    table.add_row("without new items", "", "", with_interval(of_learned.rank), "")
    console.print(table)
    first, own = next(iter(found.items()))
    for name, others in [*((name, of_one) for name, of_one in found.items() if test), ("popularity", popular)]:
        if name != first:
            low, high = difference_interval_95(own, others, "hr_at_10")
            gain = difference(own, others, "hr_at_10")
            console.print(f"HR@10 of new items, {first} minus {name}: {gain:+.3f} ({low:+.3f} to {high:+.3f})")


def with_interval(found: NDArray[np.int64]) -> str:
    """Return HR@10 and its interval as text."""
    low, high = interval_95(found, "hr_at_10")
    return f"{metrics(found)['hr_at_10']:.4f} ({low:.4f} to {high:.4f})"


if __name__ == "__main__":
    typer.run(main)

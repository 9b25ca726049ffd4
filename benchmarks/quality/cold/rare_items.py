"""Measure whether the codes of rarely used items should come from titles and categories, too; no test event is read.

Each user's last events before the test events are held out, at most ``LAST`` and a fifth of them; the others train. So
thousands of them tell how well items are placed by the number of their training events. Intervals are over users.

``events``            codes from co-occurrence alone
``blend-S``           the vector of an item of n training events is (n v + S p) / (n + S) before it is quantised, for
                      the vector v of co-occurrence, and the vector p that a content map predicts, learned on all v
``discount``          co-occurrence whose mutual information counts less for pairs and items of few events
``discount-blend-S``  both
``replace-M``         the trained model of ``events``, in which items below M training events get the codes that the
                      service would give them if they were new; their biases keep them as likely as they are

Lists of ten similar items are judged by the labels of their items, as ``benchmarks/quality/similar.py`` does, and by
held-out events: whether a user has chosen both the item and one of its list in these events. With ``--vectors N``,
nothing is trained, and lists are those of the largest cosines of the vectors, from the events of the first N users.

A data directory named ``board`` is made if it is missing (`benchmarks.quality.cold.board`); a job's label is its kind.

    python -m benchmarks.quality.cold.rare_items --out runs --data board --way events --way blend-3 --way replace-5
    python -m benchmarks.quality.cold.rare_items --out runs --data $LISAREC_DATA/online-retail --vectors 10000
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from scipy import sparse

from benchmarks.machine import cpu, load_averages
from benchmarks.quality.cold.board import write_board
from benchmarks.quality.similar import K, Labels, agreement, label_vectors, without_itself
from benchmarks.quality.training.choices import TEMPORAL
from benchmarks.quality.training.epoch_printer import EpochPrinter
from model.artifact import model_directory
from model.artifact.item_table import ItemTable
from model.artifact.model_directory import Artifact
from model.cold_items import (
    NEAREST_ITEMS,
    POOLED_QUERIES,
    Neighbours,
    QuerySample,
    codes_of_nearest_items,
    query_sample,
)
from model.config import EVENT_WEIGHTS, Config, DataCard, ModelConfig, preset
from model.content.content_map import MAX_ITEMS, learned_content
from model.content.text_features import Description
from model.data.interactions import Histories, Interactions, training_histories
from model.data.readers import read_interactions, read_items
from model.data.splits import Split, split
from model.holdout_ranks import Scorer, held_out_events, ranks_full, state_scorer, states_of
from model.lisa import item_codes
from model.lisa.item_codes import FixedCodes
from model.lisa.item_similarity import Similarity
from model.metrics import BOOTSTRAP_DRAWS, gains
from model.training import train
from model.training.threads import use_threads

LAST, LEAST_SHARE = 10, 5  # held-out events of a user: at most, and one in so many
EDGES = (0, 1, 5, 20, 100)  # training events of an item, where groups begin
LISTS_OF_GROUP = 800
MOST_EVENTS = 20_000
NEGATIVES = 1_024  # the sampled softmax takes a third of the time
BOARD = "board"
OF_EVENTS, OF_LISTS = ("hr_at_10", "ndcg_at_10", "hr_at_50"), ("labels alike", "chosen together")
PLAIN_INFORMATION = item_codes.mutual_information

console = Console(width=320)
ListsOf = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Returns the lists of ten similar items of some items, by their rows."""


class Judged(NamedTuple):
    """Measures (n,) by name, and the training events and users behind each of their values (n,)."""

    measures: Mapping[str, NDArray[np.float64]]
    counts: NDArray[np.int64]
    user: NDArray[np.int64]


class World(NamedTuple):
    """A table, its split and its items, in the same order of rows."""

    interactions: Interactions
    parts: Split
    items: ItemTable

    @classmethod
    def of(cls, data: Path, first: Sequence[str] = (), users: int | None = None) -> World:
        """Read a data directory, with these items first, or only so many users and their items."""
        interactions = read_interactions(data).stepping(EVENT_WEIGHTS).with_items_first(first)
        if users is not None:
            interactions = interactions.where(interactions.user < users)
            chosen, item = np.unique(interactions.item, return_inverse=True)
            ids = [interactions.item_ids[row] for row in chosen.tolist()]
            interactions = replace(interactions, item_ids=ids, item=item.astype(np.int32))
        parts, texts, ids = last_events(interactions, split_name(data)), read_items(data), interactions.item_ids
        counts = np.bincount(interactions.item[parts.train], minlength=len(ids))
        titles, categories = [texts.titles.get(one, "") for one in ids], [texts.categories.get(one, ()) for one in ids]
        return cls(interactions, parts, ItemTable(ids, titles, categories, counts))


def split_name(data: Path) -> str:
    """Return the name of the split of a table."""
    return "temporal" if data.name in (*TEMPORAL, BOARD) else "loo"


def last_events(interactions: Interactions, name: str, _: str = "train") -> Split:
    """Split as the named split does, but hold out several events of each user for validation."""
    parts = split(interactions, "temporal" if name == "temporal" else "loo")
    known = parts.train.copy()
    known[parts.validation] = True
    lengths = np.bincount(interactions.user[known], minlength=len(interactions.user_ids))
    held = np.minimum(LAST, lengths // LEAST_SHARE)
    ends = interactions.starts[:-1] + lengths
    stretches = zip(ends.tolist(), held.tolist(), strict=True)
    validation = np.concatenate([np.arange(end - own, end) for end, own in stretches])
    known[validation] = False
    return Split(known, validation.astype(np.int64), parts.test, parts.cutoff_us)


def discounted(counts: sparse.csr_array, degree: NDArray[np.float32], first: int = 0) -> sparse.csr_array:
    """Return the mutual information, with less for pairs and items of few events (Pantel and Lin, 2002)."""
    found = PLAIN_INFORMATION(counts, degree, first)
    row = np.repeat(np.arange(first, first + counts.shape[0]), np.diff(counts.indptr))
    least = np.minimum(degree[row], degree[counts.indices])
    found.data *= counts.data / (counts.data + 1) * least / (least + 1)
    return found


def blended(vectors: NDArray[np.float32], items: ItemTable, strength: float) -> NDArray[np.float32]:
    """Return vectors (N, D) of co-occurrence, mixed with those that titles and categories predict."""
    rows = items.popular_first[:MAX_ITEMS]
    rows = rows[items.counts[rows] > 0]
    content = learned_content(vectors[rows], items.counts[rows], descriptions(items, rows))
    predicted, is_known = content.of_descriptions(descriptions(items, np.arange(len(items))))
    share = (strength / (items.counts + strength) * is_known).astype(np.float32)[:, None]
    return vectors + share * (predicted - vectors) if content.exists else vectors


def descriptions(items: ItemTable, rows: NDArray[np.integer]) -> list[Description]:
    """Return the descriptions of some items."""
    return [Description(items.titles[row], items.categories[row]) for row in rows.tolist()]


def vectors_by(way: str, world: World) -> NDArray[np.float32]:
    """Return the vectors from which a way makes codes, with seed 0."""
    interactions, ids = world.interactions, world.interactions.item_ids
    histories = training_histories(interactions, world.parts.train, EVENT_WEIGHTS)
    counts = item_codes.cooccurrence(histories.item, histories.starts, len(ids))
    with information_of(way):
        vectors = item_codes.item_vectors(counts, ModelConfig().width, 0)
    return blended(vectors, world.items, strength_of(way)) if "blend-" in way else vectors


def information_of(way: str) -> ExitStack:
    """Count the mutual information as the way does."""
    stack = ExitStack()
    if "discount" in way:
        stack.enter_context(mock.patch("model.lisa.item_codes.mutual_information", discounted))
    return stack


def strength_of(way: str) -> float:
    """Return the number at the end of a way's name."""
    return float(way.split("-")[-1])


def train_way(data: Path, way: str, seed: int, length: tuple[int, float], out: Path) -> Artifact:
    """Train with the codes of a way, or load the trained model.

    length  the number of epochs, and the share of the events from which each learns
    """
    folder = out / data.name / f"{way}-seed-{seed}"
    if model_directory.exists(folder):
        return model_directory.load(folder)
    shape, training = preset("lisa-mini")
    settings = {"epochs": length[0], "patience": length[0], "epoch_share": length[1], "seed": seed}
    settings |= {"full_softmax_items": 1, "sampled_negatives": NEGATIVES}
    card = DataCard.model_validate({"split": split_name(data)})
    config = Config(model=shape, training=training.model_copy(update=settings), data=card)
    plain = item_codes.codes_of

    def codes_of(vectors: NDArray[np.float32], config: ModelConfig, seed: int) -> FixedCodes:
        return plain(blended(vectors, World.of(data).items, strength_of(way)), config, seed)

    with information_of(way) as stack:
        stack.enter_context(mock.patch("model.training.train.split", last_events))
        if "blend-" in way:
            stack.enter_context(mock.patch("model.lisa.item_codes.codes_of", codes_of))
        return train.train(data, folder, config, progress=EpochPrinter(f"{data.name}, {way}, seed {seed}", console))


@torch.inference_mode()
def sample_audience(trained: Artifact) -> QuerySample:
    """Sample queries of users with one event each, as the service does."""
    rows = np.random.default_rng(0).permutation(len(trained.items))[:POOLED_QUERIES]
    alone = Histories.joined(np.array_split(rows, len(rows)))
    state = map(torch.from_numpy, states_of(alone, trained.history_counts, trained.config.model))
    return query_sample(trained, trained.model.read(*state, trained.tables))


@torch.inference_mode()
def replaced(trained: Artifact, fewest: int) -> Artifact:
    """Give items with fewer events the codes of the other ones next to what their descriptions predict."""
    items, frequent = trained.items, copy.copy(trained.items)
    frequent.popular_first = items.popular_first[items.counts[items.popular_first] >= fewest]
    known, audience = Neighbours(replace(trained, items=frequent)), sample_audience(trained)
    rare = np.flatnonzero(items.counts < fewest)
    predicted, is_known = trained.content.of_descriptions(descriptions(items, rare))
    model = copy.copy(trained.model)
    history, target, bias = (part.clone() for part in (model.history_codes, model.target_codes, model.bias.detach()))
    for row, vector in zip(rare[is_known].tolist(), predicted[is_known], strict=True):
        codes = codes_of_nearest_items(trained, known.nearest(vector, NEAREST_ITEMS), audience)
        before, after = audience.log_shares(np.stack([trained.target_codes[row], codes.target]))
        history[row], target[row] = torch.from_numpy(codes.history), torch.from_numpy(codes.target)
        bias[row] += float(before - after)
    model.history_codes, model.target_codes = history, target
    model.bias = torch.nn.Parameter(bias, requires_grad=False)
    return replace(trained, model=model)


def scorer_of(trained: Artifact) -> Scorer:
    """Return a scorer of the model with its lift, without the compiled kernels."""
    model, vectors = trained.model, trained.model.item_vectors().detach()

    @torch.inference_mode()
    def score(*state: NDArray[Any]) -> NDArray[np.float32]:
        histograms, last, recent = map(torch.from_numpy, state)
        scores = model.read(histograms, last, recent, trained.tables) @ vectors.T + model.bias
        found: NDArray[np.float32] = scores.scatter_add_(1, *model.follower_gains(recent)).numpy()
        return found

    return state_scorer(score, trained.history_counts, trained.config.model)


def judged_ranks(trained: Artifact, world: World) -> Judged:
    """Rank the held-out items."""
    drawn = np.sort(np.random.default_rng(0).permutation(world.parts.validation)[:MOST_EVENTS])
    events = held_out_events(world.interactions, drawn, trained.config)
    ranks = ranks_full(events, scorer_of(trained), trained.config.data.seen_rule)
    measures = {metric: gains(ranks, metric) for metric in OF_EVENTS}
    return Judged(measures, world.items.counts[events.targets].astype(np.int64), events.users.astype(np.int64))


def judged_lists(world: World, lists_of: ListsOf) -> Judged:
    """Judge the lists of similar items. What is chosen together is NaN for items without such events."""
    labels, held = labels_of(world.items), world.parts.validation
    user, item = world.interactions.user[held], world.interactions.item[held]
    wanted = wanted_items(world.items, labels, item)
    lists = lists_of(wanted)
    shape = len(world.interactions.user_ids), len(world.items)
    chosen = sparse.csr_array((np.ones(len(held)), (user, item)), shape=shape)
    chosen.data[:] = 1
    beside = sparse.csr_array(chosen.T @ chosen)
    alone = np.asarray(beside[wanted].sum(axis=1)).ravel() == beside.diagonal()[wanted]
    hits = np.array([beside[[one], own].max() > 0 for one, own in zip(wanted.tolist(), lists, strict=True)])
    measures = agreement(labels, wanted, lists), np.where(alone, np.nan, hits)
    counts = world.items.counts[wanted].astype(np.int64)
    return Judged(dict(zip(OF_LISTS, measures, strict=True)), counts, np.arange(len(wanted)))


def similar_by_codes(trained: Artifact) -> ListsOf:
    """Return what lists the most similar items as the service defines them, without the compiled kernels."""
    with torch.inference_mode():
        similarity, _, bias = Similarity.of(trained.model)
    return similar_by(similarity.vectors(trained.target_codes, trained.history_codes), bias.numpy())


def similar_by_cosine(vectors: NDArray[np.float32]) -> ListsOf:
    """Return what lists the items with the largest cosines, seen from the mean."""
    centred = vectors - vectors.mean(axis=0)
    centred /= np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-9)
    return similar_by(centred, np.zeros(len(vectors), np.float32))


def similar_by(vectors: NDArray[np.float32], bias: NDArray[np.float32]) -> ListsOf:
    """Return what lists the items with the largest products, plus their bias."""

    def lists_of(wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        found = []
        for own in np.array_split(wanted, len(wanted) // 256 + 1):
            scores = vectors[own] @ vectors.T + bias
            best = np.argpartition(-scores, K, axis=1)[:, : K + 1]
            order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1, kind="stable")
            found.append(np.take_along_axis(best, order, axis=1))
        return without_itself(np.concatenate(found), wanted)

    return lists_of


def labels_of(items: ItemTable) -> sparse.csr_array:
    """Return the labels by which similar items are judged: kinds of jobs, categories, or else words of titles."""
    if items.ids[0].startswith("job-"):
        kinds = np.array([int(one.split("-")[1]) for one in items.ids])
        return sparse.csr_array((np.ones(len(items)), (np.arange(len(items)), kinds)))
    return label_vectors(items, Labels.CATEGORIES if len(items.categories.names) else Labels.WORDS)


def wanted_items(items: ItemTable, labels: sparse.csr_array, held: NDArray[np.int32]) -> NDArray[np.int64]:
    """Draw labelled items of each group, half of them among the held-out ones where there are as many."""
    labelled = np.flatnonzero(labels.sum(axis=1))
    labelled = labelled[np.argsort(np.array(list(items.ids))[labelled])]  # the same for models, whose rows differ
    later = np.random.default_rng(0).random(len(labelled)) + ~np.isin(labelled, held)
    labelled = labelled[np.argsort(later)]
    group = np.searchsorted(EDGES, items.counts[labelled], side="right")
    return np.concatenate([labelled[group == one][:LISTS_OF_GROUP] for one in range(1, len(EDGES) + 1)])


def interval(values: NDArray[np.float64], user: NDArray[np.int64]) -> tuple[float, float]:
    """Return the bootstrap interval of the mean over users with several values each."""
    _, own = np.unique(user, return_inverse=True)
    sums, events = np.bincount(own, values), np.bincount(own)
    often = np.random.default_rng(0).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), BOOTSTRAP_DRAWS)
    low, high = np.percentile((often @ sums) / np.maximum(often @ events, 1), [2.5, 97.5])
    return float(low), float(high)


def groups_of(counts: NDArray[np.int64]) -> dict[str, NDArray[np.bool_]]:
    """Return which values belong to each group of training events."""
    place = np.searchsorted(EDGES, counts, side="right") - 1
    labels = [*(f"{a}" if b == a + 1 else f"{a} to {b - 1}" for a, b in pairwise(EDGES)), f"{EDGES[-1]} or more"]
    return {"all": np.ones(len(counts), bool), **{label: place == n for n, label in enumerate(labels)}}


def table_of(found: Mapping[str, Judged]) -> Table:
    """Return the measures of each way, and their differences from the first one."""
    first = next(iter(found.values()))
    columns = [text for one in first.measures for text in (one, "minus the first")]
    table = Table("way", "training events", "number", *columns, box=box.MARKDOWN)
    for way, judged in found.items():
        for label, inside in groups_of(judged.counts).items():
            cells: list[str] = []
            for measure, own in judged.measures.items():
                chosen = inside & ~np.isnan(own)
                if not chosen.any():
                    cells += ["", ""]
                    continue
                margin = (own - first.measures[measure])[chosen]
                low, high = interval(margin, judged.user[chosen])
                cells += [f"{own[chosen].mean():.4f}", f"{margin.mean():+.4f} ({low:+.4f} to {high:+.4f})"]
            if inside.any():
                table.add_row(way, label, f"{inside.sum():,}", *cells)
    return table


def judge_training(data: Path, way: str, seed: int, length: tuple[int, float], out: Path) -> tuple[Judged, Judged]:
    """Train as a way does, and judge the ranks and the lists of the model."""
    is_replaced = way.startswith("replace-")
    trained = train_way(data, "events" if is_replaced else way, seed, length, out)
    trained = replaced(trained, int(strength_of(way))) if is_replaced else trained
    world = World.of(data, list(trained.items.ids))
    return judged_ranks(trained, world), judged_lists(world, similar_by_codes(trained))


def main(
    data: Annotated[list[Path], typer.Option(help="Data directory; repeatable. If 'board' is missing, it is made.")],
    out: Annotated[Path, typer.Option(help="Where trainings are kept.")],
    way: Annotated[list[str] | None, typer.Option(help="Repeatable; the first is compared with the others.")] = None,
    seed: int = 0,
    vectors: Annotated[int | None, typer.Option(help="Train nothing; judge vectors from so many users.")] = None,
    epochs: int = 3,
    share: Annotated[float, typer.Option(help="Of the events, from which an epoch learns.")] = 1.0,
) -> None:
    """Train what is not trained yet, and print the tables."""
    use_threads(1)
    for directory in data:
        if directory.name == BOARD and not directory.exists():
            write_board(directory)
        found = dict[str, tuple[Judged, ...]]()
        for one in way or ("events", "blend-10"):
            if vectors is not None:
                world = World.of(directory, users=vectors)
                found[one] = (judged_lists(world, similar_by_cosine(vectors_by(one, world))),)
            else:
                found[one] = judge_training(directory, one, seed, (epochs, share), out)
        about = f"vectors of {vectors:,} users" if vectors is not None else f"{epochs} epochs of {share:g}, seed {seed}"
        console.print(f"{directory.name}, {about}")
        for judged in zip(*found.values(), strict=True):
            console.print(table_of(dict(zip(found, judged, strict=True))), soft_wrap=True)
    console.print(f"{cpu()}, load {load_averages()}, torch {torch.__version__}")


if __name__ == "__main__":
    typer.run(main)

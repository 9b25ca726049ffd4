"""The choices of users among new and learned items, and their ranks when the new items get given codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.quality.cold.items import NOT_RANKED, K, train_without
from model.artifact import model_directory
from model.artifact.model_directory import Artifact
from model.cold_items import ColdCodes
from model.config import EVENT_WEIGHTS, Config, DataCard, SplitName, TrainConfig
from model.content.text_features import Description
from model.data.interactions import Histories, Interactions
from model.data.readers import read_interactions, read_items
from model.data.splits import Split, split
from model.holdout_ranks import states_of
from model.inference.engine import Engine

TRAIN_SHARE, VALIDATION_SHARE = 0.9, 0.95  # quantiles of time
MAX_HISTORY = 1_000
BLOCK = 256

CodesByRow = Mapping[int, ColdCodes]
"""Codes of new items, by their rows among all items of the data."""


class Questions(NamedTuple):
    """Users at the moment when they chose an item.

    vectors  (Q, D)  their queries
    best     (Q, K)  scores of the best learned items, best first
    target   (Q,)    rows of the chosen items, among all items of the data
    score    (Q,)    scores of these, -inf for new items
    rank     (Q,)    ranks of these among learned items, NOT_RANKED for new items
    """

    vectors: NDArray[np.float32]
    best: NDArray[np.float32]
    target: NDArray[np.int64]
    score: NDArray[np.float32]
    rank: NDArray[np.int64]


class World(NamedTuple):
    """A data set of which every tenth item is new.

    rows       (items,)  rows of the model, -1 for new items
    described  descriptions of all items
    """

    trained: Artifact
    interactions: Interactions
    parts: Split
    rows: NDArray[np.int64]
    described: Sequence[Description]

    @property
    def new(self) -> NDArray[np.int64]:
        """The new items."""
        return np.flatnonzero(self.rows < 0)

    @property
    def learned(self) -> NDArray[np.int64]:
        """The items that the model has learned, in its order."""
        known = np.flatnonzero(self.rows >= 0)
        return known[np.argsort(self.rows[known])]


def prepare(data_dir: Path, model: Path, epochs: int | None) -> World:
    """Read the data; train the model without every tenth item if it does not exist."""
    interactions = read_interactions(data_dir).stepping(EVENT_WEIGHTS)
    name: SplitName = "loo" if interactions.time_is_order else "temporal"
    parts = split(interactions, name)
    if not model_directory.exists(model):
        training = TrainConfig() if epochs is None else TrainConfig(epochs=epochs)
        recipe = Config(training=training, data=DataCard(split=name))
        train_without(data_dir, interactions, parts, recipe, model)
    trained, texts = model_directory.load(model), read_items(data_dir)
    described = [Description(texts.titles.get(one, ""), texts.categories.get(one, ())) for one in interactions.item_ids]
    return World(trained, interactions, parts, trained.items.rows.places_of(interactions.item_ids), described)


def positions_of(world: World, part: str, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw a held-out event of each user on a new item, and one on a learned item."""
    interactions = world.interactions
    if interactions.time_is_order:
        held_out = world.parts.validation if part == "validation" else world.parts.test
    else:
        times = interactions.timestamp_us
        first, middle = np.quantile(times, [TRAIN_SHARE, VALIDATION_SHARE], method="lower").tolist()
        begin, end = (first, middle) if part == "validation" else (middle, np.inf)
        held_out = np.flatnonzero((times >= begin) & (times < end))
    is_learned = world.rows[interactions.item] >= 0
    learned_before = np.concatenate([[0], np.cumsum(is_learned)])
    begins = interactions.starts[interactions.user]
    has_history = learned_before[np.arange(len(interactions))] > learned_before[begins]
    held_out = np.random.default_rng(seed).permutation(held_out[has_history[held_out]])
    found = []
    for some in (held_out[~is_learned[held_out]], held_out[is_learned[held_out]]):
        _, first_of_user = np.unique(interactions.user[some], return_index=True)
        found.append(np.sort(some[first_of_user]))
    return found[0], found[1]


def questions_at(world: World, engine: Engine, positions: NDArray[np.int64]) -> Questions:
    """Return the questions at these events, from the learned items that the users chose before."""
    trained, interactions = world.trained, world.interactions
    parts = list[tuple[NDArray[np.float32], ...]]()
    rows = world.rows[interactions.item]
    for begin in range(0, len(positions), BLOCK):
        histories = []
        for position in positions[begin : begin + BLOCK].tolist():
            history = rows[interactions.starts[interactions.user[position]] : position]
            histories.append(history[history >= 0][-MAX_HISTORY:])
        queries = engine.step(*states_of(Histories.joined(histories), trained.history_counts, trained.config.model))
        scores = engine.scores(queries).numpy()
        wanted = rows[positions[begin : begin + BLOCK]]
        own = np.where(wanted >= 0, scores[np.arange(len(wanted)), wanted], -np.inf).astype(np.float32)
        rank = np.where(wanted >= 0, (scores >= own[:, None]).sum(axis=1), NOT_RANKED)
        parts.append((queries.vectors_on_cpu.numpy(), -np.sort(-scores, axis=1)[:, :K], own, rank))
    vectors, best, own, rank = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Questions(vectors, best, interactions.item[positions].astype(np.int64), own, rank)


def ranks(world: World, asked: Questions, codes: CodesByRow) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rank the chosen items among the learned ones and the new ones with codes; also count the listed new ones."""
    rows = np.array(sorted(codes), np.int64)
    targets = torch.from_numpy(np.stack([codes[row].target for row in rows.tolist()]).astype(np.int64))
    with torch.inference_mode():
        books = world.trained.model.target_codebooks
        vectors = sum(books[book][words] for book, words in enumerate(targets.T))
        assert isinstance(vectors, torch.Tensor)
        scores = asked.vectors @ vectors.numpy().T + np.array([codes[row].bias for row in rows.tolist()], np.float32)
    place = np.searchsorted(rows, asked.target).clip(max=len(rows) - 1)
    is_new = rows[place] == asked.target
    own = np.where(is_new, scores[np.arange(len(scores)), place], asked.score)
    above = (scores >= own[:, None]).sum(axis=1)  # among them the item itself, if it is new
    found = np.where(is_new, (asked.best >= own[:, None]).sum(axis=1) + above, asked.rank + above)
    unknown = ~is_new & ~np.isfinite(asked.score)
    tenth = np.sort(np.concatenate([asked.best, scores], axis=1), axis=1)[:, -K]
    return np.where(unknown, NOT_RANKED, found), (scores >= tenth[:, None]).sum(axis=1)


def by_popularity(world: World, asked: Questions, part: str) -> NDArray[np.int64]:
    """Rank the chosen items by the number of events on all items before the part begins."""
    interactions = world.interactions
    before = world.parts.train
    if not interactions.time_is_order:
        share = TRAIN_SHARE if part == "validation" else VALIDATION_SHARE
        before = interactions.timestamp_us < np.quantile(interactions.timestamp_us, share, method="lower")
    counts = np.bincount(interactions.item[before], minlength=len(interactions.item_ids))
    best = np.argsort(-counts, kind="stable")[:K]
    hits = asked.target[:, None] == best
    return np.where(hits.any(axis=1), hits.argmax(axis=1) + 1, NOT_RANKED)

"""Tables of a screening, and the states of their users in the device's memory."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse

from benchmarks.quality.training.screening.ideas import GAPS, States
from model.config import Config, DataCard, ModelConfig
from model.data.interactions import Histories, training_histories
from model.holdout_ranks import HeldOutEvents, held_out_events
from model.lisa import item_codes, item_followers
from model.lisa.histogram import running_histograms
from model.lisa.item_followers import Followers, strongest_of
from model.lisa.recent_attention import recent_windows
from model.training.loop import VALIDATION_USERS
from model.training.memory import Resources
from model.training.train import prepare_training

TEMPORAL = {"online-retail", "completejourney"}
DENSE_ITEMS = 8_192  # up to here a matrix of all pairs is dense
EVENTS_AT_ONCE = 65_536


class Table(NamedTuple):
    """The training and validation events of a table, and what every training counts of them.

    times_s          (events,)  of the training events; None if timestamps only give an order
    validation_s     (events',) of the events before the held-out ones
    association      the mutual information of items, sparse or dense
    counts           follow-ups, for the lift
    coded            the codes of all items, by what they depend on
    strongest        the strongest followers of each item, by their number
    """

    name: str
    config: Config
    histories: Histories
    events: HeldOutEvents
    times_s: NDArray[np.float64] | None
    validation_s: NDArray[np.float64] | None
    association: Any
    counts: sparse.csr_array
    popularity: NDArray[np.int64]
    coded: dict[tuple[int, ...], item_codes.FixedCodes]
    strongest: dict[int, Followers]

    @property
    def items(self) -> int:
        """The size of the catalogue."""
        return len(self.popularity)

    def followers(self, count: int, decay: float) -> Followers:
        """Return the strongest followers, like ``PairCounts``; only the usual decay was counted."""
        assert decay == self.config.training.lift_count_decay
        if count not in self.strongest:
            self.strongest[count] = strongest_of(self.counts, count)
        return self.strongest[count]

    def codes(self, shape: ModelConfig, seed: int) -> item_codes.FixedCodes:
        """Return the codes of all items."""
        books = shape.history_codebooks, shape.history_codewords, shape.target_codebooks, shape.target_codewords
        key = shape.width, seed, *books
        if key not in self.coded:
            vectors = item_codes.strongest_components(self.association, self.items, shape.width, seed)
            self.coded[key] = item_codes.codes_of(vectors, shape, seed)
        return self.coded[key]


def read_table(directory: Path, users: int | None) -> Table:
    """Read a table, or its first users alone."""
    config = Config(data=DataCard(split="temporal" if directory.name in TEMPORAL else "loo"))
    inputs = prepare_training(directory, Path("nowhere"), config, Resources("cpu"), resume=False)
    interactions, parts, config = inputs.interactions, inputs.parts, inputs.recipe
    drawn = np.sort(np.random.default_rng(0).permutation(parts.validation)[:VALIDATION_USERS])
    train = parts.train
    if users is not None:
        drawn, train = drawn[interactions.user[drawn] < users], train & (interactions.user < users)
    histories = training_histories(interactions, train, config.event_weights)
    events = held_out_events(interactions, drawn, config)
    seconds = None if interactions.time_is_order else interactions.timestamp_us / 1e6
    validation_s = None
    if seconds is not None:
        begins = interactions.starts[interactions.user[drawn]]
        lengths = events.histories.lengths
        validation_s = seconds[np.arange(lengths.sum()) + np.repeat(begins - events.histories.starts[:-1], lengths)]
    items = len(interactions.item_ids)
    near = _pairs(histories, items, item_codes.WINDOW, item_codes.DECAY_PER_EVENT)
    counts = _pairs(histories, items, item_followers.WINDOW, config.training.lift_count_decay)
    together = sparse.csr_array(near + near.T)
    together.setdiag(0)
    together.eliminate_zeros()
    association: Any = item_codes.mutual_information(together, item_codes.degrees(together))
    if items <= DENSE_ITEMS:
        association = association.toarray()
    popularity = np.bincount(histories.item, minlength=items)
    times_s = None if seconds is None else seconds[train]
    return Table(
        directory.name, config, histories, events, times_s, validation_s, association, counts, popularity, {}, {}
    )


def stored_table(path: Path) -> Table:
    """Read a table that was pickled."""
    table: Table = pickle.loads(path.read_bytes())
    return table


def _pairs(histories: Histories, items: int, window: int, decay: float) -> sparse.csr_array:
    """Count as ``item_codes.follower_counts``, faster."""
    if items > DENSE_ITEMS:
        return item_codes.follower_counts(histories.item, histories.starts, items, window, decay)
    item, user = histories.item.astype(np.int64), histories.rows
    counts = np.zeros(items * items, np.float32)
    for distance in range(1, window + 1):
        together = user[distance:] == user[:-distance]
        pairs = item[:-distance][together] * items + item[distance:][together]
        np.add.at(counts, pairs, np.float32(np.exp(-decay * (distance - 1))))
    return sparse.csr_array(counts.reshape(items, items))


def states(
    histories: Histories,
    times_s: NDArray[np.float64] | None,
    at: NDArray[np.int64],
    codes: NDArray[np.uint8],
    shape: ModelConfig,
    device: torch.device,
) -> States:
    """Compute the states after these events, ascending, on a device."""
    histogram = torch.empty(
        (len(at), len(shape.decay_rates), shape.history_codebooks, shape.history_codewords),
        dtype=torch.float16,  # a dozen trainings of a million states share the device's memory
        device=device,
    )
    begin = done = 0
    starts = histories.starts
    while begin < len(histories):
        end = max(int(np.searchsorted(starts, starts[begin] + EVENTS_AT_ONCE, side="right")) - 1, begin + 1)
        part = histories[begin:end]
        chosen = at[slice(*np.searchsorted(at, starts[[begin, end]]))] - starts[begin]
        rows = running_histograms(
            codes[part.item], part.weights, part.starts, shape.decay_rates, shape.history_codewords
        )
        histogram[done : done + len(chosen)] = torch.from_numpy(rows[chosen]).half().to(device)
        begin, done = end, done + len(chosen)
    recent = recent_windows(histories.item, starts, at, shape.recent_items)
    gaps = np.full(recent.shape, GAPS - 1, np.uint8)
    clock = np.zeros((len(at), 3), np.uint8)
    if times_s is not None:
        places = np.maximum(at[:, None] - np.arange(max(shape.recent_items, 2)), 0)
        ages = _buckets(times_s[at][:, None] - times_s[places])
        gaps = np.where(recent < 0, GAPS - 1, ages[:, : recent.shape[1]]).astype(np.uint8)
        is_first = at == np.repeat(starts[:-1], histories.lengths)[at]
        hour, weekday = times_s[at] // 3600 % 24, times_s[at] // 86400 % 7
        clock = np.stack([hour, 24 + weekday, 31 + np.where(is_first, GAPS - 1, ages[:, 1])], axis=1).astype(np.uint8)
    found = histories.item[at].astype(np.int64), recent, gaps, clock
    return States(histogram, *(torch.from_numpy(part).to(device) for part in found))


def _buckets(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return a bucket below GAPS - 1 of each time: 0 for none, then about a factor of 3.5 each."""
    wide = 1 + np.minimum(np.log2(np.maximum(seconds, 0) + 1) / 1.8, GAPS - 3).astype(np.int64)
    return np.where(seconds <= 0, 0, wide)

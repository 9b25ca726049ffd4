"""A training that continues from a trained model, with its weights. The model's items keep their rows and codes.

So a state of the trained model has the same bins in the new one, unless its user chose a new item. New items come after
the known ones. They get codes like cold items of a served model: from the users who chose them, else from their titles
and categories. Training then changes the codewords and biases, but no code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.artifact.model_directory import Artifact
from model.cold_items import (
    CONTEXT_ITEMS,
    MAX_SIMILAR_ITEMS,
    NEAREST_ITEMS,
    POOLED_QUERIES,
    SAMPLED_QUERIES,
    ColdCodes,
    ColdItemEvent,
    ColdItems,
    Neighbours,
    QuerySample,
    SampledQuery,
    codes_of_nearest_items,
    codes_of_similar_items,
    drawn,
    likeliest_codes,
    query_sample,
    sampled_query,
)
from model.config import Config, DataCard, ModelConfig, TrainConfig
from model.content.text_features import Description
from model.data.interactions import Histories, Interactions
from model.holdout_ranks import states_of
from model.lisa.item_codes import make_distinct
from model.lisa.lisa_mini import LisaMini

CHOICES_OF_ITEM = 30  # maximum number of events that determine an item's codes
STATES_AT_ONCE = 256
OF_ITEMS = {"followers", "lift", "history_codes", "target_codes"}  # these are counted or assigned again


class WarmStartError(ValueError):
    """A warm start from this model is not possible. The message says what to do."""


class WarmStart:
    """The trained model that a warm start continues from."""

    def __init__(self, trained: Artifact) -> None:
        self.trained = trained
        self.item_ids: Sequence[str] = list(trained.items.ids)

    def continued(self, config: Config) -> Config:
        """Return the recipe of a warm start from the model.

        raises  WarmStartError  when its codes are learned, or it has another shape or other event weights
        """
        before, name = self.trained.config, self.trained.name
        if not isinstance(self.trained.model, LisaMini) or not isinstance(before.training, TrainConfig):
            raise WarmStartError(
                f"cannot continue from {name!r}, because its codes are learned; use a preset such as lisa-mini"
            )
        if _shape(before.model) != _shape(config.model):
            raise WarmStartError(f"{name!r} has another shape; use its preset, or train without --warm-from")
        if before.event_weights != config.event_weights:
            raise WarmStartError(
                f"{name!r} has other event weights; use the same weights, or train without --warm-from"
            )
        about = {
            "warm_from": self.trained.tag,
            "warm_count": before.training.warm_count + 1,
            "fine_items": 0,
        }
        shape = config.model.model_copy(update={"target_codebooks": before.model.target_codebooks})
        return config.model_copy(update={"model": shape, "training": config.training.model_copy(update=about)})

    def judged(self, config: Config, interactions: Interactions) -> Config:
        """Return the recipe, completed from the data, with what is certain: the model learned from no held-out event.

        So it is on the model's own table, or, for the temporal split, on one that gained events only after the model's.
        """
        before = self.trained.config
        assert isinstance(before.training, TrainConfig)
        old, new = before.data, config.data
        is_known = not before.training.warm_from or before.training.warm_knows_no_tests
        is_held_out = old.split == new.split and old.train_on != "all" and old.train_on in ("train", new.train_on)
        is_certain = is_known and is_held_out
        if old.sha256 != new.sha256:
            is_certain = is_certain and _has_gained_only_later_events(old, new, interactions)
        training = config.training.model_copy(update={"warm_knows_no_tests": is_certain})
        return config.model_copy(update={"training": training})

    def model(
        self, histories: Histories, config: ModelConfig, new_items: Sequence[tuple[str, Description]]
    ) -> LisaMini:
        """Return the model to train, including the new items.

        histories  training events; the rows of new items come after those of known items
        new_items  the ids and descriptions of the new items
        """
        wider = self.trained.model
        if new_items:
            wider = wider.with_cold_items(*ColdItems.of(NewItemCodes(self.trained, histories).of(new_items)))
        distinct = make_distinct(wider.target_codes.numpy(), config.target_codewords)
        model = LisaMini(config, wider.history_codes, torch.from_numpy(distinct))
        weights = {name: tensor for name, tensor in wider.state_dict().items() if name not in OF_ITEMS}
        model.load_state_dict(weights, strict=False)
        return model


class NewItemCodes:
    """Finds the codes of items that a trained model does not know."""

    def __init__(self, trained: Artifact, histories: Histories) -> None:
        self._trained, self._histories = trained, histories
        self._known = len(trained.items)

    def of(self, new_items: Sequence[tuple[str, Description]]) -> Iterator[ColdCodes]:
        """Yield the codes of each new item; see ``WarmStart.model``."""
        counts, choices = self._choices(len(new_items))
        positions = max(self._histories.positions, 1)
        for (item_id, described), count, chosen in zip(new_items, counts.tolist(), choices, strict=True):
            if chosen:
                # all events, scaled down like the item's choices that were sampled
                events = max(round(positions * len(chosen) / count), len(chosen))
                yield likeliest_codes(self._trained, chosen, self._sample, events)
            else:
                yield self._codes_of_content(item_id, described)

    def _choices(self, items: int) -> tuple[NDArray[np.int64], list[list[ColdItemEvent]]]:
        """Return how often each new item was chosen, and some of these events: those after at least one known item.

        Each user counts once per item, with the first choice.
        """
        histories = self._histories
        places = np.flatnonzero(histories.item >= self._known)
        item = histories.item[places] - self._known
        user = np.searchsorted(histories.starts, places, side="right") - 1
        states: list[tuple[int, NDArray[np.int32], NDArray[np.float32]]] = []
        found, seen = np.zeros(items, np.int64), set[tuple[int, int]]()
        for place, one, owner in zip(places.tolist(), item.tolist(), user.tolist(), strict=True):
            if found[one] == CHOICES_OF_ITEM or (one, owner) in seen:
                continue
            seen.add((one, owner))
            before = slice(int(histories.starts[owner]), place)
            if (known := self._known_before(before)) is not None:
                states.append((one, *known))
                found[one] += 1
        choices: list[list[ColdItemEvent]] = [[] for _ in range(items)]
        queries = self._queries([(history, weights) for _, history, weights in states])
        for (one, history, _), query in zip(states, queries, strict=True):
            newest = history[::-1][:CONTEXT_ITEMS]
            choices[one].append(ColdItemEvent(tuple(newest.tolist()), query))
        return np.bincount(item, minlength=items).astype(np.int64), choices

    def _known_before(self, events: slice) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
        """Return the items of these events that the model knows, with their weights; None if there are none."""
        items, weights = self._histories.item[events], self._histories.weights[events]
        known = items < self._known
        return (items[known], weights[known]) if known.any() else None

    @torch.inference_mode()
    def _queries(self, histories: Sequence[tuple[NDArray[np.int32], NDArray[np.float32]]]) -> Iterator[Tensor]:
        """Yield the query (D,) after each of these histories of known items, oldest first."""
        shape, codes = self._trained.config.model, self._trained.history_codes
        for begin in range(0, len(histories), STATES_AT_ONCE):
            items, weights = zip(*histories[begin : begin + STATES_AT_ONCE], strict=True)
            histories_at_once = Histories.joined(items, weights)
            histograms, last, recent = map(torch.from_numpy, states_of(histories_at_once, codes, shape))
            yield from self._trained.model.read(histograms, last, recent, self._trained.tables)

    @cached_property
    def _user_queries(self) -> Tensor:
        """Queries of a sample of the users with known items: (Q, D)."""
        users = np.random.default_rng(0).permutation(np.flatnonzero(self._histories.lengths))
        starts = self._histories.starts
        known = (self._known_before(slice(int(starts[user]), int(starts[user + 1]))) for user in users)
        sample = list(islice((one for one in known if one is not None), SAMPLED_QUERIES))
        if not sample:
            raise WarmStartError(
                f"no event is about an item that {self._trained.name!r} knows; train without --warm-from"
            )
        return torch.stack([*self._queries(sample)])

    @cached_property
    def _sample(self) -> list[SampledQuery]:
        with torch.inference_mode():
            scores = self._user_queries @ self._trained.model.item_vectors().T + self._trained.model.bias
            rows = zip(self._user_queries, scores, strict=True)
            return [sampled_query(self._trained, query, own) for query, own in rows]

    @cached_property
    def _audience(self) -> QuerySample:
        return query_sample(self._trained, self._user_queries[:POOLED_QUERIES])

    @cached_property
    def _neighbours(self) -> Neighbours:
        return Neighbours(self._trained)

    def _codes_of_content(self, item_id: str, described: Description) -> ColdCodes:
        """Return codes predicted from title and categories; else the most common codes of some random items."""
        if self._trained.content.reads_texts:
            (predicted,), (is_known,) = self._trained.content.of_descriptions([described])
            if is_known:
                nearest = self._neighbours.nearest(predicted, NEAREST_ITEMS)
                return codes_of_nearest_items(self._trained, nearest, self._audience)
        rows = drawn(np.arange(self._known), MAX_SIMILAR_ITEMS, item_id)
        return codes_of_similar_items(self._trained, rows, self._audience)


def _has_gained_only_later_events(before: DataCard, after: DataCard, interactions: Interactions) -> bool:
    """Return whether a table with all events of an earlier one has the same ones before its temporal split."""
    if before.cutoff_us is None or after.cutoff_us is None or before.cutoff_us > after.cutoff_us:
        return False
    return interactions.count_before(before.cutoff_us) == before.events_before_cutoff


def _shape(config: ModelConfig) -> ModelConfig:
    """Return the shape without the parts that a training may choose anew."""
    chosen = {"followers": 0, "lift_decay": 1.0, "dropout": 0.0, "target_codebooks": 1}
    return config.model_copy(update=chosen if config.recent_heads else {**chosen, "recent_items": 1})

"""The map from content to item vectors: ridge regression, and recovery of a linear relation."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from model.content.content_map import EVENTS_OF_HALF_WEIGHT, NO_CONTENT, TEXT_PENALTY, learned_content
from model.content.text_features import Description, features, rarities, term_counts

ITEMS, WIDTH, NUMBERS = 300, 8, 12
COLOURS, THINGS = ("green", "black", "white", "oolong"), ("tea", "cup", "kettle", "spoon", "biscuit")


def described(rng: np.random.Generator) -> tuple[list[Description], NDArray[np.float32]]:
    """Items with a colour and a kind; their vectors are the sums of both vectors plus noise."""
    colours, things = rng.normal(size=(len(COLOURS), WIDTH)), rng.normal(size=(len(THINGS), WIDTH))
    colour, thing = rng.integers(len(COLOURS), size=ITEMS), rng.integers(len(THINGS), size=ITEMS)
    titles = [Description(f"{COLOURS[one]} {THINGS[other]}") for one, other in zip(colour, thing, strict=True)]
    targets = 3 + colours[colour] + things[thing] + 0.1 * rng.normal(size=(ITEMS, WIDTH))
    return titles, targets.astype(np.float32)


def weights_of(events: NDArray[np.int64]) -> NDArray[np.float64]:
    return events / (events + EVENTS_OF_HALF_WEIGHT)


def test_predictions_from_titles_equal_ridge_regression() -> None:
    rng = np.random.default_rng(0)
    titles, targets = described(rng)
    events = rng.integers(1, 200, ITEMS)
    found = learned_content(targets, events, titles)

    counts = term_counts(titles)
    x = features(counts, rarities(counts)).toarray().astype(np.float64)
    used = x.any(axis=0)
    x, weights = x[:, used], weights_of(events)
    mean = weights @ targets / weights.sum()
    gram = x.T @ (weights[:, None] * x) + TEXT_PENALTY * np.eye(x.shape[1])
    solved = np.linalg.solve(gram, x.T @ (weights[:, None] * (targets - mean)))
    predicted, is_known = found.of_descriptions(titles)
    assert is_known.all()
    np.testing.assert_allclose(predicted, mean + x @ solved, atol=0.02)
    np.testing.assert_allclose(found.mean, mean, atol=1e-4)


def test_known_words_give_near_vectors_and_others_are_unknown() -> None:
    rng = np.random.default_rng(1)
    titles, targets = described(rng)
    is_new = np.array([title.title == "black cup" for title in titles])
    assert 5 < is_new.sum() < 50
    kept = np.flatnonzero(~is_new)
    found = learned_content(targets[kept], np.full(len(kept), 100), [titles[row] for row in kept.tolist()])
    predicted, is_known = found.of_descriptions([Description("Black CUP!"), Description("1 2 3"), Description("")])
    assert is_known.tolist() == [True, False, False]
    wanted = targets[is_new].mean(axis=0) - found.mean
    told = predicted[0] - found.mean
    assert told @ wanted / np.linalg.norm(told) / np.linalg.norm(wanted) > 0.8
    np.testing.assert_array_equal(predicted[1:], [found.mean, found.mean])


@pytest.mark.parametrize("lengths", [1.0, 1000.0])
def test_vectors_of_a_shop_predict_those_of_the_model(lengths: float) -> None:
    """Regardless of their length; items without a vector are ignored."""
    rng = np.random.default_rng(2)
    vectors = rng.normal(size=(ITEMS, NUMBERS))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    targets = (vectors @ rng.normal(size=(NUMBERS, WIDTH)) + 1).astype(np.float32)
    lacking = rng.random(ITEMS) < 0.3
    given = np.where(lacking[:, None], np.nan, lengths * vectors)
    found = learned_content(targets, np.full(ITEMS, 1000), [Description("")] * ITEMS, given)
    assert (found.numbers, found.reads_texts) == (NUMBERS, False)
    predicted = found.of_shop_vectors(vectors)
    around = targets - targets.mean(axis=0)
    assert ((predicted - targets) ** 2).sum() < 0.02 * (around**2).sum()


def test_frequent_items_have_more_weight() -> None:
    titles = [Description("tea")] * 2 + [Description("cup")] * 2
    targets = np.array([[1.0], [-1.0], [0.0], [0.0]], np.float32)
    predicted, _ = learned_content(targets, np.array([1000, 1, 10, 10]), titles).of_descriptions(titles[:1])
    assert predicted[0, 0] > 0


def test_uninformative_content_gives_no_map() -> None:
    targets = np.ones((2, WIDTH), np.float32)
    nameless = [Description("")] * 2
    assert learned_content(targets, np.ones(2, int), nameless) is NO_CONTENT
    assert learned_content(targets, np.ones(2, int), nameless, np.full((2, 3), np.nan)) is NO_CONTENT
    assert learned_content(targets, np.zeros(2, int), [Description("tea")] * 2) is NO_CONTENT
    predicted, is_known = NO_CONTENT.of_descriptions([Description("tea")])
    assert (predicted.shape, is_known.tolist()) == ((1, 0), [False])

"""Training on recent events or a sample of users, and events with reordered items."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from model.config import DataCard
from model.data.arrays import MappedArrays
from model.data.interactions import DataError, Interactions
from model.data.readers import read_interactions
from model.data.splits import split, thinned

Write = Callable[..., Path]
SINCE_S = 1_000


@pytest.fixture(params=["in memory", "in pieces"])
def found(request: pytest.FixtureRequest, tmp_path: Path, write_rows: Write) -> Interactions:
    rng = np.random.default_rng(0)
    rows = [(f"u{user}", f"i{rng.integers(9)}", rng.integers(2 * SINCE_S)) for user in range(40) for _ in range(6)]
    directory = write_rows(tmp_path / "data", rows)
    if request.param == "in memory":
        return read_interactions(directory)
    return read_interactions(directory, MappedArrays(tmp_path / "work", 25))


def test_thinning_reduces_training_events_and_keeps_held_out_ones(found: Interactions) -> None:
    whole = split(found, "loo")
    assert thinned(found, whole, DataCard()) is whole
    since = datetime.fromtimestamp(SINCE_S, UTC)
    parts = thinned(found, split(found, "loo"), DataCard(since=since, users_sample=0.25))
    users = np.unique(found.user[parts.train])
    assert len(users) <= 10
    expected = whole.train & np.isin(found.user, users) & (found.timestamp_us >= SINCE_S * 1_000_000)
    np.testing.assert_array_equal(parts.train, expected)
    for one, other in ((parts.validation, whole.validation), (parts.test, whole.test)):
        np.testing.assert_array_equal(one, other)
    again = thinned(found, split(found, "loo"), DataCard(since=since, users_sample=0.25))
    np.testing.assert_array_equal(again.train, parts.train)


def test_a_share_of_users_is_sampled(found: Interactions) -> None:
    parts = thinned(found, split(found, "loo"), DataCard(users_sample=0.5))
    assert len(np.unique(found.user[parts.train])) == 20


def test_an_empty_training_set_is_refused(found: Interactions, tmp_path: Path, write_rows: Write) -> None:
    with pytest.raises(DataError, match="no training event is left; use an earlier --since"):
        thinned(found, split(found, "loo"), DataCard(since=datetime(2030, 1, 1, tzinfo=UTC)))
    with pytest.raises(DataError, match="no event has a weight above 0"):
        found.stepping({"click": 0.0})
    order = read_interactions(write_rows(tmp_path / "order", [("u", f"i{place}", place) for place in range(5)]))
    with pytest.raises(DataError, match="omit --since"):
        thinned(order, split(order, "loo"), DataCard(since=datetime(1970, 1, 1, tzinfo=UTC)))


def test_items_may_be_put_first_including_unused_ones(found: Interactions) -> None:
    first = ["elsewhere", *sorted(found.item_ids, reverse=True)[:5]]
    moved = found.with_items_first(first)
    assert moved.item_ids[: len(first)] == first
    assert sorted(moved.item_ids) == sorted({*found.item_ids, "elsewhere"})
    names = [[one.item_ids[item] for item in one.item] for one in (found, moved)]
    assert names[0] == names[1]

"""Memory-limited trainings: the same counts and models, and refusal of too little memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.artifact import model_directory
from model.artifact.item_statistics import FILES
from model.data.arrays import MappedArrays
from model.data.readers import read_interactions
from model.lisa import item_complements
from model.training import memory, train
from model.training.counts import pair_counts, purchases
from model.training.counts.pair_counts import PairCounts
from model.training.loop import TrainError
from model.training.memory import GIB, MIB, Resources
from tests.model.data.histories import packed

ITEMS = 12
Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def _process_that_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore memory that other tests have left allocated."""
    monkeypatch.setattr(memory, "resident_bytes", lambda: 0)


@given(
    histories=st.lists(st.lists(st.integers(0, ITEMS - 2), max_size=40), min_size=1, max_size=8),
    piece=st.sampled_from([1, 2, 5, 16]),
)
@settings(max_examples=10)
def test_counting_pairs_by_blocks_gives_the_same_counts(
    tmp_path_factory: pytest.TempPathFactory, histories: list[list[int]], piece: int
) -> None:
    events = packed(histories)
    whole = PairCounts(events, ITEMS)
    by_blocks = PairCounts(events, ITEMS, MappedArrays(tmp_path_factory.mktemp("work"), piece))
    for count, decay in ((3, 0.4), (ITEMS + 2, 1.0)):
        one, other = (counts.followers(count, decay) for counts in (whole, by_blocks))
        np.testing.assert_array_equal(one.items, other.items)
        np.testing.assert_array_equal(one.shares, other.shares)
    np.testing.assert_array_equal(whole.item_vectors(4, seed=0), by_blocks.item_vectors(4, seed=0))


@pytest.mark.parametrize("stored_at_once", [1, 5_000, pair_counts.STORED_AT_ONCE])
def test_counting_many_pairs_is_bit_identical(
    tmp_path: Path, stored_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_counts, "STORED_AT_ONCE", stored_at_once)
    rng = np.random.default_rng(0)
    popular = 300 * rng.random((400, 60)) ** 4
    events = packed([row.astype(int)[: rng.integers(0, 60)].tolist() for row in popular])
    whole, by_blocks = (PairCounts(events, 300, *arrays) for arrays in ((), (MappedArrays(tmp_path, 500),)))
    one, other = (counts.followers(16, 0.4) for counts in (whole, by_blocks))
    np.testing.assert_array_equal(one.items, other.items)
    np.testing.assert_array_equal(one.shares, other.shares)
    np.testing.assert_array_equal(whole.item_vectors(16, seed=0), by_blocks.item_vectors(16, seed=0))


def test_a_dominant_item_is_counted_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = []
    whole_look_up = pair_counts.ItemIndex.look_up

    def look_up(index: pair_counts.ItemIndex, column: Any, places: Any, steps: range) -> Any:
        looked_up.append(len(places))
        return whole_look_up(index, column, places, steps)

    monkeypatch.setattr(pair_counts.ItemIndex, "look_up", look_up)
    rows = [[0, 1, 0, 2, 0, 0] for _ in range(50)]
    events, arrays = packed(rows), MappedArrays(tmp_path / "arrays", 40)
    whole, by_blocks = PairCounts(events, 3), PairCounts(events, 3, arrays)
    np.testing.assert_array_equal(whole.item_vectors(2, seed=0), by_blocks.item_vectors(2, seed=0))
    baskets = item_complements.baskets_of(np.repeat(np.arange(50), 6), events.item)
    index = pair_counts.ItemIndex(baskets.item, 3, arrays)
    for block in index.blocks():
        item_complements.counts_of_block(block, 3, baskets, index.look_up)
    assert max(looked_up) <= 20


def test_a_memory_limit_gives_the_same_model(
    shop: Path, trained: Path, tmp_path: Path, tiny_config: Make, silent: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "BYTES_PER_EVENT", 1 * MIB)  # so that the shop has a dozen pieces
    resources = Resources(memory=1280 * MIB)
    assert resources.arrays(tmp_path).piece == 320
    out = tmp_path / "model"
    progress = silent()
    train.train(shop, out, tiny_config(), resources=resources, progress=progress)
    assert any(re.fullmatch(r"counting followers, \d\d%, 0:00:\d\d to go", stage) for stage in progress.stages)
    for name in (model_directory.WEIGHTS, model_directory.CONFIG, model_directory.ITEMS):
        assert (out / name).read_bytes() == (trained / name).read_bytes(), name
    for name in FILES:
        assert [(place / name).exists() for place in (out, trained)] in ([True, True], [False, False])
        assert not (out / name).exists() or (out / name).read_bytes() == (trained / name).read_bytes(), name
    assert {path.name for path in out.iterdir()} == {path.name for path in trained.iterdir()}


def test_too_little_memory_is_refused_with_the_required_amount(
    shop: Path, tmp_path: Path, tiny_config: Make, silent: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_with(size: int) -> None:
        train.train(shop, tmp_path / "model", tiny_config(), resources=Resources(memory=size), progress=silent())

    with pytest.raises(TrainError, match=r"0\.5GiB of memory is not enough; use --memory 0\.7GiB"):
        train_with(500 * MIB)
    monkeypatch.setattr(memory, "BYTES_PER_NAME", 10 * MIB)  # as if there were millions of users
    with pytest.raises(TrainError, match=r"not enough for a model of 40 items, trained on 150 users; use .* 2\.\dGiB"):
        train_with(1 * GIB)
    assert not model_directory.exists(tmp_path / "model")


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from("uvw"),
            st.integers(0, ITEMS - 1).map("i{}".format),
            st.integers(0, 400).map(lambda step: step * 1_700 + step * step),
            st.sampled_from(["purchase", "purchase", "view"]),
            st.sampled_from(["", "", "o1", "o2"]),
        ),
        min_size=1,
        max_size=60,
    ),
    piece=st.sampled_from([1, 3, 10]),
)
@settings(max_examples=25)
def test_statistics_of_purchases_in_chunks_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, write_rows: Make, rows: list[Any], piece: int
) -> None:
    directory = write_rows(tmp_path_factory.mktemp("bought"), rows, "user_id item_id timestamp type order_id")
    both = read_interactions(directory), read_interactions(directory, MappedArrays(directory / "work", piece))
    train_masks = [np.arange(len(one)) % 7 != 5 for one in both]
    category = np.arange(len(both[0].item_ids)) % 3
    for of_pieces in (
        [purchases.complements(one, mask) for one, mask in zip(both, train_masks, strict=True)],
        [purchases.intervals(one, mask, category) for one, mask in zip(both, train_masks, strict=True)],
    ):
        for one, other in zip(*of_pieces, strict=True):
            np.testing.assert_array_equal(one, other)

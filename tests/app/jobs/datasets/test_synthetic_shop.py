"""The synthetic shop: deterministic, complete, and with patterns to learn."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from app.jobs.datasets.synthetic_shop import generate
from model.data.interactions import Interactions
from model.data.readers import read_interactions, read_items


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shop")
    generate(directory)
    return directory


@pytest.fixture(scope="module")
def interactions(shop: Path) -> Interactions:
    return read_interactions(shop)


def test_the_same_seed_gives_the_same_bytes(shop: Path, tmp_path: Path) -> None:
    generate(tmp_path)
    for name in ("interactions.tsv.gz", "items.tsv.gz"):
        assert (tmp_path / name).read_bytes() == (shop / name).read_bytes()


def test_another_seed_gives_another_shop(shop: Path, tmp_path: Path) -> None:
    generate(tmp_path, seed=8)
    assert read_interactions(tmp_path).sha256 != read_interactions(shop).sha256


def test_every_item_has_a_title_and_a_click(shop: Path, interactions: Interactions) -> None:
    items = read_items(shop)
    assert set(items.titles) == set(interactions.item_ids)
    assert len(set(items.titles.values())) == len(items.titles) == 432
    assert items.titles["trail-running-shoes-blue"] == "Trail running shoes, blue"
    assert items.categories["trail-running-shoes-blue"] == ("Outdoor", "Trail running")


def test_events_of_a_user_are_in_order_of_time(interactions: Interactions) -> None:
    for begin, end in pairwise(interactions.starts.tolist()):
        times = interactions.timestamp_us[begin:end].tolist()
        assert times == sorted(set(times))


def test_the_next_item_is_predictable(interactions: Interactions) -> None:
    """The commonest successor of an item is a far better guess than the most popular item."""
    followers: dict[int, Counter[int]] = {}
    for begin, end in pairwise(interactions.starts.tolist()):
        for item, successor in pairwise(interactions.item[begin:end].tolist()):
            followers.setdefault(item, Counter())[successor] += 1
    foreseen = sum(successors.most_common(1)[0][1] for successors in followers.values())
    commonest = Counter(interactions.item.tolist()).most_common(1)[0][1]
    assert foreseen / len(interactions) > 0.3
    assert commonest / len(interactions) < 0.02

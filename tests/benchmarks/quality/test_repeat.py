"""The benchmark of repeat purchases, shortened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality import repeat
from model.data.readers import read_interactions, read_items
from model.lisa.item_intervals import Purchases
from tests.model.conftest import write_rows

DAY_S = 86_400


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Customers who buy each of a dozen items every 20 or 30 days, some sooner and some later than others."""
    draw, rows = np.random.default_rng(0), list[tuple[str, str, int]]()
    for user in range(40):
        for item in range(12):
            interval = 20 + 10 * (item % 2)
            for day in range(int(draw.integers(interval)), 400, interval):
                rows.append((f"u{user}", f"i{item}", day * DAY_S))
    directory = write_rows(tmp_path_factory.mktemp("refills"), sorted(rows, key=lambda row: (row[0], row[2])))
    labels = "".join(f"i{item}\t\tshelf-{item % 2}\n" for item in range(12))
    (directory / "items.tsv").write_text("item_id\ttitle\tcategories\n" + labels, encoding="utf-8")
    return directory


def test_due_items_rank_better_than_frequent_ones(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeat, "K", 3)
    repeat.main(data, most=30)
    printed = " ".join(capsys.readouterr().out.split())
    assert "one order of each user, split by time 80/10/10" in printed
    assert "repeat, as served" in printed
    assert "minus it" not in printed  # the test is read when that is asked for
    repeat.main(data, most=30, test=True)
    assert "minus it" in " ".join(capsys.readouterr().out.split())
    bought = repeat.Bought.of(read_interactions(data), read_items(data))
    found = repeat.measure(bought, 30.0, 30, 0)
    assert found["repeat"].ndcg.mean() > found["frequency, then recency"].ndcg.mean() + 0.1
    assert found["repeat"].hit.mean() > found["recency"].hit.mean()


def test_test_orders_contain_repeat_purchases(data: Path) -> None:
    bought = repeat.Bought.of(read_interactions(data), read_items(data))
    begin_us, end_us = 300 * DAY_S * 1e6, 350 * DAY_S * 1e6
    questions = repeat.questions_of(bought, begin_us, end_us, 1_000, 0)
    assert len(questions) == 40
    for one in questions:
        assert one.bought.age_days.min() > 0
        assert set(one.again.tolist()) <= set(one.bought.item.tolist())
        assert len(one.again) > 0
    assert len(repeat.questions_of(bought, begin_us, end_us, 7, 0)) == 7


def test_ties_count_against_the_method() -> None:
    bought = Purchases(np.arange(20, dtype=np.int64), np.full(20, 5.0))
    found = repeat.measured([repeat.Question(bought, np.array([0, 1]))], repeat.recency)
    assert [part.tolist() for part in found] == [[0.0], [0.0], [0.0]]
    few = Purchases(np.arange(3, dtype=np.int64), np.array([1.0, 2.0, 3.0]))
    hit, recall, ndcg = repeat.measured([repeat.Question(few, np.array([0, 2]))], repeat.recency)
    assert (hit.tolist(), recall.tolist()) == ([1.0], [1.0])
    assert ndcg.tolist() == pytest.approx([(1 + 0.5) / (1 + 1 / np.log2(3))])

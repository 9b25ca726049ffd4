"""Set-valued columns: the last values, the labels in use, and the removal of unused labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.catalogue.category_column import CategoryColumn
from app.catalogue.expressions import set_columns, texts
from app.catalogue.expressions.set_columns import TextSetColumn
from model.artifact.string_table import Labels
from model.inference import bitmap
from model.inference.diversity import ItemLabels

ROWS = 6
LABELS = [f"label-{n}" for n in range(40)]
SETS = st.none() | st.lists(st.sampled_from(LABELS), unique=True, max_size=4).map(tuple)
STEPS = st.lists(st.dictionaries(st.integers(0, ROWS - 1), SETS, min_size=1), max_size=20)


@pytest.fixture(scope="module", autouse=True)
def _small_bounds() -> Iterator[None]:
    """Lower the thresholds, so that a few labels suffice to drop unused ones and to need two bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "MIN_NEW", 8)
        patch.setattr(set_columns, "ONE_LETTER", 5)
        yield


def rows_of(items: bitmap.Bitmap) -> list[int]:
    return [*map(int, np.flatnonzero(bitmap.to_mask(items, ROWS)))]


@given(STEPS)
def test_a_column_shows_the_last_values(steps: list[dict[int, tuple[str, ...] | None]]) -> None:
    column, expected = TextSetColumn(ROWS), dict[int, tuple[str, ...] | None]()
    for step in steps:
        column.set(np.array([*step]), [*step.values()])
        expected |= step
        assert column.values_at(np.arange(ROWS)) == [expected.get(row) for row in range(ROWS)]
        assert [column.value(row) for row in range(ROWS)] == [expected.get(row) for row in range(ROWS)]
        assert column.sizes.tolist() == [len(expected.get(row) or ()) for row in range(ROWS)]
        of_rows = column.by_label().of_rows(np.arange(ROWS))
        assert column.labels.at(of_rows.labels) == [one for row in range(ROWS) for one in expected.get(row) or ()]
        for label in LABELS[:5]:
            assert rows_of(column.rows_with(label)) == [
                row for row in range(ROWS) if label in (expected.get(row) or ())
            ]


def test_unused_labels_are_dropped() -> None:
    column = TextSetColumn(ROWS)
    for turn in range(100):
        column.set(np.arange(ROWS), [("tea", f"stock-{turn}-{row}") for row in range(ROWS)])
    assert len(column.labels) < 40
    assert column.value(5) == ("tea", "stock-99-5")


def test_concurrent_readers_see_a_consistent_label_numbering() -> None:
    replaced = TextSetColumn(ROWS)
    column = CategoryColumn(Labels.of([("pots",)] * ROWS), replaced)
    for turn in range(50):
        replaced.set(np.arange(2), [(f"old-{turn}", "pots"), (f"new-{turn}",)])
        reader = column.with_fixed_labels()
        labels = reader.of_rows(np.array([1]))
        replaced.set(np.arange(2, ROWS), [(f"other-{turn}-{row}",) for row in range(2, ROWS)])
        assert rows_of(reader.rows_with_labels(labels.labels)) == [1]
        assert rows_of(column.rows_with(f"new-{turn}")) == [1]
        assert rows_of(column.rows_with_all_names(["pots", f"old-{turn}"])) == [0]
        assert column.labels[0] == "pots"
        assert column.labels.number(f"other-{turn}-3") == column.numbers_of([f"other-{turn}-3"]).item()
    assert len(replaced.labels) < 40


def test_only_new_labels_are_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MIN_NEW", 1_000)
    replaced = TextSetColumn(ROWS)
    column = CategoryColumn(Labels.of([("pots",)] * ROWS), replaced)
    replaced.set(np.array([0]), [tuple(LABELS)])
    assert rows_of(column.rows_with(LABELS[-1])) == [0]
    looked_up, number = list[str](), Labels.number

    def noted(labels: Labels, name: str) -> int | None:
        looked_up.append(name)
        return number(labels, name)

    monkeypatch.setattr(Labels, "number", noted)
    replaced.set(np.array([1]), [("brand-new",)])
    assert rows_of(column.rows_with("brand-new")) == [1]
    assert set(looked_up) == {"brand-new"}


def test_concurrent_readers_see_an_item_before_or_after_the_drop() -> None:
    replaced = TextSetColumn(ROWS)
    column = CategoryColumn(Labels.of([("pots",)] * ROWS), replaced)
    replaced.set(np.arange(ROWS - 1), [(f"old-{row}",) for row in range(ROWS - 1)])
    reader, labels = column.with_fixed_labels(), replaced.labels
    for turn in range(50):
        replaced.set(np.arange(ROWS - 1), [(f"new-{turn}-{row}",) for row in range(ROWS - 1)])
    assert replaced.labels is not labels, "unused labels were dropped"
    replaced.set(np.array([ROWS - 1]), [("last",)])
    assert reader.value(ROWS - 1) == ("pots",)
    assert len(reader.of_rows(np.array([ROWS - 1])).labels) == 1


def test_sets_are_decoded_once_for_all_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = TextSetColumn(ROWS)
    column = CategoryColumn(Labels.of([("pots",)] * ROWS), replaced)
    replaced.set(np.arange(3), [("tea",), ("tea", "cups"), ("cups",)])
    decoded, decode = list[str](), set_columns.decoded_sets

    def noted(sets: Sequence[str]) -> ItemLabels:
        decoded.extend(sets)
        return decode(sets)

    monkeypatch.setattr(set_columns, "decoded_sets", noted)
    for _ in range(3):
        assert rows_of(column.with_fixed_labels().rows_with_labels(column.numbers_of(["cups"]))) == [1, 2]
    assert len(decoded) == 3

"""Vectors in an items table, and models that learn from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from model.artifact import model_directory
from model.data.interactions import DataError
from model.data.item_vectors import read_item_vectors
from model.data.readers import read_items
from model.training import train

Make = Callable[..., Any]


def test_vectors_are_found_by_id_and_normalised(tmp_path: Path) -> None:
    rows = {"item_id": ["a", "b", "c"], "title": ["A", "B", "C"], "vector": [[1e300, 0.0], None, [-3.0, 4.0]]}
    pl.DataFrame(rows).write_parquet(tmp_path / "items.parquet")
    found = read_item_vectors(tmp_path)
    assert found is not None
    vectors = found.of(["c", "b", "unknown", "a"])
    assert vectors.dtype == np.float16
    expected = np.array([[-0.6, 0.8], [np.nan] * 2, [np.nan] * 2, [1, 0]])
    np.testing.assert_allclose(vectors.astype(np.float64), expected, atol=1e-3)
    assert read_items(tmp_path).titles == {"a": "A", "b": "B", "c": "C"}


@pytest.mark.parametrize("cells", [None, [None, None]])
def test_a_table_without_vectors_gives_none(tmp_path: Path, cells: list[None] | None) -> None:
    assert read_item_vectors(tmp_path) is None
    frame = pl.DataFrame({"item_id": ["a", "b"]})
    if cells is not None:
        frame = frame.with_columns(pl.Series("vector", cells, pl.List(pl.Float32)))
    frame.write_parquet(tmp_path / "items.parquet")
    assert read_item_vectors(tmp_path) is None


def test_an_error_counts_a_line_before_the_header(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("sep=;\nitem_id;vector\na;[1,2]\nb;[1]\n")
    with pytest.raises(DataError, match="line 4: the vector does not have 2 numbers"):
        read_item_vectors(tmp_path)


def test_a_model_learns_from_vectors(
    tmp_path: Path, rows: list[Any], write_rows: Make, tiny_config: Make, silent: Make
) -> None:
    """The items of the shop form a ring, and so do their vectors."""
    directory = write_rows(tmp_path / "data", rows)
    angles = {f"i{item}": 2 * np.pi * item / 40 for item in range(40)}
    table = {"item_id": [*angles], "vector": [[np.cos(one), np.sin(one)] for one in angles.values()]}
    pl.DataFrame(table).write_parquet(directory / "items.parquet")
    train.train(directory, tmp_path / "model", tiny_config(), progress=silent())
    content = model_directory.load(tmp_path / "model").content
    assert (content.numbers, content.reads_texts) == (2, False)
    predicted = content.of_shop_vectors(np.array(table["vector"]))
    assert predicted.std(axis=0).max() > 0

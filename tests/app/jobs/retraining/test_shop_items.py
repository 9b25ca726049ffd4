"""Items of the store override the items table of the archive in training data."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from app.jobs.retraining.shop_items import items_of_store, put_over_file
from app.serving.store_factory import opened_store
from app.settings import Settings
from model.data.item_vectors import read_item_vectors
from model.data.readers import read_items
from storage.items.vectors import encode
from storage.records import ItemEntry

PUT = [
    ItemEntry("tea", "Green tea", ("drinks", "organic"), vector=encode([3, 4])),
    ItemEntry("cup", categories=("cups",)),
    ItemEntry("pot", available=False),
    ItemEntry("unused", "Nobody has used it", vector=encode([1, 0])),
]
USED = ["tea", "cup", "pot", "old"]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(data_dir=tmp_path / "state")

    async def put() -> None:
        async with opened_store(settings, is_new=True) as store:
            await store.put_items(settings.tenant, PUT)

    asyncio.run(put())
    return settings


def test_the_store_returns_updates_of_used_items(settings: Settings) -> None:
    found = asyncio.run(items_of_store(settings, USED))
    assert found.keys() == {"tea", "cup"}
    vector = found["tea"].pop("vector")
    assert vector == pytest.approx([0.6, 0.8], abs=1e-3)
    assert found == {"tea": {"title": "Green tea", "categories": "drinks|organic"}, "cup": {"categories": "cups"}}


@pytest.mark.parametrize("file", ["items.tsv", "items.parquet", None])
def test_updates_override_the_file(settings: Settings, tmp_path: Path, file: str | None) -> None:
    rows: dict[str, list[Any]] = {
        "item_id": ["tea", "cup", "old"],
        "title": ["Tea", "Cup", "Old"],
        "categories": ["a", "b", "c"],
    }
    if file == "items.tsv":
        pl.DataFrame(rows).write_csv(tmp_path / file, separator="\t")
    elif file is not None:
        pl.DataFrame(rows | {"vector": [None, [0.0, 2.0], [1.0, 1.0]]}).write_parquet(tmp_path / file)
    of_store = asyncio.run(items_of_store(settings, USED))
    put_over_file(tmp_path, of_store)
    texts, vectors = read_items(tmp_path), read_item_vectors(tmp_path)
    of_file = {} if file is None else {"cup": "Cup", "old": "Old"}
    assert {name: title for name, title in texts.titles.items() if title} == {"tea": "Green tea"} | of_file
    kept = {} if file is None else {"old": ("c",)}
    assert texts.categories == {"tea": ("drinks", "organic"), "cup": ("cups",)} | kept
    assert vectors is not None
    assert vectors.rows.keys() == {"tea"}  # those of the file may have other numbers
    without = {name: {key: value for key, value in own.items() if key != "vector"} for name, own in of_store.items()}
    if file == "items.parquet":
        pl.DataFrame(rows | {"vector": [None, [0.0, 2.0], [1.0, 1.0]]}).write_parquet(tmp_path / file)
        put_over_file(tmp_path, without)
        vectors = read_item_vectors(tmp_path)
        assert vectors is not None
        expected = np.array([[0, 1], [0.7071, 0.7071]])
        np.testing.assert_allclose(vectors.of(["cup", "old"]).astype(np.float64), expected, atol=1e-3)


def test_a_store_without_updates_keeps_the_file(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,title\ntea,Tea\n")
    put_over_file(tmp_path, {})
    assert (tmp_path / "items.csv").read_text() == "item_id,title\ntea,Tea\n"

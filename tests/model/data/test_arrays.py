"""Memory-mapped arrays: tables read and split in chunks equal those read and split at once."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import EVENT_WEIGHTS
from model.data.arrays import Arrays, MappedArrays
from model.data.interactions import (
    DataError,
    Histories,
    histories_before,
    repeat_share,
    seen_before,
    training_histories,
)
from model.data.orders import order_numbers
from model.data.readers import read_interactions
from model.data.splits import split
from tests.model.data.same_interactions import require_same

COLUMNS = ("user_id", "item_id", "timestamp", "type", "value", "order_id")
rows_of = st.lists(
    st.tuples(
        st.sampled_from("uvwxyz"),
        st.sampled_from("abcde"),
        st.integers(0, 50) | st.integers(10**9, 10**9 + 3),
        st.sampled_from(["click", "view", "dislike", "purchase"]),
        st.none() | st.integers(0, 9).map(float),
        st.sampled_from(["", "o1", "o2", None]),
    ),
    min_size=1,
    max_size=60,
)
pieces = st.sampled_from([1, 2, 3, 7, 20, 1000])


def written(directory: Path, rows: list[tuple[Any, ...]]) -> Path:
    schema = {"timestamp": pl.Float64, "value": pl.Float64}
    frame = pl.DataFrame(rows, [(name, schema.get(name, pl.String)) for name in COLUMNS], orient="row")
    frame.write_parquet(directory / "interactions.parquet", row_group_size=8)
    return directory


def require_same_histories(one: Histories, other: Histories) -> None:
    for name in ("item", "weights", "starts"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


@given(rows=rows_of, piece=pieces)
@settings(max_examples=25)
def test_chunked_reading_equals_reading_at_once(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[Any, ...]], piece: int
) -> None:
    directory = written(tmp_path_factory.mktemp("events"), rows)
    both = read_interactions(directory), read_interactions(directory, MappedArrays(directory / "work", piece))
    require_same(*both)
    if {row[3] for row in rows} == {"dislike"}:
        for one in both:
            with pytest.raises(DataError, match="no event has a weight above 0"):
                one.stepping(EVENT_WEIGHTS)
        return
    whole, in_pieces = (one.stepping(EVENT_WEIGHTS) for one in both)
    require_same(whole, in_pieces)
    assert repeat_share(whole) == repeat_share(in_pieces)
    np.testing.assert_array_equal(order_numbers(whole), order_numbers(in_pieces))
    names = ["loo"] if whole.time_is_order else ["loo", "temporal"]
    for name in names:
        for train_on in ("train", "validation", "all"):
            parts = [split(one, name, train_on) for one in (whole, in_pieces)]  # type: ignore[arg-type]
            for of_split in ("train", "validation", "test"):
                np.testing.assert_array_equal(*(getattr(one, of_split) for one in parts))
            require_same_histories(
                *(
                    training_histories(one, own.train, EVENT_WEIGHTS)
                    for one, own in zip((whole, in_pieces), parts, strict=True)
                )
            )
            test = parts[0].test
            require_same_histories(*(histories_before(one, test, EVENT_WEIGHTS) for one in (whole, in_pieces)))
            seen = [seen_before(one, test, ["view"]) for one in (whole, in_pieces)]
            assert [one.tolist() for one in seen[0]] == [one.tolist() for one in seen[1]]
    assert not [*(directory / "work").iterdir()]  # nothing is left where a process ends, however it does


def test_the_progress_of_reading_is_reported(tmp_path: Path) -> None:
    stages: list[str] = []
    directory = written(tmp_path, [("u", f"i{row}", row, "click", None, None) for row in range(20)])
    read_interactions(directory, MappedArrays(tmp_path / "work", 5), stages.append)
    shares = [f"reading data, {share}%" for share in (0, 25, 50, 75)]
    assert [stage.partition("%")[0] + "%" for stage in stages[1:-1]] == shares
    assert (stages[0], stages[2].endswith("to go"), stages[-1]) == ("reading data", True, "sorting events")


@pytest.mark.parametrize("piece", [3, 1000])
def test_a_bad_cell_is_named_in_any_chunk(tmp_path: Path, piece: int) -> None:
    rows = [(f"u{row}", "i", row, "click", None, None) for row in range(20)]
    rows[13] = ("u\x85u", "i", 1, "click", None, None)
    with pytest.raises(DataError, match=r"interactions\.parquet, row 14: user_id 'u\\x85u' is not an id"):
        read_interactions(written(tmp_path, rows), MappedArrays(tmp_path / "work", piece))


def resident_kib(path: Path) -> int:
    """Resident memory of a mapped file in KiB."""
    regions = re.findall(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    return sum(map(int, regions))


def test_page_cache_of_a_saved_file_is_released(tmp_path: Path) -> None:
    arrays, path = MappedArrays(tmp_path, 1000), tmp_path / "item.npy"
    kept = np.arange(1 << 20)
    arrays.save(path, kept)
    np.testing.assert_array_equal(np.load(path), kept)
    saved = arrays.saved(path)
    assert int(saved.sum()) == int(kept.sum())
    assert resident_kib(path) >= 8 << 10
    arrays.release()
    assert resident_kib(path) == 0
    assert int(saved[-1]) == len(kept) - 1


def test_texts_are_read_with_mapped_arrays(tmp_path: Path, rows: list[Any], write_rows: Any) -> None:
    directory = write_rows(tmp_path, rows)
    require_same(read_interactions(directory), read_interactions(directory, MappedArrays(tmp_path / "work", 100)))


def test_invalid_tables_are_refused_with_mapped_arrays(tmp_path: Path) -> None:
    arrays = MappedArrays(tmp_path / "work", 3)
    (tmp_path / "interactions.parquet").write_bytes(b"no table")
    with pytest.raises(DataError, match="is not a Parquet table"):
        read_interactions(tmp_path, arrays)
    pl.DataFrame({"user_id": ["u"], "item_id": ["i"]}).write_parquet(tmp_path / "interactions.parquet")
    with pytest.raises(DataError, match="column 'timestamp' is missing"):
        read_interactions(tmp_path, arrays)
    pl.DataFrame(schema=dict.fromkeys(COLUMNS, pl.String)).write_parquet(tmp_path / "interactions.parquet")
    with pytest.raises(DataError, match="has no interactions"):
        read_interactions(tmp_path, arrays)


@pytest.fixture(params=["in memory", "mapped"])
def arrays(request: pytest.FixtureRequest, tmp_path: Path) -> Arrays:
    return Arrays() if request.param == "in memory" else MappedArrays(tmp_path / "work", 4)


class TestArrays:
    def test_released_memory_is_read_again(self, arrays: Arrays) -> None:
        made = arrays.empty(10_000, np.int64)
        made[:] = np.arange(10_000)
        arrays.release()
        assert made.sum() == 9_999 * 5_000
        made[7] = -1
        arrays.release()
        assert made[7] == -1
        assert len(arrays.empty(0, np.int32)) == 0

    def test_chunks_are_complete_and_in_order(self, arrays: Arrays) -> None:
        found = [*arrays.slices(10)]
        assert [one.start for one in found] == [0, *(one.stop for one in found[:-1])]
        assert found[-1].stop == 10
        assert [*arrays.slices(0)] == []

    def test_parts_are_joined_in_order(self, arrays: Arrays) -> None:
        def parts() -> Iterator[Any]:
            yield np.arange(3, dtype=np.int32)
            yield np.arange(5, dtype=np.int32)

        assert arrays.joined(parts(), 20, np.int32).tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
        assert arrays.joined([], 0, np.int32).tolist() == []

    @pytest.mark.parametrize("share", [1, 2])
    def test_groups_fit_into_a_chunk_or_are_alone(self, tmp_path: Path, share: int) -> None:
        arrays = MappedArrays(tmp_path, 4)
        starts = np.array([0, 2, 4, 5, 5, 11, 11, 12], np.int64)
        found = [*arrays.groups(starts, share)]
        assert [one.start for one in found] == [0, *(one.stop for one in found[:-1])]
        assert found[-1].stop == len(starts) - 1
        for one in found:
            assert starts[one.stop] - starts[one.start] <= 4 // share or one.stop == one.start + 1


def test_the_digest_equals_that_of_the_file(tmp_path: Path) -> None:
    directory = written(tmp_path, [("u", "i", 1, "click", None, None)])
    digest = hashlib.sha256((directory / "interactions.parquet").read_bytes()).hexdigest()
    assert read_interactions(directory, MappedArrays(tmp_path / "work", 3)).sha256 == digest


def test_disk_space_of_a_mapped_array_is_allocated_first(tmp_path: Path) -> None:
    array = MappedArrays(tmp_path, 8).empty(1 << 20, np.int8)
    files = [file for file in Path("/proc/self/fd").iterdir() if str(file.resolve()).startswith(str(tmp_path))]
    assert [file.stat().st_blocks * 512 >= len(array) for file in files] == [True]


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{re.escape(str(tmp_path))}'"):
        MappedArrays(tmp_path, 8).empty(10, np.int8)

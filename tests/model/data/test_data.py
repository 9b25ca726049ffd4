"""Data directories: what is read, what is refused and where, and properties of the splits."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import EVENT_WEIGHTS
from model.data.interactions import DataError, Interactions, repeat_share
from model.data.readers import ItemTexts, read_interactions, read_items
from model.data.splits import split

HEADER = b"user_id\titem_id\ttimestamp\n"
TYPED = b"user_id\titem_id\ttimestamp\ttype\tvalue\n"
Write = Callable[..., Path]


def put(directory: Path, name: str, content: bytes) -> Path:
    (directory / name).write_bytes(content)
    return directory


def named(interactions: Interactions) -> list[tuple[str, str, int, str]]:
    """Interactions as rows of ids."""
    return [
        (
            interactions.user_ids[interactions.user[row]],
            interactions.item_ids[interactions.item[row]],
            int(interactions.timestamp_us[row]),
            interactions.type_names[interactions.type[row]],
        )
        for row in range(len(interactions))
    ]


class TestReading:
    def test_events_are_grouped_by_user_and_sorted_stably_by_time(self, tmp_path: Path) -> None:
        content = HEADER + b"b\tx\t5\na\tz\t9\nb\ty\t3\na\ty\t9\nb\tx\t5\na\tx\t9\nb\tz\t5\n"
        found = read_interactions(put(tmp_path, "interactions.tsv", content))
        assert named(found) == [
            ("b", "y", 3_000_000, "click"),
            ("b", "x", 5_000_000, "click"),
            ("b", "x", 5_000_000, "click"),
            ("b", "z", 5_000_000, "click"),
            ("a", "z", 9_000_000, "click"),
            ("a", "y", 9_000_000, "click"),
            ("a", "x", 9_000_000, "click"),
        ]
        assert found.starts.tolist() == [0, 4, 7]
        assert found.user_ids == ["b", "a"]
        assert found.item_ids == ["x", "z", "y"]  # by first appearance in the file
        assert found.sha256 == hashlib.sha256(content).hexdigest()

    @pytest.mark.parametrize("name", ["tsv.gz", "csv", "csv.gz", "parquet"])
    def test_every_format_of_a_table_gives_the_same_interactions(self, tmp_path: Path, name: str) -> None:
        rows = [("u1", "i1", "1700000000", "click", ""), ("u2", "i1", "1700000000.25", "view", "2.5")]
        rows += [("u1", "i2", "1600000000", "purchase", "-1e3")]
        columns = ["user_id", "item_id", "timestamp", "type", "value"]
        tsv, other = tmp_path / "tsv", tmp_path / "other"
        tsv.mkdir()
        other.mkdir()
        content = "".join("\t".join(row) + "\n" for row in [columns, *rows]).encode()
        put(tsv, "interactions.tsv", content)
        if name == "parquet":
            cells = [(user, item, float(time), kind, float(value or "0")) for user, item, time, kind, value in rows]
            pl.DataFrame(cells, columns, orient="row").write_parquet(other / "interactions.parquet")
        else:
            raw = content if "tsv" in name else content.replace(b"\t", b",")
            put(other, f"interactions.{name}", gzip.compress(raw) if name.endswith("gz") else raw)
        expected, found = read_interactions(tsv), read_interactions(other)
        assert named(found) == named(expected)
        assert found.starts.tolist() == expected.starts.tolist()
        if name == "tsv.gz":
            assert found.sha256 == expected.sha256

    def test_numeric_user_ids_in_parquet(self, tmp_path: Path) -> None:
        frame = pl.DataFrame({"user_id": [7, 7], "item_id": [1, 2], "timestamp": [10, 11]})
        frame.write_parquet(tmp_path / "interactions.parquet")
        found = read_interactions(tmp_path)
        assert named(found) == [("7", "1", 10_000_000, "click"), ("7", "2", 11_000_000, "click")]

    @settings(max_examples=30)
    @given(
        st.datetimes(datetime(1970, 1, 2), datetime(2100, 1, 1)).map(lambda time: time.replace(tzinfo=UTC)),
        st.integers(-14 * 60, 14 * 60),
    )
    def test_rfc_3339_times_equal_unix_seconds(
        self, tmp_path_factory: pytest.TempPathFactory, time: datetime, offset_minutes: int
    ) -> None:
        micros = (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        local = time.astimezone(timezone(timedelta(minutes=offset_minutes)))
        texts = [
            time.isoformat(),
            time.isoformat().replace("+00:00", "Z"),
            local.isoformat(timespec="microseconds"),
            f"{micros // 1_000_000}.{micros % 1_000_000:06}",
        ]
        content = HEADER + "".join(f"u\ti{row}\t{text}\n" for row, text in enumerate(texts)).encode()
        found = read_interactions(put(tmp_path_factory.mktemp("times"), "interactions.tsv", content))
        assert found.timestamp_us.tolist() == [micros] * len(texts)
        assert found.item.tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        "content",
        [
            HEADER + b"u\ti\t1\nu\tj\t2",
            (HEADER + b"u\ti\t1\nu\tj\t2\n").replace(b"\n", b"\r\n"),
            b"\xef\xbb\xbf" + HEADER + b"u\ti\t1\nu\tj\t2\n",
            b"\xef\xbb\xbf" + (HEADER + b"u\ti\t1\nu\tj\t2\n").replace(b"\n", b"\r\n"),
            b"note\ttimestamp\titem_id\tuser_id\n\xc3\xbc \t1\ti\tu\n\t2\tj\tu\n",
        ],
        ids=["no last newline", "CRLF", "BOM", "BOM and CRLF", "columns in another order, one of them unknown"],
    )
    def test_harmless_differences_do_not_matter(self, tmp_path: Path, content: bytes) -> None:
        found = read_interactions(put(tmp_path, "interactions.tsv", content))
        assert named(found) == [("u", "i", 1_000_000, "click"), ("u", "j", 2_000_000, "click")]

    def test_ids_may_use_every_character_of_the_pattern(self, tmp_path: Path) -> None:
        content = HEADER + b"a.b:C_@-9\t" + b"x" * 128 + b"\t1\n...\t-\t2\n"
        found = read_interactions(put(tmp_path, "interactions.tsv", content))
        assert found.user_ids == ["a.b:C_@-9", "..."]
        assert found.item_ids == ["x" * 128, "-"]

    def test_a_quoted_csv_field_may_hold_the_separator(self, tmp_path: Path) -> None:
        put(tmp_path, "items.csv", b'item_id,title\n"a","Salt, ""fine"""\n')
        assert read_items(tmp_path).titles == {"a": 'Salt, "fine"'}


REFUSED: dict[str, tuple[bytes, str]] = {
    "missing column": (b"user_id\titem_id\nu\ti\n", "line 1: column 'timestamp' is missing"),
    "column twice": (
        b"user_id\titem_id\ttimestamp\titem_id\nu\ti\t1\tj\n",
        "line 1: column 'item_id' appears twice",
    ),
    "empty file": (b"", "is empty"),
    "blank file": (b" \n\n", "is empty"),
    "header only": (HEADER, "has no interactions"),
    "repeated header": (HEADER + b"u\ti\t1\n" + HEADER, "line 3: the header is repeated"),
    "time in words": (HEADER + b"u\ti\t1\nu\ti\tnoon\n", "line 3: timestamp 'noon' is neither"),
    "time without a zone": (HEADER + b"u\ti\t2024-01-01T00:00:00\n", "line 2: timestamp '2024-01-01T00:00:00'"),
    "day": (HEADER + b"u\ti\t20251224\n", "line 2: timestamp '20251224' is a day without a time zone"),
    "day and time": (HEADER + b"u\ti\t20251224183000\n", "line 2: timestamp '20251224183000' is neither"),
    "month 13": (HEADER + b"u\ti\t2024-13-01T00:00:00Z\n", "line 2: timestamp"),
    "time NaN": (HEADER + b"u\ti\tNaN\n", "line 2: timestamp 'NaN'"),
    "time inf": (HEADER + b"u\ti\t1\nu\ti\t-inf\n", "line 3: timestamp '-inf'"),
    "time after the year 9999": (HEADER + b"u\ti\t3e20\n", "line 2: timestamp '3e20' is after the year 9999"),
    "ticks of .NET": (HEADER + b"u\ti\t638712345670000000\n", "line 2: timestamp '638712345670000000' is after"),
    "time beyond 64 bits": (HEADER + b"u\ti\t1e300\n", "line 2: timestamp '1e300'"),
    "time empty": (HEADER + b"u\ti\t\n", "line 2: timestamp ''"),
    "user with a control character": (HEADER + b"u\ti\t1\nu\x7fu\ti\t1\n", "line 3: user_id 'u\\x7fu' is not an id"),
    "item with a control character": (HEADER + "u\t\u0085\t1\n".encode(), "line 2: item_id '\\x85' is not an id"),
    "item too long": (HEADER + b"u\t" + b"x" * 129 + b"\t1\n", "line 2: item_id 'xxx"),
    "user dots": (HEADER + b"..\ti\t1\n", "line 2: user_id '..' is not an id"),
    "user empty": (HEADER + b"u\ti\t1\n\ti\t1\n", "line 3: user_id '' is not an id"),
    "item empty": (HEADER + b"u\t\t1\n", "line 2: item_id '' is not an id"),
    "too few fields": (HEADER + b"u\ti\t1\nu\ti\n", "line 3: 2 fields, but the header has 3"),
    "too many fields": (HEADER + b"u\ti\t1\t2\n", "line 2: 4 fields, but the header has 3"),
    "blank line": (HEADER + b"u\ti\t1\n\nu\ti\t2\n", "line 3: 0 fields, but the header has 3"),
    "not UTF-8": (HEADER + b"u\ti\t1\nu\xff\ti\t1\n", "line 3: not UTF-8"),
    "type empty": (TYPED + b"u\ti\t1\t\t\n", "line 2: type '' is not an id"),
    "type with a space": (TYPED + b"u\ti\t1\tadd to cart\t\n", "line 2: type 'add to cart'"),
    "value NaN": (TYPED + b"u\ti\t1\tclick\t\nu\ti\t1\tclick\tnan\n", "line 3: value 'nan' is not a finite number"),
    "value in words": (TYPED + b"u\ti\t1\tclick\tten\n", "line 2: value 'ten'"),
}


class TestRefusals:
    @pytest.mark.parametrize("case", REFUSED)
    def test_names_the_file_and_the_line(self, tmp_path: Path, case: str) -> None:
        content, expected = REFUSED[case]
        put(tmp_path, "interactions.tsv", content)
        with pytest.raises(DataError) as refused:
            read_interactions(tmp_path)
        assert str(tmp_path / "interactions.tsv") in str(refused.value)
        assert expected in str(refused.value)

    @pytest.mark.parametrize("case", REFUSED)
    def test_names_the_same_line_in_compressed_tables(self, tmp_path: Path, case: str) -> None:
        content, expected = REFUSED[case]
        put(tmp_path, "interactions.tsv.gz", gzip.compress(content))
        with pytest.raises(DataError) as refused:
            read_interactions(tmp_path)
        assert expected in str(refused.value)

    def test_names_a_bad_line_far_down(self, tmp_path: Path) -> None:
        lines = [b"u%d\ti\t%d\n" % (row % 7, row) for row in range(20_000)]
        lines[15_000] = b"u\ti\n"
        put(tmp_path, "interactions.tsv", HEADER + b"".join(lines))
        with pytest.raises(DataError, match="line 15002: 2 fields"):
            read_interactions(tmp_path)

    def test_refuses_an_open_quote_in_a_csv(self, tmp_path: Path) -> None:
        put(tmp_path, "interactions.csv", b'user_id,item_id,timestamp\n"u,i,1\n')
        with pytest.raises(DataError, match=r"interactions\.csv, line 2"):
            read_interactions(tmp_path)

    def test_names_the_row_of_a_parquet_table(self, tmp_path: Path) -> None:
        frame = pl.DataFrame({"user_id": ["u", None], "item_id": ["i", "i"], "timestamp": [1, 2]})
        frame.write_parquet(tmp_path / "interactions.parquet")
        with pytest.raises(DataError, match=r"interactions\.parquet, row 2: user_id '' is not an id"):
            read_interactions(tmp_path)

    @pytest.mark.parametrize("damage", ["not gzip", "cut", "overwritten", "wrong checksum"])
    def test_names_a_corrupt_gzip_file(self, tmp_path: Path, damage: str) -> None:
        rows = b"".join(b"u%d\ti\t%d\n" % (row, row * row) for row in range(500))
        whole = gzip.compress(HEADER + rows)
        broken = {
            "not gzip": HEADER + rows,
            "cut": whole[: len(whole) // 2],
            "overwritten": whole[:12] + b"\xff" * 8 + whole[20:],
            "wrong checksum": whole[:-8] + b"\0" * 8,
        }
        put(tmp_path, "interactions.tsv.gz", broken[damage])
        with pytest.raises(DataError, match=r"interactions\.tsv\.gz cannot be read"):
            read_interactions(tmp_path)

    def test_names_an_invalid_parquet_file(self, tmp_path: Path) -> None:
        put(tmp_path, "interactions.parquet", HEADER)
        with pytest.raises(DataError, match=r"interactions\.parquet is not a Parquet table"):
            read_interactions(tmp_path)

    def test_refuses_two_tables(self, tmp_path: Path) -> None:
        put(tmp_path, "interactions.tsv", HEADER + b"u\ti\t1\n")
        put(tmp_path, "interactions.csv", b"user_id,item_id,timestamp\nu,i,1\n")
        with pytest.raises(DataError, match=r"interactions\.tsv and interactions\.csv; keep one"):
            read_interactions(tmp_path)

    def test_names_a_remedy_for_a_missing_directory_or_table(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="does not exist; download one with 'lisarec data NAME'"):
            read_interactions(tmp_path / "nowhere")
        with pytest.raises(DataError, match=r"has no interactions\.tsv\.gz"):
            read_interactions(tmp_path)


class TestItems:
    def test_titles_and_categories_are_read(self, tmp_path: Path) -> None:
        content = 'item_id\ttitle\tcategories\na\tCaf\u00e9 "big"\tp|q|p|\nb\t\t\nc\tno shelf\t\n'.encode()
        found = read_items(put(tmp_path, "items.tsv", content))
        assert found.titles == {"a": 'Caf\u00e9 "big"', "b": "", "c": "no shelf"}
        assert found.categories == {"a": ("p", "q"), "b": (), "c": ()}

    def test_titles_and_categories_are_optional(self, tmp_path: Path) -> None:
        assert read_items(tmp_path) == ItemTexts({}, {})
        assert read_items(put(tmp_path, "items.tsv", b"item_id\na\n")) == ItemTexts({"a": ""}, {"a": ()})

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (
                b"item_id\ttitle\na\tx\nb\ty\na\tz\n",
                "line 4: item_id 'a' appears twice, first in line 2",
            ),
            (b"title\nx\n", "line 1: column 'item_id' is missing"),
            (b"item_id\ttitle\na\x1fb\tx\n", "line 2: item_id 'a\\x1fb' is not an id"),
            (b"item_id\ttitle\na\tx\nb\n", "line 3: 1 fields, but the header has 2"),
            (b"item_id\na\n\nb\n", "line 3: item_id '' is not an id"),
        ],
    )
    def test_bad_items_are_refused(self, tmp_path: Path, content: bytes, expected: str) -> None:
        put(tmp_path, "items.tsv", content)
        with pytest.raises(DataError) as refused:
            read_items(tmp_path)
        assert expected in str(refused.value)


class TestWeights:
    CONTENT = TYPED + b"u\ti\t1\tclick\t\nu\tj\t2\tdislike\t\nv\ti\t3\tdislike\t1\nu\ti\t4\tview\t\n"

    def test_events_have_the_weight_of_their_type(self, tmp_path: Path) -> None:
        found = read_interactions(put(tmp_path, "interactions.tsv", self.CONTENT))
        assert found.weights({"click": 1, "dislike": 0, "view": 0.5}).tolist() == [1, 0, 0.5, 0]

    def test_only_events_of_positive_weight_change_states(self, tmp_path: Path) -> None:
        found = read_interactions(put(tmp_path, "interactions.tsv", self.CONTENT))
        stepping = found.stepping(EVENT_WEIGHTS)
        assert named(stepping) == [("u", "i", 1_000_000, "click"), ("u", "i", 4_000_000, "view")]
        # users and items keep their places, also those that are left without an event
        assert (stepping.user_ids, stepping.item_ids) == (found.user_ids, found.item_ids)
        assert stepping.starts.tolist() == [0, 2, 2]
        assert stepping.sha256 == found.sha256
        assert found.stepping({"click": 1, "dislike": 2, "view": 1}) is found

    def test_all_types_without_a_weight_are_listed(self, tmp_path: Path) -> None:
        found = read_interactions(put(tmp_path, "interactions.tsv", self.CONTENT))
        with pytest.raises(DataError) as refused:
            found.stepping({"click": 1})
        options = "--event-weight dislike=1 --event-weight view=1, or 0 to ignore a type. Known weights: click"
        assert str(refused.value).startswith(f"event types without a weight: 'dislike', 'view'; pass {options}. ")

    def test_the_list_of_types_is_truncated(self, tmp_path: Path) -> None:
        rows = b"".join(b"u\ti\t%d\ttype-%d\n" % (row, row) for row in range(1000))
        found = read_interactions(put(tmp_path, "interactions.tsv", HEADER.rstrip() + b"\ttype\n" + rows))
        with pytest.raises(DataError, match=r"'type-114', 'type-115' and 980 others; pass") as refused:
            found.stepping({"click": 1})
        assert len(str(refused.value)) < 1000


def test_repeat_share_is_the_share_of_events_on_items_the_user_had_before(tmp_path: Path, write_rows: Write) -> None:
    rows = [("u", "a", 1), ("u", "b", 2), ("u", "a", 3), ("v", "a", 4), ("u", "a", 5)]
    assert repeat_share(read_interactions(write_rows(tmp_path, rows))) == pytest.approx(2 / 5)


tables = st.lists(
    st.tuples(st.sampled_from("uvwxyz"), st.sampled_from("abcde"), st.integers(0, 50)), min_size=1, max_size=60
)


class TestSplits:
    @settings(max_examples=30)
    @given(tables)
    def test_loo(self, tmp_path_factory: pytest.TempPathFactory, write_rows: Write, rows: list[Any]) -> None:
        found = read_interactions(write_rows(tmp_path_factory.mktemp("loo"), rows))
        parts = split(found, "loo")
        tests, validations, trains = [], [], []
        for user in range(len(found.user_ids)):
            events = np.flatnonzero(found.user == user).tolist()
            held_out = 2 if len(events) >= 3 else 0
            trains += events[: len(events) - held_out]
            validations += events[-2:-1] if held_out else []
            tests += events[-1:] if held_out else []
        assert np.flatnonzero(parts.train).tolist() == trains
        assert parts.validation.tolist() == validations
        assert parts.test.tolist() == tests

    @settings(max_examples=30)
    @given(tables)
    def test_temporal(self, tmp_path_factory: pytest.TempPathFactory, write_rows: Write, rows: list[Any]) -> None:
        found = read_interactions(write_rows(tmp_path_factory.mktemp("temporal"), rows))
        if found.time_is_order:
            with pytest.raises(DataError, match="only give the order"):
                split(found, "temporal")
            return
        parts = split(found, "temporal")
        times = sorted(found.timestamp_us.tolist())
        cutoff_us = times[int(0.9 * (len(times) - 1))]
        tests, validations, trains = [], [], []
        for user in range(len(found.user_ids)):
            events = np.flatnonzero(found.user == user).tolist()
            earlier = [event for event in events if found.timestamp_us[event] < cutoff_us]
            validations += earlier[-1:] if len(earlier) >= 3 else []
            trains += earlier[:-1] if len(earlier) >= 3 else earlier
            tests += events[-1:] if len(events) > max(len(earlier), 1) else []
        assert np.flatnonzero(parts.train).tolist() == trains
        assert parts.validation.tolist() == validations
        assert parts.test.tolist() == tests

    @pytest.mark.parametrize("name", ["loo", "temporal"])
    @pytest.mark.parametrize("train_on", ["train", "validation", "all"])
    def test_training_events_are_a_prefix_and_held_out_events_have_a_history(
        self, tmp_path: Path, write_rows: Write, rows: list[Any], name: Any, train_on: Any
    ) -> None:
        found = read_interactions(write_rows(tmp_path, rows))
        parts = split(found, name, train_on)
        for begin, end in zip(found.starts[:-1], found.starts[1:], strict=True):
            assert (np.diff(parts.train[begin:end].astype(int)) <= 0).all()
        held_out = np.concatenate([parts.validation, parts.test])
        assert len(parts.validation) > 50
        assert len(parts.test) > 5
        assert (found.user[held_out - 1] == found.user[held_out]).all()
        assert parts.train[parts.test].all() == parts.train[parts.test].any() == (train_on == "all")
        assert parts.train[parts.validation].all() == parts.train[parts.validation].any() == (train_on != "train")
        assert not np.isin(parts.validation, parts.test).any()
        if train_on == "all":
            assert parts.train.all()

    def test_temporal_never_trains_on_events_after_the_first_test_event(
        self, tmp_path: Path, write_rows: Write, rows: list[Any]
    ) -> None:
        found = read_interactions(write_rows(tmp_path, rows))
        parts = split(found, "temporal", "validation")
        assert found.timestamp_us[parts.train].max() < found.timestamp_us[parts.test].min()

    @pytest.mark.parametrize("first", [0, 1, 17])
    def test_temporal_is_refused_for_ordinal_timestamps(self, tmp_path: Path, write_rows: Write, first: int) -> None:
        rows = [(user, f"i{place}", first + place) for user in "uvw" for place in range(9)]
        found = read_interactions(write_rows(tmp_path, rows))
        assert found.time_is_order
        with pytest.raises(DataError, match="use the protocol loo_full"):
            split(found, "temporal")

    def test_dropping_weightless_events_keeps_timestamps_ordinal(self, tmp_path: Path, write_rows: Write) -> None:
        kinds = ["click", "dislike", "click", "click"]
        rows = [(user, "i", place, kind) for user in "uv" for place, kind in enumerate(kinds)]
        directory = write_rows(tmp_path, rows, "user_id item_id timestamp type")
        with pytest.raises(DataError, match="only give the order"):
            split(read_interactions(directory).stepping(EVENT_WEIGHTS), "temporal")

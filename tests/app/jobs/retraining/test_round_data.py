"""Data of a round, which are read in pieces, against whole tables of the same archive."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from stat import S_IMODE

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from app.jobs.retraining.round_data import COLUMNS, RoundData
from model.config import EVENT_WEIGHTS
from storage.archive import training_events
from storage.archive.item_events import events_on_items
from storage.archive.training_events import TrainingEvents
from storage.archive.writer import ArchiveWriter, EventEntry
from storage.folders.local_folder import LocalFolder
from storage.state.event import IMPRESSION, Event, LogRecord, Merge, Undo

DAY_MS = 86_400_000
DAYS = 4
TYPES = ("click", "click", "purchase", "dislike", "seen-in-store", IMPRESSION)
ALL = 10_000


def random_log(seed: int, users: int = 9, entries: int = 240) -> list[EventEntry]:
    """Events, most with shared timestamps, some undone, and some of merged users."""
    rng = random.Random(seed)
    ids = [f"u{number}" for number in range(users)]
    found: list[EventEntry] = []
    for seq in range(1, entries + 1):
        user_id = rng.choice(ids) if rng.random() < 0.9 else f"once{seq}"
        logged_ms = rng.randrange(DAYS * 1000) * DAY_MS // 1000
        event = Event(
            f"e{seq}",
            user_id,
            f"i{rng.randrange(20)}",
            rng.choice(TYPES),
            logged_ms // DAY_MS * DAY_MS * 1000 + rng.choice([0, 1, 2, seq]) * 1_000_000,
            None,
            rng.choice([None, 2.5]),
            order_id=rng.choice([None, "o1"]),
        )
        if event.type == IMPRESSION:
            event = replace(event, item_id="", items=("i1", "i2"))
        record: LogRecord = event
        if rng.random() < 0.1:
            record = Undo(user_id, f"e{rng.randrange(1, seq + 1)}", 0)
        elif rng.random() < 0.01:
            record = Merge(user_id, ids[0], 0)
        found.append(
            EventEntry(
                rng.choice(["main", "main", "other"]),
                ids.index(user_id) % 3 if user_id in ids else 0,
                seq,
                logged_ms,
                record,
            )
        )
    return found


def archived(folder: Path, seed: int) -> TrainingEvents:
    """Write the log to an archive in batches."""
    log = random_log(seed)
    with ArchiveWriter.open(folder) as writer:
        for begin in range(0, len(log), 80):
            some = log[begin : begin + 80]
            writer.commit(some, dict.fromkeys(range(3), f"{some[-1].seq}-0"))
    return TrainingEvents(folder, "main")


def whole_log(folder: Path) -> pl.DataFrame:
    """All entries at once, in the order of logging."""
    return pl.read_parquet([*folder.glob("tenant=main/day=*/*.parquet")], hive_partitioning=False).sort("logged_ms")


def whole_table(folder: Path, newest: int = ALL) -> pl.DataFrame:
    """The valid events of the newest entries."""
    events = events_on_items(whole_log(folder).tail(newest).lazy())
    return events.sort("user_id", "timestamp_us", "seq").select(training_events.COLUMNS).collect()


class TestNewest:
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("piece_rows", [1, 30, ALL])
    def test_events_in_pieces_equal_the_whole_table(self, tmp_path: Path, seed: int, piece_rows: int) -> None:
        events = archived(tmp_path, seed)
        pieces = list(events.newest(ALL, piece_rows))
        assert_frame_equal(pl.concat(pieces), whole_table(tmp_path))
        users = [set(piece["user_id"]) for piece in pieces]
        assert len(set().union(*users)) == sum(map(len, users)), "a user is in one piece"
        assert (len(pieces) > 1) == (piece_rows < ALL)

    @pytest.mark.parametrize("seed", range(3))
    def test_the_newest_entries_that_fit_are_read(self, tmp_path: Path, seed: int) -> None:
        """Whole milliseconds, and at least one of them."""
        events, logged_ms = archived(tmp_path, seed), whole_log(tmp_path)["logged_ms"].to_list()
        for max_rows in (1, 2, 30, len(logged_ms) // 2, len(logged_ms) - 1, len(logged_ms), ALL):
            newest = logged_ms[-max_rows:]
            is_cut = len(newest) < len(logged_ms) and logged_ms[-max_rows - 1] == newest[0] < newest[-1]
            rows = len(newest) - newest.count(newest[0]) if is_cut else len(newest)
            assert_frame_equal(pl.concat(events.newest(max_rows, 30)), whole_table(tmp_path, rows))

    def test_a_day_with_too_many_entries_is_truncated(self, tmp_path: Path) -> None:
        """As after a replay, whether the day is the newest or not."""
        for day, entries in enumerate((500, 20)):
            begin = 1 + day * 500
            log = [
                EventEntry(
                    "main",
                    seq % 2,
                    seq,
                    day * DAY_MS + (seq - 1) // 5,
                    Event(str(seq), f"u{seq}", "i", "click", 5, None),
                )
                for seq in range(begin, begin + entries)
            ]
            with ArchiveWriter.open(tmp_path) as writer:
                writer.commit(log, dict.fromkeys(range(2), f"{log[-1].seq}-0"))
            found = pl.concat(TrainingEvents(tmp_path, "main").newest(200, 30))
            expected = [f"u{seq}" for seq in range(begin + entries - 200, begin + entries)]
            assert sorted(found["user_id"]) == sorted(expected)

    def test_entries_archived_late_keep_the_order_of_logging(self, tmp_path: Path) -> None:
        """The newest day's file has most of the older entries, and the file before it some newest ones."""
        late, today = "1970-01-10", 8 * DAY_MS
        log = [
            EventEntry("main", 0, seq, logged_ms, Event(str(seq), f"u{seq}", "i", "click", 5, None), filed_under)
            for seq, (logged_ms, filed_under) in enumerate(
                [
                    *((hour * 3_600_000, late) for hour in range(100)),
                    *((today + minute * 60_000, "") for minute in range(50)),
                    *((today + DAY_MS + minute * 60_000, late) for minute in range(20)),
                ],
                start=1,
            )
        ]
        with ArchiveWriter.open(tmp_path) as writer:
            writer.commit(log, {0: f"{log[-1].seq}-0"})
        for newest in (10, 60, 71, 100):
            found = pl.concat(TrainingEvents(tmp_path, "main").newest(newest, 30))
            assert sorted(found["user_id"]) == sorted(f"u{entry.seq}" for entry in log[-newest:])

    def test_concurrent_archiving_and_merging_change_nothing(self, tmp_path: Path) -> None:
        events = archived(tmp_path, 1)
        expected = whole_table(tmp_path)
        pieces = events.newest(ALL, 30)
        found = [next(pieces)]
        records: list[LogRecord] = [Event("x", "u8", "i1", "click", 5, None), Undo("u8", "e9", 0), Merge("u7", "u8", 0)]
        with ArchiveWriter.open(tmp_path) as writer:
            later = [
                EventEntry("main", number % 4, 1_000 + number, DAY_MS * number // 3, record)
                for number, record in enumerate(records)
            ]
            writer.commit(later, dict.fromkeys(range(4), "1003-0"))
            writer.compact("2026-01-01")
        assert_frame_equal(pl.concat([*found, *pieces]), expected)

    def test_an_archive_without_events_gives_an_empty_piece(self, tmp_path: Path) -> None:
        with ArchiveWriter.open(tmp_path):
            pass
        (piece,) = TrainingEvents(tmp_path, "main").newest(ALL)
        assert (piece.columns, len(piece)) == ([*training_events.COLUMNS], 0)


@pytest.fixture(params=[30, ALL])
def in_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = TrainingEvents.newest
    monkeypatch.setattr(TrainingEvents, "newest", lambda events, rows: newest(events, rows, request.param))


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("seed", range(3))
def test_files_of_both_trainings_equal_those_of_a_whole_table(tmp_path: Path, seed: int) -> None:
    """In the same order, without types that have no weight; these are counted."""
    events, data = archived(tmp_path / "archive", seed), RoundData(tmp_path / "round")
    assert not data.exist()
    log = whole_table(tmp_path / "archive")
    known = [kind for kind, weight in EVENT_WEIGHTS.items() if weight > 0]
    table = log.filter(pl.col("type").is_in(known))
    assert data.read(events, ALL, EVENT_WEIGHTS) == len(log.filter(pl.col("type") == "seen-in-store")) > 0
    assert S_IMODE((tmp_path / "round").stat().st_mode) == 0o700
    assert (data.exist(), data.count(), set(data.item_ids())) == (True, len(table), set(table["item_id"]))

    seen_ms = 2 * DAY_MS
    past, holdout = data.split(seen_ms)
    is_new = (pl.col("logged_ms") > seen_ms) & (pl.col("timestamp_us") > seen_ms * 1000)
    end_us = max(
        table["timestamp_us"].quantile(0.9, "lower") or 0,
        table.filter(is_new)["timestamp_us"].quantile(0.05, "lower") or 0,
    )
    assert len(holdout) > 0
    (tmp_path / "archive" / "items.csv").write_text("item_id,title\ni1,Tea\n")
    data.write_directories(past, LocalFolder(tmp_path / "archive"), [""], {"i2": {"title": "Cup"}})
    for name, expected in (("past", table.filter(pl.col("timestamp_us") < end_us)), ("all", table)):
        made = pl.read_parquet(data.directory(name) / "interactions.parquet")
        assert_frame_equal(made, expected.select(*COLUMNS, timestamp=pl.col("timestamp_us") / 1e6), check_exact=True)
        titles = pl.read_parquet(data.directory(name) / "items.parquet")
        assert dict(titles.select("item_id", "title").iter_rows()) == {"i1": "Tea", "i2": "Cup"}


def test_only_items_of_the_tenant_are_used(tmp_path: Path) -> None:
    """Tenants may share item ids, and a table beside all tenants belongs to none of them."""
    folder = tmp_path / "archive"
    archived(folder, 1)

    def title(tenant: str, name: str) -> str | None:
        events, data = TrainingEvents(folder, tenant), RoundData(tmp_path / name)
        data.read(events, ALL, EVENT_WEIGHTS)
        past, _ = data.split(0)
        data.write_directories(past, LocalFolder(folder), events.item_folders(), {"i2": {"title": "Cup"}})
        titles = pl.read_parquet(data.directory("all") / "items.parquet")
        return dict(titles.select("item_id", "title").iter_rows()).get("i1")

    (folder / "items.csv").write_text("item_id,title\ni1,Somebody's\n")
    assert title("main", "1") is None
    (folder / "tenant=other" / "items.csv").write_text("item_id,title\ni1,Tea\n")
    assert (title("main", "2"), title("other", "3")) == (None, "Tea")


def test_the_items_table_of_the_archive_belongs_to_its_only_tenant(tmp_path: Path) -> None:
    with ArchiveWriter.open(tmp_path) as writer:
        writer.commit([entry for entry in random_log(1) if entry.tenant == "main"], {0: "240-0"})
    assert TrainingEvents(tmp_path, "main").item_folders() == ["tenant=main/", ""]

"""The archive by itself: committed events appear once, and killed writers leave no trace."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from errno import ENOSPC
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.archive import pieces
from storage.archive.hashes import Hashes
from storage.archive.item_counts import count_archived_items
from storage.archive.manifest import MANIFEST, ArchiveFile, Manifest
from storage.archive.reader import ArchiveReader, ArchiveSnapshot
from storage.archive.writer import ArchiveWriter, ErasureEntry, EventEntry
from storage.errors import StorageError, StorageUnavailable
from storage.folders.local_folder import LocalFolder
from storage.records import LogEntry
from storage.state.event import Event, digest
from tests.storage.archive.dying import Died, dying_at
from tests.storage.archive.entries import TODAY, logged, place, read, seqs, some
from tests.storage.oracles.random_events import ODD_IDS, as_impression, click

UserId = str
Oracle = dict[tuple[str, UserId], list[LogEntry]]


def holds(archive: ArchiveReader, *events: tuple[str, str], tenant: str = "main") -> list[bool]:
    return archive.read(lambda snapshot: snapshot.holds(tenant, events))


def require(archive: ArchiveReader, archive_id: str, partition: int, through: int) -> None:
    archive.read(lambda snapshot: snapshot.require(archive_id, partition, through))


def files(directory: Path, suffix: str = ".parquet") -> list[Path]:
    return sorted(directory.rglob(f"*{suffix}"))


events = st.builds(
    Event,
    event_id=st.text(min_size=1, max_size=3),
    user_id=st.sampled_from(["u", "v", "a/b", "ü"]),
    item_id=st.just("item1"),
    type=st.sampled_from(["click", "buy"]),
    timestamp_us=st.integers(-(2**62), 2**62),
    id_time_us=st.none() | st.integers(0, 2**50),
    value=st.none() | st.floats(allow_nan=False),
    recommendation_id=st.none() | st.just("r"),
    order_id=st.none() | st.just("o"),
)
shown = st.lists(st.text(max_size=3) | st.sampled_from(ODD_IDS), min_size=1, max_size=5)
entries = st.builds(
    logged,
    seq=st.just(0),
    event=events | st.builds(as_impression, events, shown),
    tenant=st.sampled_from(["main", "../x", "ten ant"]),
    day=st.integers(0, 3),
)


erased = {digest(user_id): user_id for user_id in ("u", "v", "a/b", "ü")}
erasures = st.builds(
    ErasureEntry, st.sampled_from(["main", "../x"]), st.just(0), st.just(0), st.sampled_from([*erased])
)


class TestContents:
    @given(st.lists(st.lists(entries | entries | entries | erasures, max_size=8), max_size=6), st.data())
    @settings(max_examples=25)
    @pytest.mark.slow
    def test_committed_events_are_found_once_across_merges(
        self, batches: Sequence[Sequence[EventEntry | ErasureEntry]], data: st.DataObject
    ) -> None:
        oracle: Oracle = {}
        seq = 0
        with TemporaryDirectory() as folder, ArchiveWriter.open(Path(folder)) as writer:
            archive = ArchiveReader(Path(folder))
            for batch in batches:
                numbered = [replace(entry, seq=seq + number) for number, entry in enumerate(batch, start=1)]
                seq += len(batch)
                writer.commit(numbered, place(seq))
                for entry in numbered:
                    if isinstance(entry, ErasureEntry):
                        oracle.update({place: [] for place in oracle if place == (entry.tenant, erased[entry.user])})
                        continue
                    known = oracle.setdefault((entry.tenant, entry.record.user_id), [])
                    known.append(LogEntry(entry.seq, entry.record))
                if data.draw(st.booleans()):
                    writer.compact(today=data.draw(st.sampled_from([TODAY, "2023-11-16", "2024-01-01"])))
            for (tenant, user_id), expected in oracle.items():
                after, through = sorted(data.draw(st.tuples(st.integers(0, seq), st.integers(0, seq))))
                found = read(archive, user_id, tenant, after=after, through=through)
                assert found == [entry for entry in expected if after < entry.seq <= through]
                ids = [(user_id, entry.record.entry_id) for entry in expected] or [(user_id, "e")]
                absent = [(user_id, event_id + "?") for _, event_id in ids] + [("nobody", ids[0][1])]
                assert holds(archive, *ids, *absent, tenant=tenant) == [
                    bool(expected) and one in ids for one in [*ids, *absent]
                ]
            assert sum(file.rows for file in writer.manifest.files) == sum(map(len, oracle.values()))
            assert {str(path.relative_to(folder)) for path in files(Path(folder))} == {
                file.path for file in writer.manifest.files
            }

    def test_files_are_sorted_by_user_for_skipping(self, tmp_path: Path) -> None:
        with ArchiveWriter.open(tmp_path) as writer:
            writer.commit([*some(1, 50, "b"), *some(51, 99, "a"), *some(100, 120, "b")], place(120))
        (path,) = files(tmp_path)
        table = pl.read_parquet(path)
        assert table["user_id"].is_sorted()
        assert table.filter(user_id="b")["seq"].is_sorted()
        (hashes,) = files(tmp_path, ".npy")
        assert np.load(hashes, allow_pickle=False).shape == (2, 120 + 2)

    def test_ids_with_half_equal_hashes_are_distinct(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def half_equal(name: str) -> bytes:
            return (7).to_bytes(8, "little") + (hash(name) % 2**63).to_bytes(8, "little")

        monkeypatch.setattr("storage.archive.hashes.digest", half_equal)
        with ArchiveWriter.open(tmp_path) as writer:
            writer.commit(some(1, 9), place(9))
        archive = ArchiveReader(tmp_path)
        assert holds(archive, ("u", "e1"), ("u", "e9"), ("u", "e10"), ("v", "e1")) == [True, True, False, False]

    @pytest.mark.slow
    def test_a_day_has_few_files_and_one_when_it_is_over(self, tmp_path: Path) -> None:
        with ArchiveWriter.open(tmp_path) as writer:
            most = 0
            for seq in range(1, 101):
                writer.commit([logged(seq, click(f"e{seq}"))], place(seq))
                writer.compact(today=TODAY)
                most = max(most, len(files(tmp_path)))
            assert most <= 7  # a binary counter's digits
            writer.compact(today="2023-11-15")
            assert len(files(tmp_path)) == 1
        assert seqs(ArchiveReader(tmp_path)) == list(range(1, 101))

    def test_days_beyond_the_retention_are_dropped(self, tmp_path: Path) -> None:
        with ArchiveWriter.open(tmp_path) as writer:
            writer.commit([*some(1, 5), *some(6, 9, day=1)], place(9))
            assert writer.drop_before("2023-11-15") == 5
            assert writer.manifest.seq(0) == 9
        assert seqs(ArchiveReader(tmp_path)) == [6, 7, 8, 9]
        assert holds(ArchiveReader(tmp_path), ("u", "e5"), ("u", "e6")) == [False, True]
        assert len(files(tmp_path)) == 1


class TestLargeFiles:
    """Files that are merged, erased from and counted in chunks."""

    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pieces, "PIECE_ROWS", 50)
        monkeypatch.setattr(pieces, "SAMPLED_EVERY", 5)

    def fill(self, folder: Path, users: Sequence[str], rows_of_files: Sequence[int]) -> list[Path]:
        seq = 0
        with ArchiveWriter.open(folder) as writer:
            for day, rows in enumerate(rows_of_files):
                numbers = range(seq + 1, seq + rows + 1)
                clicks = [click(f"e{n}", users[n % len(users)], n % 7) for n in numbers]
                writer.commit(
                    [logged(n, one, day=day) for n, one in zip(numbers, clicks, strict=True)], place(seq + rows)
                )
                seq += rows
            return [folder / file.path for file in writer.manifest.files]

    users = pytest.mark.parametrize(
        "users", [["the only user"], [f"u{number}" for number in range(101)], ["often", "often", "u1", "u2"]]
    )

    @users
    @pytest.mark.parametrize("rows_of_files", [[1], [1, 1], [400, 1, 30], [49, 50, 51, 100]])
    def test_pieces_are_bounded_and_in_order(self, tmp_path: Path, users: list[str], rows_of_files: list[int]) -> None:
        paths = self.fill(tmp_path, users, rows_of_files)
        merged = list(pieces.merge(paths))
        assert max(map(len, merged)) <= 50 + 5 * len(paths)
        whole = pl.concat([pl.read_parquet(path) for path in paths]).sort("user_id", "seq")
        assert pl.concat(merged).equals(whole)
        packed = pieces.pack(merged)
        packed.seek(0)
        assert pl.read_parquet(packed).equals(whole)

    @users
    def test_a_user_is_erased_from_all_pieces(self, tmp_path: Path, users: list[str]) -> None:
        self.fill(tmp_path, users, [300])
        before = {user_id: read(ArchiveReader(tmp_path), user_id) for user_id in users}
        with ArchiveWriter.open(tmp_path) as writer:
            writer.commit([ErasureEntry("main", 0, 301, digest(users[0]))], place(302))
            assert sum(file.rows for file in writer.manifest.files) == 300 - len(before[users[0]])
            assert len(writer.manifest.files) == (len(users) > 1)
        after = ArchiveReader(tmp_path)
        assert {user_id: read(after, user_id) for user_id in users} == before | {users[0]: []}
        assert not holds(after, *((users[0], entry.record.entry_id) for entry in before[users[0]]))[0]

    def test_large_files_are_not_merged_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("storage.archive.writer.MAX_FILE_ROWS", 50)
        with ArchiveWriter.open(tmp_path) as writer:
            for first, last in ((1, 100), (101, 120), (121, 140)):
                writer.commit(some(first, last), place(last))
            writer.compact(today="2023-11-15")
            assert [file.rows for file in writer.manifest.files] == [100, 40]
        assert seqs(ArchiveReader(tmp_path)) == list(range(1, 141))

    @pytest.mark.parametrize(("most_rows", "counted"), [(100, 120), (120, 120), (121, 320)])
    def test_item_counts_use_the_newest_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_rows: int, counted: int
    ) -> None:
        monkeypatch.setattr("storage.archive.item_counts.MAX_ARCHIVED_ROWS", most_rows)
        self.fill(tmp_path, [f"u{number}" for number in range(100_003)], [200, 120])
        reader = ArchiveReader(tmp_path)
        archive_id = reader.read(lambda snapshot: snapshot.manifest.archive_id)
        counts = reader.read(
            lambda snapshot: count_archived_items(snapshot, None, archive_id, "main", {"click"})
        ).counts
        assert counts == Counter(f"item{n % 7}" for n in range(321 - counted, 321))


class TestKilledWriters:
    @pytest.mark.slow
    def test_commit_all_or_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """For every call that changes the disk, in a commit, a merge and a drop."""
        deaths = 0
        for number in range(200):
            directory = tmp_path / str(number)
            with ArchiveWriter.open(directory) as writer:
                writer.commit(some(1, 6, day=-1), place(6))
                writer.commit(some(7, 9), place(9))
                writer.commit([*some(10, 12), *some(13, 13, "v", day=-1), *some(14, 14, "v")], place(12))
            died = True
            with suppress(Died), dying_at(monkeypatch, number), ArchiveWriter.open(directory) as writer:
                gone = ErasureEntry("main", 0, 17, digest("v"))
                writer.commit([*some(13, 15), *some(16, 16, tenant="new"), gone, *some(18, 18, "v")], place(18))
                writer.compact(today=TODAY)
                writer.drop_before(TODAY)
                died = False
            deaths += died
            with ArchiveWriter.open(directory) as writer:
                position = writer.manifest.seq(0)
                assert position in (12, 18)
                listed = {name for file in writer.manifest.files for name in (file.path, file.hashes_path)}
                found = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
                assert found - listed == {MANIFEST, "archive.lock"}
                assert listed <= found
                last = 12 if position == 12 else 15
                assert seqs(ArchiveReader(directory)) in (list(range(1, last + 1)), list(range(7, last + 1)))
                assert len(read(ArchiveReader(directory), tenant="new")) == (1 if position == 18 else 0)
                of_v = [entry.seq for entry in read(ArchiveReader(directory), "v")]
                assert of_v == ([13, 14] if position == 12 else [18])
                writer.commit(some(19, 19), place(19))
            if not died:
                break
        assert deaths > 30

    def test_leave_files_that_the_next_writer_deletes_on_a_full_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with ArchiveWriter.open(tmp_path) as writer:
            writer.commit(some(1, 5), place(5))
        left, add = files(tmp_path)[0].with_name("left.parquet"), LocalFolder.add
        left.write_bytes(b"half")

        def add_if_there_is_room(folder: LocalFolder, name: str, data: bytes) -> None:
            if left.exists():
                raise OSError(ENOSPC, "the disk is full")
            add(folder, name, data)

        monkeypatch.setattr(LocalFolder, "add", add_if_there_is_room)
        with ArchiveWriter.open(tmp_path) as writer:
            writer.commit(some(6, 6), place(6))
        assert seqs(ArchiveReader(tmp_path)) == [1, 2, 3, 4, 5, 6]

    def test_leave_temporary_files_that_the_next_writer_deletes(self, tmp_path: Path) -> None:
        """But not items tables, beside all tenants or those of one."""
        with ArchiveWriter.open(tmp_path) as writer:
            writer.commit(some(1, 5), place(5))
        tables = [tmp_path / "items.csv", tmp_path / "tenant=main" / "items.csv"]
        for table in tables:
            table.write_text("item_id,title\ni1,Tea\n")
        left = files(tmp_path)[0].with_name("left.parquet")
        left.write_bytes(b"half")
        with ArchiveWriter.open(tmp_path) as writer:
            writer.compact(today=TODAY)
        assert (files(tmp_path, ".csv"), left.exists()) == (tables, False)

    def test_exclude_other_writers(self, tmp_path: Path) -> None:
        with (
            ArchiveWriter.open(tmp_path),
            pytest.raises(StorageUnavailable, match="another process"),
            ArchiveWriter.open(tmp_path),
        ):
            pass
        with ArchiveWriter.open(tmp_path):
            pass


class TestReading:
    def test_readers_miss_nothing_during_a_merge(self, tmp_path: Path) -> None:
        archive = ArchiveReader(tmp_path)
        with ArchiveWriter.open(tmp_path) as writer:
            writer.commit(some(1, 3), place(3))
            first = archive.read(lambda snapshot: snapshot)
            writer.commit(some(4, 6), place(6))
            writer.compact(today=TODAY)
            with pytest.raises(FileNotFoundError):
                first.entries("main", "u")
        assert seqs(archive) == [1, 2, 3, 4, 5, 6]

    def test_a_missing_older_or_different_archive_is_unavailable(self, tmp_path: Path) -> None:
        archive = ArchiveReader(tmp_path)
        with pytest.raises(StorageUnavailable, match="cannot be read"):
            read(archive)
        with ArchiveWriter.open(tmp_path) as writer:
            writer.commit(some(1, 3), place(3))
            archive_id = writer.manifest.archive_id
        require(archive, archive_id, 0, 3)
        for needed in ((archive_id, 0, 4), (archive_id, 1, 1), ("other", 0, 1)):
            with pytest.raises(StorageUnavailable, match="--archive-dir"):
                require(archive, *needed)

    @pytest.mark.parametrize("suffix", [".parquet", ".npy"])
    def test_a_damaged_or_missing_file_is_an_error(self, tmp_path: Path, suffix: str) -> None:
        with ArchiveWriter.open(tmp_path) as writer:
            writer.commit(some(1, 3), place(3))
        (path,) = files(tmp_path, suffix)
        path.write_bytes(b"something else")
        with pytest.raises(StorageError):
            read(ArchiveReader(tmp_path))
        path.unlink()
        with pytest.raises(StorageUnavailable, match="lacks files"):
            read(ArchiveReader(tmp_path))

    @pytest.mark.parametrize("day", ["2020-01-01", "2020-01-01/../../.."])
    @pytest.mark.parametrize("path", ["{}/a.parquet", "../a.parquet", "tenant=main/day={day}/../../../a.parquet"])
    def test_a_manifest_cannot_name_files_outside_the_archive(self, tmp_path: Path, path: str, day: str) -> None:
        """Otherwise a forged manifest makes services read any file, and the archiver delete it."""
        outside, archive = tmp_path / "a.parquet", tmp_path / "archive"
        outside.write_bytes(b"of somebody else")
        archive.mkdir()
        listed = ArchiveFile(path.format(tmp_path, day=day), "main", day, 1)
        (archive / MANIFEST).write_text(Manifest("id", {}, 1, (listed,)).to_json())
        with pytest.raises(StorageError, match="not a list of archived files"), ArchiveWriter.open(archive) as writer:
            writer.drop_before("2021-01-01")
        with pytest.raises(StorageError, match="not a list of archived files"):
            read(ArchiveReader(archive))
        assert outside.read_bytes() == b"of somebody else"

    def test_a_manifest_of_another_version_is_refused(self, tmp_path: Path) -> None:
        earlier = r"earlier lisarec \(version [123].*backup.*restore.*another directory"
        for text, reason in (
            ('{"version": 5}', "version 5"),
            ('{"version": 3}', earlier),
            ('{"version": 2}', earlier),
            ('{"version": 1}', earlier),
            ("[]", "not a list"),
            ("{", "not a list"),
        ):
            (tmp_path / MANIFEST).write_text(text)
            with pytest.raises(StorageError, match=reason):
                read(ArchiveReader(tmp_path))
            with pytest.raises(StorageError, match=reason), ArchiveWriter.open(tmp_path):
                pass


def test_a_snapshot_opens_while_another_thread_reads_the_previous_one(tmp_path: Path) -> None:
    before: dict[str, Hashes] = {str(number): np.zeros(0, np.uint64) for number in range(20_000)}
    is_over = threading.Event()

    def read_hashes() -> None:
        for number in count():
            if is_over.is_set():
                break
            before[f"new-{number % 1_000_000}"] = np.zeros(0, np.uint64)

    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read_hashes)
        try:
            for _ in range(30):
                ArchiveSnapshot(LocalFolder(tmp_path), Manifest("archive", {}, 0, ()), before)
        finally:
            is_over.set()
        reading.result()

"""Folders and buckets: no partial files, no lost updates, and verified copies."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from errno import ENOSPC
from pathlib import Path
from urllib.parse import urlsplit

import obstore
import pytest

import storage.folders.folder
from benchmarks.storage.s3_server import BUCKET, S3Server
from storage.archive.async_reader import TIMEOUT_S
from storage.folders.folder import Folder, Overtaken, add_file
from storage.folders.local_folder import LocalFolder, replace_file
from storage.folders.object_folder import ABANDONED_AFTER_S, BULK, QUICK, UNFINISHED, ObjectFolder
from storage.folders.place import ObjectUrl, open_folder, parse_place

NAMES = ("archive.json", "tenant=..%2Fx/day=2026-11-21/00000001-ab-cd.parquet", "tenant=ten%20ant/ä~.npy")
KINDS = ("directory", "s3")
LONG = bytes(range(256)) * 80_000  # several parts of an upload


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "directory":
        return LocalFolder(tmp_path / "folder")
    return ObjectFolder(request.getfixturevalue("s3")(), tmp_path / "cache")


@pytest.fixture
def bucket(s3: Callable[[], str], tmp_path: Path) -> ObjectFolder:
    return ObjectFolder(s3(), tmp_path / "cache")


def data(folder: Folder, name: str) -> bytes:
    found = folder.read(name)
    assert found is not None
    return found.data


class TestFolder:
    def test_files_round_trip_until_removed(self, folder: Folder) -> None:
        assert list(folder.names()) == []
        for name in NAMES:
            folder.add(name, memoryview(name.encode()))
        for name in NAMES:
            folder.add(name, name.encode() * 2)
        assert sorted(folder.names()) == sorted(NAMES)
        for name in NAMES:
            assert folder.has(name)
            assert data(folder, name) == folder.path(name).read_bytes() == name.encode() * 2
            folder.remove(name)
            folder.remove(name)
            assert not folder.has(name)
            with pytest.raises(FileNotFoundError):
                folder.read(name)
            with pytest.raises(FileNotFoundError):
                folder.path(name).read_bytes()
        assert list(folder.names()) == []

    def test_a_known_version_is_not_read_again(self, folder: Folder) -> None:
        folder.add("a", b"1")
        found = folder.read("a")
        assert found is not None
        assert folder.read("a", found.version) is None
        folder.add("a", b"2")
        assert data(folder, "a") == b"2" != found.data
        newer = folder.read("a", found.version)
        assert newer is not None
        assert newer.version != found.version

    def test_only_the_version_that_was_read_is_replaced(self, folder: Folder) -> None:
        with folder.writing():
            first = folder.replace("a", b"1", None)
            with pytest.raises(Overtaken):
                folder.replace("a", b"another", None)
            second = folder.replace("a", b"2", first)
            with pytest.raises(Overtaken):
                folder.replace("a", b"another", first)
            assert data(folder, "a") == b"2"
            assert folder.read("a", second) is None

    @pytest.mark.parametrize("max_conditional", [len(LONG), 0], ids=["in one request", "in parts"])
    def test_creating_a_file_replaces_none(
        self, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_conditional: int
    ) -> None:
        monkeypatch.setattr(storage.folders.folder, "MAX_CONDITIONAL", max_conditional)
        for content in (LONG, b"another"):
            (tmp_path / "file").write_bytes(content)
            with nullcontext() if content is LONG else pytest.raises(Overtaken):
                add_file(folder, "file", tmp_path / "file", is_new=True)
            assert folder.path("file").read_bytes() == LONG

    def test_long_files_are_complete(self, folder: Folder) -> None:
        folder.add("long", LONG)
        assert folder.path("long", hashlib.sha256(LONG).hexdigest()[:32]).read_bytes() == LONG


def test_a_write_on_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = LocalFolder(tmp_path)
    folder.add("day=1/a", b"1")

    def fail(_: int) -> None:
        raise OSError(ENOSPC, "the disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    for name in ("day=1/a", "day=1/b"):
        with pytest.raises(OSError, match="the disk is full"):
            folder.add(name, b"2")
    assert list(folder.names()) == ["day=1/a"]
    assert data(folder, "day=1/a") == b"1"


def test_files_and_new_folders_are_synced_before_renaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        calls.append(("fsync", os.fstat(descriptor).st_ino))

    def renamed(unfinished: Path, path: Path) -> None:
        rename(unfinished, path)
        calls.append(("rename", path.stat().st_ino))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    folder = LocalFolder(tmp_path / "new" / "archive")
    with folder.writing():
        folder.add("tenant=a/day=1/file", b"1")
    day = tmp_path / "new" / "archive" / "tenant=a" / "day=1"
    *of_folders, content, name, of_name = calls
    above = list(day.parents)[: -len(tmp_path.parents)]
    assert set(of_folders) == {("fsync", one.stat().st_ino) for one in above}
    number = (day / "file").stat().st_ino
    assert [content, name, of_name] == [("fsync", number), ("rename", number), ("fsync", day.stat().st_ino)]


def test_a_replacement_keeps_permissions_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftover, seen = tmp_path / "secrets.unfinished", []
    leftover.touch(mode=0o644)
    sync = os.fsync

    def look_and_sync(descriptor: int) -> None:
        seen.append(os.fstat(descriptor).st_mode & 0o777)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", look_and_sync)
    with leftover.open("rb") as reader:
        replace_file(tmp_path / "secrets", b"secret", 0o660)
        assert reader.read() == b""
    assert seen[0] == 0o660
    assert (tmp_path / "secrets").read_bytes() == b"secret"
    assert not leftover.exists()


class TestBucket:
    def test_concurrent_replacements_lose_no_update(self, bucket: ObjectFolder) -> None:
        """Each writer adds lines to one object, and retries after conflicts."""
        bucket.add("lines", b"")

        def add_lines(number: int) -> None:
            for line in range(5):
                while True:
                    found = bucket.read("lines")
                    assert found is not None
                    try:
                        bucket.replace("lines", found.data + f"{number}-{line}\n".encode(), found.version)
                        break
                    except Overtaken:
                        continue

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(add_lines, range(4)))
        lines = data(bucket, "lines").decode().split()
        assert sorted(lines) == [f"{number}-{line}" for number in range(4) for line in range(5)]

    def test_concurrent_creations_have_one_winner(self, bucket: ObjectFolder) -> None:
        def create(number: int) -> bool:
            try:
                bucket.replace("one", str(number).encode(), None)
            except Overtaken:
                return False
            return True

        with ThreadPoolExecutor(8) as threads:
            won = list(threads.map(create, range(8)))
        assert sum(won) == 1
        assert data(bucket, "one") == str(won.index(True)).encode()

    def test_a_put_without_a_response_is_recognised_as_done(
        self, bucket: ObjectFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The client's retry finds its own version instead of the expected one."""
        version, put = bucket.replace("a", b"1", None), obstore.put

        def put_twice(*args: object, **options: object) -> object:
            put(*args, **options)  # type: ignore[arg-type]
            return put(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(obstore, "put", put_twice)
        version = bucket.replace("a", b"2", version)
        monkeypatch.undo()
        assert bucket.read("a", version) is None

    def test_partial_uploads_are_never_read(self, bucket: ObjectFolder, s3: Callable[[], str]) -> None:
        address = urlsplit(os.environ["AWS_ENDPOINT_URL"])
        bucket.add("old", b"whole")
        for name in ("old", "new"):
            path = f"/{BUCKET}/{str(bucket).removeprefix(f's3://{BUCKET}/')}/{name}"
            with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
                head = f"PUT {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: 100\r\n\r\n"
                connection.sendall(head.encode() + b"half")
        bucket.add("after", b"")
        assert data(bucket, "old") == b"whole"
        assert sorted(bucket.names()) == ["after", "old"]

    @pytest.mark.usefixtures("s3")
    def test_a_missing_bucket_is_named(self, tmp_path: Path) -> None:
        folder = ObjectFolder("s3://no-such-bucket/archive", tmp_path)
        with pytest.raises(OSError, match="the bucket of 's3://no-such-bucket/archive' does not exist"):
            folder.replace("archive.json", b"{}", None)
        with pytest.raises(OSError, match="the bucket of 's3://no-such-bucket/archive' does not exist"):
            folder.add("log.jsonl.gz", LONG)

    def test_a_copy_with_another_hash_is_refused_and_deleted(self, bucket: ObjectFolder, tmp_path: Path) -> None:
        bucket.add("a", b"forged")
        digest = hashlib.sha256(b"written").hexdigest()[:32]
        with pytest.raises(OSError, match="differs from what was uploaded"):
            bucket.path("a", digest)
        assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
        bucket.add("a", b"written")
        assert bucket.path("a", digest).read_bytes() == b"written"

    def test_an_invalid_hash_cannot_address_other_files(self, bucket: ObjectFolder, tmp_path: Path) -> None:
        (other := tmp_path / "a").write_bytes(b"of somebody else")
        bucket.add("a", b"forged")
        for forged in (str(tmp_path), "../../..", ""):
            with pytest.raises(OSError, match="is no SHA-256"):
                bucket.path("a", forged)
        assert other.read_bytes() == b"of somebody else"

    def test_a_copy_is_used_without_the_bucket(self, s3_server: S3Server, bucket: ObjectFolder) -> None:
        digest = hashlib.sha256(b"1").hexdigest()[:32]
        bucket.add("a", b"1")
        bucket.path("a", digest)
        s3_server.freeze()
        quick_s, bulk_s = (float(str(timeout).rstrip("s")) for timeout in (QUICK["timeout"], BULK["read_timeout"]))
        assert quick_s < TIMEOUT_S  # what a request may wait for the archive
        begin_s = time.monotonic()
        with pytest.raises(OSError, match="failed"):
            bucket.read("a")
        assert time.monotonic() - begin_s < bulk_s  # so the timeout was the shorter one
        assert bucket.path("a", digest).read_bytes() == b"1"
        s3_server.thaw()
        assert data(bucket, "a") == b"1"

    def test_a_file_without_a_hash_is_copied_again_when_it_changes(self, bucket: ObjectFolder) -> None:
        for content in (b"1", b"2"):
            bucket.add("a", content)
            assert bucket.path("a").read_bytes() == content

    def test_unused_copies_and_abandoned_downloads_are_deleted(self, bucket: ObjectFolder, tmp_path: Path) -> None:
        digest = hashlib.sha256(b"x").hexdigest()
        copies = {}
        for name in ("day=1/a", "day=1/b", "c"):
            bucket.add(name, b"x")
            copies[name] = [bucket.path(name, digest), bucket.path(name)]
        (cache,) = (tmp_path / "cache").iterdir()
        old, young = cache / UNFINISHED / "old", cache / UNFINISHED / "young"
        for path in (old, young):
            path.write_bytes(b"")
        os.utime(old, (0, time.time() - ABANDONED_AFTER_S - 1))
        bucket.forget_copies_except({"day=1/a"})
        kept = [path for path in cache.rglob("*") if path.is_file()]
        assert sorted(kept) == sorted([*copies["day=1/a"], young])


class TestPlace:
    def test_paths_and_urls_are_distinguished(self, tmp_path: Path) -> None:
        assert parse_place("archive/of s3") == Path("archive/of s3")
        for url in ("s3://bucket/some/prefix", "gs://bucket/p", "az://container/p"):
            place = parse_place(f"{url}/")
            assert place == ObjectUrl(url)
            assert str(place) == url
            assert str(place / "x") == f"{url}/x"
            assert (place / "x").parent == place
            assert place.name == url.rpartition("/")[2]
        assert isinstance(open_folder(parse_place("x"), tmp_path), LocalFolder)
        assert str(open_folder(parse_place("s3://b/x"), tmp_path)) == "s3://b/x"

    @pytest.mark.parametrize(
        "url", ["http://host/x", "s3:///x", "s3://key:secret@bucket/x", "s3://bucket/x?token=secret", "s3://b/x#y"]
    )
    def test_other_urls_are_refused_without_showing_secrets(self, url: str) -> None:
        with pytest.raises(ValueError, match="://") as refused:
            parse_place(url)
        assert "secret" not in str(refused.value)

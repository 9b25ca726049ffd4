"""Downloads from a local publisher: either the expected table arrives, or nothing."""

from __future__ import annotations

import csv
import gzip
import io
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from app.jobs.datasets import download as downloads
from app.jobs.datasets.download import PUBLIC_SETS, DownloadError, PublicSet, download, git_blob_id
from app.jobs.datasets.writer import new_directory, write_interactions
from model.data.readers import read_interactions, read_items
from tests.storage.folders.durability import Disk

SEQUENCES = b"1 10\n1 11\n2 10\n"
TABLE = "user_id\titem_id\ttimestamp\n1\t10\t0\n1\t11\t1\n2\t10\t0\n"


@dataclass
class Publisher:
    """A fake publisher; it omits the last ``lost`` bytes of its files, and then hangs or disconnects."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    lost: int = 0
    hangs: bool = False
    closing: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def publisher(serve_http: Callable[[type[BaseHTTPRequestHandler]], str]) -> Iterator[Publisher]:
    at = Publisher()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = at.files.get(self.path.removeprefix("/"))
            if content is None:
                return self.send_error(404)
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) - at.lost])
            if at.hangs:
                at.closing.wait()
            return None

        def log_message(self, *_: object) -> None:
            pass

    at.url = serve_http(Handler)
    yield at
    at.closing.set()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PublicSet:
    """A data set of three events in place of a real one."""
    with new_directory(tmp_path / "expected") as directory:
        table_sha256 = write_interactions(directory, [(1, 10, 0), (1, 11, 1), (2, 10, 0)])
    small = replace(PUBLIC_SETS["ml-1m"], table_sha256=table_sha256, git_blob=git_blob_id(SEQUENCES))
    monkeypatch.setitem(downloads.PUBLIC_SETS, "ml-1m", small)
    return small


def fetch(publisher: Publisher, target: Path, name: str = "ml-1m", timeout_s: float = 5) -> None:
    download(name, target, lambda done, size: None, base_url=publisher.url, timeout_s=timeout_s)


def refused(publisher: Publisher, target: Path, reason: str, *, name: str = "ml-1m", timeout_s: float = 5) -> None:
    """Assert that the download fails for this reason and leaves nothing behind."""
    before = sorted(target.parent.iterdir())
    with pytest.raises(DownloadError, match=reason):
        fetch(publisher, target, name, timeout_s)
    assert sorted(target.parent.iterdir()) == before


@pytest.mark.usefixtures("small")
class TestOneFile:
    def test_arrives_as_a_data_directory(self, publisher: Publisher, tmp_path: Path) -> None:
        publisher.files["ml-1m.txt"] = SEQUENCES
        steps: list[tuple[int, int | None]] = []
        target = tmp_path / "data" / "ml-1m"
        download("ml-1m", target, lambda done, size: steps.append((done, size)), base_url=publisher.url)
        assert [file.name for file in target.iterdir()] == ["interactions.tsv.gz"]
        assert gzip.decompress((target / "interactions.tsv.gz").read_bytes()).decode() == TABLE
        assert steps[-1] == (len(SEQUENCES), len(SEQUENCES))
        assert [folder.name for folder in target.parent.iterdir()] == ["ml-1m"]

    def test_gives_the_same_bytes_every_time(self, publisher: Publisher, tmp_path: Path) -> None:
        publisher.files["ml-1m.txt"] = SEQUENCES
        fetch(publisher, tmp_path / "first")
        fetch(publisher, tmp_path / "second")
        first, second = ((tmp_path / name / "interactions.tsv.gz").read_bytes() for name in ("first", "second"))
        assert first == second

    def test_a_file_with_another_hash_is_refused(self, publisher: Publisher, tmp_path: Path) -> None:
        publisher.files["ml-1m.txt"] = SEQUENCES + b"2 12\n"
        refused(publisher, tmp_path / "ml-1m", "git blob id .* instead of .*; the download was deleted")

    def test_a_table_with_another_hash_is_refused(
        self, publisher: Publisher, tmp_path: Path, small: PublicSet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        publisher.files["ml-1m.txt"] = SEQUENCES + b"2 12\n"
        monkeypatch.setitem(downloads.PUBLIC_SETS, "ml-1m", replace(small, git_blob=None))
        refused(publisher, tmp_path / "ml-1m", "its SHA-256 is .* instead of .*; the download was deleted")

    def test_a_missing_file_is_named(self, publisher: Publisher, tmp_path: Path) -> None:
        refused(publisher, tmp_path / "ml-1m", r"/ml-1m\.txt answers 404; try again later")

    def test_a_truncated_file_is_refused(self, publisher: Publisher, tmp_path: Path) -> None:
        publisher.files["ml-1m.txt"] = SEQUENCES
        publisher.lost = 5
        refused(publisher, tmp_path / "ml-1m", "was interrupted .*; run the command again")

    def test_a_stalled_download_times_out(self, publisher: Publisher, tmp_path: Path) -> None:
        publisher.files["ml-1m.txt"] = SEQUENCES
        publisher.lost, publisher.hangs = 5, True
        refused(publisher, tmp_path / "ml-1m", r"sent nothing for 0\.2 s; run the command again", timeout_s=0.2)

    def test_an_unreachable_publisher_is_named(self, tmp_path: Path) -> None:
        nobody = Publisher(url="http://127.0.0.1:9")
        refused(nobody, tmp_path / "ml-1m", r"127\.0\.0\.1:9/ml-1m\.txt cannot be reached .*check the network")

    def test_an_existing_target_is_kept(self, publisher: Publisher, tmp_path: Path) -> None:
        publisher.files["ml-1m.txt"] = SEQUENCES
        (tmp_path / "keep").write_text("mine")
        with pytest.raises(FileExistsError, match="exists already; remove it or choose another directory with --out"):
            fetch(publisher, tmp_path)
        assert (tmp_path / "keep").read_text() == "mine"


def test_an_unknown_data_set_lists_the_known_ones(tmp_path: Path) -> None:
    refused(
        Publisher(), tmp_path / "x", "unknown data set 'netflix'; choose one of: ml-1m, beauty, ml-lat", name="netflix"
    )


def test_a_file_that_is_no_archive_is_refused(publisher: Publisher, tmp_path: Path) -> None:
    publisher.files["ml-latest-small.zip"] = b"<html>please log in</html>"
    refused(publisher, tmp_path / "x", "is not the expected file .*proxy", name="ml-latest-small")


def test_an_archive_without_ratings_is_refused(publisher: Publisher, tmp_path: Path) -> None:
    publisher.files["ml-latest-small.zip"] = zipped({"ml-latest-small/README.txt": b""})
    refused(publisher, tmp_path / "x", "is not the expected file", name="ml-latest-small")


@pytest.mark.parametrize("name", ["ml-1m", "beauty"])
def test_published_sequences_give_the_expected_table(
    name: str, publisher: Publisher, shared_data: Path, tmp_path: Path
) -> None:
    """The shared copy, converted to SASRec's format, equals SASRec's file and converts back."""
    published = b"".join(b"%s %s\n" % (row[0], row[1]) for row in table(shared_data / name / "interactions.tsv.gz"))
    assert git_blob_id(published) == PUBLIC_SETS[name].git_blob
    publisher.files[PUBLIC_SETS[name].file_name] = published
    fetch(publisher, tmp_path / name, name)
    assert read_interactions(tmp_path / name).sha256 == read_interactions(shared_data / name).sha256


def test_published_ratings_give_the_expected_table(publisher: Publisher, shared_data: Path, tmp_path: Path) -> None:
    """The shared copy, sorted by film like MovieLens, converts back to itself."""
    shared = shared_data / "ml-latest-small"
    ratings = sorted(table(shared / "interactions.tsv.gz"), key=lambda row: (int(row[0]), int(row[1])))
    publisher.files["ml-latest-small.zip"] = zipped(
        {
            "ml-latest-small/ratings.csv": csv_file(
                [b"userId", b"movieId", b"rating", b"timestamp"], *([row[0], row[1], b"4.0", row[2]] for row in ratings)
            ),
            "ml-latest-small/movies.csv": csv_file([b"movieId", b"title", b"genres"], *table(shared / "items.tsv.gz")),
        }
    )
    fetch(publisher, tmp_path / "small", "ml-latest-small")
    assert read_interactions(tmp_path / "small").sha256 == read_interactions(shared).sha256
    assert read_items(tmp_path / "small") == read_items(shared)


def table(file: Path) -> list[list[bytes]]:
    return [line.split(b"\t") for line in gzip.decompress(file.read_bytes()).splitlines()[1:]]


def csv_file(*rows: list[bytes]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([cell.decode() for cell in row] for row in rows)
    return text.getvalue().encode()


def zipped(files: dict[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:
        for name, content in files.items():
            members.writestr(name, content)
    return archive.getvalue()


def test_a_data_set_is_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    with new_directory(tmp_path / "new" / "set") as directory:
        write_interactions(directory, [(1, 10, 0)])
    assert disk.lost(tmp_path / "new") == []
    assert disk.torn == []

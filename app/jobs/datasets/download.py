"""Downloads public data sets from their publishers, and converts them into data directories."""

from __future__ import annotations

import csv
import hashlib
import io
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from app.jobs.datasets.writer import new_directory, write_interactions, write_items

READ_TIMEOUT_S = 30.0

OnProgress = Callable[[int, int | None], None]  # bytes so far; bytes in all, if the publisher says


class DownloadError(Exception):
    """A data set could not be downloaded. The message says what to do. Partial files are deleted."""


@dataclass(frozen=True)
class PublicSet:
    """A set's source, the checksums of its file and its table, and its publisher's terms of use.

    convert       writes the download into a data directory, and returns the SHA-256 of its interactions table
    table_sha256  the expected SHA-256
    git_blob      the id of the file in the publisher's git repository, if it has one
    """

    title: str
    base_url: str
    file_name: str
    convert: Callable[[Path, Path], str]
    table_sha256: str
    terms: str
    terms_url: str
    git_blob: str | None = None


def download(
    name: str, target: Path, on_progress: OnProgress, *, base_url: str | None = None, timeout_s: float = READ_TIMEOUT_S
) -> PublicSet:
    """Fetch a set and write it to ``target`` as a data directory.

    on_progress  called with the progress
    base_url     where to fetch from instead of the publisher
    timeout_s    how long to wait for the next bytes
    raises       DownloadError; FileExistsError when ``target`` exists
    """
    public_set = find(name)
    url = f"{base_url or public_set.base_url}/{public_set.file_name}"
    with new_directory(target) as directory, TemporaryDirectory(dir=target.parent, prefix=".download-") as scratch:
        file = Path(scratch) / public_set.file_name
        _fetch(url, file, on_progress, timeout_s)
        if public_set.git_blob is not None:
            _require_same(url, "its git blob id is", git_blob_id(file.read_bytes()), public_set.git_blob)
        table_sha256 = _convert(url, file, directory, public_set)
        _require_same(url, "its SHA-256 is", table_sha256, public_set.table_sha256)
    return public_set


def find(name: str) -> PublicSet:
    """Return the set of that name; raises DownloadError with the known names otherwise."""
    if name not in PUBLIC_SETS:
        raise DownloadError(f"unknown data set {name!r}; choose one of: {', '.join(PUBLIC_SETS)}")
    return PUBLIC_SETS[name]


def git_blob_id(content: bytes) -> str:
    """Return git's id of these bytes, in hex."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def convert_sequences(file: Path, directory: Path) -> str:
    """Convert SASRec's format: a line ``user item`` for each event, grouped by user; the order becomes the time."""
    with file.open(encoding="ascii") as lines:
        return write_interactions(
            directory,
            (
                (user_id, item_id, position)
                for user_id, events in groupby(map(str.split, lines), key=itemgetter(0))
                for position, (_, item_id) in enumerate(events)
            ),
        )


def convert_movielens(file: Path, directory: Path) -> str:
    """Convert MovieLens' zip of csv files: each user's ratings, stably sorted by time, with titles and genres."""
    with zipfile.ZipFile(file) as archive:
        write_items(directory, _read_csv(archive, f"{file.stem}/movies.csv", "movieId", "title", "genres"))
        ratings = _read_csv(archive, f"{file.stem}/ratings.csv", "userId", "movieId", "timestamp")
        return write_interactions(
            directory,
            (
                event
                for _, events in groupby(ratings, key=itemgetter(0))
                for event in sorted(events, key=lambda event: int(event[2]))
            ),
        )


def _read_csv(archive: zipfile.ZipFile, name: str, *columns: str) -> Iterator[tuple[str, ...]]:
    with archive.open(name) as raw:
        for row in csv.DictReader(io.TextIOWrapper(raw, encoding="utf-8", newline="")):
            yield tuple(row[column] for column in columns)


def _fetch(url: str, file: Path, on_progress: OnProgress, timeout_s: float) -> None:
    try:
        with httpx.stream("GET", url, timeout=timeout_s, follow_redirects=True) as answer, file.open("wb") as out:
            answer.raise_for_status()
            size = answer.headers.get("content-length")
            for chunk in answer.iter_bytes():
                out.write(chunk)
                on_progress(answer.num_bytes_downloaded, int(size) if size else None)
    except httpx.HTTPStatusError as exc:
        status = exc.response.status_code
        raise DownloadError(
            f"{url} answers {status}; try again later, or check whether the publisher has moved the file"
        ) from exc
    except httpx.TimeoutException as exc:
        raise DownloadError(f"{url} sent nothing for {timeout_s:g} s; run the command again") from exc
    except httpx.ConnectError as exc:
        raise DownloadError(f"{url} cannot be reached ({exc}); check the network or HTTPS_PROXY") from exc
    except httpx.HTTPError as exc:
        raise DownloadError(f"the download of {url} was interrupted ({exc}); run the command again") from exc


def _convert(url: str, file: Path, directory: Path, public_set: PublicSet) -> str:
    try:
        return public_set.convert(file, directory)
    except (ValueError, LookupError, csv.Error, zipfile.BadZipFile, zlib.error) as exc:
        raise DownloadError(
            f"{url} is not the expected file ({exc}); a proxy may have answered instead of the publisher"
        ) from exc


def _require_same(url: str, what: str, found: str, expected: str) -> None:
    if found != expected:
        raise DownloadError(
            f"{url} is not the expected file: {what} {found} instead of {expected}; the download was deleted"
        )


SASREC = "https://raw.githubusercontent.com/kang205/SASRec/master/data"

PUBLIC_SETS = {
    "ml-1m": PublicSet(
        title="MovieLens-1M as in the SASRec paper: 6,040 users, 3,416 films, 999,611 events",
        base_url=SASREC,
        file_name="ml-1m.txt",
        convert=convert_sequences,
        table_sha256="4c7e9b014ca902ec344f623a7434614b4c30b888819253ec13bc298d35c90434",
        terms="research only, no redistribution, no commercial use without permission",
        terms_url="https://files.grouplens.org/datasets/movielens/ml-1m-README.txt",
        git_blob="9ab8e3edb8742f8d8cc4911e3dee25e82a6fcc24",
    ),
    "beauty": PublicSet(
        title="Amazon Beauty as in the SASRec paper: 52,204 users, 57,289 products, 394,908 events",
        base_url=SASREC,
        file_name="Beauty.txt",
        convert=convert_sequences,
        table_sha256="fd94b894841c236840bbe8890f946317b18f032b34341e8335319b53a8bc9895",
        terms="benchmarks and research; cite its authors",
        terms_url="https://cseweb.ucsd.edu/~jmcauley/datasets/amazon/links.html",
        git_blob="cee2ab468d220772a9dfefed9aa9c492dc9b3418",
    ),
    "ml-latest-small": PublicSet(
        title="MovieLens latest-small of 2018: 610 users, 9,724 films, 100,836 events, titles and genres",
        base_url="https://files.grouplens.org/datasets/movielens",
        file_name="ml-latest-small.zip",
        convert=convert_movielens,
        table_sha256="68c1765045cc0b4ea513f82faddc81d58707c3e353d4d88334ca154692d2e133",
        terms="no commercial use without permission; redistribution under the same conditions",
        terms_url="https://files.grouplens.org/datasets/movielens/ml-latest-small-README.html",
    ),
}

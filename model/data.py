"""Data directories: interactions, items, and the splits of the evaluation protocols."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from model.config import SplitName, TrainOn

ID_PATTERN = r"\A[A-Za-z0-9_.:@-]{1,128}\z"
SUFFIXES = (".tsv.gz", ".tsv", ".csv.gz", ".csv", ".parquet")
REQUIRED = ("user_id", "item_id", "timestamp")
OPTIONAL = ("type", "value")
ARCHIVE_MANIFEST = "archive.json"  # drawn in storage/archive.py
ARCHIVE_ATTEMPTS = 5
ARCHIVE_COLUMNS = ("user_id", "seq", "event_id", "item_id", "timestamp_us", "type", "value")
UNDO, INTO = "!undo", "!into"  # types of entries that are no events, drawn in storage/corrections.py
ARCHIVE_COLUMNS_AS_TEXT = {
    "user_id": pl.col("user_id"),
    "item_id": pl.col("item_id"),
    "timestamp": (pl.col("timestamp_us") / 1e6).cast(pl.String),
    "type": pl.col("type"),
    "value": pl.col("value").cast(pl.String),
}
LAST_SECOND = 253_402_300_799  # the end of 9999, where RFC 3339 ends too
REPEAT_SHARE_OF_SHOPS = 0.05


AVAILABLE = {"true": True, "1": True, "false": False, "0": False}


class DataError(ValueError):
    """A data directory that cannot be read; the message names the file, the line and the way out."""


@dataclass(frozen=True)
class Interactions:
    """Events grouped by user, each user's in order of time (equal times keep the order of the file).

    user, item, type  (events,)  int32, indices into user_ids, item_ids, type_names
    timestamp_us      (events,)  int64, microseconds since the epoch
    value             (events,)  float64, NaN where the table has none
    time_is_order     whether the timestamps only count the events of a user instead of telling a time
    sha256            hex digest of the uncompressed table as it lay in the file
    """

    user_ids: list[str]
    item_ids: list[str]
    type_names: list[str]
    user: NDArray[np.int32]
    item: NDArray[np.int32]
    type: NDArray[np.int32]
    timestamp_us: NDArray[np.int64]
    value: NDArray[np.float64]
    time_is_order: bool
    sha256: str

    def __len__(self) -> int:
        return len(self.user)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where each user's events begin, and the end: (users + 1,)."""
        return np.searchsorted(self.user, np.arange(len(self.user_ids) + 1)).astype(np.int64)

    def weights(self, event_weights: Mapping[str, float]) -> NDArray[np.float32]:
        """Weight of every event by its type; raises DataError for a type without one."""
        missing = sorted(set(self.type_names) - set(event_weights))
        if missing:
            known = ", ".join(sorted(event_weights))
            raise DataError(
                f"event type {missing[0]!r} has no weight; give it one with --event-weight {missing[0]}=1, or 0. "
                f"Others have: {known}"
            )
        return np.array([event_weights[name] for name in self.type_names], np.float32)[self.type]

    def stepping(self, event_weights: Mapping[str, float]) -> Interactions:
        """Only the events that step a state: those of positive weight."""
        keep = self.weights(event_weights) > 0
        if keep.all():
            return self
        return replace(
            self,
            user=self.user[keep],
            item=self.item[keep],
            type=self.type[keep],
            timestamp_us=self.timestamp_us[keep],
            value=self.value[keep],
        )


@dataclass(frozen=True)
class Histories:
    """Histories of events, oldest first, packed one behind the other.

    item     (events,)         int32
    weights  (events,)         float32
    starts   (histories + 1,)  int64, where each one begins, and the end
    """

    item: NDArray[np.int32]
    weights: NDArray[np.float32]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, rows: slice) -> Histories:
        """Some of the histories that stand side by side."""
        begin, end, step = rows.indices(len(self))
        assert step == 1
        starts = self.starts[begin : end + 1]
        events = slice(starts[0], starts[-1])
        return Histories(self.item[events], self.weights[events], starts - starts[0])

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        """The items of each history."""
        return (self.item[begin:end] for begin, end in pairwise(self.starts))

    @property
    def weights_of_each(self) -> Iterator[NDArray[np.float32]]:
        """The weights of each history's events."""
        return (self.weights[begin:end] for begin, end in pairwise(self.starts))

    @property
    def last_items(self) -> NDArray[np.int32]:
        """(histories,), none of which may be empty."""
        return self.item[self.starts[1:] - 1]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(histories,)"""
        return np.diff(self.starts)

    @property
    def rows(self) -> NDArray[np.int64]:
        """Which history each event belongs to: (events,)."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def positions(self) -> int:
        """How many events have a successor of the same user."""
        return int(np.maximum(self.lengths - 1, 0).sum())


@dataclass(frozen=True)
class Split:
    """What trains and what is held out. The input of a held-out event is everything before it of the same user.

    train       (events,) bool   events the model may learn from; a prefix of every user
    validation  (users',) int64  positions of the held-out validation events
    test        (users'',) int64 positions of the held-out test events
    """

    train: NDArray[np.bool_]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]


@dataclass(frozen=True)
class ItemTexts:
    """Titles and categories by item id, as far as the data directory has them."""

    titles: dict[str, str]
    categories: dict[str, tuple[str, ...]]


def read_interactions(directory: Path) -> Interactions:
    """Read ``interactions.*`` of a data directory, or the events of an archive; raises DataError with file and line."""
    table = _read_archive(directory) or _read_table(directory)
    frame = table.frame
    if frame.is_empty():
        raise DataError(f"{table.path} has no interactions; it needs a header and at least one line")
    table.require_ids("user_id", "item_id")
    timestamp_us = table.timestamps_us()
    kind = frame["type"] if "type" in frame.columns else pl.repeat("click", len(frame), eager=True)
    if "type" in frame.columns:
        table.require_ids("type")
    value = table.numbers("value") if "value" in frame.columns else np.full(len(frame), np.nan)
    user, user_ids = _indices(frame["user_id"])
    item, item_ids = _indices(frame["item_id"])
    type_, type_names = _indices(kind)
    order = np.lexsort((timestamp_us, user))  # stable: equal times keep the order of the file
    user, timestamp_us = user[order], timestamp_us[order]
    return Interactions(
        user_ids,
        item_ids,
        type_names,
        user,
        item[order],
        type_[order],
        timestamp_us,
        value[order],
        _only_counts(user, timestamp_us),
        table.sha256,
    )


def read_items(directory: Path) -> ItemTexts:
    """Read ``items.*`` of a data directory; without such a file no item has a title."""
    path = _find(directory, "items")
    if path is None:
        return ItemTexts({}, {})
    frame = read_item_table(path)
    ids = frame["item_id"].to_list()
    empty = pl.repeat("", len(frame), eager=True)
    titles = (frame["title"] if "title" in frame.columns else empty).fill_null("")
    categories = (frame["categories"] if "categories" in frame.columns else empty).fill_null("")
    return ItemTexts(
        dict(zip(ids, titles.to_list(), strict=True)),
        {name: categories_in(text) for name, text in zip(ids, categories.to_list(), strict=True)},
    )


def read_item_table(path: Path) -> pl.DataFrame:
    """The columns item_id, title, categories and available of a file, as texts, as many as it has; no id twice."""
    table = _read(path, ("item_id",), ("title", "categories", "available"))
    table.require_ids("item_id")
    ids = table.frame["item_id"]
    table.refuse(ids.is_duplicated() & ~ids.is_first_distinct(), "item_id {!r} stands here a second time", "item_id")
    if "available" in table.frame.columns:
        cells = table.frame["available"]
        bad = ~cells.fill_null("").str.to_lowercase().is_in([*AVAILABLE, ""])
        table.refuse(bad, "available {!r} is none of true, false, 1, 0", "available")
    return table.frame


def split(interactions: Interactions, name: SplitName, train_on: TrainOn = "train") -> Split:
    """Split as the protocols of the same name do.

    loo       the last event of each user with at least 3 is the test event, the one before it validation
    temporal  trains before the 90 % quantile of time, tests each later user's last event; the last earlier event of
              each user with at least 3 earlier ones is validation; refused where timestamps are only an order

    train_on ``validation`` trains on the validation events too, ``all`` on everything.
    """
    parts = _split_temporal(interactions) if name == "temporal" else _split_loo(interactions)
    if train_on == "all":
        return Split(np.ones(len(interactions), bool), parts.validation, parts.test)
    if train_on == "validation":
        train = parts.train.copy()
        train[parts.validation] = True
        return Split(train, parts.validation, parts.test)
    return parts


def training_histories(
    interactions: Interactions, train: NDArray[np.bool_], event_weights: Mapping[str, float]
) -> Histories:
    """The training events of every user, with their weights; ``train`` as in a Split."""
    weights = interactions.weights(event_weights)
    lengths = np.bincount(interactions.user[train], minlength=len(interactions.user_ids))
    return Histories(interactions.item[train], weights[train], _starts(lengths))


def histories_before(
    interactions: Interactions, positions: NDArray[np.int64], event_weights: Mapping[str, float]
) -> Histories:
    """What precedes each of the given positions in its user's history."""
    weights = interactions.weights(event_weights)
    begins = interactions.starts[interactions.user[positions]]
    lengths = positions - begins
    starts = _starts(lengths)
    events = np.arange(starts[-1]) + np.repeat(begins - starts[:-1], lengths)
    return Histories(interactions.item[events], weights[events], starts)


def seen_before(
    interactions: Interactions, positions: NDArray[np.int64], unseen_types: Collection[str]
) -> list[NDArray[np.int32]]:
    """The items before each of the given positions in its user's history, without those of some types."""
    is_seen = np.array([name not in unseen_types for name in interactions.type_names])[interactions.type]
    begins = interactions.starts[interactions.user[positions]]
    return [interactions.item[begin:end][is_seen[begin:end]] for begin, end in zip(begins, positions, strict=True)]


def _starts(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def repeat_share(interactions: Interactions) -> float:
    """Share of the events whose item the same user had before: high in shops, near 0 for ratings."""
    pairs = interactions.user.astype(np.int64) * len(interactions.item_ids) + interactions.item
    return 1.0 - len(np.unique(pairs)) / max(len(pairs), 1)


def _split_loo(interactions: Interactions) -> Split:
    lengths = np.diff(interactions.starts)
    last = interactions.starts[1:][lengths >= 3] - 1
    train = np.ones(len(interactions), bool)
    train[last] = train[last - 1] = False
    return Split(train, last - 1, last)


def _split_temporal(interactions: Interactions) -> Split:
    if interactions.time_is_order:
        raise DataError("the timestamps are only an order within each user, so there is no 'temporal' split; use 'loo'")
    cutoff_us = np.quantile(interactions.timestamp_us, 0.9, method="lower")
    earlier = interactions.timestamp_us < cutoff_us
    users = len(interactions.user_ids)
    earlier_events = np.bincount(interactions.user[earlier], minlength=users)
    lengths = np.diff(interactions.starts)
    train_ends = interactions.starts[:-1] + earlier_events
    validation = train_ends[earlier_events >= 3] - 1
    test = interactions.starts[1:][(lengths > earlier_events) & (lengths >= 2)] - 1
    train = earlier.copy()
    train[validation] = False
    return Split(train, validation, test)


def _only_counts(user: NDArray[np.int32], timestamp_us: NDArray[np.int64]) -> bool:
    """Whether every event of a user stands one second after the one before."""
    same_user = user[1:] == user[:-1]
    return bool(np.all(np.diff(timestamp_us)[same_user] == 1_000_000))


def _indices(column: pl.Series) -> tuple[NDArray[np.int32], list[str]]:
    """Indices in order of first appearance, and the names."""
    names = column.unique(maintain_order=True)
    index = pl.DataFrame({"name": names, "index": np.arange(len(names), dtype=np.int32)})
    joined = pl.DataFrame({"name": column}).join(index, on="name", how="left", maintain_order="left")
    return joined["index"].to_numpy().astype(np.int32), names.to_list()


def categories_in(text: str) -> tuple[str, ...]:
    """Those of a cell."""
    return tuple(dict.fromkeys(part for part in text.split("|") if part))


def _find(directory: Path, stem: str) -> Path | None:
    if not directory.is_dir():
        raise DataError(f"data directory {str(directory)!r} does not exist; 'lisarec data NAME' makes one")
    found = [directory / f"{stem}{suffix}" for suffix in SUFFIXES if (directory / f"{stem}{suffix}").is_file()]
    if len(found) > 1:
        raise DataError(f"data directory {str(directory)!r} has {found[0].name} and {found[1].name}; keep one of them")
    return found[0] if found else None


@dataclass(frozen=True)
class _Table:
    """A table as text columns; row i stands in line i + 2 of a text file."""

    path: Path
    frame: pl.DataFrame
    sha256: str

    def refuse(self, bad: pl.Series, reason: str, column: str) -> None:
        """Raise DataError for the first row where ``bad`` holds; ``{!r}`` in the reason becomes the cell."""
        rows = bad.fill_null(True).arg_true()
        if len(rows):
            cell = self.frame[column][rows[0]]
            place = (
                f"row {rows[0] + 1}" if self.path.suffix == ".parquet" or self.path.is_dir() else f"line {rows[0] + 2}"
            )
            raise DataError(f"{self.path}, {place}: " + reason.format("" if cell is None else str(cell)[:80]))

    def require_ids(self, *columns: str) -> None:
        for column in columns:
            cells = self.frame[column]
            self.refuse(cells.eq_missing(column), "the header is repeated; remove this line", column)
            bad = ~cells.str.contains(ID_PATTERN) | cells.is_in([".", ".."])
            self.refuse(bad, f"{column} {{!r}} is not an id (1 to 128 of A-Z a-z 0-9 _ . : @ -)", column)

    def numbers(self, column: str) -> NDArray[np.float64]:
        """The column as floats, NaN where a cell is empty."""
        cells = self.frame[column]
        numbers = cells.cast(pl.Float64, strict=False)
        bad = (numbers.is_null() | ~numbers.is_finite()) & cells.is_not_null() & (cells != "")
        self.refuse(bad, f"{column} {{!r}} is not a finite number", column)
        return numbers.fill_null(np.nan).to_numpy().astype(np.float64)

    def timestamps_us(self) -> NDArray[np.int64]:
        """Unix seconds or RFC 3339 times as microseconds."""
        cells = self.frame["timestamp"]
        seconds = cells.cast(pl.Float64, strict=False)
        seconds = seconds.set(~seconds.is_finite(), None)
        times = (seconds * 1e6).round().cast(pl.Int64, strict=False)
        if times.null_count():
            texts = cells.filter(times.is_null())
            parsed = texts.str.to_datetime("%+", time_unit="us", time_zone="UTC", strict=False)
            times = times.scatter(times.is_null().arg_true(), parsed.dt.timestamp("us"))
        self.refuse(times.is_null(), "timestamp {!r} is neither Unix seconds nor an RFC 3339 time", "timestamp")
        far = times.abs() > LAST_SECOND * 1_000_000
        self.refuse(far, "timestamp {!r} lies beyond the year 9999; the unit is seconds", "timestamp")
        return times.to_numpy().astype(np.int64)


def _read_table(directory: Path) -> _Table:
    path = _find(directory, "interactions")
    if path is None:
        raise DataError(f"data directory {str(directory)!r} has no interactions.tsv.gz (or .tsv, .csv, .parquet)")
    return _read(path, REQUIRED, OPTIONAL)


def _read_archive(directory: Path) -> _Table | None:
    """The events that 'lisarec archive' has put there, or those of one tenant: DIR or DIR/tenant=NAME; else None.

    Each user's stand in log order. The digest is that of the table as text, which merging files does not change.
    """
    root, tenant = (directory.parent, directory.name) if directory.name.startswith("tenant=") else (directory, "")
    manifest = root / ARCHIVE_MANIFEST
    if not manifest.is_file():
        return None
    for _ in range(ARCHIVE_ATTEMPTS):
        paths = _archived_files(manifest, tenant)
        try:
            frames = [pl.read_parquet(root / path, columns=[*ARCHIVE_COLUMNS]) for path in paths]
        except FileNotFoundError:  # merged by the archiver meanwhile
            continue
        except (OSError, pl.exceptions.PolarsError) as exc:
            raise DataError(f"archive {str(root)!r} cannot be read: {str(exc)[:200]}") from exc
        table = _counted(pl.concat(frames)).sort("user_id", "seq").select(**ARCHIVE_COLUMNS_AS_TEXT)
        return _Table(directory, table, hashlib.sha256(table.write_csv(separator="\t").encode()).hexdigest())
    raise DataError(f"archive {str(root)!r} lacks files that its {ARCHIVE_MANIFEST} names")


def _counted(log: pl.DataFrame) -> pl.DataFrame:
    """The events that no undo takes back, without those of users who became another one, whose log has copies."""
    is_undo, is_into = pl.col("type") == UNDO, pl.col("type") == INTO
    undone = log.filter(is_undo).select("user_id", event_id="item_id")
    merged = log.filter(is_into).select("user_id")
    events = log.filter(~is_undo & ~is_into)
    events = events.join(undone, on=["user_id", "event_id"], how="anti").join(merged, on="user_id", how="anti")
    return events.with_columns(type=pl.col("type").str.replace("!.*", ""))  # codes, drawn in storage/cold.py


def _archived_files(manifest: Path, folder: str) -> list[str]:
    """Paths of the Parquet files that the archive's list names, of one tenant's folder if it has several."""
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        paths = [Path(file["path"]) for file in files]
    except (OSError, ValueError, TypeError, LookupError) as exc:
        raise DataError(f"{manifest} is no list of archived files: {exc!r}") from exc
    folders = sorted({path.parts[0] for path in paths})
    if not folders:
        raise DataError(f"archive {str(manifest.parent)!r} has no events yet; 'lisarec archive' moves them there")
    if not folder and len(folders) > 1:
        named = ", ".join(str(manifest.parent / name) for name in folders[:5])
        raise DataError(f"archive {str(manifest.parent)!r} has several tenants; choose one of {named}")
    if folder and folder not in folders:
        raise DataError(f"archive {str(manifest.parent)!r} has no {folder!r}; it has {', '.join(folders[:5])}")
    return [str(path) for path in paths if path.parts[0] == (folder or folders[0])]


def _read(path: Path, required: Sequence[str], optional: Sequence[str]) -> _Table:
    raw = _uncompressed(path)
    if path.suffix == ".parquet":
        try:
            frame = pl.read_parquet(io.BytesIO(raw))
            frame = frame.select(pl.col(name).cast(pl.String) for name in frame.columns)
        except pl.exceptions.PolarsError as exc:
            raise DataError(f"{path} is not a Parquet table of numbers and texts: {str(exc)[:200]}") from exc
    else:
        frame = _parse(path, raw)
    _check_header(path, frame.columns, required, optional)
    keep = [name for name in (*required, *optional) if name in frame.columns]
    return _Table(path, frame.select(keep), hashlib.sha256(raw).hexdigest())


def _uncompressed(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as exc:
        raise DataError(f"{path} cannot be read: {exc}") from exc


def _check_header(path: Path, header: Sequence[str], required: Sequence[str], optional: Sequence[str]) -> None:
    for name in (*required, *optional):
        if f"{name}_duplicated_0" in header:  # what polars calls the second column of a name
            raise DataError(f"{path}, line 1: column {name!r} stands there twice; keep one of them")
        if name in required and name not in header:
            expected = " ".join(required) + "".join(f" [{name}]" for name in optional)
            raise DataError(f"{path}, line 1: column {name!r} is missing; the header must name {expected}")


def _separator(path: Path) -> str:
    return "," if ".csv" in path.name else "\t"


def _parse(path: Path, raw: bytes) -> pl.DataFrame:
    if not raw.strip():
        raise DataError(f"{path} is empty; it needs a header and at least one line")
    separator = _separator(path)
    try:
        frame = pl.read_csv(
            raw, separator=separator, infer_schema=False, quote_char='"' if separator == "," else None, encoding="utf8"
        )
    except pl.exceptions.PolarsError as exc:
        raise _first_broken_line(path, raw, str(exc)) from exc
    if frame.width > 1 and frame[:, -1].null_count():
        error = _first_broken_line(path, raw, "")
        if "fields" in str(error):
            raise error
    return frame


def _lines(path: Path, raw: bytes) -> Iterator[list[str]]:
    text = io.StringIO(raw.decode("utf-8", errors="strict"), newline="")
    if _separator(path) == ",":
        return csv.reader(text)
    return csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE)


def _first_broken_line(path: Path, raw: bytes, otherwise: str) -> DataError:
    """Walk the file line by line to name the first one that has too few or too many fields."""
    try:
        lines = _lines(path, raw)
        width = len(next(lines))
        for number, fields in enumerate(lines, start=2):
            if len(fields) != width:
                return DataError(f"{path}, line {number}: {len(fields)} fields where the header has {width}")
    except UnicodeDecodeError as exc:
        number = raw[: exc.start].count(b"\n") + 1
        return DataError(f"{path}, line {number}: not UTF-8 text")
    except csv.Error as exc:
        return DataError(f"{path}: {exc}")
    return DataError(f"{path} cannot be read: {otherwise[:200]}")

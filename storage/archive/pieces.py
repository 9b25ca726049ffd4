"""Reading and writing Parquet files of an archive in pieces, so that memory does not grow with the files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from io import BytesIO
from pathlib import Path

import polars as pl
from polars.io.plugins import register_io_source

from storage.archive.manifest import COLUMNS

ROW_GROUP = 16_384  # rows; a look-up of one user reads one or two groups of each file that has the user
PIECE_ROWS = 16 * ROW_GROUP  # some 300 MB while they are read and sorted
SAMPLED_EVERY = 1_024  # rows of a file, to divide its users into pieces
ORDER = ("user_id", "seq")


def pack(pieces: Iterable[pl.DataFrame]) -> BytesIO:
    """Return the Parquet file of pieces that are in order."""
    packed = BytesIO()
    rows = register_io_source(lambda *_: iter(pieces), schema=COLUMNS)
    rows.sink_parquet(packed, compression="zstd", statistics=True, row_group_size=ROW_GROUP, engine="streaming")
    return packed


def slices(path: Path) -> Iterator[pl.DataFrame]:
    """Yield the rows of a file in pieces."""
    rows = pl.scan_parquet(path)
    for start in range(0, rows.select(pl.len()).collect().item(), PIECE_ROWS):
        yield rows.slice(start, PIECE_ROWS).collect()


def merge(paths: list[Path], columns: Collection[str] = tuple(COLUMNS)) -> Iterator[pl.DataFrame]:
    """Yield the rows of sorted files in pieces, in the order of all, with columns that include those of ORDER."""
    if not paths:
        return
    rows, beginning = pl.scan_parquet(paths).select(columns), pl.lit(True)
    for last in _last_rows(paths):
        yield rows.filter(beginning, _is_through(*last)).sort(ORDER).collect()
        beginning = _is_after(*last)
    yield rows.filter(beginning).sort(ORDER).collect()


def _last_rows(paths: list[Path]) -> Iterator[tuple[str, int]]:
    """Return the ORDER of the last row of each piece but the last, by samples of the files."""
    sampled = pl.col(ORDER).gather_every(SAMPLED_EVERY)
    sample = pl.concat([pl.scan_parquet(path).select(sampled).collect(engine="streaming") for path in paths])
    step = PIECE_ROWS // SAMPLED_EVERY
    return sample.sort(ORDER).gather_every(step, offset=step).iter_rows()


def _is_through(user_id: str, seq: int) -> pl.Expr:
    return (pl.col("user_id") < user_id) | (pl.col("user_id") == user_id) & (pl.col("seq") <= seq)


def _is_after(user_id: str, seq: int) -> pl.Expr:
    return (pl.col("user_id") > user_id) | (pl.col("user_id") == user_id) & (pl.col("seq") > seq)

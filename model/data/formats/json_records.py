"""Tables as JSON: one record a line, or an array of records."""

from __future__ import annotations

import io
import json
import re
from collections import defaultdict
from pathlib import Path

import polars as pl

from model.data.interactions import DataError

JSON_SUFFIXES = (".jsonl.gz", ".jsonl", ".json.gz", ".json")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ARRAY = re.compile(rb"\s*\[")


def is_json(path: Path) -> bool:
    """Return whether the name of a file says that it is JSON."""
    return path.name.endswith(JSON_SUFFIXES)


def json_records(path: Path, raw: bytes) -> pl.DataFrame:
    """Return the fields of the records as columns, null for a record without the field.

    A column with both texts and numbers has texts.

    raises  DataError  which names the first line that is no record
    """
    raw = raw.removeprefix(BYTE_ORDER_MARK)
    if not raw.strip():
        raise DataError(f"{path} is empty; it needs at least one record")
    try:
        if ARRAY.match(raw):
            return pl.read_json(io.BytesIO(raw), infer_schema_length=None)
        return pl.read_ndjson(io.BytesIO(raw), infer_schema_length=None)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as exc:
        raise _first_problem(path, raw, str(exc)) from exc


def _first_problem(path: Path, raw: bytes, otherwise: str) -> DataError:
    """Read the text record by record to name the first problem."""
    kinds = defaultdict[str, set[type]](set)
    is_array = bool(ARRAY.match(raw))
    try:
        records = json.loads(raw) if is_array else map(_record, raw.splitlines())
        for number, record in enumerate(records, start=1):
            if not isinstance(record, dict):
                place = f"row {number}" if is_array else f"line {number}"
                return DataError(f"{path}, {place}: not a JSON record; write one a line, or an array of them")
            for field, value in record.items():
                kinds[field].add(type(value))
    except ValueError as exc:
        return DataError(f"{path} is not JSON: {exc}")
    if mixed := next((field for field, found in kinds.items() if {list, dict} <= found), None):
        return DataError(f"{path}: the field {mixed!r} has both lists and records; write one kind, or leave it out")
    return DataError(f"{path} cannot be read: {otherwise[:200]}")


def _record(line: bytes) -> object:
    """Return the record of a line, an empty one for an empty line, and None for what is not JSON."""
    try:
        return json.loads(line or b"{}")
    except ValueError:
        return None

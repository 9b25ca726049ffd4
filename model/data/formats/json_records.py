"""Tables as JSON: one record a line, or an array of records."""

from __future__ import annotations

import io
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import polars as pl

from model.data.interactions import DataError

JSON_SUFFIXES = (".jsonl.gz", ".jsonl", ".json.gz", ".json")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ARRAY = re.compile(rb"\s*\[")
BOOLEAN = re.compile(rb"[\[:,]\s*(true|false)\b")
JSON_TEXT = r"(?s)^(\[.*\]|\{.*\})$"
LISTS, RECORDS, BOOLEANS, NUMBERS, TEXTS = "lists", "records", "booleans", "numbers", "texts"
KINDS: Mapping[type, str] = {list: LISTS, dict: RECORDS, bool: BOOLEANS, int: NUMBERS, float: NUMBERS, str: TEXTS}


def is_json(path: Path) -> bool:
    """Return whether the name of a file says that it is JSON."""
    return path.name.endswith(JSON_SUFFIXES)


def json_records(path: Path, raw: bytes) -> pl.DataFrame:
    """Return the fields of the records as columns, null for a record without the field.

    A column with both texts and numbers has texts.

    raises  DataError  which names the first line that is no record, or a field of several kinds
    """
    raw = raw.removeprefix(BYTE_ORDER_MARK)
    if not raw.strip():
        raise DataError(f"{path} is empty; it needs at least one record")
    is_array = ARRAY.match(raw) is not None
    try:
        if is_array:
            frame = pl.read_json(io.BytesIO(raw), infer_schema_length=None)
        else:
            frame = pl.read_ndjson(io.BytesIO(raw), infer_schema_length=None)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as exc:
        raise _first_problem(path, raw) or DataError(f"{path} cannot be read: {str(exc)[:200]}") from exc
    may_hide_booleans = is_array and any(map(_has_numbers, frame.dtypes)) and BOOLEAN.search(raw) is not None
    if (may_hide_booleans or any(map(_may_hide_json, frame))) and (problem := _first_problem(path, raw)):
        raise problem
    return frame


def _has_numbers(dtype: pl.DataType | pl.datatypes.DataTypeClass) -> bool:
    """Return whether a column of that type has numbers; only in an array, polars reads booleans as numbers."""
    if isinstance(dtype, pl.Struct):
        return any(map(_has_numbers, dtype.to_schema().values()))
    return _has_numbers(dtype.inner) if isinstance(dtype, pl.List) else dtype.is_numeric()


def _may_hide_json(column: pl.Series) -> bool:
    """Return whether texts of a column, or of its records, may be lists or records, which polars writes so."""
    if isinstance(column.dtype, pl.Struct):
        return any(map(_may_hide_json, column.struct.unnest()))
    return column.dtype == pl.String and bool(column.str.contains(JSON_TEXT).any())


def _first_problem(path: Path, raw: bytes) -> DataError | None:
    """Read the text record by record, and return the first problem, if there is one."""
    kinds = defaultdict[str, set[str]](set)
    unit = "row" if ARRAY.match(raw) else "line"
    try:
        for number, record in enumerate(_records(raw), start=1):
            if not isinstance(record, dict):
                return DataError(f"{path}, {unit} {number}: not a JSON record; write one a line, or an array of them")
            _note_kinds(kinds, record)
    except UnicodeDecodeError:
        return DataError(f"{path} is not UTF-8 text; save it as UTF-8")
    except ValueError as exc:
        return DataError(f"{path} is not JSON: {exc}")
    for field, found in kinds.items():
        if (found & {LISTS, RECORDS} and len(found) > 1) or found == {BOOLEANS, NUMBERS}:
            named = " and ".join(sorted(found))
            return DataError(f"{path}: the field {field!r} has both {named}; write one kind, or leave it out")
    return None


def _records(raw: bytes) -> Iterator[object]:
    """Yield the records, an empty one for an empty line, and None for a line that is not JSON; raises ValueError."""
    text = raw.decode()
    if ARRAY.match(raw):
        yield from json.loads(text, parse_constant=_refuse)
        return
    for line in text.split("\n"):
        try:
            yield json.loads(line if line.strip() else "{}", parse_constant=_refuse)
        except json.JSONDecodeError:
            yield None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"it has {constant}; write null")


def _note_kinds(kinds: Mapping[str, set[str]], record: Mapping[str, Any], within: str = "") -> None:
    """Note the kinds of a record's fields, of those of its records, named a.b, and of what lists have, named a[]."""
    for field, value in record.items():
        _note_kind(kinds, within + field, value)


def _note_kind(kinds: Mapping[str, set[str]], field: str, value: Any) -> None:
    if value is not None:
        kinds[field].add(KINDS[type(value)])
    if isinstance(value, dict):
        _note_kinds(kinds, value, f"{field}.")
    elif isinstance(value, list):
        for element in value:
            _note_kind(kinds, f"{field}[]", element)

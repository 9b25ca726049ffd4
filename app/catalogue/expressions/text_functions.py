"""Text functions of expressions, applied once to each distinct text of a column instead of to every row."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from math import prod
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from app.catalogue.expressions.columns import TextColumn
from app.catalogue.expressions.environment import InvalidExpression
from storage.records import EPOCH

MAX_TEXTS = 100_000  # distinct texts that a function may search, a few milliseconds of work
FEW_TEXTS = 1_000  # up to here, Python finds texts faster than Polars starts
MAX_PATTERN = 300  # characters times repetitions; compiling each may take a tenth of a millisecond
# words and their alternatives, between which are few gaps: a search has few states, whatever the pattern's length
QUICK_PATTERN, MOST_GAPS, QUICK_SIZE = re.compile(r"\^?[\w \-&'()|]*\$?"), 2, 4
IN_BRACES, NUMBER = re.compile(r"\{[^}]*"), re.compile(r"[0-9]+")
MICROSECONDS: Mapping[str, float] = {"h": 3.6e9, "m": 6e7, "s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}
DURATION = re.compile(r"-?(\d+(\.\d*)?|\.\d+)(h|ms|m|s|us|ns)((\d+(\.\d*)?|\.\d+)(h|ms|m|s|us|ns))*")
PART = re.compile(r"(\d+\.?\d*|\.\d+)(h|ms|m|s|us|ns)")

FUNCTIONS: Mapping[str, Callable[[pl.Series, str], pl.Series]] = {
    "startsWith": lambda texts, wanted: texts.str.starts_with(wanted),
    "endsWith": lambda texts, wanted: texts.str.ends_with(wanted),
    "contains": lambda texts, wanted: texts.str.contains(wanted, literal=True),
    "matches": lambda texts, wanted: texts.str.contains(wanted),
}
OF_ONE_TEXT: Mapping[str, Callable[[str, str], bool]] = {
    "startsWith": str.startswith,
    "endsWith": str.endswith,
    "contains": str.__contains__,
}


def matched(position: int, function: str, column: TextColumn, wanted: str) -> NDArray[np.bool_]:
    """Return for each distinct text of the column whether the function is true for it, and False for no text."""
    return _with_no_text(_matched(position, function, _searchable(position, column), wanted))


def matches(position: int, function: str, text: str, wanted: str) -> bool:
    """Return whether the function is true for the text."""
    return bool(_matched(position, function, pl.Series([text]), wanted)[0])


def size_in_bytes(position: int, texts: TextColumn | str) -> int:
    """Return the size of a text, or of the distinct texts of a column, in UTF-8."""
    if isinstance(texts, str):
        return len(texts.encode())
    return int(_searchable(position, texts).str.len_bytes().sum())


def pattern_size(position: int, pattern: str) -> int:
    """Return the characters of a regular expression times its repetitions, or QUICK_SIZE if their number is irrelevant.

    raises  InvalidExpression  for too many
    """
    repeats = prod(max(map(int, NUMBER.findall(part)), default=1) or 1 for part in IN_BRACES.findall(pattern))
    size = len(pattern) * repeats
    if size > MAX_PATTERN:
        reason = f"a regular expression may have at most {MAX_PATTERN} characters, counting {{n}} repetitions"
        raise InvalidExpression(position, reason)
    words = pattern.removeprefix("(?i)")
    gaps = words.count("?") + words.count(".*")
    is_quick = gaps <= MOST_GAPS and QUICK_PATTERN.fullmatch(words.replace(".*", "").replace("?", ""))
    return min(size, QUICK_SIZE) if is_quick else size


def compared(position: int, compare: Callable[[Any, Any], Any], column: TextColumn, text: str) -> NDArray[np.bool_]:
    """Return the result of comparing each distinct text of the column by code points, and False for no text."""
    return _with_no_text(compare(_searchable(position, column), text).to_numpy())


def microseconds(position: int, function: str, text: str) -> int:
    """Return the value of ``timestamp`` (RFC 3339) or ``duration`` (as ``1h30m``)."""
    if function == "timestamp":
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            moment = None
        if moment is None or moment.tzinfo is None:
            raise InvalidExpression(position, 'write a time as "2026-01-31T12:00:00Z"')
        return (moment - EPOCH) // timedelta(microseconds=1)
    if not DURATION.fullmatch(text):
        raise InvalidExpression(position, 'write a duration as "24h" or "1h30m"')
    size = sum(float(number) * MICROSECONDS[unit] for number, unit in PART.findall(text))
    return round(-size if text.startswith("-") else size)


def _matched(position: int, function: str, texts: pl.Series, wanted: str) -> NDArray[np.bool_]:
    if function != "matches" and len(texts) <= FEW_TEXTS:
        is_true = OF_ONE_TEXT[function]
        return np.array([is_true(text, wanted) for text in texts.to_list()], np.bool_)
    try:
        return FUNCTIONS[function](texts, wanted).to_numpy()
    except pl.exceptions.ComputeError as exc:
        raise InvalidExpression(position, f"this is not a valid regular expression: {exc}") from None


def _searchable(position: int, column: TextColumn) -> pl.Series:
    if len(column.texts) > MAX_TEXTS:
        reason = f"this property has more than {MAX_TEXTS:,} different texts, so only == and in work on it"
        raise InvalidExpression(position, reason)
    return column.texts.series


def _with_no_text(found: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return np.append(found, [False])

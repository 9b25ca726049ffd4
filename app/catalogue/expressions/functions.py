"""The functions and operators of expressions, each applied to all rows at once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from app.catalogue.expressions import text_functions
from app.catalogue.expressions.columns import NO_TEXT, Column, TextColumn
from app.catalogue.expressions.comparisons import can_compare, rows_among, rows_compared
from app.catalogue.expressions.environment import DECIMAL_POINT, KNOWN, InvalidExpression
from app.catalogue.expressions.set_columns import SetColumn
from app.catalogue.expressions.values import MISSING, Condition, Numbers, Rows, Truth, Value

MAX_OPERATIONS = 64  # on columns; each takes up to a millisecond for a million items
TOO_MANY = f"an expression may take at most {MAX_OPERATIONS} operations; compare fewer properties, or shorten its lists"
INT64 = range(-(2**63), 2**63)
NUMBERS_PER_OPERATION = 4  # comparisons with a number that count as one operation
STEPS_PER_OPERATION = 2_000_000  # bytes of texts times a pattern's characters; slow patterns take 5 ns for each
PATTERN_PER_OPERATION = 8  # characters of a pattern; the slowest take a quarter of a millisecond each to compile
MATCHES_PER_OPERATION = 8  # of one text
SIZE_PER_OPERATION = 4_096  # characters and elements of texts and lists that are the same for all rows
DURATIONS = {"duration_to_hours": 3_600_000_000, "duration_to_minutes": 60_000_000, "duration_to_seconds": 1_000_000}
TEXT_FUNCTIONS = frozenset({"startsWith", "endsWith", "contains", "matches"})
COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "_==_": operator.eq,
    "_!=_": operator.ne,
    "_<_": operator.lt,
    "_<=_": operator.le,
    "_>_": operator.gt,
    "_>=_": operator.ge,
}
SWAPPED = {"_<_": "_>_", "_<=_": "_>=_", "_>_": "_<_", "_>=_": "_<=_", "_==_": "_==_", "_!=_": "_!=_"}
ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    "_+_": operator.add,
    "_-_": operator.sub,
    "_*_": operator.mul,
    "_/_": operator.truediv,
}


class Functions:
    """Calls functions, and counts the operations on rows."""

    def __init__(self, rows: Rows, operations: Operations) -> None:
        self._rows = rows
        self._operations = operations
        self._sizes: dict[Column, Numbers] = {}  # of columns, each computed once
        self._patterns: set[str] = set()  # compiled before

    def call(self, position: int, function: str, args: Sequence[Value]) -> Value:
        """Return the value of a function; raise InvalidExpression if rows or these arguments are unsupported."""
        if function == KNOWN:
            return self._is_known(args[0])
        if MISSING in args:
            return MISSING
        is_of_rows = any(isinstance(arg, Truth | Numbers | Column) for arg in args)
        if is_of_rows:
            self._operations.count(position)
        elif size := sum(len(arg) for arg in args if isinstance(arg, str | tuple)):
            self._operations.count(position, size / SIZE_PER_OPERATION)
        try:
            value = self._called(position, function, args)
        except OverflowError:
            value = INT64.stop
        if isinstance(value, int) and value not in INT64:
            raise InvalidExpression(position, "this number is too large")
        return value

    def _called(self, position: int, function: str, args: Sequence[Any]) -> Value:
        if function in COMPARISONS:
            return self._compared(position, function, *args)
        if function == "@in":
            return self._contained(position, *args)
        if function == "!_":
            (condition,) = args
            return Truth(condition.false, condition.true) if isinstance(condition, Truth) else not condition
        if function in TEXT_FUNCTIONS:
            return self._matched(position, function, *args)
        if function == "size":
            return self._size(*args)
        if function in ARITHMETIC or function == "-_":
            return self._computed(position, function, args)
        if function == "double" and not isinstance(args[0], str | TextColumn):
            return self._as_float(args[0])
        if function in DURATIONS:
            return self._in_units(args[0], DURATIONS[function])
        if function in ("timestamp", "duration") and isinstance(args[0], str):
            return text_functions.microseconds(position, function, args[0])
        raise InvalidExpression(position, f"{function} cannot be used here")

    def _as_float(self, value: Any) -> Value:
        return Numbers(value.values.astype(np.float64), value.known) if isinstance(value, Numbers) else float(value)

    def _in_units(self, duration: Numbers | int, unit: int) -> Value:
        """Return the whole units in a duration, or in each row's, rounded towards zero."""
        if isinstance(duration, Numbers):
            return Numbers(
                duration.values // unit + ((duration.values < 0) & (duration.values % unit > 0)), duration.known
            )
        return duration // unit if duration >= 0 else -(-duration // unit)

    def _is_known(self, value: Value) -> Condition:
        if isinstance(value, Truth):
            known = value.true | value.false
        elif isinstance(value, Numbers | Column):
            known = value.known
        else:
            return value is not MISSING
        return Truth(known, ~known)

    def _compared(self, position: int, function: str, one: Value, other: Value) -> Condition:
        compare = COMPARISONS[function]
        match one, other:
            case (Numbers(), _) | (_, Numbers()):
                values, known = self._rows.spread(one)
                other_values, other_known = self._rows.spread(other)
                if can_compare(values, other_values):
                    return self._rows.truth_where(rows_compared(function, values, other_values), known)
                if can_compare(other_values, values):
                    return self._rows.truth_where(rows_compared(SWAPPED[function], other_values, values), other_known)
                return self._rows.truth_where(compare(values, other_values), known & other_known)
            case (TextColumn(), str()):
                return self._compared_text(position, function, one, other)
            case (str(), TextColumn()):
                return self._compared_text(position, SWAPPED[function], other, one)
            case (Truth(), _) | (_, Truth()) if function in ("_==_", "_!=_"):
                left, right = self._rows.truth(one), self._rows.truth(other)
                same = Truth(
                    left.true & right.true | left.false & right.false, left.true & right.false | left.false & right.true
                )
                return same if function == "_==_" else Truth(same.false, same.true)
            case (TextColumn(), TextColumn()) if one is other:
                return self._rows.truth_where(np.full(self._rows.count, compare(0, 0)), one.known)
            case (Truth() | Column(), _) | (_, Truth() | Column()):
                raise InvalidExpression(position, "this compares two properties of items that cannot be compared")
        return bool(compare(one, other))

    def _compared_text(self, position: int, function: str, column: TextColumn, text: str) -> Truth:
        if function not in ("_==_", "_!=_"):
            wanted = text_functions.compared(position, COMPARISONS[function], column, text)
            return self._rows.truth_where(column.rows_with(wanted), column.known)
        number = column.texts.number(text)
        if number is None:
            number = NO_TEXT  # matches no known row
        return self._rows.truth_where(rows_compared(function, column.numbers, number), column.known)

    def _contained(self, position: int, one: Value, values: Value) -> Condition:
        match one, values:
            case (str(), SetColumn()):
                return self._rows.truth_where(values.rows_with(one), values.known)
            case (TextColumn(), tuple()):
                numbers = [number for text in values if (number := one.texts.number(text)) is not None]
                is_wanted = np.zeros(len(one.texts) + 1, np.bool_)
                is_wanted[numbers] = True
                return self._rows.truth_where(one.rows_with(is_wanted), one.known)
            case (Numbers(), tuple()):
                self._operations.count(position, len(values) // NUMBERS_PER_OPERATION)
                return self._rows.truth_where(rows_among(one.values, values), one.known)
            case (Truth() | Column() | Numbers(), _) | (_, Column()):
                raise InvalidExpression(position, "a property of items cannot be looked for in another property")
        return one in values  # type: ignore[operator]

    def _matched(self, position: int, function: str, one: Value, other: str) -> Condition:
        if not isinstance(other, str):
            raise InvalidExpression(position, f"{function} cannot look for a property of items, only for a fixed text")
        if function == "matches":
            self._count_pattern(position, one, other)
        if isinstance(one, TextColumn):
            return self._rows.truth_where(
                one.rows_with(text_functions.matched(position, function, one, other)), one.known
            )
        return text_functions.matches(position, function, one, other)  # type: ignore[arg-type]

    def _count_pattern(self, position: int, one: Value, pattern: str) -> None:
        size = text_functions.size_in_bytes(position, one)  # type: ignore[arg-type]
        steps = text_functions.pattern_size(position, pattern)
        reason = f"the regular expressions are too long for {size:,} bytes of texts; shorten them, or use contains"
        if pattern not in self._patterns:
            self._patterns.add(pattern)
            self._operations.count(position, steps / PATTERN_PER_OPERATION, reason)
        self._operations.count(position, 1 / MATCHES_PER_OPERATION + size * steps / STEPS_PER_OPERATION, reason)

    def _size(self, value: Value) -> Value:
        if not isinstance(value, SetColumn | TextColumn):
            return len(value)  # type: ignore[arg-type]
        if value not in self._sizes:
            self._sizes[value] = Numbers(value.sizes, value.known)
        return self._sizes[value]

    def _computed(self, position: int, function: str, args: Sequence[Any]) -> Value:
        if any(isinstance(arg, TextColumn | SetColumn) for arg in args):
            raise InvalidExpression(position, "texts and sets of items can be compared, but not joined")
        if function == "-_":
            (value,) = args
            return Numbers(-value.values, value.known) if isinstance(value, Numbers) else -value
        one, other = args
        if not any(isinstance(arg, Numbers) for arg in args):
            return self._computed_once(position, function, one, other)
        values, known = self._rows.spread(one)
        other_values, other_known = self._rows.spread(other)
        if function == "_/_" and np.result_type(values, other_values).kind != "f":
            raise InvalidExpression(position, "whole numbers cannot be divided; write double(x) / 2.0")
        with np.errstate(all="ignore"):
            return Numbers(ARITHMETIC[function](values, other_values), known & other_known)

    def _computed_once(self, position: int, function: str, one: Any, other: Any) -> Value:
        if function == "_/_" and isinstance(one, int):
            raise InvalidExpression(position, f"whole numbers cannot be divided; {DECIMAL_POINT}")
        with np.errstate(all="ignore"):
            if isinstance(one, float):
                return float(ARITHMETIC[function](np.float64(one), other))
        return ARITHMETIC[function](one, other)  # type: ignore[no-any-return]


class Operations:
    """Counts operations on columns, and rejects expressions that need too many."""

    def __init__(self) -> None:
        self._number = 0.0

    def count(self, position: int, more: float = 1, reason: str = TOO_MANY) -> None:
        """Count this many more operations, or a part of one; raise InvalidExpression beyond the bound."""
        self._number += more
        if self._number >= MAX_OPERATIONS + 1:
            raise InvalidExpression(position, reason)

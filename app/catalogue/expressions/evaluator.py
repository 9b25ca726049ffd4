"""Evaluates a checked expression for all items at once, by operations on whole columns.

A part of an expression either has one value for all items, as a parameter has, or one for each row. As in CEL, an
operation on a missing value is an error, and ``&&`` and ``||`` need only the side that decides. If an expression is an
error for an item, a filter excludes the item, and a boost adds nothing to its score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numba
import numpy as np
from numpy.typing import NDArray

from app.catalogue.expressions.columns import BooleanColumn, Column, NumberColumn, TextColumn
from app.catalogue.expressions.comparisons import rows_compared
from app.catalogue.expressions.environment import InvalidExpression
from app.catalogue.expressions.functions import Functions, Operations
from app.catalogue.expressions.labels import rows_of_numbers, sets_with_any
from app.catalogue.expressions.set_columns import SetColumn
from app.catalogue.expressions.syntax_tree import Call, Constant, Elements, Name, Node, Quantifier, Unsupported
from app.catalogue.expressions.values import MISSING, Condition, Numbers, Rows, Scalar, Truth, Value
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.diversity import ItemLabels


class Evaluation:
    """Evaluates expressions with the columns of items and with scalars.

    columns  by name, such as ``item.price``; a property without values has no column
    scalars  by name, such as ``params.max_price`` and ``now``; missing names have no value
    rows     the number of items
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        scalars: Mapping[str, Scalar],
        rows: int,
        operations: Operations | None = None,
    ) -> None:
        self._columns = columns
        self._scalars = scalars
        self._rows = Rows(rows)
        self._operations = operations or Operations()
        self._functions = Functions(self._rows, self._operations)

    def rows_where(self, node: Node) -> Bitmap:
        """Return the rows for which a condition is true.

        raises  InvalidExpression  when an operation is unsupported on columns, or too many are needed
        """
        return self._rows.truth(self._value(node)).true

    def outcomes(self, node: Node) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return for which rows a condition is true, and for which it is false: (N,) each; raises as `rows_where`."""
        truth = self._rows.truth(self._value(node))
        return bitmap.to_mask(truth.true, self._rows.count), bitmap.to_mask(truth.false, self._rows.count)

    def numbers(self, node: Node) -> NDArray[np.float64]:
        """Return a number for each row (N,), NaN if it is an error; raises as `rows_where`."""
        value = self._value(node)
        if isinstance(value, Numbers):
            return np.where(bitmap.to_mask(value.known, self._rows.count), value.values.astype(np.float64), np.nan)
        return np.full(self._rows.count, np.nan if value is MISSING else value, np.float64)

    def gains(self, node: Node, most: float) -> NDArray[np.float32]:
        """Return a number for each row (N,), between -most and most, and 0 if it is an error."""
        values, known = self._rows.spread(self._value(node))
        gains = np.zeros(self._rows.count, np.float32)
        if isinstance(values, np.ndarray):
            _limit(values.astype(np.float64, copy=False), known, most, gains)
        elif known is self._rows.all and values == values:  # no NaN
            gains[:] = min(max(values, -most), most)
        return gains

    def _value(self, node: Node) -> Value:
        match node:
            case Constant(_, value) if value is not None and not isinstance(value, bytes):
                return value
            case Name(_, name):
                return self._named(name)
            case Elements(_, elements):
                return self._list(elements)
            case Quantifier():
                return self._quantified(node)
            case Call(_, "_&&_" | "_||_" as function, (left, right)):
                return self._joined(function == "_||_", left, right)
            case Call(_, "_?_:_", (condition, then, otherwise)):
                return self._chosen(node.position, self.condition(condition), then, otherwise)
            case Call(_, function, args):
                return self._functions.call(node.position, function, [self._value(arg) for arg in args])
            case Unsupported(position, what):
                raise InvalidExpression(position, f"{what} cannot be used here")
        raise InvalidExpression(node.position, "null and bytes cannot be used here")

    def _named(self, name: str) -> Value:
        if name in self._scalars:
            return self._scalars[name]
        match self._columns.get(name):
            case None:
                return MISSING
            case BooleanColumn() as column:
                return Truth(column.true & column.known, column.known & ~column.true)
            case NumberColumn() as column:
                return Numbers(column.values, column.known)
            case column:
                return column  # type: ignore[return-value]

    def _list(self, elements: Sequence[Node]) -> Value:
        values = [self._value(element) for element in elements]
        for element, value in zip(elements, values, strict=True):
            if isinstance(value, Truth | Numbers | Column):
                raise InvalidExpression(element.position, "a list has no properties of items")
        return MISSING if MISSING in values else values  # type: ignore[return-value]

    # ---- conditions

    def condition(self, node: Node) -> Condition:
        """Return the value of a condition."""
        return self._value(node)  # type: ignore[return-value]

    def _joined(self, decisive: bool, left: Node, right: Node) -> Condition:
        first = self.condition(left)
        return first if first is decisive else self._rows.join(decisive, first, self.condition(right))

    def _chosen(self, position: int, condition: Condition, then: Node, otherwise: Node) -> Value:
        if not isinstance(condition, Truth):
            return MISSING if condition is MISSING else self._value(then if condition else otherwise)
        one, other = self._value(then), self._value(otherwise)
        self._operations.count(position)
        if one is MISSING and other is MISSING:
            return MISSING
        if any(isinstance(value, str | list | TextColumn | SetColumn) for value in (one, other)):
            raise InvalidExpression(position, "a condition on items chooses between numbers and conditions only")
        if any(isinstance(value, bool | Truth) for value in (one, other)):
            yes, no = self._rows.truth(one), self._rows.truth(other)
            return Truth(
                condition.true & yes.true | condition.false & no.true,
                condition.true & yes.false | condition.false & no.false,
            )
        yes_values, yes_known = self._rows.spread(one)
        no_values, no_known = self._rows.spread(other)
        is_whole = np.result_type(yes_values, no_values).kind == "i"
        values = np.empty(self._rows.count, np.int64 if is_whole else np.float64)
        chosen, others = (
            np.atleast_1d(np.asarray(part, values.dtype)).view(np.uint64) for part in (yes_values, no_values)
        )
        _choose(condition.true, chosen, others, values.view(np.uint64))
        return Numbers(values, condition.true & yes_known | condition.false & no_known)

    def _quantified(self, node: Quantifier) -> Condition:
        elements = self._value(node.elements)
        if elements is MISSING:
            return MISSING
        if isinstance(elements, SetColumn):
            return self._quantified_sets(node, elements)
        result: Condition = node.needs_all
        for element in elements:  # type: ignore[union-attr]
            inner = Evaluation(
                self._columns, {**self._scalars, node.variable: element}, self._rows.count, self._operations
            )
            result = self._rows.join(not node.needs_all, result, inner.condition(node.predicate))
        return result

    def _quantified_sets(self, node: Quantifier, sets: SetColumn) -> Condition:
        """Evaluate the predicate once for each distinct text."""
        self._operations.count(node.position)
        texts = sets.labels
        column = TextColumn(np.arange(len(texts), dtype=np.int32), texts)
        inner = Evaluation({node.variable: column}, self._scalars, len(texts), self._operations)
        true, false = inner.outcomes(node.predicate)
        decisive, other = (false, true) if node.needs_all else (true, false)
        decided, others = sets.rows_with_any(decisive), sets.known & ~sets.rows_with_any(~other)
        return Truth(others, decided) if node.needs_all else Truth(decided, others)


def compile_loops() -> None:
    """Compile the loops, or load their compiled code, before the first request."""
    rows, bits = bitmap.empty(1), np.zeros(1, np.uint64)
    _choose(rows, bits, bits, bits)
    _limit(np.zeros(1), rows, 1.0, np.zeros(1, np.float32))
    for numbers in (np.zeros(1, np.int16), np.zeros(1, np.int32)):
        rows_of_numbers(np.zeros(1, np.bool_), numbers)
        rows_compared("_==_", numbers, 0)
    rows_compared("_<_", np.zeros(1, np.int64), 0)
    rows_compared("_<_", np.zeros(1), 0.0)
    sets_with_any(np.zeros(1, np.bool_), ItemLabels(np.zeros(0, np.int64), np.zeros(1, np.int64)))


@numba.njit(cache=True, nogil=True)
def _choose(chosen, values, others, result):  # type: ignore[no-untyped-def]
    """Choose the bits of each row without a branch, which would be mispredicted for half of them.

    values, others  (N,), or (1,) for the same value in each row
    """
    step, other_step = len(values) != 1, len(others) != 1
    for row in range(len(result)):
        mask = np.uint64(0) - (chosen[row // 64] >> np.uint64(row % 64) & np.uint64(1))
        result[row] = values[row * step] & mask | others[row * other_step] & ~mask


@numba.njit(cache=True, nogil=True)
def _limit(values, known, most, gains):  # type: ignore[no-untyped-def]
    for row in range(len(gains)):
        value = min(max(values[row], -most), most)
        is_number = (known[row // 64] >> np.uint64(row % 64) & np.uint64(1) != 0) & (values[row] == values[row])
        gains[row] = value if is_number else 0.0

"""Evaluates a checked expression for all items at once, by operations on whole columns.

A part of an expression either has one value for all items, as a parameter has, or one for each row. As in CEL, an
operation on a missing value is an error, and ``&&`` and ``||`` need only the side that decides. If an expression is an
error for an item, a filter excludes the item, and a boost adds nothing to its score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import numba
import numpy as np
from numpy.typing import NDArray

from app.catalogue.expressions.columns import BooleanColumn, Column, NumberColumn, TextColumn
from app.catalogue.expressions.comparisons import rows_among, rows_compared
from app.catalogue.expressions.environment import InvalidExpression
from app.catalogue.expressions.functions import Functions, Operations
from app.catalogue.expressions.labels import rows_of_numbers, sets_with_any
from app.catalogue.expressions.set_columns import SetColumn
from app.catalogue.expressions.syntax_tree import Call, Constant, Elements, Name, Node, Quantifier, names
from app.catalogue.expressions.values import MISSING, Condition, Numbers, Rows, Scalar, Truth, Value
from model.inference import bitmap
from model.inference.bitmap import Bitmap
from model.inference.diversity import ItemLabels

LABELS_PER_OPERATION = 25_000  # distinct labels of a property whose sets a quantifier looks through
PARTS_PER_OPERATION = 256  # parts of an expression evaluated for the elements of lists; each takes some microseconds
JOINS_PER_OPERATION = 16  # conditions on all rows that such a loop joins


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
        self.scalars = {name: tuple(one) if isinstance(one, list) else one for name, one in scalars.items()}
        self._rows = Rows(rows)
        self._operations = operations or Operations()
        self._functions = Functions(self._rows, self._operations)
        self.variables: frozenset[str] = frozenset()  # of the quantifiers over lists around the current part
        # of parts in quantifiers by identity: the names, and the values that the variables do not change
        self._names: dict[int, frozenset[str]] = {}
        self._values: dict[int, Value] = {}
        self._by_label: dict[tuple[SetColumn, str], Evaluation] = {}

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
        """Return the value of a part; in a loop, one that does not depend on its variables is evaluated once."""
        if not self.variables:
            return self._evaluated(node)
        self._operations.count(node.position, 1 / PARTS_PER_OPERATION)
        key = id(node)
        if key not in self._names:
            self._names[key] = names(node)
        if not self.variables.isdisjoint(self._names[key]):
            return self._evaluated(node)
        if key not in self._values:
            self._values[key] = self._evaluated(node)
        return self._values[key]

    def _evaluated(self, node: Node) -> Value:
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
        raise InvalidExpression(node.position, "null and bytes cannot be used here")

    def _named(self, name: str) -> Value:
        if name in self.scalars:
            return self.scalars[name]
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
                raise InvalidExpression(element.position, "a list cannot contain properties of items")
        return MISSING if MISSING in values else tuple(values)  # type: ignore[return-value]

    # ---- conditions

    def condition(self, node: Node) -> Condition:
        """Return the value of a condition."""
        return self._value(node)  # type: ignore[return-value]

    def _joined(self, decisive: bool, left: Node, right: Node) -> Condition:
        first = self.condition(left)
        return first if first is decisive else self.join(left.position, decisive, first, self.condition(right))

    def join(self, position: int, decisive: bool, first: Condition, second: Condition) -> Condition:
        """Return both conditions joined, as `Rows.join` does; in a loop, joining all rows is counted."""
        if self.variables and (isinstance(first, Truth) or isinstance(second, Truth)):
            self._operations.count(position, 1 / JOINS_PER_OPERATION)
        return self._rows.join(decisive, first, second)

    def _chosen(self, position: int, condition: Condition, then: Node, otherwise: Node) -> Value:
        if not isinstance(condition, Truth):
            return MISSING if condition is MISSING else self._value(then if condition else otherwise)
        one, other = self._value(then), self._value(otherwise)
        self._operations.count(position)
        if one is MISSING and other is MISSING:
            return MISSING
        if any(isinstance(value, str | tuple | TextColumn | SetColumn) for value in (one, other)):
            raise InvalidExpression(position, "a condition on items can choose only between numbers or conditions")
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
        decisive = not node.needs_all
        result: Condition = node.needs_all
        inner = self.inside({**self.scalars}, self.variables | {node.variable})
        for element in elements:  # type: ignore[union-attr]
            inner.scalars[node.variable] = element
            result = inner.join(node.position, decisive, result, inner.condition(node.predicate))
            if result is decisive:
                break
        return result

    def inside(self, scalars: dict[str, Scalar], variables: frozenset[str]) -> Evaluation:
        """Return an evaluation with other scalars that shares everything else."""
        inner = copy(self)
        inner.scalars, inner.variables = scalars, variables
        return inner

    def _quantified_sets(self, node: Quantifier, sets: SetColumn) -> Condition:
        """Evaluate the predicate once for each distinct text."""
        texts = sets.labels
        self._operations.count(node.position, 1 + len(texts) // LABELS_PER_OPERATION)
        key = sets, node.variable
        if key not in self._by_label:
            column = TextColumn(np.arange(len(texts), dtype=np.int32), texts)
            self._by_label[key] = Evaluation({node.variable: column}, {}, len(texts), self._operations)
        scalars = {name: value for name, value in self.scalars.items() if name != node.variable}
        inner = self._by_label[key].inside(scalars, self.variables - {node.variable})
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
    for values in (np.zeros(1), np.zeros(1, np.int64)):
        rows_among(values, [0])
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

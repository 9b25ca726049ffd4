"""Filters, boosts and objectives of requests: compiled once per text, evaluated once per text and values."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from numpy.typing import NDArray

from app.catalogue.expressions import objective, syntax_tree
from app.catalogue.expressions.columns import Column, NumberColumn, TextColumn
from app.catalogue.expressions.environment import Environment, InvalidExpression, ValueType
from app.catalogue.expressions.evaluator import Evaluation, compile_loops
from app.catalogue.expressions.labels import LabelSnapshot
from app.catalogue.expressions.set_columns import TextSetColumn
from app.catalogue.expressions.syntax_tree import Call, Node
from app.catalogue.expressions.values import Scalar
from app.catalogue.item_properties import ItemProperties
from app.schemas.fields import MAX_BOOST

ENVIRONMENTS, COMPILED = 16, 128  # cache sizes; a compiled expression takes up to some hundred kilobytes
RESULT_BYTES = 1 << 26  # for cached results
KEY_BYTES = 1 << 14  # for the key of a cached result
ITEM, CURRENT, USER, PARAMS, NOW = "item.", "current.", "user.", "params.", "now"

Result = Literal["boolean", "number"]
Selected = NDArray[Any]
"""The result: for a filter a bitmap of the items for which it is true, for a boost each item's score gain: (N,)."""


class Expression(NamedTuple):
    """An expression of a request, and the values of its names.

    values  by name, such as ``params.max_price``; missing names have no value
    types   the types of the values that are not item properties
    """

    text: str
    result: Result
    values: Mapping[str, Scalar]
    types: tuple[tuple[str, ValueType], ...]


class _Compiled(NamedTuple):
    node: Node
    of_items: tuple[str, ...]  # the names of the items' properties
    others: tuple[str, ...]


class ItemExpressions:
    """The expressions of requests for the items of one catalogue. Only one thread may call `evaluate`."""

    def __init__(self, properties: ItemProperties) -> None:
        self._properties = properties
        self._environment = lru_cache(ENVIRONMENTS)(self._build_environment)
        self._compiled: OrderedDict[Hashable, _Compiled] = OrderedDict()
        self._results = _Results(RESULT_BYTES)
        compile_loops()

    def find(self, expression: Expression) -> Selected | None:
        """Return the cached result, if any; do not change it."""
        compiled = self._compiled.get(self._text_key(expression))
        found: Selected | None = None if compiled is None else self._results.find(self._key(expression, compiled))
        return found

    def evaluate(self, expression: Expression) -> Selected:
        """Return the result; do not change it.

        raises  InvalidExpression
        """
        compiled = self._compile(expression)
        with self._properties.lock:
            columns = {name: self._properties.column(name.removeprefix(ITEM)) for name in compiled.of_items}
            key = self._key(expression, compiled)
            found: Selected | None = self._results.find(key)
            if found is None:
                known = {name: column for name, column in columns.items() if column is not None}
                found = self._evaluate(expression, compiled.node, known)
                self._results.keep(key, found)
        return found

    def names_without_value(self, expression: Expression) -> list[str]:
        """Return the names of the current item and the user that have no value; none before `evaluate` has run."""
        compiled = self._compiled.get(self._text_key(expression))
        names = () if compiled is None else compiled.others
        return [name for name in names if name.startswith((CURRENT, USER)) and name not in expression.values]

    def find_labels(self, name: str) -> LabelSnapshot | None:
        """Return the cached items by the labels of a text or set property, if any."""
        found: LabelSnapshot | None = self._results.find(self._labels_key(name))
        return found

    def labels(self, name: str) -> LabelSnapshot:
        """Return the items by the labels of a text or set property."""
        with self._properties.lock:
            column = self._properties.column(name)
            found = self.find_labels(name)
            if found is None:
                if not isinstance(column, TextColumn | TextSetColumn):  # no item ever had a value
                    column = TextColumn.empty(self._properties.rows)
                found = column.by_label()
                self._results.keep(self._labels_key(name), found)
        return found

    def find_value_gains(self, name: str, strength: float) -> Selected | None:
        """Return the cached score gains from a number property, if any; do not change them."""
        found: Selected | None = self._results.find((*self._values_key(name), strength))
        return found

    def value_gains(self, name: str, strength: float) -> Selected:
        """Return the score gains from a number property, as in `gains_of`; do not change them."""
        with self._properties.lock:
            column, key = self._properties.column(name), self._values_key(name)
            gains: Selected | None = self._results.find((*key, strength))
            if gains is not None:
                return gains
            values: Selected | None = self._results.find(key)
            if values is None:
                if not isinstance(column, NumberColumn):  # no item ever had a value
                    column = NumberColumn(self._properties.rows)
                values = objective.log_values(column)
                self._results.keep(key, values)
            gains = objective.gains_of(values, strength, MAX_BOOST)
            self._results.keep((*key, strength), gains)
        return gains

    def split(self, expression: Expression) -> list[Expression]:
        """Return the conditions that ``&&`` joins in a valid filter, in order; each is a valid filter by itself."""
        node = self._compile(expression).node
        if isinstance(node, Call) and node.function == "_&&_":
            sides = expression.text[: node.position], expression.text[node.position + len("&&") :]
            try:
                return [part for side in sides for part in self.split(expression._replace(text=side.strip()))]
            except InvalidExpression:
                pass  # the ``&&`` is inside parentheses
        return [expression]

    def check(self, expression: Expression) -> None:
        """Compile the expression, regardless of its values; raise InvalidExpression."""
        self._compile(expression)

    def _compile(self, expression: Expression) -> _Compiled:
        key = self._text_key(expression)
        compiled = self._compiled.get(key)
        if compiled is None:
            environment = self._environment(tuple(sorted(self._properties.types.items())), expression.types)
            node = environment.compile(expression.text, expression.result)
            names = sorted(syntax_tree.names(node))
            of_items = tuple(name for name in names if name.startswith(ITEM))
            compiled = _Compiled(node, of_items, tuple(name for name in names if not name.startswith(ITEM)))
            self._compiled[key] = compiled
            if len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def _evaluate(self, expression: Expression, node: Node, columns: Mapping[str, Column]) -> Selected:
        scalars = {**expression.values, NOW: _now_s() * 1_000_000}
        evaluation = Evaluation(columns, scalars, self._properties.rows)
        if expression.result == "boolean":
            return evaluation.rows_where(node).copy()
        return evaluation.gains(node, MAX_BOOST)

    def _text_key(self, expression: Expression) -> Hashable:
        return expression.text, expression.result, expression.types, self._properties.types_version

    def _key(self, expression: Expression, compiled: _Compiled) -> Hashable:
        values = [_now_s() if name == NOW else expression.values.get(name) for name in compiled.others]
        changes = [self._properties.changes(name.removeprefix(ITEM)) for name in compiled.of_items]
        return self._text_key(expression), tuple(values), tuple(changes)

    def _values_key(self, name: str) -> tuple[Hashable, ...]:
        return "values", name, self._properties.types_version, self._properties.changes(name)

    def _labels_key(self, name: str) -> Hashable:
        return name, self._properties.types_version, self._properties.changes(name)

    def _build_environment(
        self, properties: tuple[tuple[str, ValueType], ...], others: tuple[tuple[str, ValueType], ...]
    ) -> Environment:
        of_items = {f"{of}{name}": type_ for name, type_ in properties for of in (ITEM, CURRENT)}
        try:
            return Environment({**of_items, **dict(others)})
        except RuntimeError:
            raise InvalidExpression(0, "a parameter has a name that is not valid in expressions") from None


class _Results:
    """A cache of the newest results, in bounded memory."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._by_key: OrderedDict[Hashable, Any] = OrderedDict()

    def find(self, key: Hashable) -> Any:
        return self._by_key.get(key)

    def keep(self, key: Hashable, result: Selected | LabelSnapshot) -> None:
        self._drop(self._by_key.pop(key, None))
        self._by_key[key] = result
        self._bytes += result.nbytes + KEY_BYTES
        while self._bytes > self._max_bytes and len(self._by_key) > 1:
            self._drop(self._by_key.popitem(last=False)[1])

    def _drop(self, result: Selected | LabelSnapshot | None) -> None:
        self._bytes -= 0 if result is None else result.nbytes + KEY_BYTES


def _now_s() -> int:
    """Return the time in whole seconds, the resolution at which results are cached."""
    return int(time.time())

"""Random expressions and properties, and CEL's own evaluator for one item."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from cel_expr_python import cel
from hypothesis import strategies as st

from app.catalogue.expressions.environment import ValueType

TYPES: Mapping[str, ValueType] = {
    "item.price": "number",
    "item.margin": "number",
    "item.brand": "text",
    "item.categories": "set",
    "item.new": "boolean",
    "item.published_at": "time",
    "current.brand": "text",
    "params.max": "number",
    "params.brands": "set",
    "params.sizes": "numbers",
}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
TEXTS = ["", "a", "ab", "b", "a\n", "Über", "\uff21", "\U0001f375"]  # UTF-16 would sort the last two otherwise
NUMBERS = [0.0, -1.0, 1.0, 2.5, 1e300]
PATTERNS = ["", "^a.?$", "a\n?$", "(?s)^..$", "(?i)ÜB", "[^a]", "[[:alpha:]]{2}", r"\pL|^$", r"\x{FF21}", "b*?|a+"]

Item = Mapping[str, Any]


class Pair(NamedTuple):
    """An expression, and its equivalent for the oracle, which has no `known`."""

    ours: str
    oracle: str


def same(text: str) -> Pair:
    return Pair(text, text)


def joined(template: str, *parts: Pair) -> Pair:
    return Pair(template.format(*(part.ours for part in parts)), template.format(*(part.oracle for part in parts)))


def searched(text: Pair, pattern: str) -> Pair:
    return Pair(*(f"{part}.matches({quoted(pattern)})" for part in text))


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


times = st.sampled_from(
    [same(one) for one in ("item.published_at", "now", 'timestamp("2026-01-31T00:00:00Z")', '(now - duration("36h"))')]
)
ages = st.builds(
    joined,
    st.sampled_from([f"double(({{}} - {{}}).get{unit}())" for unit in ("Hours", "Minutes", "Seconds")]),
    times,
    times,
)
numbers = st.recursive(
    st.sampled_from([same(name) for name in ("item.price", "item.margin", "params.max", *map(repr, NUMBERS))]) | ages,
    lambda inner: (
        st.builds(joined, st.sampled_from(["({} + {})", "({} - {})", "({} * {})", "({} / {})"]), inner, inner)
        | st.builds(joined, st.just("(-{})"), inner)
        | st.builds(joined, st.just("({} > 0.5 ? {} : {})"), inner, inner, inner)
    ),
    max_leaves=4,
)
texts = st.sampled_from([same(name) for name in ("item.brand", "current.brand", *map(quoted, TEXTS))])
scalar_texts = st.sampled_from([same(name) for name in ("current.brand", *map(quoted, TEXTS))])
elements = st.sampled_from(
    [same(one) for one in ('"a" == x', 'x.startsWith("a")', "x == current.brand", "x in params.brands", 'x < "b"')]
)
compare = st.sampled_from(["({} == {})", "({} != {})", "({} < {})", "({} <= {})", "({} > {})", "({} >= {})"])
leaves = st.one_of(
    st.builds(joined, compare, numbers, numbers),
    st.builds(joined, compare, texts, scalar_texts),
    st.builds(joined, compare, scalar_texts, texts),
    st.builds(joined, compare, times, times),
    st.builds(joined, st.just('({} - {} < duration("24h"))'), times, times),
    st.builds(joined, st.just("({} in item.categories)"), scalar_texts),
    st.builds(joined, st.just("({} in params.brands)"), texts),
    st.builds(joined, st.just("({} in [{}, {}])"), texts, scalar_texts, scalar_texts),
    st.builds(joined, st.just("({} in params.sizes)"), numbers),
    st.builds(joined, st.just("({} in params.brands + [{}])"), texts, scalar_texts),
    st.builds(joined, st.sampled_from(["(params.brands == [{}])", "([{}] + params.brands != [])"]), scalar_texts),
    st.builds(
        joined,
        st.sampled_from(
            [
                "params.sizes.exists(x, {} > x)",
                "[1.0, 2.5].all(x, {} != x)",
                "[1, 2.5].all(x, {} != x)",
                "({} in [1.0, 2])",
                "({} in [params.max, 2])",
            ]
        ),
        numbers,
    ),
    st.builds(
        joined, st.just("params.brands.exists(x, params.brands.all(y, x <= y || {} == y) && {} != x)"), texts, texts
    ),
    st.builds(
        joined, st.sampled_from(["{}.startsWith({})", "{}.endsWith({})", "{}.contains({})"]), texts, scalar_texts
    ),
    st.builds(searched, texts, st.sampled_from(PATTERNS)),
    st.builds(joined, st.just("(size(item.categories) {} 1)").map(lambda t: t.replace("{} 1", "> 1"))),
    st.builds(joined, st.sampled_from(["(size({}) > 1)", "(size({}) in [1, 2.5])"]), texts),
    st.builds(
        joined,
        st.sampled_from([f"{s}.{m}(x, {{}})" for s in ("item.categories", "params.brands") for m in ("exists", "all")]),
        elements,
    ),
    st.sampled_from([same("item.new"), same("true"), same("false")]),
    st.sampled_from([name for name in TYPES if name.startswith("item.")]).map(
        lambda name: Pair(f"known({name})", f"known_{name.partition('.')[2]}")
    ),
)
conditions = st.recursive(
    leaves,
    lambda inner: (
        st.builds(joined, st.sampled_from(["({} && {})", "({} || {})", "({} == {})"]), inner, inner)
        | st.builds(joined, st.just("(!{})"), inner)
        | st.builds(joined, st.just("({} ? {} : {})"), inner, inner, inner)
    ),
    max_leaves=8,
)


def optional(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


moments = st.builds(
    lambda hours, rest: NOW + timedelta(hours=hours, seconds=rest),
    st.integers(-100, 100),
    st.sampled_from([0.0, 0.5, 61.0]),
)
items = st.lists(
    st.fixed_dictionaries(
        {
            "item.price": optional(st.sampled_from(NUMBERS)),
            "item.margin": optional(st.sampled_from(NUMBERS)),
            "item.brand": optional(st.sampled_from(TEXTS)),
            "item.categories": optional(st.lists(st.sampled_from(TEXTS), unique=True, max_size=4)),
            "item.new": optional(st.booleans()),
            "item.published_at": optional(moments),
        }
    ),
    min_size=1,
    max_size=150,
)
scalars = st.fixed_dictionaries(
    {
        "current.brand": optional(st.sampled_from(TEXTS)),
        "params.max": optional(st.sampled_from(NUMBERS)),
        "params.brands": optional(st.lists(st.sampled_from(TEXTS), max_size=3)),
        "params.sizes": optional(st.lists(st.sampled_from(NUMBERS), max_size=3)),
    }
)

ORACLE_TYPES = {
    "text": cel.Type.STRING,
    "number": cel.Type.DOUBLE,
    "boolean": cel.Type.BOOL,
    "time": cel.Type.TIMESTAMP,
    "set": cel.Type.List(cel.Type.STRING),
    "numbers": cel.Type.List(cel.Type.DOUBLE),
}
ORACLE = cel.NewEnv(
    variables={name: ORACLE_TYPES[type_] for name, type_ in TYPES.items()}
    | {"now": cel.Type.TIMESTAMP}
    | {f"known_{name.partition('.')[2]}": cel.Type.BOOL for name in TYPES if name.startswith("item.")}
)


def microseconds(moment: datetime) -> int:
    return round((moment - EPOCH).total_seconds() * 1e6)


def evaluate_one(expression: cel.Expression, item: Item, shared: Mapping[str, Any]) -> Any:
    """Value of the expression for one item by CEL's evaluator; None for an error."""
    known = {f"known_{name.partition('.')[2]}": value is not None for name, value in item.items()}
    data = {name: value for name, value in {**item, **shared}.items() if value is not None}
    result = expression.eval(data={**data, **known, "now": NOW})
    return None if result.type() == cel.Type.ERROR else result.value()

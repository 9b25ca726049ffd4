"""Expressions over columns, against CEL's own evaluator item by item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from app.catalogue.expressions import text_functions
from app.catalogue.expressions.columns import BooleanColumn, NumberColumn, StoredColumn, TextColumn
from app.catalogue.expressions.environment import Environment, InvalidExpression
from app.catalogue.expressions.evaluator import Evaluation
from app.catalogue.expressions.set_columns import TextSetColumn
from model.inference import bitmap
from tests.app.catalogue.expressions.oracle import (
    NOW,
    ORACLE,
    TYPES,
    Item,
    Pair,
    conditions,
    evaluate_one,
    items,
    microseconds,
    numbers,
    scalars,
)

ENVIRONMENT = Environment(TYPES)
PROPERTIES = [name for name in TYPES if name.startswith("item.")]


def columns_of(found: Sequence[Item], before: Sequence[Item] = ()) -> Mapping[str, StoredColumn]:
    """Columns of items whose properties have been changed before."""
    columns: dict[str, StoredColumn] = {
        "item.price": NumberColumn(len(found)),
        "item.margin": NumberColumn(len(found)),
        "item.brand": TextColumn.empty(len(found)),
        "item.categories": TextSetColumn(len(found)),
        "item.new": BooleanColumn(len(found)),
        "item.published_at": NumberColumn(len(found), np.int64),
    }
    for items_then in (before[: len(found)], found):
        for name, column in columns.items():
            values = [one[name] for one in items_then]
            if name == "item.published_at":
                values = [None if one is None else microseconds(one) for one in values]
            column.set(np.arange(len(values)), values)
    return columns


def test_removing_a_number_does_not_disturb_a_concurrent_reader() -> None:
    column = NumberColumn(3)
    column.set(np.arange(3), [1.0, 2.0, 3.0])
    other = NumberColumn(2)
    other.set(np.arange(2), [None, 6.0])
    values = column.values
    column.set(np.arange(2), [None, 5.0])
    assert values.tolist() == [1.0, 5.0, 3.0]
    column.copy(other, np.arange(2), np.array([2, 0]))
    assert values.tolist() == [6.0, 5.0, 3.0]
    assert [column.value(row) for row in range(3)] == [6.0, 5.0, None]
    booleans = BooleanColumn(2)
    booleans.set(np.arange(2), [True, False])
    true = booleans.true
    booleans.set(np.arange(2), [None, True])
    assert bitmap.has(true, np.arange(2)).all()
    assert [booleans.value(row) for row in range(2)] == [None, True]


@given(conditions, items, items, scalars)
@settings(max_examples=400)
def test_conditions_equal_cel_item_by_item(
    expression: Pair, before: Sequence[Item], found: Sequence[Item], shared: Mapping[str, Any]
) -> None:
    node = ENVIRONMENT.compile(expression.ours, "boolean")
    given_scalars = {name: value for name, value in shared.items() if value is not None}
    evaluation = Evaluation(columns_of(found, before), {**given_scalars, "now": microseconds(NOW)}, len(found))
    rows = bitmap.to_mask(evaluation.rows_where(node), len(found))
    oracle = ORACLE.compile(expression.oracle)
    assert rows.tolist() == [evaluate_one(oracle, item, shared) is True for item in found]


@given(numbers, items, scalars)
@settings(max_examples=200)
def test_numbers_equal_cel_item_by_item(expression: Pair, found: Sequence[Item], shared: Mapping[str, Any]) -> None:
    node = ENVIRONMENT.compile(expression.ours, "number")
    given_scalars = {name: value for name, value in shared.items() if value is not None}
    evaluation = Evaluation(columns_of(found), {**given_scalars, "now": microseconds(NOW)}, len(found))
    values = evaluation.numbers(node)
    limited = np.clip(np.nan_to_num(values, nan=0.0, posinf=2.0, neginf=-2.0), -2.0, 2.0).astype(np.float32)
    assert np.array_equal(evaluation.gains(node, 2.0), limited)
    oracle = ORACLE.compile(expression.oracle)
    wanted = [evaluate_one(oracle, item, shared) for item in found]
    assert np.array_equal(values, [np.nan if one is None else one for one in wanted], equal_nan=True)


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("item.prize < 3.0", 4, "there is no item.prize; did you mean item.price? There are item.brand, item.cat"),
        ("item.xyz < 3.0", 4, f"there is no item.xyz; there are {', '.join(sorted(PROPERTIES))}"),
        ("item.xyz < 3.0", 4, "; to add it, import items that have it"),
        ("prize < 3.0", 0, "there is no prize; did you mean item.price? There are current.brand, item.brand"),
        ("xyz < 3.0", 0, f"there is no xyz; there are {', '.join(sorted(TYPES))}"),
        ("item.price < 50", 11, "write numbers with a decimal point, such as 50.0"),
        ("item.price < 50,0", 15, "write numbers with a decimal point, such as 50.0"),
        ("item.price <", 12, "the expression ends too early"),
        ("item.price", 0, "the expression must return a boolean, but returns a number"),
        ("has(item.price) && true", 0, "known(item.price)"),
        ("has(item.price)", 3, "known(item.price)"),
        ("has(item.new)", 3, "known(item.price)"),
        ("'🍵' in item.categories\n|| has (item.new)", 31, "known(item.price)"),
        ("has(item.price) > 1.0", 3, "known(item.price)"),
        ('item.brand.matches("a(")', 18, "regular expression"),
        ('item.brand.matches("(a{20}){20}")', 18, "at most 300 characters"),
        ('now < timestamp("tomorrow")', 15, "2026-01-31T12:00:00Z"),
        ("item.categories.exists_one(x, x == 'a')", 26, "exists and all"),
        ("{'a': true}['a']", 0, "a map"),
        ("item.brand == item.brand + 'a'", 25, "not joined"),
        ("x" * 2001, 2000, "at most 2,000 characters"),
        ("item.price > 1.0 and item.new", 17, "use && for and"),
        ("item.price > 1.0 OR item.new", 17, "use || for OR"),
        ("not item.new", 0, "use ! for not"),
        ('item.brand not in ["a"]', 11, "use ! for not"),
        ('item.brand = "a"', 11, "use == for ="),
        ('item.brand === "a"', 11, "use == for ==="),
        ('item.brand <> "a"', 11, "use != for <>"),
        ("item.price => 1.0", 11, "use >= for =>"),
        ("item.new & item.new", 9, "use && for &"),
        ('item.item_id == "a"', 4, "exclude, candidates, pin"),
        ("double(now - item.published_at) < 1.0", 6, "double(d.getHours())"),
        ("(now - item.published_at) / 24.0 < 1.0", 26, "double(d.getHours())"),
        ("double((now - item.published_at).getHours() / 24) < 1.0", 44, "double(x) / 2.0"),
        ("item.published_at.getHours() < 12", 26, "getHours cannot be used here"),
        ('item.brand in ["a", 1.0]', 14, "a list of values of different types"),
        ('[1.0, "a"].exists(x, x < 2.0)', 0, "a list of values of different types"),
        ('true || [1.0, "a"].exists(x, size(x) > 2)', 8, "a list of values of different types"),
    ],
)
def test_an_error_names_position_and_expectation(text: str, position: int, reason: str) -> None:
    found = [dict.fromkeys(PROPERTIES, None)]
    with pytest.raises(InvalidExpression) as refused:
        Evaluation(columns_of(found), {"now": 0}, 1).rows_where(ENVIRONMENT.compile(text, "boolean"))
    assert reason in refused.value.reason
    assert abs(refused.value.position - position) <= 1


def test_an_error_lists_a_readable_number_of_names() -> None:
    environment = Environment({f"item.{'a' * 40}_{number:03}": "number" for number in range(200)})
    with pytest.raises(InvalidExpression, match=r"_000, item\.a+_001, .*_010 and 189 others; to add it") as refused:
        environment.compile("item.xyz < 3.0", "boolean")
    assert len(refused.value.reason) < 700


HUNDRED = tuple(map(float, range(100)))


def evaluated(text: str, found: Sequence[Item], **params: Any) -> list[bool]:
    shared = {f"params.{name}": value for name, value in params.items()}
    node = ENVIRONMENT.compile(text, "boolean")
    rows = Evaluation(columns_of(found), shared, len(found)).rows_where(node)
    return [bool(one) for one in bitmap.to_mask(rows, len(found))]


@pytest.mark.parametrize(
    ("text", "params"),
    [
        (
            "params.sizes.exists(b, params.sizes.exists(c, params.sizes.exists(d, b + c + d < 0.0)))",
            {"sizes": HUNDRED},
        ),
        ("params.sizes.exists(b, params.sizes.exists(c, b + c < 0.0 || item.new))", {"sizes": HUNDRED}),
        (f"params.sizes.exists(b, size({'params.sizes + ' * 25}[b]) < 0)", {"sizes": HUNDRED}),
        (
            "params.sizes.exists(b, params.brands.exists(p, 'tea'.matches(p)))",
            {"brands": [f"[a-z]{n}" for n in range(100)]},
        ),
        ("item.brand.matches(params.brands == [] ? '' : '" + r"[aeiou]\\w?.*" * 20 + "$')", {"brands": ("a",)}),
    ],
)
def test_expressions_beyond_the_work_limit_are_refused(text: str, params: Mapping[str, Any]) -> None:
    found = [{**dict.fromkeys(PROPERTIES), "item.brand": f"a green kettle {n}" * 60} for n in range(2_000)]
    with pytest.raises(InvalidExpression, match=r"at most 64 operations|expressions are too long"):
        evaluated(text, found, **{"sizes": (1.0,), **params})


def test_loops_short_circuit_and_evaluate_invariants_once() -> None:
    found = [{**dict.fromkeys(PROPERTIES), "item.price": price, "item.categories": ["a"]} for price in (1.0, 200.0)]
    assert evaluated("params.sizes.exists(b, params.sizes.exists(c, b == 0.0 && c == 0.0))", found, sizes=HUNDRED)[0]
    assert evaluated("params.sizes.exists(x, x < 0.0 || item.price > 100.0)", found, sizes=HUNDRED) == [False, True]
    once = 'params.sizes.all(x, x >= 0.0 && item.categories.exists(c, c == "a"))'
    assert evaluated(once, found, sizes=HUNDRED) == [True, True]
    assert evaluated('item.categories.exists(now, now == "a")', found, sizes=HUNDRED) == [True, True]


def test_lists_of_parameters_compare_equal_to_literals() -> None:
    found = [{**dict.fromkeys(PROPERTIES), "item.brand": brand} for brand in ("house", "x", "b")]
    for brands in (["x", "y"], ("x", "y")):
        assert all(evaluated('params.brands == ["x", "y"]', found, brands=brands))
        assert not any(evaluated('params.brands != ["x", "y"]', found, brands=brands))
        assert evaluated('item.brand in params.brands + ["house"]', found, brands=brands) == [True, True, False]
        assert all(evaluated('["z"] + params.brands == ["z", "x", "y"]', found, brands=brands))


@pytest.mark.parametrize("pattern", ["(?i)(gift card|voucher|sample|test)", "^(Nike|Puma|Asics) ", "^.*thing.*1$"])
def test_a_pattern_of_plain_words_is_cheap(pattern: str) -> None:
    assert text_functions.pattern_size(0, pattern) == text_functions.QUICK_SIZE


@pytest.mark.parametrize("pattern", ["a..........b", "a.*b.*c.*d", r"(\w)*", "[aeiou]x*", "(a|b)+"])
def test_other_patterns_cost_by_their_length(pattern: str) -> None:
    assert text_functions.pattern_size(0, pattern) == len(pattern)

"""Text functions return the same for few texts as for many."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.catalogue.expressions import text_functions
from app.catalogue.expressions.columns import TextColumn

texts = st.text(st.sampled_from("abÜß.*\U0001f375\x00"), max_size=6)


@pytest.mark.parametrize("function", text_functions.OF_ONE_TEXT)
@given(st.lists(texts, max_size=20, unique=True), texts)
def test_few_texts_give_the_same_results_as_many(function: str, of_items: list[str], wanted: str) -> None:
    column = TextColumn.of(of_items)
    few = text_functions.matched(0, function, column, wanted)
    with patch.object(text_functions, "FEW_TEXTS", -1):
        many = text_functions.matched(0, function, column, wanted)
    assert few.tolist() == many.tolist()
    by_definition = {"startsWith": str.startswith, "endsWith": str.endswith, "contains": str.__contains__}[function]
    assert few.tolist() == [by_definition(text, wanted) for text in of_items] + [False]
    assert few.dtype == np.bool_


@pytest.mark.parametrize(
    ("text", "pattern"),
    [("Über", r"^\w+$"), ("\u0663", r"\d"), ("a\u3000b", r"a\sb"), ("heiß", r"\bheiß\b"), ("a[{", r"[\[]\{")],
)
def test_classes_of_a_pattern_know_all_alphabets(text: str, pattern: str) -> None:
    assert text_functions.matches(0, "matches", text, pattern)

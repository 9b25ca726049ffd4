"""The values of parts of an expression: one for all items, or one for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from app.catalogue.expressions.columns import TextColumn, pack
from app.catalogue.expressions.set_columns import SetColumn
from model.inference import bitmap
from model.inference.bitmap import Bitmap

Scalar: TypeAlias = "bool | int | float | str | Sequence[str] | Sequence[float]"
"""A value that all items share; a time or a duration is a number of microseconds."""


class _Missing:
    """The type of a missing value."""


MISSING = _Missing()


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """The rows for which a condition is true, and those for which it is false; for all others it is an error."""

    true: Bitmap
    false: Bitmap


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """A number, a time or a duration for each known row."""

    values: NDArray[Any]
    known: Bitmap


Value: TypeAlias = "Scalar | _Missing | Truth | Numbers | TextColumn | SetColumn"
Condition: TypeAlias = "bool | _Missing | Truth"


class Rows:
    """The number of rows, which converts values to one value per row."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.none = bitmap.empty(count)
        self.all = ~self.none

    def truth(self, value: Value) -> Truth:
        """Return a condition with a value for each row."""
        if isinstance(value, Truth):
            return value
        if value is MISSING:
            return Truth(self.none, self.none)
        return Truth(self.all, self.none) if value else Truth(self.none, self.all)

    def truth_where(self, is_true: NDArray[np.bool_] | Bitmap, known: Bitmap) -> Truth:
        """Return a condition that is known for these rows."""
        true: Bitmap = pack(is_true) if is_true.dtype == np.bool_ else is_true  # type: ignore[arg-type, assignment]
        return Truth(true & known, known & ~true)

    def spread(self, value: Value) -> tuple[Any, Bitmap]:
        """Return a number with a value for each row."""
        if isinstance(value, Numbers):
            return value.values, value.known
        return (0, self.none) if value is MISSING else (value, self.all)

    def join(self, decisive: bool, first: Condition, second: Condition) -> Condition:
        """Return both conditions joined: for ``||`` true is decisive, for ``&&`` false."""
        if first is decisive or second is decisive:
            return decisive
        if first is (not decisive) or second is (not decisive):
            return second if first is (not decisive) else first
        if first is MISSING and second is MISSING:
            return MISSING
        one, other = self.truth(first), self.truth(second)
        if decisive:
            return Truth(one.true | other.true, one.false & other.false)
        return Truth(one.true & other.true, one.false | other.false)

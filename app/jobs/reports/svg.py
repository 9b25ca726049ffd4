"""Plots as inline SVG. Colours are classes that the page's style sheet fills, so they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.jobs.reports.html import Html, tag

WIDTH, HEIGHT = 680, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 32, 44
BAR_HEIGHT, BAR_LEFT = 26, 130
APART = 4  # between the marks of two lines, so that their whiskers do not overlap
CELL_HEIGHT = 20
MOST_LABELS = 16
LABEL_WIDTH, LINE = 120, 13
FILE_STYLE = """
text { fill: #57606a; font: 12px sans-serif; } .grid { stroke: #b9c0c8; } .first.fill { fill: #0b62c4; }
@media (prefers-color-scheme: dark) { text { fill: #9aa4af } .grid { stroke: #363c44; } .first.fill { fill: #6cb2ff; } }
"""


class Point(NamedTuple):
    """A value, with its interval if it has one; ``note`` is its tooltip."""

    label: str
    value: float
    interval: tuple[float, float] | None = None
    note: str = ""


class Spot(NamedTuple):
    """A named value at an amount of the horizontal axis."""

    label: str
    amount: float
    value: float


class Axis(NamedTuple):
    """The vertical axis of a plot, by the values at its bottom and its top."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float], from_zero: bool) -> Axis:
        """Return an axis from 0, or just below the least value, to a round number above the largest."""
        low = 0.0 if from_zero else math.floor(min(values))
        span = max(values, default=0) - low or 1.0
        power = 10.0 ** math.floor(math.log10(span))
        return cls(low, low + next(step * power for step in (1, 2, 4, 8, 10) if step * power >= span * (1 - 1e-9)))

    @classmethod
    def within(cls, values: Sequence[float]) -> Axis:
        """Return an axis from just below the least value to just above the largest, in hundredths."""
        return cls(math.floor(min(values) * 100 - 0.5) / 100, math.ceil(max(values) * 100 + 0.5) / 100)

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)


def bars(points: Sequence[Point], title: str) -> Html:
    """Return a plot with one bar for each value, the first one emphasised, and whiskers for the intervals."""
    scale = (WIDTH - BAR_LEFT - 90) / max([*_values(points), 1e-9])
    parts = []
    for row, point in enumerate(points):
        middle, end = (row + 0.5) * BAR_HEIGHT, BAR_LEFT + point.value * scale
        parts.append(_text(point.label, BAR_LEFT - 8, middle, "end"))
        shade = "first" if row == 0 else "second"
        bar = {"x": BAR_LEFT, "y": middle - 8, "width": _number(max(end - BAR_LEFT, 0)), "height": 16}
        parts.append(tag("rect", tag("title", point.note), class_=f"{shade} fill", **bar))
        if point.interval is not None:
            low, high = (BAR_LEFT + bound * scale for bound in point.interval)
            parts.append(_line(low, middle, high, middle, "whisker"))
            end = max(end, high)
        parts.append(_text(f"{point.value:.4f}", end + 8, middle, "start"))
    return _svg(parts, len(points) * BAR_HEIGHT, title)


def lines(series: Sequence[tuple[str, Sequence[Point]]], title: str, x_title: str, *, from_zero: bool = True) -> Html:
    """Return a plot of at most two named lines over the same labels, with whiskers for the intervals."""
    values = [value for _, points in series for value in _values(points)]
    axis = Axis.around(values, from_zero)
    parts = _frame([point.label for point in series[0][1]], axis, x_title)
    for shade, (name, points) in zip(("first", "second"), series, strict=False):
        shift = {"first": -APART, "second": APART}[shade] if len(series) > 1 else 0
        ends = [(_x(place, len(points)) + shift, axis.y(point.value)) for place, point in enumerate(points)]
        path = " ".join(f"{_number(x)},{_number(y)}" for x, y in ends)
        parts.append(tag("polyline", points=path, class_=f"{shade} stroke"))
        for (x, y), point in zip(ends, points, strict=True):
            if point.interval is not None:
                low, high = map(axis.y, point.interval)
                parts.append(_line(x, low, x, high, f"{shade} whisker"))
            note = tag("title", f"{name}, {point.label}: {point.value:.4f} {point.note}")
            parts.append(_mark(x, y, shade, note))
    parts += _legend([name for name, _ in series]) if len(series) > 1 else []
    return _svg(parts, HEIGHT, title)


def scatter(spots: Sequence[Spot], title: str, x_title: str) -> Html:
    """Return a plot of named values over a logarithmic axis, as a file of its own with its colours."""
    axis = Axis.within([spot.value for spot in spots])
    powers = [math.log2(spot.amount) for spot in spots]
    first, last = math.floor(min(powers)), math.ceil(max(powers) + 0.5)
    labels = [f"{2**power:,}" for power in range(first, last + 1)]
    parts = [tag("style", FILE_STYLE), *_frame(labels, axis, x_title), _text(title, LEFT, 12, "start")]
    places = [(_x(power - first, len(labels)), axis.y(spot.value)) for spot, power in zip(spots, powers, strict=True)]
    for spot, (x, y) in zip(spots, places, strict=True):
        parts.append(_mark(x, y, "first", tag("title", f"{spot.label}: {spot.value:.4f}, {spot.amount:,.0f}")))
    written: list[tuple[float, float]] = []
    for (x, y), label in sorted(zip(places, (spot.label for spot in spots), strict=True), key=lambda each: each[0][1]):
        while any(abs(x - other_x) < LABEL_WIDTH and abs(y - other_y) < LINE for other_x, other_y in written):
            y += 1
        written.append((x, y))
        beyond = x > WIDTH - RIGHT - LABEL_WIDTH
        parts.append(_text(label, x - 8 if beyond else x + 8, y, "end" if beyond else "start"))
    return _svg(parts, HEIGHT, title, xmlns="http://www.w3.org/2000/svg")


def heat_map(shares: NDArray[np.floating], title: str, row_name: str, column_name: str) -> Html:
    """Return a grid of shares (rows, columns), darkest at the largest of them."""
    rows, columns = shares.shape
    largest, cell = max(float(shares.max()), 1e-12), (WIDTH - LEFT - RIGHT) / columns
    parts = []
    for row in range(rows):
        parts.append(_text(f"{row_name} {row}", LEFT - 6, (row + 0.5) * CELL_HEIGHT, "end"))
        for column in range(columns):
            share = float(shares[row, column])
            note = tag("title", f"{row_name} {row}, {column_name} {column}: {share:.2%}")
            box = {"x": _number(LEFT + column * cell), "y": row * CELL_HEIGHT, "width": _number(cell)}
            shade = f"{share / largest:.3f}"
            parts.append(tag("rect", note, class_="first fill", height=CELL_HEIGHT - 2, fill_opacity=shade, **box))
    bottom = rows * CELL_HEIGHT + 14
    parts.append(_text(f"{column_name} 0", LEFT, bottom, "start"))
    parts.append(_text(f"{column_name} {columns - 1}", WIDTH - RIGHT, bottom, "end"))
    return _svg(parts, bottom + 10, title)


def _values(points: Sequence[Point]) -> list[float]:
    return [value for point in points for value in (point.value, *(point.interval or ()))]


def _frame(labels: Sequence[str], axis: Axis, x_title: str) -> list[Html]:
    parts = []
    for tick in range(5):
        value = axis.low + (axis.high - axis.low) * tick / 4
        parts.append(_line(LEFT, axis.y(value), WIDTH - RIGHT, axis.y(value), "grid"))
        parts.append(_text(f"{value:.3g}", LEFT - 6, axis.y(value), "end"))
    every = math.ceil(len(labels) / MOST_LABELS)
    shown = range(0, len(labels), every)
    parts += [_text(labels[place], _x(place, len(labels)), HEIGHT - BOTTOM + 14, "middle") for place in shown]
    return [*parts, _text(x_title, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "middle")]


def _legend(names: Sequence[str]) -> list[Html]:
    parts = []
    for column, (shade, name) in enumerate(zip(("first", "second"), names, strict=False)):
        x = LEFT + 14 + 160 * column
        parts += [_mark(x, 12, shade, tag("title", name)), _text(name, x + 10, 12, "start")]
    return parts


def _mark(x: float, y: float, shade: str, note: Html) -> Html:
    """Return a round or a square mark, for readers to whom the two colours look the same."""
    if shade == "first":
        return tag("circle", note, cx=_number(x), cy=_number(y), r=4, class_="first fill")
    return tag("rect", note, x=_number(x - 4), y=_number(y - 4), width=8, height=8, class_="second fill")


def _svg(parts: Sequence[Html], height: float, title: str, **attributes: str) -> Html:
    box = f"0 0 {WIDTH} {_number(height)}"
    return tag("svg", tag("title", title), *parts, viewBox=box, role="img", aria_label=title, **attributes)


def _text(text: str, x: float, y: float, anchor: str) -> Html:
    return tag("text", text, x=_number(x), y=_number(y), text_anchor=anchor, dominant_baseline="central")


def _line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
    return tag("line", x1=_number(x1), y1=_number(y1), x2=_number(x2), y2=_number(y2), class_=class_)


def _x(place: float, places: int) -> float:
    return LEFT + (place + 0.5) * (WIDTH - LEFT - RIGHT) / places


def _number(value: float) -> str:
    return f"{value:.1f}"

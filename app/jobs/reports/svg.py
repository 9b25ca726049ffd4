"""Plots as inline SVG. Colours are classes that the page's style sheet fills, so they follow light and dark.

Each plot is drawn for a given width in pixels, so that its text has the same size on a phone as on a large screen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.jobs.reports.html import SHADES, Html, tag

WIDTH, HEIGHT = 680, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 32, 44
BAR_HEIGHT, BAR_THICKNESS = 40, 14  # a bar stands below its label
APART = 6  # between the marks of several lines, so that their whiskers do not overlap
CELL_HEIGHT = 20
VALUE_SPACE, CHARACTER = 60, 7.5  # widths of a bar's value, and of the widest character
LABEL_SPACE = 40  # width of a label of the horizontal axis
LABEL_WIDTH, LINE = 120, 13
FILE_STYLE = """
text { fill: #57606a; font: 12px sans-serif; } .grid { stroke: #b9c0c8; } .first.fill { fill: #0b62c4; }
@media (prefers-color-scheme: dark) { text { fill: #9aa4af } .grid { stroke: #363c44; } .first.fill { fill: #6cb2ff; } }
"""


class Point(NamedTuple):
    """A value, with its interval if it has one.

    note      its tooltip
    is_plain  whether its bar has the second colour
    """

    label: str
    value: float
    interval: tuple[float, float] | None = None
    note: str = ""
    is_plain: bool = False


class Spot(NamedTuple):
    """A named value and its position on the horizontal axis."""

    label: str
    amount: float
    value: float


class Axis(NamedTuple):
    """The vertical axis of a plot, given by the values at its bottom and its top."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float], from_zero: bool) -> Axis:
        """Return an axis from 0, or from the smallest value rounded down, to a round number above the largest."""
        low = 0.0 if from_zero else math.floor(min(values))
        span = max(values, default=0) - low or 1.0
        power = 10.0 ** math.floor(math.log10(span))
        return cls(low, low + next(step * power for step in (1, 2, 4, 8, 10) if step * power >= span * (1 - 1e-9)))

    @classmethod
    def within(cls, values: Sequence[float]) -> Axis:
        """Return an axis from just below the smallest value to just above the largest, in hundredths."""
        return cls(math.floor(min(values) * 100 - 0.5) / 100, math.ceil(max(values) * 100 + 0.5) / 100)

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)


def bars(points: Sequence[Point], title: str, width: int = WIDTH) -> Html:
    """Return a plot with one bar for each value, below its label, and whiskers for the intervals."""
    scale = width / max([*_values(points), 1e-9])
    parts = []
    for row, point in enumerate(points):
        top = row * BAR_HEIGHT + 20
        parts.append(_text(_shortened(point.label, width - VALUE_SPACE), 0, top - 9, "start"))
        parts.append(_text(f"{point.value:.4f}", width, top - 9, "end"))
        bar = {"x": 0, "y": top, "width": _number(max(point.value * scale, 0)), "height": BAR_THICKNESS}
        shade = "second" if point.is_plain else "first"
        parts.append(tag("rect", tag("title", point.note), class_=f"{shade} fill", **bar))
        if point.interval is not None:
            low, high = (bound * scale for bound in point.interval)
            middle = top + BAR_THICKNESS / 2
            parts.append(_line(low, middle, high, middle, "whisker"))
            parts += [_line(end, middle - 4, end, middle + 4, "whisker") for end in (low, high)]
    return _svg(parts, len(points) * BAR_HEIGHT, title, width)


def lines(
    series: Sequence[tuple[str, Sequence[Point]]],
    title: str,
    x_title: str,
    width: int = WIDTH,
    *,
    from_zero: bool = True,
) -> Html:
    """Return a plot of at most four lines over the labels of the longest, with whiskers for the intervals."""
    values = [value for _, points in series for value in _values(points)]
    labels = [point.label for point in max((points for _, points in series), key=len)]
    axis = Axis.around(values, from_zero)
    parts = _frame(labels, axis, x_title, width)
    for row, (shade, (name, points)) in enumerate(zip(SHADES, series, strict=False)):
        shift = (row - (len(series) - 1) / 2) * APART
        ends = [(_x(place, len(labels), width) + shift, axis.y(point.value)) for place, point in enumerate(points)]
        path = " ".join(f"{_number(x)},{_number(y)}" for x, y in ends)
        parts.append(tag("polyline", points=path, class_=f"{shade} stroke"))
        for (x, y), point in zip(ends, points, strict=True):
            if point.interval is not None:
                low, high = map(axis.y, point.interval)
                parts.append(_line(x, low, x, high, f"{shade} whisker"))
            note = tag("title", f"{name}, {point.label}: {point.value:.4f} {point.note}")
            parts.append(_mark(x, y, shade, note))
    return _svg(parts, HEIGHT, title, width)


def scatter(spots: Sequence[Spot], title: str, x_title: str) -> Html:
    """Return a plot of named values over a logarithmic axis, as a standalone file with its own colours."""
    axis = Axis.within([spot.value for spot in spots])
    powers = [math.log2(spot.amount) for spot in spots]
    first, last = math.floor(min(powers)), math.ceil(max(powers) + 0.5)
    labels = [f"{2**power:,}" for power in range(first, last + 1)]
    parts = [tag("style", FILE_STYLE), *_frame(labels, axis, x_title, WIDTH), _text(title, LEFT, 12, "start")]
    places = [
        (_x(power - first, len(labels), WIDTH), axis.y(spot.value)) for spot, power in zip(spots, powers, strict=True)
    ]
    for spot, (x, y) in zip(spots, places, strict=True):
        parts.append(_mark(x, y, "first", tag("title", f"{spot.label}: {spot.value:.4f}, {spot.amount:,.0f}")))
    written: list[tuple[float, float]] = []
    for (x, y), label in sorted(zip(places, (spot.label for spot in spots), strict=True), key=lambda each: each[0][1]):
        while any(abs(x - other_x) < LABEL_WIDTH and abs(y - other_y) < LINE for other_x, other_y in written):
            y += 1
        written.append((x, y))
        beyond = x > WIDTH - RIGHT - LABEL_WIDTH
        parts.append(_text(label, x - 8 if beyond else x + 8, y, "end" if beyond else "start"))
    return _svg(parts, HEIGHT, title, WIDTH, xmlns="http://www.w3.org/2000/svg")


def heat_map(shares: NDArray[np.floating], title: str, row_name: str, column_name: str, width: int = WIDTH) -> Html:
    """Return a grid of shares (rows, columns); the largest share has the strongest colour."""
    rows, columns = shares.shape
    largest, cell = max(float(shares.max()), 1e-12), (width - LEFT - RIGHT) / columns
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
    parts.append(_text(f"{column_name} {columns - 1}", width - RIGHT, bottom, "end"))
    return _svg(parts, bottom + 10, title, width)


def _values(points: Sequence[Point]) -> list[float]:
    return [value for point in points for value in (point.value, *(point.interval or ()))]


def _shortened(label: str, space: float) -> str:
    most = int(space / CHARACTER)
    return label if len(label) <= most else f"{label[: most - 1]}…"


def _frame(labels: Sequence[str], axis: Axis, x_title: str, width: int) -> list[Html]:
    parts = []
    for tick in range(5):
        value = axis.low + (axis.high - axis.low) * tick / 4
        parts.append(_line(LEFT, axis.y(value), width - RIGHT, axis.y(value), "grid"))
        parts.append(_text(f"{value:.3g}", LEFT - 6, axis.y(value), "end"))
    every = math.ceil(len(labels) * LABEL_SPACE / (width - LEFT - RIGHT))
    shown = range(0, len(labels), every)
    parts += [_text(labels[place], _x(place, len(labels), width), HEIGHT - BOTTOM + 14, "middle") for place in shown]
    return [*parts, _text(x_title, (LEFT + width - RIGHT) / 2, HEIGHT - 10, "middle")]


def _mark(x: float, y: float, shade: str, note: Html) -> Html:
    """Return a mark whose shape tells the line, for readers who cannot distinguish the colours."""
    if shade == "first":
        return tag("circle", note, cx=_number(x), cy=_number(y), r=4, class_="first fill")
    if shade == "second":
        return tag("rect", note, x=_number(x - 4), y=_number(y - 4), width=8, height=8, class_="second fill")
    corners = ((0, -5), (5, 4), (-5, 4)) if shade == "third" else ((0, -6), (6, 0), (0, 6), (-6, 0))
    path = " ".join(f"{_number(x + across)},{_number(y + down)}" for across, down in corners)
    return tag("polygon", note, points=path, class_=f"{shade} fill")


def _svg(parts: Sequence[Html], height: float, title: str, width: int, **attributes: str) -> Html:
    box = f"0 0 {width} {_number(height)}"
    return tag("svg", tag("title", title), *parts, viewBox=box, role="img", aria_label=title, **attributes)


def _text(text: str, x: float, y: float, anchor: str) -> Html:
    return tag("text", text, x=_number(x), y=_number(y), text_anchor=anchor, dominant_baseline="central")


def _line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
    return tag("line", x1=_number(x1), y1=_number(y1), x2=_number(x2), y2=_number(y2), class_=class_)


def _x(place: float, places: int, width: int) -> float:
    return LEFT + (place + 0.5) * (width - LEFT - RIGHT) / places


def _number(value: float) -> str:
    return f"{value:.1f}"

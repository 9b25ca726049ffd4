"""HTML from Python: only the results of ``tag`` are markup; all other text is escaped."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape

PLOT_WIDTHS = {"on-wide": 680, "on-narrow": 320}  # pixels
SHADES = ("first", "second", "third", "fourth")  # of the lines of a plot
LONGEST_WORD = 14  # characters of the longest word that a cell does not break
MARKUP = re.compile(r"<[^>]*>")


class Html(str):
    """Finished markup."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: object) -> Html:
    """Return an element. Attribute names lose a trailing underscore (``class_``); others become hyphens."""
    inside = "".join(child if isinstance(child, Html) else escape(child) for child in children)
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{named}>{inside}</{name}>")


def concatenated(*parts: Html) -> Html:
    """Return the elements one after another."""
    return Html("\n".join(parts))


def section(title: str, *children: Html) -> Html:
    """Return a section with a heading."""
    return tag("section", tag("h2", title), *children)


def figure(draw: Callable[[int], Html], caption: str, legend: Iterable[str] = ()) -> Html:
    """Return a plot with a caption, drawn once for wide screens and once for narrow ones; only one of them is visible.

    draw    draws the plot in a given width, in pixels
    legend  names of the lines, at most four
    """
    plots = [tag("div", draw(width), class_=f"plot {name}") for name, width in PLOT_WIDTHS.items()]
    names = [tag("li", tag("i", class_=f"{shade} mark"), name) for shade, name in zip(SHADES, legend, strict=False)]
    lines = [tag("ul", *names, class_="legend")] if names else []
    return tag("figure", *lines, *plots, tag("figcaption", caption))


def details(numbers: Html) -> Html:
    """Return a collapsed table of numbers, which opens on a click."""
    return tag("details", tag("summary", "The numbers"), numbers)


def with_note(text: str, note: str) -> Html:
    """Return a text with a note below it, if the note is not empty."""
    return concatenated(tag("span", text), *([tag("small", note)] if note else []))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str | None = None) -> Html:
    """Return a table whose rows become cards on narrow screens; a row's first cell is its heading.

    The roles repeat what the elements are, because browsers drop the roles of elements that are displayed as cards.
    """
    heads = [tag("th", name, scope="col", role="columnheader", class_=_fit(name)) for name in columns]
    body = [tag("tr", *_cells(row, columns), role="row") for row in rows]
    about = [] if caption is None else [tag("caption", caption)]
    parts = [
        *about,
        tag("thead", tag("tr", *heads, role="row"), role="rowgroup"),
        tag("tbody", *body, role="rowgroup"),
    ]
    return tag("div", tag("table", *parts, role="table", class_=f"columns-{len(columns)}"), class_="wide")


def _cells(row: Sequence[str], columns: Sequence[str]) -> list[Html]:
    heading = tag("th", row[0], scope="row", role="rowheader", class_=_fit(row[0]))
    named = zip(row[1:], columns[1:], strict=True)
    return [heading, *(tag("td", cell, role="cell", data_column=name, class_=_fit(cell)) for cell, name in named)]


def _fit(cell: str) -> str | None:
    """Return the class of a cell with a word so long that it has to break; None for other cells."""
    text = MARKUP.sub(" ", cell) if isinstance(cell, Html) else cell
    return "breaks" if any(len(word) > LONGEST_WORD for word in text.split()) else None

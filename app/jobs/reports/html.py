"""HTML from Python: only what ``tag`` returns is markup; all other text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


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


def figure(plot: Html, caption: str) -> Html:
    """Return a plot with what it shows."""
    return tag("figure", tag("div", plot, class_="plot"), tag("figcaption", caption))


def details(numbers: Html) -> Html:
    """Return a table of numbers that opens when it is asked for."""
    return tag("details", tag("summary", "The numbers"), numbers)


def table(columns: Iterable[str], rows: Iterable[Sequence[str]], caption: str | None = None) -> Html:
    """Return a table, wide ones of which scroll; the first cell of a row is its heading."""
    head = tag("tr", *(tag("th", name, scope="col") for name in columns))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    about = [] if caption is None else [tag("caption", caption)]
    return tag("div", tag("table", *about, tag("thead", head), tag("tbody", *body)), class_="wide")

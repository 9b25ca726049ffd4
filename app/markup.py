"""HTML from Python, in which text is text: only what ``tag`` made is markup, everything else is escaped."""

from __future__ import annotations

from html import escape


class Html(str):
    """Finished markup."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: object) -> Html:
    """An element; a trailing underscore of an attribute goes (``class_``), others become hyphens (``aria_label``)."""
    inside = "".join(child if isinstance(child, Html) else escape(child) for child in children)
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{named}>{inside}</{name}>")


def together(*parts: Html) -> Html:
    """Elements one behind the other."""
    return Html("\n".join(parts))

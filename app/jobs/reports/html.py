"""HTML from Python: only what ``tag`` returns is markup; all other text is escaped."""

from __future__ import annotations

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

"""Markdown that the generated pages are made of: tables, code and one sentence a line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

SENTENCE_END = re.compile(r"(?<=[.!?]) +(?=[A-Z'`])")
LITERAL = re.compile(
    r"(?<!\w)'([^' ][^']*)'(?!\w)|(?<![\w`/.])(https?://[\w./-]*\w|--[a-z][\w-]*|LISAREC_[A-Z_]*[A-Z]|/[a-z]+)(?![\w`])"
)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells may hold anything but line breaks."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def code(text: str) -> str:
    """Return the text as code; the empty text stays empty."""
    return f"`{text}`" if text else ""


def sentences(text: str) -> str:
    """Return a paragraph with one sentence a line, whatever its line breaks were."""
    return SENTENCE_END.sub("\n", " ".join(text.split()))


def with_code(text: str) -> str:
    """Return the text of a help message with quoted commands and values, options, variables and addresses as code."""
    return LITERAL.sub(lambda found: code(found[1] or found[2]), text)

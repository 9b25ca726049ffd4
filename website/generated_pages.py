"""The reference pages that are made from the code, by their names in docs/reference."""

from collections.abc import Callable, Mapping
from pathlib import Path

from website import command_line, metrics_page, settings_page

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
PAGES: Mapping[str, Callable[[], str]] = {
    "command-line.md": command_line.page,
    "settings.md": settings_page.page,
    "metrics.md": metrics_page.page,
}


def write() -> None:
    """Write all of them."""
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")

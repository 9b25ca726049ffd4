"""The playground in a browser: a service that serves it, and actions of a visitor."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from app.settings import Settings
from storage.archive.writer import ArchiveWriter
from tests.app.service_process import serve_in_thread


@pytest.fixture(scope="module")
def url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("playground")
    with ArchiveWriter.open(directory / "archive") as writer:
        writer.note_through(time.time() - 2 * 3600)
    settings = Settings(model_dir=model_dir, data_dir=directory, archive_dir=directory / "archive", playground=True)
    with serve_in_thread(settings) as url:
        yield url


@contextmanager
def visiting(browser: Browser, url: str, expected: str = "(?!)", **options: Any) -> Iterator[Page]:
    """Open the page as a new visitor. Console errors and requests to other hosts fail the test."""
    context = browser.new_context(reduced_motion="reduce", **{"viewport": {"width": 1200, "height": 900}, **options})
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith((url, "data:")) else wrong.append(request.url))
    try:
        page.goto(f"{url}/playground")
        yield page
    except Exception as exc:
        exc.add_note("\n".join(["The browser complained of:", *wrong]))
        raise
    finally:
        context.close()
    assert [text for text in wrong if not re.search(expected, text)] == []


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    with visiting(browser, url) as page:
        expect(page.locator("#recommendations li")).to_have_count(10)
        yield page


def recommended(page: Page) -> list[tuple[str, str]]:
    """The displayed ids and scores."""
    rows = page.locator("#recommendations .item").all()
    return [(row.get_attribute("data-item-id") or "", row.locator(".figure").inner_text()) for row in rows]


def click(page: Page, item_id: str) -> None:
    page.fill("#query", item_id)
    expect(page.locator("#found-line")).to_contain_text(f"“{item_id}”")  # not what was found before, which goes away
    page.click(f'#found button[data-item-id="{item_id}"]')
    expect(page.locator("#history li").first).to_have_attribute("data-item-id", item_id)


def open_user(page: Page, user_id: str) -> None:
    page.fill("#user", user_id)
    page.keyboard.press("Enter")


def touched(page: Page) -> set[tuple[int, int, int]]:
    """Rate, codebook and codeword of the highlighted bins."""
    cells = page.locator(".touched").all()
    names = ("data-rate", "data-codebook", "data-codeword")
    return {tuple(int(cell.get_attribute(name) or -1) for name in names) for cell in cells}  # type: ignore[misc]


def serious(page: Page) -> list[str]:
    """Serious and critical accessibility violations found by axe-core."""
    violations = Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['nodes']}" for one in violations if one["impact"] in ("serious", "critical")]

"""The playground: only where it is wanted, and in a real browser one user's state as it is."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect

from app.main import create_app
from app.settings import Settings
from model import artifact
from tests.app.conftest import SHAPE

Client = httpx.Client


@pytest.fixture(scope="module")
def url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = Settings(model_dir=model_dir, data_dir=tmp_path_factory.mktemp("playground"), playground=True)
    server = uvicorn.Server(uvicorn.Config(create_app(settings), port=0, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the service did not start"
        thread.join(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """Of a visitor who was never there. Errors on the console, and requests to elsewhere, fail the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.set_default_timeout(30_000)
    expect.set_options(timeout=30_000)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith((url, "data:")) else wrong.append(request.url))
    page.goto(f"{url}/playground")
    expect(page.locator("#recommendations li")).to_have_count(10)
    yield page
    context.close()
    assert wrong == []


def recommended(page: Page) -> list[tuple[str, str]]:
    """Ids and scores as they are shown."""
    rows = page.locator("#recommendations button").all()
    return [(row.get_attribute("data-item-id") or "", row.locator(".figure").inner_text()) for row in rows]


def click(page: Page, item_id: str) -> None:
    page.fill("#query", item_id)
    page.click(f'#found button[data-item-id="{item_id}"]')
    expect(page.locator("#history li").first).to_have_attribute("data-item-id", item_id)


def touched(page: Page) -> set[tuple[int, int, int]]:
    """Rate, codebook and codeword of the bins that glow."""
    cells = page.locator("td.touched").all()
    names = ("data-rate", "data-codebook", "data-codeword")
    return {tuple(int(cell.get_attribute(name) or -1) for name in names) for cell in cells}  # type: ignore[misc]


def test_it_is_only_there_where_it_is_wanted(start: Callable[..., Client], tmp_path: Path) -> None:
    assert start(tmp_path / "a").get("/playground/").status_code == 404
    client = start(tmp_path / "b", playground=True)
    for part in ("", "playground.js", "playground.css"):
        answer = client.get(f"/playground/{part}")
        assert answer.status_code == 200
        assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert client.get("/playground/playground.html").status_code == 422


def test_a_click_changes_the_list_and_touches_the_item_s_codes(page: Page, url: str, model_dir: Path) -> None:
    expect(page.locator("#source")).to_have_text("popular")
    codes = artifact.load(model_dir).history_codes
    for row in (7, 21):
        before = recommended(page)
        click(page, f"item-{row}")
        expect(page.locator("#source")).to_have_text("personalised")
        assert recommended(page) != before
        own = {(rate, book, int(codes[row, book])) for rate in range(len(SHAPE.decay_rates)) for book in range(3)}
        assert touched(page) == own
    user = page.input_value("#user")
    answer = httpx.get(f"{url}/v1/users/{user}/recommendations").json()["items"]
    assert recommended(page) == [(item["item_id"], f"{item['score']:.2f}") for item in answer]
    heat = np.array(
        [
            float(cell.evaluate("cell => cell.firstChild.style.getPropertyValue('--heat')"))
            for cell in page.locator("td").all()
        ]
    )
    histogram = np.array(httpx.get(f"{url}/v1/users/{user}").json()["histogram"])
    np.testing.assert_allclose(
        heat.reshape(histogram.shape), histogram / histogram.max(axis=(1, 2), keepdims=True), atol=1e-6
    )


def test_undo_restores_the_list_and_a_reload_keeps_the_visitor(page: Page) -> None:
    click(page, "item-3")
    before, user = recommended(page), page.input_value("#user")
    click(page, "item-40")
    page.click("#undo")
    expect(page.locator("#history li")).to_have_count(1)
    assert recommended(page) == before
    expect(page.locator("#undo")).to_be_enabled()  # there is one more click to take back
    page.reload()
    expect(page.locator("#history li")).to_have_count(1)
    assert (recommended(page), page.input_value("#user")) == (before, user)
    page.click("#reset")
    expect(page.locator("#history li")).to_have_count(0)
    expect(page.locator("#source")).to_have_text("popular")
    assert page.input_value("#user") != user


def test_titles_are_text(page: Page, url: str) -> None:
    title = "<img src=x onerror=alert(1)> \"tea\" & 'pot' \U0001f375 \u05e9\u05dc\u05d5\u05dd"
    httpx.put(f"{url}/v1/items/item-9", json={"title": title}).raise_for_status()
    shown = page.locator('#found button[data-item-id="item-9"] b')
    for attempt in range(100):
        page.fill("#query", f"item-9{' ' * (attempt % 2)}")
        page.wait_for_timeout(300)
        if shown.count() and shown.inner_text() == title:
            break
    assert shown.inner_text() == title


def test_a_narrow_screen_needs_no_scrolling_sideways(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.click("#recommendations li:first-child button")
    expect(page.locator("#history li")).to_have_count(1)


def test_the_operator_sees_figures(page: Page) -> None:
    page.check("#watch")
    expect(page.locator("#figures")).to_be_visible()
    assert re.search(r"requests\s+[\d.]+/s", page.inner_text("#figures"))

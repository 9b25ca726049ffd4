"""The playground in a real browser: it is served only if enabled, and shows the state of one user."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from app.serving import switcher
from app.settings import Settings
from model.artifact import model_directory
from tests.app.conftest import SHAPE, write_model
from tests.app.http.playground.conftest import click, open_user, recommended, touched, visiting
from tests.app.service_process import serve_in_thread

Client = httpx.Client


def test_the_page_is_served_only_if_enabled(start: Callable[..., Client], tmp_path: Path) -> None:
    client = start(tmp_path / "a")
    for path in ("/", "/playground", "/playground/", "/playground/playground.js"):
        assert client.get(path).status_code == 404
    client = start(tmp_path / "b", playground=True)
    for path in ("/", "/playground"):
        assert client.get(path).headers["location"] == "playground/"
    page = client.get("/playground/").text
    for part in ("", *re.findall(r'(?:src|href)="([^":]+)"', page)):
        answer = client.get(f"/playground/{part}")
        assert answer.status_code == 200
        assert "script-src 'self'" in answer.headers["content-security-policy"]
    for part, status in (("playground.html", 404), ("elsewhere.js", 404), ("..%2fplayground.py", 404), ("%2e%2e", 404)):
        assert client.get(f"/playground/{part}").status_code == status


def test_a_click_changes_the_list_and_highlights_the_item_s_codes(page: Page, url: str, model_dir: Path) -> None:
    expect(page.locator("#source")).to_have_text("popular")
    codes = model_directory.load(model_dir).history_codes
    for row in (7, 21, 7):  # the second time its bins are fuller than by one click
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
            float(heat)
            for heat in page.locator(".map i").evaluate_all(
                "cells => cells.map(cell => cell.style.getPropertyValue('--heat'))"
            )
        ]
    )
    histogram = np.array(httpx.get(f"{url}/v1/users/{user}").json()["histogram"])
    np.testing.assert_allclose(
        heat.reshape(histogram.shape), histogram / histogram.max(axis=(1, 2), keepdims=True), atol=1e-6
    )
    expect(page.locator("#axes")).to_have_text("Each row is one of 3 codebooks, each column one of 8 codewords.")
    most = [f"colour from 0 to {largest:.2f}" for largest in histogram.max(axis=(1, 2))]
    assert page.locator("#histogram h3 small").all_inner_texts() == most
    read = page.locator("#square")
    row, column = divmod(int(histogram[1].argmax()), histogram.shape[2])
    page.hover(f'[data-rate="1"][data-codebook="{row}"][data-codeword="{column}"]')
    expect(read).to_have_text(f"Codeword {column + 1} of codebook {row + 1}: {histogram[1].max():.3f}")
    described = page.locator(".map").nth(1).get_attribute("aria-label") or ""
    assert f"most used are codeword {column + 1} of codebook {row + 1} with {histogram[1].max():.2f}" in described
    page.focus(".map")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowLeft", "ArrowLeft"):  # the last one leads nowhere
        page.keyboard.press(key)
    expect(read).to_have_text(f"Codeword 1 of codebook 2: {histogram[0, 1, 0]:.3f}")
    page.focus("#query")
    page.mouse.move(5, 5)
    expect(read).to_be_empty()


def test_a_long_full_bin_is_highlighted(page: Page, url: str, model_dir: Path) -> None:
    """If decay equals growth, a click leaves the value of its bins unchanged."""
    httpx.post(f"{url}/v1/events", json=[{"user_id": "eve", "item_id": "item-7"}] * 40).raise_for_status()
    open_user(page, "eve")
    expect(page.locator("#state-size")).to_have_text("40 events")
    page.fill("#query", "item-7")
    page.click('#found button[data-item-id="item-7"]')
    expect(page.locator("#state-size")).to_have_text("41 events")
    codes = model_directory.load(model_dir).history_codes[7].tolist()
    assert touched(page) == {(rate, *code) for rate in range(len(SHAPE.decay_rates)) for code in enumerate(codes)}


def test_undo_restores_the_list_and_a_reload_keeps_the_visitor(page: Page) -> None:
    first = recommended(page)
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
    page.click("#undo")
    expect(page.locator("#source")).to_have_text("popular")
    assert recommended(page) == first
    expect(page.locator("#undo")).to_be_disabled()
    click(page, "item-3")
    page.click("#reset")
    expect(page.locator("#history li")).to_have_count(0)
    expect(page.locator("#source")).to_have_text("popular")
    assert page.input_value("#user") != user


def test_repeated_clicks_are_one_event(page: Page) -> None:
    page.fill("#query", "item-3")
    page.dblclick('#found button[data-item-id="item-3"]')
    expect(page.locator("#history li")).to_have_count(1)
    held: list[Route] = []
    page.route("**/v1/events", lambda route: held.append(route), times=1)
    button = page.locator("#recommendations .item").first
    first = button.get_attribute("data-item-id")
    button.click()
    button.click()
    page.locator("#recommendations .item").nth(1).click()
    expect(page.locator("main")).to_have_attribute("aria-busy", "true")
    held[0].continue_()
    expect(page.locator("#history li")).to_have_count(3)
    expect(page.locator("main")).to_have_attribute("aria-busy", "false")
    assert page.locator("#history li").nth(1).get_attribute("data-item-id") == first
    assert len(page.evaluate("JSON.parse(localStorage.getItem('lisarec.playground')).clicks")) == 3


def test_rapid_clicks_are_sent_in_order(page: Page, url: str) -> None:
    """Starting over during a click discards it for the next visitor."""
    user = page.input_value("#user")
    for _ in range(5):
        page.evaluate("document.querySelector('#recommendations .item').click()")
    page.evaluate("document.getElementById('reset').click()")
    expect(page.locator("#user")).not_to_have_value(user)
    click(page, "item-3")
    assert httpx.get(f"{url}/v1/users/{user}").status_code == 404
    assert len(page.evaluate("JSON.parse(localStorage.getItem('lisarec.playground')).clicks")) == 1


def test_corrupt_browser_storage_starts_a_new_visitor(page: Page) -> None:
    page.evaluate("localStorage.setItem('lisarec.playground', '{')")
    page.reload()
    expect(page.locator("#recommendations li")).to_have_count(10)


def test_moved_items_are_announced(page: Page) -> None:
    click(page, "item-3")
    before = [item_id for item_id, _ in recommended(page)]
    click(page, "item-40")
    after = [item_id for item_id, _ in recommended(page)]
    expected = [
        "new" if item_id not in before else ("" if up == 0 else f"▲ {up}" if up > 0 else f"▼ {-up}")
        for place, item_id in enumerate(after)
        for up in [before.index(item_id) - place if item_id in before else 0]
    ]
    assert len(set(expected)) > 2
    shown = page.locator("#recommendations .moved").evaluate_all(
        "all => all.map(one => one.querySelector('[aria-hidden]')?.textContent ?? one.textContent)"
    )
    assert shown == expected
    assert page.locator("#recommendations .rank").all_inner_texts() == [str(rank) for rank in range(1, 11)]


def test_the_first_steps_disappear_when_done(page: Page) -> None:
    steps, done = page.locator("#start li"), page.locator("#start .done")
    expect(steps).to_have_count(3)
    expect(done).to_have_count(0)
    page.hover("#recommendations li:first-child .item")  # why something is popular says little
    click(page, "item-3")
    expect(done).to_have_count(1)
    page.mouse.move(5, 5)
    page.hover("#recommendations li:nth-child(2) .item")
    expect(done).to_have_count(2)
    expect(steps.nth(2)).to_have_text(re.compile("Done: .* read why it is there"))
    page.click("#recommendations li:nth-child(2) .item")
    expect(page.locator("#start")).to_be_hidden()
    page.reload()
    expect(page.locator("#history li")).to_have_count(2)
    expect(page.locator("#start")).to_be_hidden()
    page.click("text=First steps")
    expect(done).to_have_count(0)
    expect(page.get_by_role("button", name="Hide first steps")).to_have_attribute("aria-expanded", "true")
    page.click("text=Hide first steps")
    expect(page.locator("#start")).to_be_hidden()


def test_a_click_shows_its_stages_and_their_times(page: Page, url: str) -> None:
    with page.expect_response(re.compile("/recommendations")) as answered:
        click(page, "item-12")
    header = answered.value.header_value("server-timing") or ""
    steps = {name: float(took) for name, took in re.findall(r"(\w+);dur=([\d.]+)", header)}
    assert steps.keys() == {"store", "step", "scan"}
    shown = dict(re.findall(r"([a-z ]+?) ([\d.]+) ms", page.inner_text("#timing")))
    for name, took in steps.items():
        assert float(shown[name]) == pytest.approx(took, abs=0.51 if took >= 10 else 0.0051)
    parts = sum(float(took) for name, took in shown.items() if name != "from click to list")
    assert parts == pytest.approx(float(shown["from click to list"]), abs=3)
    assert float(shown["event"]) > 0


def test_an_unavailable_item_disappears(page: Page, url: str) -> None:
    click(page, "item-5")
    gone = recommended(page)[0][0]
    httpx.put(f"{url}/v1/items/{gone}", json={"available": False}).raise_for_status()
    try:
        page.fill("#query", gone)
        expect(page.locator(f'#found button[data-item-id="{gone}"]')).to_contain_text("not available")
        page.reload()
        expect(page.locator("#recommendations li")).to_have_count(10)
        assert gone not in dict(recommended(page))
    finally:
        httpx.put(f"{url}/v1/items/{gone}", json={"available": True}).raise_for_status()


def test_a_cold_item_is_marked(page: Page, url: str) -> None:
    httpx.put(f"{url}/v1/items/brand-new", json={"title": "Brand new"}).raise_for_status()
    before = recommended(page)
    page.fill("#query", "brand")
    page.click("#found button:has-text('not learned yet')")
    expect(page.locator("#state-size")).to_have_text("1 event")
    assert touched(page) == set()
    page.click("#undo")
    expect(page.locator("#state-size")).to_have_text("0 events")
    assert recommended(page) == before


def test_a_new_generation_is_shown_after_a_switch(browser: Browser, tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "one")
    write_model(
        tmp_path / "models" / "two", shape=SHAPE.model_copy(update={"decay_rates": (0.1,), "history_codebooks": 2})
    )
    settings = Settings(model_dir=tmp_path / "models" / "one", data_dir=tmp_path, playground=True)
    with serve_in_thread(settings) as url, visiting(browser, url) as page:
        click(page, "item-3")
        expect(page.locator("#model-line")).to_contain_text("one")
        httpx.post(f"{url}/v1/admin/generations/two/activate").raise_for_status()
        click(page, "item-4")
        expect(page.locator("#model-line")).to_contain_text("two")
        expect(page.locator("#notice")).to_be_hidden()
        histogram = np.array(httpx.get(f"{url}/v1/users/{page.input_value('#user')}").json()["histogram"])
        assert page.locator(".map i").count() == histogram.size
        click(page, "item-5")
        assert len(touched(page)) == 2


def test_a_missing_model_is_reported(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switcher, "REBUILD_EVERY_S", 0.05)
    write_model(tmp_path / "models" / "first")
    settings = Settings(data_dir=tmp_path / "state", models_dir=tmp_path / "models", playground=True)
    with serve_in_thread(settings) as url, visiting(browser, url) as page:
        expect(page.locator("#found-line")).to_have_text("The catalogue is empty")
        expect(page.locator("#model-line")).to_have_text("no model yet")
        expect(page.locator("#why")).to_contain_text("no model yet")
        expect(page.locator("#source")).to_have_text("popular")
        after = "getComputedStyle(document.querySelector('#recommendations'), '::after').content"
        assert page.evaluate(after) == '"nothing to recommend"'
        for part in ("#histogram", "#legend", "#axes", "#card"):
            expect(page.locator(part)).to_be_hidden()
        events = [{"user_id": "ann", "item_id": f"item-{number}"} for number in range(4, 7)]
        httpx.post(f"{url}/v1/events", json=events).raise_for_status()
        open_user(page, "ann")
        expect(page.locator("#state-size")).to_have_text("3 events")
        expect(page.locator("#history")).to_have_text("no items that the model has learned")
        httpx.post(f"{url}/v1/admin/generations/first/activate").raise_for_status()
        open_user(page, "ann")
        expect(page.locator("#model-line")).to_contain_text("60 items")
        expect(page.locator("#histogram")).to_be_visible()
        expect(page.locator("#why")).to_contain_text("what the model knows of the user")
        expect(page.locator("#history li")).to_have_count(3)


def test_opening_a_user_changes_nothing(page: Page, url: str) -> None:
    events = [{"user_id": "ada@shop", "item_id": f"item-{row}"} for row in (4, 8, 15)]
    httpx.post(f"{url}/v1/events", json=events).raise_for_status()
    open_user(page, "ada@shop")
    expect(page.locator("#history li")).to_have_count(3)
    answer = httpx.get(f"{url}/v1/users/ada@shop/recommendations").json()["items"]
    assert recommended(page) == [(item["item_id"], f"{item['score']:.2f}") for item in answer]
    assert touched(page) == set()
    expect(page.locator("#undo")).to_be_disabled()
    page.click("#reset")
    expect(page.locator("#history li")).to_have_count(0)
    assert httpx.get(f"{url}/v1/users/ada@shop").json()["event_count"] == 3


def test_the_url_restores_user_and_search_and_back_returns(browser: Browser, page: Page, url: str) -> None:
    events = [{"user_id": "grace & co", "item_id": f"item-{row}"} for row in (4, 8)]
    httpx.post(f"{url}/v1/events", json=events).raise_for_status()
    click(page, "item-3")
    own = page.input_value("#user")
    open_user(page, "grace & co")
    expect(page.locator("#history li")).to_have_count(2)
    page.fill("#query", "item-1")
    page.press("#query", "Enter")
    expect(page).to_have_url(re.compile(r"#user=grace\+%26\+co&query=item-1$"))
    shown = recommended(page)
    with visiting(browser, url) as other:
        other.goto(page.url)
        expect(other.locator("#history li")).to_have_count(2)
        expect(other.locator("#found-line")).to_contain_text("“item-1”")
        assert (recommended(other), other.input_value("#user")) == (shown, "grace & co")
    page.go_back()
    expect(page.locator("#history li")).to_have_count(1)
    expect(page.locator("#user")).to_have_value(own)
    expect(page.locator("#undo")).to_be_enabled()  # it is still the visitor of this page
    page.go_forward()
    expect(page.locator("#user")).to_have_value("grace & co")
    expect(page.locator("#query")).to_have_value("item-1")
    page.click("#reset")
    expect(page.locator("#history li")).to_have_count(0)
    expect(page).to_have_url(re.compile(r"/playground/#query=item-1$"))


def test_starting_over_deletes_the_visitor(page: Page, url: str) -> None:
    click(page, "item-3")
    user = page.input_value("#user")
    assert httpx.get(f"{url}/v1/users/{user}").status_code == 200
    page.click("#reset")
    expect(page.locator("#history li")).to_have_count(0)
    assert httpx.get(f"{url}/v1/users/{user}").status_code == 404

"""Errors in the playground: refused requests, missing keys, and an unreachable service."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from app.http.auth import keys
from app.settings import Settings
from tests.app.http.playground.conftest import click, open_user, recommended, visiting
from tests.app.service_process import serve_in_thread
from tests.waiting import wait_until


def test_a_failed_undo_can_be_repeated(browser: Browser, url: str) -> None:
    with visiting(browser, url, expected="ERR_FAILED") as page:
        click(page, "item-3")
        before = recommended(page)
        click(page, "item-40")
        page.route("**/events/*", lambda route: route.abort())
        page.click("#undo")
        expect(page.locator("#notice")).to_contain_text("cannot be reached")
        page.unroute("**/events/*")
        page.click("#undo")
        expect(page.locator("#history li")).to_have_count(1)
        expect(page.locator("#notice")).to_be_hidden()
        assert recommended(page) == before


def test_a_click_without_a_response_can_be_undone(browser: Browser, url: str) -> None:
    with visiting(browser, url, expected="ERR_FAILED") as page:
        click(page, "item-3")
        before = recommended(page)
        page.route("**/v1/events", lambda route: (route.fetch(), route.abort()))
        page.click("#recommendations li:first-child button")
        expect(page.locator("#notice")).to_contain_text("cannot be reached")
        page.unroute("**/v1/events")
        page.click("#undo")
        expect(page.locator("#notice")).to_be_hidden()
        assert recommended(page) == before


def test_late_responses_are_not_shown_for_another_user(browser: Browser, url: str) -> None:
    events = [{"user_id": "grace@shop", "item_id": f"item-{row}"} for row in (4, 8)]
    httpx.post(f"{url}/v1/events", json=events).raise_for_status()
    with visiting(browser, url, expected="ERR_FAILED|status of 422") as page:
        click(page, "item-3")
        page.check("#personal")
        expect(page.locator("#found-line")).to_contain_text("best for this user")
        page.route("**/v1/**", lambda route: route.abort())
        open_user(page, "grace@shop")
        expect(page.locator("#notice")).to_contain_text("cannot be reached")
        expect(page.locator("#recommendations li, #found li, #history li, #source:not(:empty)")).to_have_count(0)
        expect(page.locator("#state-size")).to_be_empty()
        page.unroute("**/v1/**")
        page.click("#rules summary")
        page.fill("#filter", "item.")
        page.click("text=Apply")
        expect(page.locator("#filter-fault")).to_contain_text("at character")
        expect(page.locator("#recommendations li")).to_have_count(0)
        expect(page.locator("#history li")).to_have_count(2)
        expect(page.locator("#state-size")).to_have_text("2 events")


def test_the_page_asks_for_a_key_if_needed(browser: Browser, model_dir: Path, tmp_path: Path) -> None:
    text, key = keys.make("main", ["events:write", "recs:read", "users:admin"])
    keys.add(tmp_path / "keys", key)
    settings = Settings(model_dir=model_dir, data_dir=tmp_path, keys_file=tmp_path / "keys", playground=True)
    with serve_in_thread(settings) as url, visiting(browser, url, expected="status of 40[13]") as page:
        expect(page.locator("#notice")).to_contain_text("key")
        page.evaluate("""() => {
            window.announced = []
            const hear = () => announced.push(document.querySelector("#failure").textContent)
            new MutationObserver(hear).observe(document.querySelector("#failure"), { childList: true })
        }""")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        wait_until(lambda: "key" in page.evaluate("announced.at(-1) ?? ''"))
        expect(page.locator("#key")).to_be_focused()
        assert page.evaluate("announced[0]") == ""
        page.fill("#key", text)
        page.keyboard.press("Enter")
        expect(page.locator("#query")).to_be_focused()
        click(page, "item-3")
        expect(page.locator("#source")).to_have_text("personalised")
        expect(page.locator("#key-form")).to_be_hidden()
        expect(page.locator("#figures")).to_contain_text("unavailable")  # that needs one more scope


def test_errors_of_the_service_are_shown(browser: Browser, url: str) -> None:
    with visiting(browser, url, expected="status of 422") as page:
        expect(page.locator("#recommendations li")).to_have_count(10)  # the page has named its visitor
        user = page.input_value("#user")
        page.fill("#user", "nobody\u0085here")
        page.keyboard.press("Enter")
        expect(page.locator("#notice")).to_contain_text("not valid")
        expect(page.locator("#retry")).to_be_hidden()
        open_user(page, "x" * 129)
        expect(page.locator("#notice")).to_contain_text("1 to 128 characters")
        page.reload()
        expect(page.locator("#recommendations li")).to_have_count(10)
        assert page.input_value("#user") == user  # not one that the service refuses


def test_a_failed_page_load_is_retried(browser: Browser, url: str) -> None:
    with visiting(browser, url, expected="ERR_FAILED") as page:
        page.route("**/v1/**", lambda route: route.abort())
        page.reload()
        expect(page.locator("#notice")).to_contain_text("cannot be reached")
        page.unroute("**/v1/**")
        page.click("text=Try again")
        expect(page.locator("#recommendations li")).to_have_count(10)
        expect(page.locator("#found li")).to_have_count(20)
        expect(page.locator("#query")).to_be_focused()
        page.route("**/v1/**", lambda route: route.abort())
        page.click("#recommendations li:first-child .item")
        expect(page.locator("#notice")).to_contain_text("cannot be reached")
        expect(page.locator("#retry")).to_be_hidden()


def test_a_timeout_is_shown_as_unreachable(browser: Browser, url: str) -> None:
    with visiting(browser, url) as page:
        expect(page.locator("#recommendations li")).to_have_count(10)
        page.add_init_script("window.late = new AbortController(); AbortSignal.timeout = () => late.signal")
        held: list[Route] = []
        page.route("**/v1/**", lambda route: held.append(route))
        page.reload()
        wait_until(lambda: page.evaluate("document.readyState") == "complete" and held)
        page.evaluate("late.abort(new DOMException('', 'TimeoutError'))")
        expect(page.locator("#notice")).to_contain_text("the service does not answer; try again")
        page.unroute("**/v1/**")
        page.evaluate("late = new AbortController()")
        page.click("#retry")
        expect(page.locator("#recommendations li")).to_have_count(10)
        expect(page.locator("#notice")).to_be_hidden()


@pytest.mark.parametrize("path", ["**/recommendations?*", "**/v1/model"])
def test_a_refused_first_request_is_retried(browser: Browser, url: str, path: str) -> None:
    with visiting(browser, url, expected="status of 503") as page:
        expect(page.locator("#recommendations li")).to_have_count(10)
        page.route(path, lambda route: route.fulfill(status=503, body="no server is available"))
        page.reload()
        expect(page.locator("#notice")).to_contain_text("the service answered 503")
        page.unroute(path)
        page.click("text=Try again")
        expect(page.locator("#recommendations li")).to_have_count(10)
        expect(page.locator("#notice")).to_be_hidden()


def test_a_failed_load_of_another_user_is_retried(browser: Browser, url: str) -> None:
    with visiting(browser, url, expected="ERR_FAILED|status of 404") as page:
        page.route("**/v1/**", lambda route: route.abort())
        page.reload()
        expect(page.locator("#notice")).to_contain_text("cannot be reached")
        open_user(page, "ann")
        expect(page.locator("#retry")).to_be_visible()
        page.unroute("**/v1/**")
        open_user(page, "bob")
        expect(page.locator("#recommendations li")).to_have_count(10)
        expect(page.locator("#figures")).to_contain_text("tiny in 1 process")  # as if the page had been filled at first
        page.route("**/v1/**", lambda route: route.abort())
        open_user(page, "ann")
        expect(page.locator("#recommendations li")).to_have_count(0)
        page.unroute("**/v1/**")
        page.click("text=Try again")
        expect(page.locator("#recommendations li")).to_have_count(10)
        expect(page.locator("#user")).to_have_value("ann")


@pytest.mark.parametrize("script", ["playground.js", "timing.js"])
def test_a_missing_script_is_reported(browser: Browser, url: str, script: str) -> None:
    with visiting(browser, url, expected="ERR_FAILED") as page:
        expect(page.locator("#recommendations li")).to_have_count(10)
        expect(page.locator("#unstarted")).to_have_count(0)
        page.route(f"**/{script}", lambda route: route.abort())
        page.reload()
        expect(page.locator("#unstarted")).to_be_visible()
        page.unroute(f"**/{script}")
        page.reload()
        expect(page.locator("#recommendations li")).to_have_count(10)


def test_an_id_of_spaces_is_ignored(page: Page) -> None:
    user = page.input_value("#user")
    page.on("request", lambda request: pytest.fail(request.url) if "/users/" in request.url else None)
    open_user(page, "   ")
    assert page.evaluate("document.querySelector('#user').validationMessage") == "Enter an id that is not only spaces."
    assert page.evaluate("JSON.parse(localStorage.getItem('lisarec.playground')).id") == user

"""The page itself: escaping, accessibility, and explanations."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.app.conftest import SHAPE
from tests.app.http.playground.conftest import click, open_user, recommended, serious, visiting

pytest_plugins = "pytester"

TITLE = "<img src=x onerror=alert(1)> \"tea\" & 'pot' \U0001f375"
HEBREW = "\u05e9\u05dc\u05d5\u05dd <b>"


def test_the_card_shows_the_model_and_its_quality(page: Page, url: str) -> None:
    served = httpx.get(f"{url}/v1/model").json()
    served["generation"] = TITLE
    served["config"]["data"] |= {"sha256": "abcdef0123456789" * 4, "events": 12345, "users": 678}
    epochs = [(0, 0.21, 0.41), (1, 0.23, 0.44), (2, 0.22, 0.45)]  # the weights of the best one were kept
    served["metrics"] = {"epochs": [dict(zip(("epoch", "ndcg_at_10", "hr_at_10"), one, strict=True)) for one in epochs]}
    page.route("**/v1/model", lambda route: route.fulfill(json=served))
    page.reload()
    expect(page.locator("#model-line")).to_have_text(f"{TITLE} · 60 items · lisa-mini")
    card = dict(
        zip(page.locator("#model dt").all_inner_texts(), page.locator("#model dd").all_inner_texts(), strict=True)
    )
    assert card == {
        "generation": f"{TITLE}, {served['tag']}",
        "items": "60",
        "learned from": "12,345 events of 678 users",
        "on validation": "HR@10 0.440, NDCG@10 0.230 (split loo, seen rule all, data abcdef0123456789)",
        "a user's state": f"at most {served['state_bytes']:,} bytes, however long the history",
        "histogram": "2 rates \u00d7 3 codebooks \u00d7 8 codewords",
    }


def test_a_failed_search_is_shown_until_the_next_one(browser: Browser, url: str) -> None:
    with visiting(browser, url, expected="ERR_FAILED") as page:
        click(page, "item-3")
        page.route("**/v1/items?*", lambda route: route.abort())
        page.fill("#query", "item-4")
        expect(page.locator("#found-line")).to_contain_text("cannot be reached")
        expect(page.locator("#found li")).to_have_count(0)
        page.click("#recommendations li:first-child .item")
        expect(page.locator("#history li")).to_have_count(2)
        expect(page.locator("#found-line")).to_contain_text("cannot be reached")
        page.unroute("**/v1/items?*")
        click(page, "item-5")
        expect(page.locator("#notice")).to_be_hidden()


def test_titles_are_escaped(page: Page, url: str) -> None:
    click(page, "item-3")
    first, second = (item_id for item_id, _ in recommended(page)[:2])
    for item_id, title in ((first, TITLE), (second, HEBREW)):
        words = {"title": title, "categories": [title]}
        httpx.put(f"{url}/v1/items/{item_id}", json=words).raise_for_status()
    page.reload()
    for item_id, title in ((second, HEBREW), (first, TITLE)):
        row = page.locator(f'#recommendations button[data-item-id="{item_id}"]')
        expect(row.locator("b")).to_have_text(title)
        page.mouse.move(5, 5)
        row.hover()
        expect(page.locator("#why b")).to_have_text(title)
    expect(page.locator("#announcement")).to_contain_text(f"first is {TITLE}")
    for item_id, title in ((second, HEBREW), (first, TITLE)):
        click(page, item_id)
        expect(page.locator(f'#found button[data-item-id="{item_id}"] b')).to_have_text(title)
        expect(page.locator(f'#found button[data-item-id="{item_id}"] small')).to_have_text(title)
    page.locator("#recommendations .item").last.hover()
    assert {TITLE, HEBREW} & set(page.locator("#why em").all_inner_texts())
    assert page.locator("#history li").all_inner_texts()[:2] == [TITLE, HEBREW]
    assert page.locator("main img, b b").count() == 0
    directions = "all => all.map(one => getComputedStyle(one).direction)"
    assert page.locator("#history li").evaluate_all(directions)[:2] == ["ltr", "rtl"]
    assert page.locator("#found b").evaluate_all(directions) == ["ltr"]


def test_a_narrow_screen_needs_no_scrolling_sideways(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.click("#recommendations li:first-child button")
    expect(page.locator("#history li")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_search_for_a_long_word_needs_no_scrolling_sideways(page: Page) -> None:
    page.set_viewport_size({"width": 320, "height": 640})
    page.fill("#query", "x" * 256)
    expect(page.locator("#found-line")).to_contain_text("xxx")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


def test_the_page_works_with_the_keyboard_alone(page: Page) -> None:
    page.focus("#query")
    page.keyboard.type("item-33")
    expect(page.locator("#found li")).to_have_count(1)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#history li")).to_have_count(1)
    page.keyboard.press("Tab")  # into the list
    place = "[...document.querySelectorAll('#recommendations .item')].indexOf(document.activeElement)"
    assert page.evaluate(place) == 0
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#history li")).to_have_count(2)
    assert page.evaluate(place) == 2  # the list is another one, and who reads it stays where they were
    expect(page.locator("#announcement")).to_contain_text("Recommendations, personalised: first is")
    page.click("#recommendations li:nth-child(5) button")
    expect(page.locator("#history li")).to_have_count(3)
    assert page.evaluate(place) == 4  # a screen reader clicks like a pointer
    page.focus("#undo")
    for count in (2, 1, 0):
        page.keyboard.press("Enter")
        expect(page.locator("#history li")).to_have_count(count)
    assert page.evaluate("document.activeElement.id") == "history"  # there is nothing more to undo


def test_keys_of_an_input_method_do_not_leave_the_search(page: Page) -> None:
    page.fill("#query", "item-3")
    expect(page.locator("#found-line")).to_contain_text("item-3")
    press = "new KeyboardEvent('keydown', {key: 'ArrowDown', bubbles: true, cancelable: true, isComposing: %s})"
    for is_composing, focused in (("true", "INPUT"), ("false", "BUTTON")):
        page.focus("#query")
        page.evaluate(f"document.querySelector('#query').dispatchEvent({press % is_composing})")
        assert page.evaluate("document.activeElement.tagName") == focused


def test_meaningful_colours_survive_forced_colours(browser: Browser, url: str) -> None:
    colours = "places => places.map(place => getComputedStyle(document.querySelector(place)).backgroundColor)"
    places = [".map i", ".map .touched", "#legend .reads", "#time-bar i.store"]
    found = []
    for forced in ("none", "active"):
        with visiting(browser, url, forced_colors=forced) as page:
            click(page, "item-3")
            expect(page.locator(".map .touched").first).to_be_visible()
            found.append(page.evaluate(colours, places))
    assert found[0] == found[1]


@pytest.mark.parametrize("way", ["pointer", "keys", "finger"])
def test_a_recommendation_is_explained(browser: Browser, url: str, way: str) -> None:
    options: dict[str, Any] = {"has_touch": True, "is_mobile": True, "viewport": {"width": 390, "height": 800}}
    with visiting(browser, url, **(options if way == "finger" else {})) as page:
        click(page, "item-3")
        click(page, "item-40")
        expect(page.locator(".speaks")).to_have_count(0)
        user = page.input_value("#user")
        answer = httpx.get(f"{url}/v1/users/{user}/recommendations", params={"explain": "true"}).json()["items"]
        place = next(place for place, item in enumerate(answer) if place and item["explanation"]["history"])
        item, row = answer[place], page.locator("#recommendations li").nth(place)
        page.mouse.move(5, 5)  # and not where the list may scroll away from under it
        if way == "pointer":
            row.locator(".item").hover()
        elif way == "keys":
            page.focus("#recommendations li:first-child .item")
            for _ in range(place):
                page.keyboard.press("ArrowDown")
        else:
            row.locator(".why").tap()
        bins = {(word["codebook"], word["codeword"]) for word in item["explanation"]["history"]}
        names = ("data-codebook", "data-codeword")
        found = [tuple(int(cell.get_attribute(name) or -1) for name in names) for cell in page.locator(".speaks").all()]
        assert sorted(found) == sorted([*bins] * len(SHAPE.decay_rates))
        recent = [one.get("title") or one["item_id"] for one in item["explanation"]["recent_items"]]
        assert recent
        assert page.locator("#why em").all_inner_texts() == recent
        assert f"Score {item['score']:.2f}" in page.inner_text("#why")
        follows = any(one["follows"] > 0 for one in item["explanation"]["recent_items"])
        assert ("more often after" in page.inner_text("#why")) == follows
        described = row.locator(".item").get_attribute("aria-describedby") or ""
        assert page.locator(f"[id='{described}']").text_content() == page.locator("#why").text_content()
        if way == "finger":
            page.locator(".speaks").first.tap()
            expect(page.locator("#square")).to_contain_text("Codeword")
            expect(page.locator(".speaks")).to_have_count(len(found))  # they are still to be seen
            page.evaluate("document.querySelector('#rules').open = true")
            assert re.search(r"\bclick|\bpoint at", page.inner_text("body"), re.IGNORECASE) is None
            assert page.inner_text("#undo") == "Undo last tap"
        page.focus("#query")
        page.mouse.move(5, 5)
        if way != "finger":
            expect(page.locator(".speaks")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_violation(browser: Browser, url: str, scheme: str) -> None:
    with visiting(browser, url, color_scheme=scheme) as page:
        expect(page.locator("#recommendations li")).to_have_count(10)
        assert serious(page) == []
        events = [{"user_id": page.input_value("#user"), "item_id": f"item-{row}"} for row in range(20)]
        httpx.post(f"{url}/v1/events", json=events).raise_for_status()
        click(page, "item-3")
        click(page, "item-40")
        expect(page.locator("#figures svg").first).to_be_visible()
        page.hover("#recommendations li:first-child .item")
        expect(page.locator("#why em").first).to_be_visible()
        assert serious(page) == []
        page.set_viewport_size({"width": 360, "height": 640})
        assert serious(page) == []


def test_axe_finds_an_injected_violation(page: Page) -> None:
    page.evaluate("document.querySelector('#model-line').style.setProperty('color', '#bbb')")
    page.evaluate("document.querySelector('label[for=query]').remove()")
    assert [one.partition(":")[0] for one in serious(page)] == ["color-contrast", "label"]


def test_a_missing_browser_fails_in_ci(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile("def test_it(browser): pass")
    monkeypatch.setenv("PATH", "")
    for in_ci, outcome in ((True, "errors"), (False, "skipped")):
        monkeypatch.setattr("tests.conftest.IN_CI", in_ci)
        result = pytester.runpytest_inprocess("-rsE", "-p", "tests.conftest")
        assert result.parseoutcomes() == {outcome: 1}
        result.stdout.fnmatch_lines("*there is no Chromium*")


def test_the_browser_ignores_network_changes(browser: Browser) -> None:
    """Otherwise starting a container would abort the requests of a loading page."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # the process has ended
            parents[status.parent] = Path("/proc", *re.findall(r"PPid:\s(\d+)", status.read_text()))
    own = {Path(f"/proc/{os.getpid()}")}
    while children := {process for process, parent in parents.items() if parent in own} - own:
        own |= children
    assert any("chrom" in target(process / "exe") for process in own)
    opened = {target(link) for process in own for link in (process / "fd").glob("*")}
    _, *sockets = (line.split() for line in Path("/proc/net/netlink").read_text().splitlines())
    assert [socket for socket in sockets if socket[1] == "0" and f"socket:[{socket[-1]}]" in opened] == []


def target(link: Path) -> str:
    """The target of the link; empty if the link is missing."""
    try:
        return os.readlink(link)
    except OSError:
        return ""


def test_a_failure_shows_the_browser_console(browser: Browser, url: str) -> None:
    with pytest.raises(ZeroDivisionError) as failed:
        _complain_and_fail(browser, url)
    assert failed.value.__notes__ == ["The browser complained of:\na script did not arrive"]


def _complain_and_fail(browser: Browser, url: str) -> None:
    with visiting(browser, url) as page:
        with page.expect_console_message():
            page.evaluate("console.error('a script did not arrive')")
        raise ZeroDivisionError


def test_popular_items_are_explained(page: Page) -> None:
    page.mouse.move(5, 5)
    page.hover("#recommendations li:first-child .item")
    expect(page.locator("#why")).to_contain_text("is popular")


def test_the_explanation_is_visible_beside_the_list(page: Page) -> None:
    click(page, "item-3")
    for width in (1000, 700):
        page.set_viewport_size({"width": width, "height": 760})
        page.hover("#recommendations li:nth-child(2) .item")
        expect(page.locator("#why small")).to_be_in_viewport()
        page.mouse.move(5, 5)


def test_ids_are_escaped(page: Page, url: str) -> None:
    odd = "<img src=x onerror=alert(1)>/\"'?#100%"
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    httpx.post(f"{url}/v1/events", json={"user_id": odd, "item_id": "item-1"}).raise_for_status()
    open_user(page, odd)
    expect(page.locator("#history li").first).to_have_attribute("data-item-id", "item-1")
    assert page.input_value("#user") == odd
    assert page.locator("main img, body img[onerror]").count() == 0

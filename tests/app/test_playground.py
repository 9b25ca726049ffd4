"""The playground: only where it is wanted, and in a real browser one user's state as it is."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect
from playwright.sync_api import TimeoutError as Timeout

from app import keys
from app.main import create_app
from app.metrics import LATENCY_BUCKETS_S, Metrics
from app.settings import Settings
from benchmarks import playground as benchmark
from model import artifact
from storage.archive import ArchiveWriter
from tests.app.conftest import SHAPE, write_model

Client = httpx.Client


pytest_plugins = "pytester"


@contextmanager
def serving(settings: Settings) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(create_app(settings), port=0, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the service did not start"
        thread.join(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("playground")
    with ArchiveWriter.open(directory / "archive") as writer:
        writer.note_through(time.time() - 2 * 3600)
    settings = Settings(model_dir=model_dir, data_dir=directory, archive_dir=directory / "archive", playground=True)
    with serving(settings) as url:
        yield url


@contextmanager
def visiting(browser: Browser, url: str, expected: str = "(?!)", **options: Any) -> Iterator[Page]:
    """As a visitor who was never there. Errors on the console, and requests to elsewhere, fail the test."""
    context = browser.new_context(reduced_motion="reduce", **{"viewport": {"width": 1200, "height": 900}, **options})
    page = context.new_page()
    page.set_default_timeout(30_000)
    expect.set_options(timeout=30_000)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith((url, "data:")) else wrong.append(request.url))
    try:
        page.goto(f"{url}/playground")
        yield page
    finally:
        context.close()
    assert [text for text in wrong if not re.search(expected, text)] == []


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    with visiting(browser, url) as page:
        expect(page.locator("#recommendations li")).to_have_count(10)
        yield page


def recommended(page: Page) -> list[tuple[str, str]]:
    """Ids and scores as they are shown."""
    rows = page.locator("#recommendations .item").all()
    return [(row.get_attribute("data-item-id") or "", row.locator(".figure").inner_text()) for row in rows]


def click(page: Page, item_id: str) -> None:
    page.fill("#query", item_id)
    page.click(f'#found button[data-item-id="{item_id}"]')
    expect(page.locator("#history li").first).to_have_attribute("data-item-id", item_id)


def open_user(page: Page, user_id: str) -> None:
    page.fill("#user", user_id)
    page.keyboard.press("Enter")


def touched(page: Page) -> set[tuple[int, int, int]]:
    """Rate, codebook and codeword of the bins that glow."""
    cells = page.locator(".touched").all()
    names = ("data-rate", "data-codebook", "data-codeword")
    return {tuple(int(cell.get_attribute(name) or -1) for name in names) for cell in cells}  # type: ignore[misc]


def test_it_is_only_there_where_it_is_wanted(start: Callable[..., Client], tmp_path: Path) -> None:
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
    for part in ("playground.html", "elsewhere.js", "..%2fplayground.py", "%2e%2e"):
        assert client.get(f"/playground/{part}").status_code == 404


def test_a_click_changes_the_list_and_touches_the_item_s_codes(page: Page, url: str, model_dir: Path) -> None:
    expect(page.locator("#source")).to_have_text("popular")
    codes = artifact.load(model_dir).history_codes
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


def test_a_bin_that_has_long_been_full_glows_too(page: Page, url: str, model_dir: Path) -> None:
    """Where things fade as fast as they come, a click leaves its bins as they were."""
    httpx.post(f"{url}/v1/events", json=[{"user_id": "eve", "item_id": "item-7"}] * 40).raise_for_status()
    open_user(page, "eve")
    expect(page.locator("#state-size")).to_have_text("40 events")
    page.fill("#query", "item-7")
    page.click('#found button[data-item-id="item-7"]')
    expect(page.locator("#state-size")).to_have_text("41 events")
    codes = artifact.load(model_dir).history_codes[7].tolist()
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


def test_what_could_not_be_undone_is_undone_the_next_time(browser: Browser, url: str) -> None:
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


def test_a_click_whose_answer_was_lost_can_be_undone(browser: Browser, url: str) -> None:
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


def test_what_is_clicked_at_once_is_done_in_order(page: Page, url: str) -> None:
    """Whoever starts over while a click is under way is forgotten with it, and has no part in the next visitor's."""
    user = page.input_value("#user")
    for _ in range(5):
        page.evaluate("document.querySelector('#recommendations .item').click()")
    page.evaluate("document.getElementById('reset').click()")
    expect(page.locator("#user")).not_to_have_value(user)
    click(page, "item-3")
    assert httpx.get(f"{url}/v1/users/{user}").status_code == 404
    assert len(page.evaluate("JSON.parse(localStorage.getItem('lisarec.playground')).clicks")) == 1


def test_what_a_browser_has_kept_wrongly_is_a_new_visitor(page: Page) -> None:
    page.evaluate("localStorage.setItem('lisarec.playground', '{')")
    page.reload()
    expect(page.locator("#recommendations li")).to_have_count(10)


def test_what_moved_is_said(page: Page) -> None:
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


def test_the_steps_of_a_click_and_their_times(page: Page, url: str) -> None:
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


def test_an_item_that_is_not_available_disappears(page: Page, url: str) -> None:
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


def test_an_item_that_no_model_has_learned_is_said_to_be_so(page: Page, url: str) -> None:
    httpx.put(f"{url}/v1/items/brand-new", json={"title": "Brand new"}).raise_for_status()
    before = recommended(page)
    page.fill("#query", "brand")
    page.click("#found button:has-text('not learned yet')")
    expect(page.locator("#state-size")).to_have_text("1 event")
    assert touched(page) == set()
    page.click("#undo")
    expect(page.locator("#state-size")).to_have_text("0 events")
    assert recommended(page) == before


def test_another_generation_is_shown_when_it_takes_over(browser: Browser, tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "one")
    write_model(
        tmp_path / "models" / "two", shape=SHAPE.model_copy(update={"decay_rates": (0.1,), "history_codebooks": 2})
    )
    settings = Settings(model_dir=tmp_path / "models" / "one", data_dir=tmp_path, playground=True)
    with serving(settings) as url, visiting(browser, url) as page:
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


def test_the_card_says_what_is_served_and_how_good_it_is(page: Page, url: str) -> None:
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
        "a user's state": f"{served['state_bytes']} bytes, however long the history",
        "histogram": "2 rates \u00d7 3 codebooks \u00d7 8 codewords",
    }


def test_a_user_is_opened_and_left_as_they_are(page: Page, url: str) -> None:
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


def test_starting_over_forgets_the_visitor(page: Page, url: str) -> None:
    click(page, "item-3")
    user = page.input_value("#user")
    assert httpx.get(f"{url}/v1/users/{user}").status_code == 200
    page.click("#reset")
    expect(page.locator("#history li")).to_have_count(0)
    assert httpx.get(f"{url}/v1/users/{user}").status_code == 404


def test_where_there_are_keys_it_asks_for_one(browser: Browser, model_dir: Path, tmp_path: Path) -> None:
    text, key = keys.make("main", ["events:write", "recs:read", "users:admin"])
    keys.add(tmp_path / "keys", key)
    settings = Settings(model_dir=model_dir, data_dir=tmp_path, keys_file=tmp_path / "keys", playground=True)
    with serving(settings) as url, visiting(browser, url, expected="status of 40[13]") as page:
        expect(page.locator("#notice")).to_contain_text("key")
        page.fill("#key", text)
        page.keyboard.press("Enter")
        click(page, "item-3")
        expect(page.locator("#source")).to_have_text("personalised")
        expect(page.locator("#key-form")).to_be_hidden()
        expect(page.locator("#figures")).to_contain_text("not to be seen")  # that needs one more scope


def test_what_the_service_refuses_is_said(browser: Browser, url: str) -> None:
    with visiting(browser, url, expected="status of 422") as page:
        page.evaluate("document.getElementById('user').removeAttribute('pattern')")
        page.fill("#user", "nobody here")
        page.keyboard.press("Enter")
        expect(page.locator("#notice")).to_contain_text("not valid")


TITLE = "<img src=x onerror=alert(1)> \"tea\" & 'pot' \U0001f375"
HEBREW = "\u05e9\u05dc\u05d5\u05dd <b>"


def test_titles_are_text(page: Page, url: str) -> None:
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


def test_it_is_used_with_keys_alone(page: Page) -> None:
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


@pytest.mark.parametrize("way", ["pointer", "keys", "finger"])
def test_a_recommendation_is_explained(browser: Browser, url: str, way: str) -> None:
    options = {"has_touch": True, "is_mobile": True, "viewport": {"width": 390, "height": 800}}
    with visiting(browser, url, **(options if way == "finger" else {})) as page:
        click(page, "item-3")
        click(page, "item-40")
        expect(page.locator(".speaks")).to_have_count(0)
        user = page.input_value("#user")
        answer = httpx.get(f"{url}/v1/users/{user}/recommendations", params={"explain": "true"}).json()["items"]
        place = next(place for place, item in enumerate(answer) if place and item["explanation"]["history"])
        item, row = answer[place], page.locator("#recommendations li").nth(place)
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
        described = row.locator(".item").get_attribute("aria-describedby") or ""
        assert page.locator(f"[id='{described}']").text_content() == page.locator("#why").text_content()
        page.focus("#query")
        page.mouse.move(5, 5)
        if way != "finger":
            expect(page.locator(".speaks")).to_have_count(0)


def serious(page: Page) -> list[str]:
    """What axe-core finds to be a serious or critical obstacle for people with disabilities."""
    violations = Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['nodes']}" for one in violations if one["impact"] in ("serious", "critical")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_keeps_people_with_disabilities_out(browser: Browser, url: str, scheme: str) -> None:
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


def test_an_obstacle_would_be_found(page: Page) -> None:
    page.evaluate("document.querySelector('#model-line').style.setProperty('color', '#bbb')")
    page.evaluate("document.querySelector('label[for=query]').remove()")
    assert [one.partition(":")[0] for one in serious(page)] == ["color-contrast", "label"]


def test_without_a_browser_continuous_integration_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile("def test_it(browser): pass")
    monkeypatch.setenv("PATH", "")
    for in_ci, outcome in ((True, "errors"), (False, "skipped")):
        monkeypatch.setattr("tests.conftest.IN_CI", in_ci)
        result = pytester.runpytest_inprocess("-rsE", "-p", "tests.conftest")
        assert result.parseoutcomes() == {outcome: 1}
        result.stdout.fnmatch_lines("*there is no chromium*")


def test_what_is_popular_is_explained_as_such(page: Page) -> None:
    page.mouse.move(5, 5)
    page.hover("#recommendations li:first-child .item")
    expect(page.locator("#why")).to_contain_text("is what many choose")


def test_the_explanation_is_seen_beside_the_list(page: Page) -> None:
    click(page, "item-3")
    for width in (1000, 700):
        page.set_viewport_size({"width": width, "height": 760})
        page.hover("#recommendations li:nth-child(2) .item")
        expect(page.locator("#why small")).to_be_in_viewport()
        page.mouse.move(5, 5)


FIGURES = re.compile(
    r"events [\d.]*[1-9][\d.]*/s requests [\d.]*[1-9][\d.]*/s "
    r"half of them within ≈ [\d.]+ ms 99 of 100 within ≈ [\d.]+ ms failed 0.0/s"
)


def test_the_operator_sees_figures(page: Page, url: str) -> None:
    figures = page.locator("#figures")
    expect(figures).to_contain_text("tiny in 1 process")
    with httpx.Client(base_url=url) as client:
        for _ in range(100):
            client.post("/v1/events", json=[{"user_id": "bob", "item_id": "item-1"}] * 50).raise_for_status()
            shown = " ".join(figures.all_inner_texts()[0].split())
            if FIGURES.search(shown):
                break
            page.wait_for_timeout(100)
        else:
            pytest.fail(shown)
    assert "log lag 2 h" in shown
    page.uncheck("#watch")
    with pytest.raises(Timeout), page.expect_request("**/metrics", timeout=2_500):
        pass


def test_the_operator_s_figures_come_back_with_the_service(browser: Browser, url: str) -> None:
    with visiting(browser, url, expected="ERR_FAILED") as page:
        page.route("**/metrics", lambda route: route.abort())
        expect(page.locator("#figures")).to_contain_text("not to be seen")
        page.unroute("**/metrics")
        expect(page.locator("#figures")).to_contain_text("tiny in 1 process")


def test_quantiles_are_those_of_the_buckets(page: Page) -> None:
    """Of what was answered in between, calls of the service alone, as Prometheus' histogram_quantile has them."""
    rng = np.random.default_rng(3)
    metrics = Metrics()
    expositions, observed = [], rng.lognormal(-5, 1.5, (2, 400))
    for seconds in observed:
        for second in seconds:
            metrics.requests.observe("GET", "/v1/model", 200, float(second))
            metrics.requests.observe("GET", "/healthz", 200, 3.0)
        metrics.sample(0)
        expositions.append(metrics.exposition().decode())
    bounds = np.array([0, *LATENCY_BUCKETS_S])
    under = np.array([(observed[1] <= bound).sum() for bound in bounds])
    for share in (0.5, 0.99):
        found = page.evaluate(
            """async ([share, before, now]) => {
                const { quantile, readMetrics } = await import("/playground/operations.js")
                return quantile(share, readMetrics(now), readMetrics(before))
            }""",
            [share, *expositions],
        )
        assert found == pytest.approx(np.interp(share * 400, under, bounds))


def test_the_benchmark_measures_clicks_and_keys(browser: Browser, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.measure(browser, f"{url}/playground/", rounds=1, clicks=2)
    said = capsys.readouterr().out
    for what in ("first contentful paint", "recommendations painted", "click to new list", "key to what was found"):
        found = re.search(rf"{what} +median +([\d,]+) ms", said)
        assert found is not None, said
        assert int(found[1].replace(",", "")) > 0


def test_the_benchmark_names_every_item(model_dir: Path, tmp_path: Path) -> None:
    items = artifact.load(benchmark.name_items(tmp_path, artifact.load(model_dir), 1000)).items
    assert len(items) == len(set(items.ids)) == len(set(items.titles)) == 1000
    assert items.titles[999] == items.titles[999 % 432].replace("no. 0", "no. 2")
    assert all(items.categories)

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
from tests.app.conftest import SHAPE

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
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
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
    page.goto(f"{url}/playground")
    yield page
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


def touched(page: Page) -> set[tuple[int, int, int]]:
    """Rate, codebook and codeword of the bins that glow."""
    cells = page.locator(".touched").all()
    names = ("data-rate", "data-codebook", "data-codeword")
    return {tuple(int(cell.get_attribute(name) or -1) for name in names) for cell in cells}  # type: ignore[misc]


def test_it_is_only_there_where_it_is_wanted(start: Callable[..., Client], tmp_path: Path) -> None:
    assert start(tmp_path / "a").get("/playground/").status_code == 404
    client = start(tmp_path / "b", playground=True)
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


def test_a_user_is_opened_and_left_as_they_are(page: Page, url: str) -> None:
    events = [{"user_id": "ada@shop", "item_id": f"item-{row}"} for row in (4, 8, 15)]
    httpx.post(f"{url}/v1/events", json=events).raise_for_status()
    page.fill("#user", "ada@shop")
    page.keyboard.press("Enter")
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
        httpx.put(f"{url}/v1/items/{item_id}", json={"title": title}).raise_for_status()
    page.reload()
    for item_id, title in ((second, HEBREW), (first, TITLE)):
        expect(page.locator(f'#recommendations button[data-item-id="{item_id}"] b')).to_have_text(title)
    for item_id, title in ((second, HEBREW), (first, TITLE)):
        click(page, item_id)
        expect(page.locator(f'#found button[data-item-id="{item_id}"] b')).to_have_text(title)
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


def test_quantiles_are_those_of_the_buckets(page: Page) -> None:
    """Of what was answered in between, calls of the service alone, as Prometheus' histogram_quantile has them."""
    rng = np.random.default_rng(3)
    metrics = Metrics()
    expositions, observed = [], rng.lognormal(-5, 1.5, (2, 400))
    for seconds in observed:
        for second in seconds:
            metrics.observe_request("GET", "/v1/model", 200, float(second))
            metrics.observe_request("GET", "/healthz", 200, 3.0)
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

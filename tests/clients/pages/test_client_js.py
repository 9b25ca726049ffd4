"""The browser script: how it is served, and its behaviour in a real browser on the pages of a shop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import BrowserContext, Page

from benchmarks.harness.service_process import free_port, wait_until_ready
from clients.lisarec_client import visitor_in
from storage.state.event import uuid7_time_us
from tests.clients.conftest import HOW_TO, ROOT, Exchange, Proxy, Service
from tests.clients.pages.conftest import NOTE_ANSWERS, STORED, Shop, enter, push, visitor
from tests.waiting import PATIENCE_S, wait_until

YEAR_S = 365 * 86_400
NO_STORAGE = "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('no', 'SecurityError') }})"
NO_COOKIES = "Object.defineProperty(document, 'cookie', {get() { return '' }, set() {}})"


@pytest.fixture
def documented() -> Callable[[str], str]:
    """Returns the script on the pages of docs/how-to/integrate that contains a word."""
    pages = "".join(page.read_text() for page in sorted((HOW_TO / "integrate").glob("*.md")))
    scripts = re.findall(r"^```js\n(.*?)^```$", pages, re.DOTALL | re.MULTILINE)
    return lambda word: next(script for script in scripts if word in script)


def without_service(exchange: Exchange) -> None:
    """Serve only the script, as from the browser cache, and no API."""
    if exchange.path == "/client.js":
        exchange.forward()


def test_the_script_is_small_public_and_cacheable(service: Service) -> None:
    answer = httpx.get(f"{service.url}/client.js")
    assert answer.status_code == 200
    assert len(answer.content) <= 2_048
    assert answer.content == (ROOT / "clients" / "client.js").read_bytes()
    assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
    assert answer.headers["cache-control"] == "public, max-age=3600"
    assert answer.headers["access-control-allow-origin"] == "*"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_documented_page_sends_impressions_and_clicks(
    shop: Shop, context: BrowserContext, integration_script: Callable[[str], str]
) -> None:
    shop.pages["/"] = "<!doctype html><button id='buy'>Buy</button>" + integration_script("html").replace(
        "https://recs.shop.example", shop.service.url
    ).replace("PAGE-KEY", shop.key)
    catalogue_key = {"authorization": f"Bearer {shop.service.add_key('catalogue:write')}"}
    put = httpx.put(f"{shop.service.url}/v1/items/school-bag-red", headers=catalogue_key, json={"title": "School bag"})
    assert put.status_code == 200  # pages post on items that the shop has
    page = context.new_page()
    enter(page, shop)
    page.click("#buy")
    wait_until(lambda: len(shop.service.log(visitor(context))) == 2)
    viewed, bought = shop.service.log(visitor(context))
    assert [(event["item_id"], event["type"]) for event in (viewed, bought)] == [
        ("school-bag-red", "view"),
        ("school-bag-red", "cart"),
    ]
    id_time_us = uuid7_time_us(viewed["event_id"])
    assert id_time_us is not None
    assert abs(id_time_us / 1e6 - time.time()) < PATIENCE_S


def test_visible_items_are_one_impression(
    page: Page, shop: Shop, context: BrowserContext, documented: Callable[[str], str]
) -> None:
    cards = "".join(f"<p data-item=item-{n} style='height: 40px'>tea</p>" for n in range(1, 4))
    page.evaluate("cards => { document.body.innerHTML = cards; self.recommendation_id = 'r' }", cards)
    page.add_script_tag(content=documented("IntersectionObserver"))
    wait_until(lambda: shop.service.log(visitor(context)) if context.cookies() else [])
    (seen,) = shop.service.log(visitor(context))
    assert (seen["type"], seen["recommendation_id"]) == ("impression", "r")
    assert sorted(seen["items"]) == ["item-1", "item-2", "item-3"]


def test_an_item_visible_twice_is_once_in_the_impression(
    page: Page, shop: Shop, context: BrowserContext, documented: Callable[[str], str]
) -> None:
    page.evaluate(
        "() => { document.body.innerHTML = '<p data-item=item-1>tea</p>'.repeat(2); self.recommendation_id = 'r' }"
    )
    page.add_script_tag(content=documented("IntersectionObserver"))
    wait_until(lambda: shop.service.log(visitor(context)) if context.cookies() else [])
    assert [event["items"] for event in shop.service.log(visitor(context))] == [["item-1"]]


def test_the_visitor_s_id_is_in_a_first_party_cookie_for_a_year(
    page: Page, shop: Shop, context: BrowserContext
) -> None:
    push(page, "item-1")
    (cookie,) = context.cookies()
    assert (cookie["domain"], cookie["path"], cookie["sameSite"]) == ("localhost", "/", "Lax")
    assert abs(cookie["expires"] - time.time() - YEAR_S) < 3_600
    first = visitor(context)
    assert visitor_in(first) == first
    enter(page, shop)
    push(page, "item-2")
    assert visitor(context) == first
    context.clear_cookies()  # as the shop does when somebody logs out
    push(page, "item-3")
    assert visitor_in(visitor(context))
    assert visitor(context) != first
    wait_until(lambda: [event["item_id"] for event in shop.service.log(first)] == ["item-1", "item-2"])
    wait_until(lambda: [event["item_id"] for event in shop.service.log(visitor(context))] == ["item-3"])


def test_failed_events_are_resent_by_the_next_page_with_the_same_ids(
    page: Page, shop: Shop, proxy: Proxy, context: BrowserContext
) -> None:
    proxy.play = without_service
    push(page, "item-1", "item-2", "item-3")
    stored = page.evaluate(STORED)
    assert len(stored) == 3
    wait_until(lambda: "/v1/events" in proxy.requests)
    proxy.play = Exchange.forward
    enter(page, shop)
    wait_until(lambda: page.evaluate(STORED) == [])
    assert sorted(shop.service.logged_ids(visitor(context))) == stored  # some were on their way when it came back


def test_unacknowledged_events_count_once(page: Page, shop: Shop, proxy: Proxy, context: BrowserContext) -> None:
    def take_and_hang_up(exchange: Exchange) -> None:
        if exchange.command == "OPTIONS":
            exchange.forward()
        else:
            exchange.ask_service()

    proxy.play = take_and_hang_up
    push(page, "item-1")
    wait_until(lambda: len(shop.service.log(visitor(context))) == 1)
    proxy.play = Exchange.forward
    (stored,) = page.evaluate(STORED)
    enter(page, shop)
    wait_until(lambda: page.evaluate(STORED) == [])
    assert proxy.requests.count("/v1/events") >= 2
    assert shop.service.logged_ids(visitor(context)) == [stored]


def test_a_click_that_leaves_the_page_is_sent(page: Page, shop: Shop, context: BrowserContext) -> None:
    page.evaluate("() => { document.querySelector('a').onclick = () => lisarec.push({item_id: 'item-7'}) }")
    page.click("a")
    page.wait_for_url("**/bye")
    wait_until(lambda: shop.service.log(visitor(context)))
    assert [event["item_id"] for event in shop.service.log(visitor(context))] == ["item-7"]


def test_an_invalid_event_does_not_block_the_others(page: Page, shop: Shop, context: BrowserContext) -> None:
    push(page, "item-1", "no\nid", "item-2")
    wait_until(lambda: page.evaluate(STORED) == [])
    assert sorted(event["item_id"] for event in shop.service.log(visitor(context))) == ["item-1", "item-2"]


@pytest.mark.parametrize("characters", [9_000, 2_000_000])
def test_a_large_event_does_not_block_the_others(
    page: Page, shop: Shop, context: BrowserContext, characters: int
) -> None:
    page.evaluate(f"lisarec.push({{item_id: 'x'.repeat({characters})}})")
    push(page, "item-1")
    wait_until(lambda: page.evaluate(STORED) == [])
    assert [event["item_id"] for event in shop.service.log(visitor(context))] == ["item-1"]


def test_a_large_event_queued_by_an_earlier_script_is_dropped(page: Page, shop: Shop, context: BrowserContext) -> None:
    page.evaluate("localStorage['lisarec:0'] = JSON.stringify({item_id: 'x'.repeat(2e6)})")
    enter(page, shop)
    push(page, "item-1")
    wait_until(lambda: page.evaluate(STORED) == [])
    assert [event["item_id"] for event in shop.service.log(visitor(context))] == ["item-1"]


def test_an_unserialisable_event_does_not_block_the_others(
    page: Page, shop: Shop, proxy: Proxy, context: BrowserContext
) -> None:
    broken = "<script>lisarec = [{item_id: 1n}, {item_id: 'item-1'}]</script>"
    shop.pages["/"] = broken + shop.pages["/"]
    enter(page, shop)
    page.evaluate("for (let n = 0; n < 100; n++) lisarec.push({item_id: 1n})")
    push(page, "item-2")
    wait_until(lambda: len(shop.service.log(visitor(context))) == 2)
    assert sorted(event["item_id"] for event in shop.service.log(visitor(context))) == ["item-1", "item-2"]


@pytest.mark.parametrize(
    ("item_ids", "why"),
    [
        (["no\nid", "nor\nthis"], "{index: 0, field: item_id, reason:"),
        (["unheard-of-1", "unheard-of-2"], "unknown items"),
        ([f"item-{n % 50}" for n in range(130)], "overflow"),
    ],
)
def test_the_console_names_once_why_events_are_dropped(
    page: Page, shop: Shop, proxy: Proxy, item_ids: list[str], why: str
) -> None:
    said: list[str] = []
    page.on("console", lambda line: said.append(f"{line.type}: {line.text}"))
    if len(item_ids) > 100:
        proxy.play = without_service
    page.evaluate(NOTE_ANSWERS)
    push(page, *item_ids)
    page.wait_for_function(f"self.answersRead >= {100 if len(item_ids) > 100 else 1}")
    proxy.play = Exchange.forward
    page.evaluate("lisarec.push({item_id: 'item-1'})")  # which is too many, and has the others sent again
    page.wait_for_function(f"!({STORED}).length")
    (warning,) = [line for line in said if "lisarec" in line]
    assert warning.startswith(f"warning: lisarec dropped {why}"), said


def test_at_most_100_events_are_queued_and_sent_in_order(
    page: Page, shop: Shop, proxy: Proxy, context: BrowserContext
) -> None:
    proxy.play = without_service
    for n in range(130):
        push(page, f"item-{n % 50}")
    stored = page.evaluate(STORED)
    assert len(stored) == 100
    proxy.play = Exchange.forward
    enter(page, shop)
    wait_until(lambda: page.evaluate(STORED) == [])
    assert sorted(shop.service.logged_ids(visitor(context))) == stored


def test_tabs_keep_each_other_s_events(page: Page, shop: Shop, proxy: Proxy, context: BrowserContext) -> None:
    other = context.new_page()
    enter(other, shop)
    proxy.play = without_service
    for n in range(5):
        push(page, f"item-{n}")
        push(other, f"item-{n + 10}")
    wait_until(lambda: len(page.evaluate(STORED)) == 10)  # a tab hears of what another one stores a moment later
    stored = page.evaluate(STORED)
    other.close()
    proxy.play = Exchange.forward
    enter(page, shop)
    wait_until(lambda: page.evaluate(STORED) == [])
    assert sorted(shop.service.logged_ids(visitor(context))) == stored  # several requests were on their way


def test_events_stay_queued_until_acknowledged(page: Page, shop: Shop, proxy: Proxy, context: BrowserContext) -> None:
    def be_another_site(exchange: Exchange) -> None:
        if exchange.command == "POST":
            exchange.answer(200, b"<!doctype html>", {"Access-Control-Allow-Origin": exchange.headers["origin"]})
        else:
            exchange.forward()

    proxy.play = be_another_site
    page.evaluate(NOTE_ANSWERS)
    push(page, "item-1")
    page.wait_for_function("self.answersRead")
    proxy.play = Exchange.forward
    enter(page, shop)
    page.wait_for_function(f"!({STORED}).length")
    assert [event["item_id"] for event in shop.service.log(visitor(context))] == ["item-1"]


def test_events_are_sent_without_local_storage(shop: Shop, proxy: Proxy, context: BrowserContext) -> None:
    context.add_init_script(NO_STORAGE)
    shop.open_to(proxy.url)
    page = context.new_page()
    enter(page, shop)
    push(page, "item-1", "item-2")
    wait_until(lambda: len(shop.service.log(visitor(context))) == 2)


def test_visitors_without_cookies_are_not_tracked(shop: Shop, proxy: Proxy, context: BrowserContext) -> None:
    context.add_init_script(NO_COOKIES)
    shop.open_to(proxy.url)
    page = context.new_page()
    enter(page, shop)
    push(page, "item-1")
    page.wait_for_timeout(1_200)
    assert set(proxy.requests) == {"/client.js"}


@pytest.fixture
def tutorial_url(service: Service, tmp_path: Path) -> Iterator[str]:
    """The shop of docs/tutorials/shop-page.md, with its own keys and a free port."""
    text = (ROOT / "docs" / "tutorials" / "shop-page.md").read_text()
    found = re.findall(r"^```(html|python)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    scripts = dict(reversed(found))  # the first of each language is a whole file
    url = f"http://localhost:{(port := free_port())}"
    (tmp_path / "page.html").write_text(scripts["html"])
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "clients"),
        "LISAREC_URL": service.url,
        "PAGE_KEY": service.add_key("events:write", origins=[url]),
        "BACKEND_KEY": service.add_key("recs:read"),
    }
    backend = subprocess.Popen(
        [sys.executable, "-c", scripts["python"].replace("3000", str(port))],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", backend, "/")
        yield url
    finally:
        backend.kill()
        backend.wait()


def test_the_page_of_the_tutorial_shows_personalised_lists(
    service: Service, tutorial_url: str, context: BrowserContext
) -> None:
    page = context.new_page()
    page.goto(f"{tutorial_url}/?item=item-3")
    wait_until(lambda: context.cookies())
    (view,) = wait_until(lambda: service.log(visitor(context)))
    assert (view["item_id"], view["type"]) == ("item-3", "view")

    def is_personal() -> bool:
        page.reload(wait_until="networkidle")  # where 250 ms were too short, the list is the fallback
        return re.search("from=.", page.get_attribute("#list a", "href") or "") is not None

    wait_until(is_personal)
    page.click("#list a")
    page.click("#cart")
    (cart,) = wait_until(lambda: [event for event in service.log(visitor(context)) if event["type"] == "cart"])
    assert cart["recommendation_id"]
    assert cart["item_id"] == page.inner_text("#item")

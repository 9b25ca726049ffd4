"""Pages of a shop in a real browser, with the script of the service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler

import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from tests.clients.conftest import Proxy, Service

STORED = "Object.keys(localStorage).filter(name => name.startsWith('lisarec:')).map(name => name.slice(8)).sort()"
# a timer is due when the script has done with the answer what it does at once
NOTE_ANSWERS = """() => {
  const own = fetch
  fetch = (...asked) => (self.requests++, own(...asked).finally(() => setTimeout(() => self.answersRead++)))
  self.requests = self.answersRead = 0
}"""


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """The browser context of a new visitor."""
    context = browser.new_context()
    yield context
    context.close()


class Shop:
    """Pages of another origin than the service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.url = self.key = ""
        self.pages: dict[str, str] = {}

    def open_to(self, service_url: str) -> None:
        """The page / with the script from this URL, and a page without it."""
        self.pages["/"] = (
            f'<script async src="{service_url}/client.js" data-key="{self.key}"></script><a href="/bye">bye</a>'
        )
        self.pages["/bye"] = "Goodbye"


@pytest.fixture
def shop(service: Service, serve_http: Callable[[type[BaseHTTPRequestHandler]], str]) -> Shop:
    shop = Shop(service)

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = shop.pages.get(self.path)
            self.send_response(200 if page else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write((page or "").encode())

        def log_message(self, *_: object) -> None: ...

    shop.url = serve_http(Pages).replace("127.0.0.1", "localhost")
    shop.key = service.add_key("events:write", origins=[shop.url])
    return shop


@pytest.fixture
def page(shop: Shop, proxy: Proxy, context: BrowserContext) -> Page:
    """A page of the shop whose script reaches the service through the proxy."""
    shop.open_to(proxy.url)
    page = context.new_page()
    enter(page, shop)
    return page


def enter(page: Page, shop: Shop) -> None:
    page.goto(shop.url)
    page.wait_for_function("window.lisarec?.push && !Array.isArray(window.lisarec)")


def push(page: Page, *item_ids: str) -> None:
    page.evaluate("ids => { for (const item_id of ids) lisarec.push({item_id}) }", list(item_ids))


def visitor(context: BrowserContext) -> str:
    (cookie,) = [cookie for cookie in context.cookies() if cookie["name"] == "lisarec"]
    return cookie["value"]

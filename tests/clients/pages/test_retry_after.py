"""The browser script honours Retry-After, across pages."""

from __future__ import annotations

import threading

from playwright.sync_api import BrowserContext, Page

from tests.clients.conftest import Exchange, Proxy
from tests.clients.pages.conftest import NOTE_ANSWERS, STORED, Shop, enter, push, visitor
from tests.waiting import PATIENCE_S


def be_busy(exchange: Exchange) -> None:
    """Answer with Retry-After of an hour."""
    if exchange.command == "POST":
        exchange.refuse(429, "too_many_requests", "3600")
    else:
        exchange.forward()


def enter_with_a_clock(page: Page, shop: Shop, context: BrowserContext) -> None:
    """Open a page with a fake clock that records requests of every page."""
    context.clock.install()
    context.add_init_script(f"({NOTE_ANSWERS})()")
    enter(page, shop)


def test_no_request_is_sent_during_retry_after(page: Page, proxy: Proxy) -> None:
    proxy.play = be_busy
    page.evaluate(NOTE_ANSWERS)
    push(page, "item-1")
    page.wait_for_function("self.answersRead")
    proxy.requests.clear()
    push(page, "item-2")
    page.wait_for_timeout(1_500)
    assert proxy.requests == []
    assert len(page.evaluate(STORED)) == 2


def test_another_response_does_not_end_retry_after(page: Page, proxy: Proxy) -> None:
    has_both, was_refused = threading.Event(), threading.Event()

    def refuse_one(exchange: Exchange) -> None:
        if b"item-1" in exchange.body:
            has_both.wait(PATIENCE_S)
            be_busy(exchange)
        else:
            if exchange.command == "POST":
                has_both.set()
                was_refused.wait(PATIENCE_S)
            exchange.forward()

    proxy.play = refuse_one
    page.evaluate(NOTE_ANSWERS)
    push(page, "item-1")
    push(page, "item-2")
    page.wait_for_function("self.answersRead == 1")
    was_refused.set()
    page.wait_for_function(f"({STORED}).length == 1")
    push(page, "item-3")
    assert page.evaluate("self.requests") == 2


def test_the_later_of_two_retry_after_times_counts(
    page: Page, shop: Shop, proxy: Proxy, context: BrowserContext
) -> None:
    has_both, nine_seconds_passed = threading.Event(), threading.Event()

    def refuse_both(exchange: Exchange) -> None:
        if exchange.command != "POST":
            exchange.forward()
        elif b"item-1" in exchange.body:
            has_both.wait(PATIENCE_S)
            exchange.refuse(429, "too_many_requests", "10")
        else:
            has_both.set()
            nine_seconds_passed.wait(PATIENCE_S)
            exchange.refuse(429, "too_many_requests", "9")

    proxy.play = refuse_both
    enter_with_a_clock(page, shop, context)
    push(page, "item-1")
    push(page, "item-2")
    page.wait_for_function("self.answersRead == 1")
    context.clock.fast_forward("00:09")
    nine_seconds_passed.set()
    page.wait_for_function("self.answersRead == 2")
    context.clock.fast_forward("00:07")
    push(page, "item-3")
    assert page.evaluate("self.requests") == 2
    proxy.play = Exchange.forward
    context.clock.fast_forward("00:03")
    push(page, "item-4")
    page.wait_for_function(f"!({STORED}).length")
    assert len(shop.service.log(visitor(context))) == 4


def test_the_next_page_respects_the_remaining_retry_after(
    page: Page, shop: Shop, proxy: Proxy, context: BrowserContext
) -> None:
    proxy.play = be_busy
    enter_with_a_clock(page, shop, context)
    push(page, "item-1")
    page.wait_for_function("self.answersRead")
    enter(page, shop)
    context.clock.fast_forward("58:00")
    push(page, "item-2")
    assert page.evaluate("self.requests") == 0
    proxy.play = Exchange.forward
    context.clock.fast_forward("02:00")
    push(page, "item-3")
    page.wait_for_function(f"!({STORED}).length")
    assert len(shop.service.log(visitor(context))) == 3


def test_a_clock_set_back_extends_retry_after_by_at_most_an_hour(
    page: Page, shop: Shop, context: BrowserContext
) -> None:
    context.clock.install()
    page.evaluate("localStorage.lisarecEnd = Date.now() + 864e5")
    enter(page, shop)
    enter(page, shop)
    context.clock.fast_forward("01:00:00")
    push(page, "item-1")
    page.wait_for_function(f"!({STORED}).length")

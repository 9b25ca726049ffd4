"""The cart and the search of the playground, against the responses of the service to the same requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from app.settings import Settings
from model.artifact import model_directory
from model.artifact.item_statistics import ItemStatistics
from model.lisa.item_complements import Complements
from tests.app.conftest import ITEMS, write_model
from tests.app.http.playground.conftest import click, recommended, serious, visiting
from tests.app.service_process import serve_in_thread
from tests.waiting import wait_until

EACH = 4  # complements of an item


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("cart")
    plain = model_directory.load(write_model(directory / "tiny"))
    rows = (np.arange(ITEMS)[:, None] + np.array([1, 7, 11, 20])[:EACH]) % ITEMS
    complements = Complements(rows.astype(np.int32), np.tile(np.linspace(3, 1, EACH, dtype=np.float32), (ITEMS, 1)))
    statistics = ItemStatistics(complements)
    model_directory.save(directory / "tiny", plain.model, plain.config, plain.items, plain.metrics, statistics)
    with serve_in_thread(Settings(model_dir=directory / "tiny", data_dir=directory / "state", playground=True)) as url:
        yield url


@pytest.fixture
def visitor(browser: Browser, shop: str) -> Iterator[Page]:
    with visiting(browser, shop) as page:
        expect(page.locator("#recommendations li")).to_have_count(10)
        yield page


def ids(answer: httpx.Response) -> list[str]:
    return [item["item_id"] for item in answer.raise_for_status().json()["items"]]


def shown(page: Page, list_id: str) -> list[str]:
    rows: list[str] = page.locator(f"#{list_id} [data-item-id]").evaluate_all(
        "all => all.map(one => one.dataset.itemId)"
    )
    return rows


def listed(url: str, page: Page, **query: Any) -> list[str]:
    path = f"{url}/v1/users/{page.input_value('#user')}/recommendations"
    return ids(httpx.get(path, params={"k": 10, "explain": "true", **query}))


def together(url: str, *item_ids: str) -> list[str]:
    wanted = {"history": [], "basket": item_ids, "basket_only": True, "k": 6}
    return ids(httpx.post(f"{url}/v1/recommendations", json=wanted))


def put(page: Page, item_id: str) -> None:
    page.fill("#query", item_id)
    expect(page.locator("#found-line")).to_contain_text(f"\u201c{item_id}\u201d")
    page.click(f'#found li:has([data-item-id="{item_id}"]) .add')


def test_a_cart_shows_complements_and_changes_the_list(visitor: Page, shop: str) -> None:
    click(visitor, "item-3")
    without = listed(shop, visitor)
    put(visitor, "item-30")
    expect(visitor.locator("#basket li")).to_have_count(1)
    wait_until(lambda: shown(visitor, "together") == together(shop, "item-30"))
    assert together(shop, "item-30") == ids(httpx.get(f"{shop}/v1/items/item-30/together", params={"k": 6}))
    put(visitor, "item-40")
    put(visitor, "item-40")  # which it has
    wait_until(lambda: shown(visitor, "together") == together(shop, "item-30", "item-40"))
    expect(visitor.locator("#basket li")).to_have_count(2)
    wait_until(lambda: shown(visitor, "recommendations") == listed(shop, visitor, basket=["item-30", "item-40"]))
    assert shown(visitor, "recommendations") != without
    visitor.mouse.move(5, 5)
    visitor.hover("#recommendations li:first-child .item")
    expect(visitor.locator("#why")).to_contain_text("for the cart")
    assert serious(visitor) == []
    visitor.click("#basket li:first-child button")
    wait_until(lambda: shown(visitor, "together") == together(shop, "item-40"))
    wait_until(lambda: shown(visitor, "recommendations") == listed(shop, visitor, basket=["item-40"]))
    visitor.click("#basket button")
    expect(visitor.locator("#cart")).to_be_hidden()
    wait_until(lambda: shown(visitor, "recommendations") == without)


def test_another_visitor_has_an_empty_cart(visitor: Page, shop: str) -> None:
    user = visitor.input_value("#user")
    put(visitor, "item-30")
    expect(visitor.locator("#cart")).to_be_visible()
    visitor.click("#reset")
    expect(visitor.locator("#cart")).to_be_hidden()
    expect(visitor.locator("#user")).not_to_have_value(user)
    assert [item_id for item_id, _ in recommended(visitor)] == listed(shop, visitor)


def test_a_cart_is_filled_with_the_keyboard_alone(visitor: Page) -> None:
    visitor.focus("#recommendations li:first-child .item")
    first = shown(visitor, "recommendations")[0]
    visitor.keyboard.press("ArrowRight")
    visitor.keyboard.press("Enter")
    expect(visitor.locator("#basket li")).to_have_count(1)
    wait_until(lambda: first not in shown(visitor, "recommendations"))
    assert visitor.evaluate("document.activeElement.matches('#recommendations li:first-child .item')")
    visitor.focus("#basket button")
    visitor.keyboard.press("Enter")
    expect(visitor.locator("#cart")).to_be_hidden()
    assert visitor.evaluate("document.activeElement.id") == "query"


def test_the_shown_command_contains_the_cart(visitor: Page) -> None:
    put(visitor, "item-30")
    expect(visitor.locator("#cart")).to_be_visible()
    visitor.click("#rules summary")
    visitor.click("#copy-curl")
    expect(visitor.locator("#curl")).to_contain_text("--data-urlencode 'basket=item-30'")


def test_search_results_follow_the_user_after_every_click(visitor: Page, shop: str) -> None:
    def asked(**user: str) -> list[str]:
        return ids(httpx.get(f"{shop}/v1/items", params={"query": "thing", "limit": 20, **user}))

    visitor.fill("#query", "thing")
    wait_until(lambda: shown(visitor, "found") == asked())
    visitor.check("#personal")
    expect(visitor.locator("#found-line")).to_contain_text("best for this user first")
    user = visitor.input_value("#user")
    orders: list[list[str]] = []
    for place in (2, 5):
        visitor.click(f"#found li:nth-child({place}) .item")
        expect(visitor.locator("#history li")).to_have_count(len(orders) + 1)
        wait_until(lambda: shown(visitor, "found") == asked(user_id=user))
        orders.append(shown(visitor, "found"))
    assert orders[0] != asked()
    assert orders[1] != orders[0]
    assert serious(visitor) == []
    visitor.uncheck("#personal")
    wait_until(lambda: shown(visitor, "found") == asked())

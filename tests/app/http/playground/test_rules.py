"""Rules of a list in the playground: error positions, completion of names, and the equivalent command."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.app.http.playground.conftest import click, recommended, serious, visiting

REFUSED = "422"  # which the browser, too, complains of


@pytest.fixture(scope="module")
def shop(url: str) -> str:
    items = [
        {"item_id": f"item-{row}", "properties": {"price": float(row), "brand": f"b{row % 3}"}} for row in range(60)
    ]
    httpx.post(f"{url}/v1/items", json=items).raise_for_status()
    user = {"properties": {"member": True}}
    httpx.put(f"{url}/v1/users/ann/properties", json=user).raise_for_status()
    return url


@pytest.fixture
def rules(browser: Browser, shop: str) -> Iterator[Page]:
    with visiting(browser, shop, expected=REFUSED, permissions=["clipboard-read", "clipboard-write"]) as page:
        expect(page.locator("#recommendations li")).to_have_count(10)
        page.click("#rules summary")
        yield page


def shown(page: Page) -> list[str]:
    return [item_id for item_id, _ in recommended(page)]


def asked(url: str, page: Page, **query: str) -> list[str]:
    """The list that the service returns to the visitor for the same options."""
    path = f"{url}/v1/users/{page.input_value('#user')}/recommendations"
    answer = httpx.get(path, params={"k": "10", "explain": "true", **query}).raise_for_status().json()
    return [item["item_id"] for item in answer["items"]]


def test_filter_and_boost_change_the_list(rules: Page, shop: str) -> None:
    wishes = {
        "filter": "item.price < params.most && item.brand == current.brand",
        "boost": "item.price > 9.0 ? 5.0 : 0.0",
        "params": '{"most": 15}',
        "current_item": "item-1",
    }
    for name, value in wishes.items():
        rules.fill(f"#{name}", value)
    rules.press("#filter", "Enter")
    expect(rules.locator("#recommendations li")).to_have_count(4)  # without the page's item
    assert shown(rules) == asked(shop, rules, **wishes)
    assert {int(one.removeprefix("item-")) % 3 for one in shown(rules)} == {1}
    rules.fill("#filter", "")
    rules.click("text=Apply")
    expect(rules.locator("#recommendations li")).to_have_count(10)


def test_the_parts_of_a_score_add_up_with_every_rule(rules: Page, shop: str) -> None:
    settings = {"objective": {"property": "price", "strength": 0.5}, "rotation": 0.5}
    httpx.put(f"{shop}/v1/admin/scenarios/worth", json=settings).raise_for_status()
    click(rules, "item-3")
    click(rules, "item-40")
    first = shown(rules)[0]
    impression = {"user_id": rules.input_value("#user"), "type": "impression", "items": [first]}
    httpx.post(f"{shop}/v1/events", json=impression).raise_for_status()
    rules.fill("#scenario", "worth")
    rules.fill("#boost", "item.price > 0.0 ? 0.5 : 0.0")
    rules.click("text=Apply")
    expect(rules.locator("#recommendations li small").first).to_contain_text("for the boost")
    said = rules.locator("#recommendations li small").all_text_contents()
    for line, (_, score) in zip(said, recommended(rules), strict=True):
        total, _, parts = line.partition(": ")
        assert total.endswith(score)
        added = re.findall(r"(?:[+-] ?)?\d+\.\d\d", parts.replace("\N{MINUS SIGN}", "-"))
        numbers = [float(one.replace(" ", "")) for one in added]
        assert sum(numbers) == pytest.approx(float(score), abs=0.005 * (len(numbers) + 1))
    for part in ("for the boost", "for the objective", "for its impressions"):
        assert part in "".join(said)
    httpx.delete(f"{shop}/v1/admin/scenarios/worth").raise_for_status()


REASONS = [
    ({"repeat": {"times": 1, "last_days": 12.04, "interval_days": 30}}, "repeat", "was bought 1 time, 12.0 days ago"),
    ({}, "together", "bought together with the items in the cart"),
    ({"pinned": True}, "repeat", "is pinned to this place"),
    ({}, "popular", "is popular"),
]


@pytest.mark.parametrize(("item", "source", "reason"), REASONS)
def test_a_list_without_a_model_query_names_its_ranking(
    rules: Page, item: dict[str, object], source: str, reason: str
) -> None:
    said = rules.evaluate(
        """async ([item, source]) => {
            const { explain } = await import("/playground/explanation.js");
            return explain({ item_id: "tea", ...item }, source).words[1];
        }""",
        [item, source],
    )
    assert reason in said


def test_a_scenario_is_selected_and_narrowed(rules: Page, shop: str) -> None:
    settings = {"filter": "item.brand == 'b1'", "boost": "item.price > 9.0 ? 5.0 : 0.0"}
    httpx.put(f"{shop}/v1/admin/scenarios/of-b1", json=settings).raise_for_status()
    rules.focus("#scenario")
    expect(rules.locator("#scenarios option")).to_have_attribute("value", "of-b1")
    rules.fill("#scenario", "of-b1")
    rules.fill("#filter", "item.price < 15.0")
    rules.press("#filter", "Enter")
    expect(rules.locator("#recommendations li")).to_have_count(5)
    assert shown(rules) == asked(shop, rules, scenario="of-b1", filter="item.price < 15.0")
    rules.fill("#scenario", "of-b2")
    rules.click("text=Apply")
    expect(rules.locator("#scenario-fault")).to_contain_text("of-b1")  # which is close


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("filter", "item.price < 50.0 && item.brnd == 'b1'"),
        ("filter", "'\U0001f375' == item.brand && item.price << 5.0"),
        ("boost", "item.brand"),
    ],
)
def test_an_error_is_marked_at_its_position(rules: Page, shop: str, field: str, text: str) -> None:
    (detail,) = httpx.get(f"{shop}/v1/users/ann/recommendations", params={field: text}).json()["error"]["details"]
    found = re.match(r"at character (\d+): ", detail["reason"])
    assert found is not None
    rules.fill(f"#{field}", text)
    rules.click("text=Apply")
    fault = rules.locator(f"#{field}-fault")
    expect(fault).to_contain_text(detail["reason"])
    before = "code => [...code.childNodes].slice(0, [...code.childNodes].indexOf(code.querySelector('mark')))"
    assert (
        fault.locator("code").evaluate(f"code => ({before})(code).map(one => one.textContent).join('')")
        == (text[: int(found[1]) - 1])
    )
    expect(fault.locator("mark")).to_have_text(text[int(found[1]) - 1])
    assert fault.locator("code").text_content() == text
    assert rules.get_attribute(f"#{field}", "aria-invalid") == "true"
    assert serious(rules) == []
    rules.fill(f"#{field}", "")
    rules.click("text=Apply")
    expect(fault).to_be_empty()


def test_invalid_parameters_are_reported(rules: Page) -> None:
    rules.fill("#params", '{"most": ')
    rules.click("text=Apply")
    expect(rules.locator("#params-fault")).to_contain_text("is not a JSON object")


def test_the_examples_work_in_every_shop(rules: Page) -> None:
    for name in ("filter", "boost", "params"):
        rules.fill(f"#{name}", rules.inner_text(f"label[for={name}] code"))
    rules.click("text=Apply")
    expect(rules.locator("#recommendations li")).to_have_count(0)  # no item is in the category of the example
    expect(rules.locator("#notice")).to_be_hidden()


def test_property_names_are_completed_with_the_keyboard_alone(rules: Page) -> None:
    rules.focus("#filter")
    rules.keyboard.type("item.p")
    expect(rules.locator("#completions button")).to_have_text(["price", "published_at"])
    rules.keyboard.press("ArrowDown")
    rules.keyboard.press("Enter")
    expect(rules.locator("#filter")).to_be_focused()
    rules.keyboard.type(" < 5.0 && user.")
    expect(rules.locator("#completions button")).to_have_text(["member"])
    assert serious(rules) == []
    rules.keyboard.press("Escape")
    expect(rules.locator("#completions button")).to_have_count(0)
    assert rules.input_value("#filter") == "item.price < 5.0 && user."
    rules.keyboard.type("m")
    rules.click("#completions button")
    assert rules.input_value("#filter") == "item.price < 5.0 && user.member"


def test_the_shown_command_returns_the_same_list(rules: Page) -> None:
    rules.fill("#filter", "item.brand != 'b1' && item.price < 40.0")
    rules.click("text=Apply")
    expect(rules.locator("#recommendations li")).to_have_count(10)
    rules.click("#copy-curl")
    expect(rules.locator("#copied")).to_have_text("copied")
    command = rules.evaluate("navigator.clipboard.readText()")
    assert rules.text_content("#curl") == command
    answer = json.loads(subprocess.run(["bash", "-c", command], capture_output=True, check=True).stdout)
    assert [item["item_id"] for item in answer["items"]] == shown(rules)


@pytest.mark.parametrize("change", ["text", "completion", "cart", "user"])
def test_a_command_for_another_list_disappears(rules: Page, change: str) -> None:
    rules.fill("#filter", "item.pri")
    rules.click("#copy-curl")
    expect(rules.locator("#copied")).to_have_text("copied")
    if change == "text":
        rules.fill("#params", "{}")
    elif change == "completion":
        rules.click("#completions button")
    elif change == "cart":
        rules.fill("#filter", "")
        rules.click("#copy-curl")
        expect(rules.locator("#copied")).to_have_text("copied")
        rules.click("#found li:first-child .add")
    else:
        rules.click("#reset")
    expect(rules.locator("#curl, #copied")).to_have_text(["", ""])

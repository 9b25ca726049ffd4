"""The recipes for shops and industries: each command runs unchanged and returns the documented response.

The scripts of other pages that make tables for the service run here too.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.jobs.import_items import read
from benchmarks.harness.service_process import free_port, wait_until_ready
from model.data.readers import read_interactions
from tests.clients.conftest import HOW_TO, ROOT
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

ANYWHERE = re.DOTALL | re.MULTILINE


def sections_of(page: str) -> dict[str, str]:
    """Sections of a page under docs/how-to by heading."""
    text = (HOW_TO / page).read_text()
    return dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, ANYWHERE))


RULES, ARTICLES = sections_of("lists/recipes.md"), sections_of("industries/articles.md")
GROCERIES, LISTINGS = sections_of("industries/groceries.md"), sections_of("industries/listings.md")
STREAMING, APPS = sections_of("industries/streaming.md"), sections_of("industries/apps.md")
PAGES = RULES | ARTICLES | GROCERIES | LISTINGS | STREAMING | APPS
SECTIONS = sections_of("lists/new-items.md") | sections_of("integrate/items.md") | PAGES
NEWSROOM, GROCER, RECEIPTS = "Publish", "Describe what you sell", "Import the night's receipts"
MARKETPLACE, FORGET = "Post listings", "Relist, take down and forget"
STUDIO = "Describe titles and profiles"
PLAYS, AGES, SHARE = "Post plays", "Keep age limits and licences", "Give originals a fixed share"
PAGE, SEARCH, TRACKS = "Fill a page of rows", "Search within the rules", "Choose the next track"
APP_SHOP, UPLOADS = "Set up a shop", "Pass events on"
SHOP, SCENARIO, PRODUCT_PAGE = "A shop to try them on", "Several under one name", "A product page"
TABLE, CART = "Import a messy export", "With what is in the cart"
VECTORS = "Make vectors from titles"
RECIPES = [name for name in RULES if "```json" in RULES[name] and name != SHOP]


def blocks(section: str, language: str) -> list[str]:
    """Code blocks of a section in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", SECTIONS[section], ANYWHERE)


class Shop:
    """The shop of a page: a service, and a shell in which the page's first commands have run."""

    def __init__(self, directory: Path, url: str, setting: str) -> None:
        self._directory = directory
        self.url = url
        self.setting = setting

    def run(self, commands: str) -> str:
        """Run commands after the definitions of the page; return their output."""
        definitions = self.setting.partition("\n\n")[0]
        program = f"{definitions}\nlisarec() {{ '{sys.executable}' -m app \"$@\"; }}\n{commands}"
        path = f"{ROOT}{os.pathsep}{ROOT / 'clients'}"
        environment = os.environ | {"LISAREC_URL": self.url, "PYTHONPATH": path}
        done = subprocess.run(
            ["bash", "-euc", program], cwd=self._directory, env=environment, capture_output=True, text=True,
            timeout=PATIENCE_S, check=True,
        )  # fmt: skip
        return done.stdout

    def run_python(self, script: str) -> str:
        """Run a script of the page; return its output."""
        return self.run(f"'{sys.executable}' - <<'END'\n{script}\nEND")

    def answer(self, commands: str) -> Any:
        """Run commands; return the response to the last one."""
        return json.loads(self.run(commands).splitlines()[-1])


@contextmanager
def started(directory: Path, setting: str) -> Iterator[Shop]:
    """Start a service without a model, and run the first commands of a page."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    service = subprocess.Popen(
        [sys.executable, "-m", "app", "serve", "--data-dir", str(directory / "state"), "--port", str(port)],
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until_ready(url, service)
        shop = Shop(directory, url, setting)
        shop.run(setting)
        yield shop
    finally:
        service.terminate()
        service.wait(timeout=PATIENCE_S)


def wait_for_scores(shop: Shop, expected: list[float]) -> None:
    """Wait until the service has counted the events of the page's first commands."""

    def scores() -> list[float]:
        answer = httpx.post(f"{shop.url}/v1/recommendations", json={"user_id": "ann", "k": 10}, timeout=PATIENCE_S)
        return [item["score"] for item in answer.json()["items"]]

    wait_until(lambda: scores() == expected, scores)


def wait_for_property_of_users(shop: Shop, name: str) -> None:
    """Wait until expressions can use this property of users."""
    asked = {"user_id": "ann", "k": 10, "filter": f"known(user.{name})"}
    wait_until(lambda: httpx.post(f"{shop.url}/v1/recommendations", json=asked, timeout=PATIENCE_S).is_success)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with started(tmp_path_factory.mktemp("recipes"), blocks(SHOP, "sh")[0]) as shop:
        wait_for_scores(shop, [float(count) for count in range(9, 0, -1)])
        wait_for_property_of_users(shop, "member")
        yield shop


@pytest.fixture(scope="module")
def newsroom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with started(tmp_path_factory.mktemp("articles"), blocks(NEWSROOM, "sh")[0]) as newsroom:
        wait_for_scores(newsroom, [9.0, 8.0, 7.0, 6.0, 5.0])
        yield newsroom


@pytest.fixture(scope="module")
def grocer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with started(tmp_path_factory.mktemp("groceries"), blocks(GROCER, "sh")[0]) as grocer:
        wait_for_scores(grocer, [float(count) for count in range(8, 0, -1)])
        yield grocer


@pytest.fixture(scope="module")
def marketplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with started(tmp_path_factory.mktemp("listings"), blocks(MARKETPLACE, "sh")[0]) as marketplace:
        wait_for_scores(marketplace, [9.0, 8.0, 7.0, 6.0, 5.0])
        wait_for_property_of_users(marketplace, "blocked")
        yield marketplace


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with started(tmp_path_factory.mktemp("streaming"), blocks(STUDIO, "sh")[0]) as studio:
        wait_for_scores(studio, [float(count) for count in range(11, 1, -1)])
        wait_for_property_of_users(studio, "max_age")
        yield studio


@pytest.fixture(scope="module")
def app_shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with started(tmp_path_factory.mktemp("apps"), blocks(APP_SHOP, "sh")[0]) as app_shop:
        wait_for_scores(app_shop, [8.0, 7.0, 6.0, 5.0, 4.0, 3.0])
        yield app_shop


def assert_answer(found: Any, shown: str) -> None:
    """Assert that the page shows this response, except its id."""
    expected = json.loads(shown)
    items = expected.pop("items")
    expected.pop("recommendation_id", None)
    assert {name: found[name] for name in expected} == expected
    assert [item["item_id"] for item in found["items"]] == [item["item_id"] for item in items]
    for one, other in zip(found["items"], items, strict=True):
        assert one == other | {"score": pytest.approx(other["score"], abs=0.001)}


def test_there_are_eleven_recipes() -> None:
    assert len({*RECIPES} - {SCENARIO, PRODUCT_PAGE, CART}) == 11


def test_a_list_without_rules(shop: Shop) -> None:
    (_, plain), (shown,) = blocks(SHOP, "sh"), blocks(SHOP, "json")
    assert_answer(shop.answer(plain), shown)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe(shop: Shop, recipe: str) -> None:
    (commands,), (shown,) = blocks(recipe, "sh"), blocks(recipe, "json")
    try:
        assert_answer(shop.answer(commands), shown)
    finally:
        for path in re.findall(r"/v1/items/\S+", commands):
            httpx.put(f"{shop.url}{path}", json={"available_from": None}, timeout=PATIENCE_S).raise_for_status()


def assert_page(shop: Shop, sections: dict[str, str]) -> None:
    """Check sections in order, because later ones use scenarios of earlier ones."""
    for section in (name for name in sections if "```json" in sections[name]):
        for commands, shown in re.findall(r"^```sh\n(.*?)^```\n(?:\n```json\n(.*?)^```)?", sections[section], ANYWHERE):
            answer = shop.answer(commands)
            if shown:
                assert_answer(answer, shown)


def test_articles(newsroom: Shop) -> None:
    assert_page(newsroom, ARTICLES)


def test_groceries(grocer: Shop) -> None:
    assert_page(grocer, GROCERIES)


def test_listings(marketplace: Shop) -> None:
    """In order of the page, because a listing sold in one section stays sold."""
    assert_page(marketplace, {name: text for name, text in LISTINGS.items() if name != FORGET})
    (commands,), (shown,) = blocks(FORGET, "sh"), blocks(FORGET, "json")
    assert marketplace.answer(commands) == json.loads(shown)


@pytest.fixture(scope="module")
def streaming_rules() -> str:
    """The line of the page that sets the variable with the rules."""
    return blocks(AGES, "sh")[0].partition("\n")[0] + "\n"


@pytest.mark.parametrize("section", [AGES, TRACKS])
def test_streaming_lists(studio: Shop, streaming_rules: str, section: str) -> None:
    (commands,), (shown,) = blocks(section, "sh"), blocks(section, "json")
    assert_answer(studio.answer(streaming_rules + commands), shown)


def test_the_script_for_profiles_prints_the_documented_output(studio: Shop) -> None:
    scripts = [*blocks(PAGE, "python"), *blocks(SEARCH, "python")]
    assert studio.run_python("\n".join(scripts)) == "".join([*blocks(PAGE, "text"), *blocks(SEARCH, "text")])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_page_of_rows_equals_sequential_calls(studio: Shop, k: int) -> None:
    (script,) = blocks(PAGE, "python")
    definitions, _, uses = script.partition("\nrows = ")
    rows = ast.literal_eval(uses.partition("\nfor ")[0])
    print_page = f"print([[item['item_id'] for item in row[2]] for row in page('house-20:ben', {rows}, {k})])"
    shown, expected = list[str](), []
    rules = re.findall('RULES = "(.*)"', definitions)[0]
    for row in rows:
        asked = {"user_id": "house-20:ben", "filter": rules, "k": k, "exclude": shown, **row}
        answer = httpx.post(f"{studio.url}/v1/recommendations", json=asked, timeout=PATIENCE_S).json()
        expected.append([item["item_id"] for item in answer["items"]])
        shown += expected[-1]
    assert ast.literal_eval(studio.run_python(f"{definitions}\n{print_page}")) == expected
    assert len(shown) == len(set(shown))


def test_episodes_of_an_evening_count_once(studio: Shop) -> None:
    (commands,) = blocks(PLAYS, "sh")
    studio.run(commands)
    assert [json.loads(line)["duplicates"] for line in studio.run(commands).splitlines()] == [1, 1, 1]
    log = httpx.get(f"{studio.url}/v1/users/house-21:eve/events", timeout=PATIENCE_S).json()["events"]
    assert [event["item_id"] for event in log] == ["night-train"]


def test_a_share_of_originals(studio: Shop, streaming_rules: str) -> None:
    (commands,) = blocks(SHARE, "sh")
    lists = studio.answer(streaming_rules + commands)["results"]
    titles = [[item["item_id"] for item in one["items"]] for one in lists]
    assert titles == [["fox-school", "north-coast", "red-harbour"], ["night-train", "deep-ice", "bear-days", "old-fox"]]


def test_app_recommendations(app_shop: Shop) -> None:
    """In order of the page, because lists depend on the user of its phone."""
    assert app_shop.run_python("\n".join(blocks(UPLOADS, "python"))) == "".join(blocks(UPLOADS, "text"))
    assert_page(app_shop, APPS)


def test_vectors_from_titles_are_imported(tmp_path: Path) -> None:
    """With a fake model instead of the library's."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "items.csv").write_text("item_id,title,price\n1,Kettle,4.5\n2,,3\n3,Pot,\n")
    (tmp_path / "sentence_transformers.py").write_text(
        "import numpy as np\n"
        "class SentenceTransformer:\n"
        "    def __init__(self, name): pass\n"
        "    def encode(self, texts): return np.array([[len(text), 1] for text in texts], np.float32)\n"
    )
    (script,) = blocks(VECTORS, "python")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=PATIENCE_S)
    found = {item["item_id"]: item["vector"] for item in read(tmp_path / "shop" / "vectors.parquet", {})}
    assert found.keys() == {"1", "3"}
    assert found["1"] == pytest.approx([6 / 37**0.5, 1 / 37**0.5], abs=1e-3)


def test_a_messy_table_is_cleaned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    products = [
        "SKU;Name;Brand;Price;In stock;Launched",
        "a-1;Kettle ;Hill;1,299.00;yes;15.07.2025 10:00",
        "a-2; Pot;;22;yes;",
        "a-2;Iron pot;Forge;23;No;",
        "a-3;Lid, blue;Forge;1.006,50;;",
    ]
    events = [
        "Customer,SKU,When,Action",
        *["ann,a-1,01.12.2025 09:30,view"] * 2,
        "bob,a-2,01.07.2025 09:30,add_to_cart",
        ",a-2,02.07.2025 09:30,add_to_cart",
    ]
    (tmp_path / "products.csv").write_text("\ufeff" + "\n".join(products))
    (tmp_path / "events.csv").write_text("\n".join(events))
    (script,) = blocks(TABLE, "python")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=PATIENCE_S)
    found = read(tmp_path / "shop" / "items.csv", {})
    assert found == [
        {
            "item_id": "a-1",
            "title": "Kettle",
            "available": True,
            "published_at": "2025-07-15T10:00:00+02:00",
            "properties": {"brand": "Hill", "price": 1299.0},
        },
        {
            "item_id": "a-2",
            "title": "Iron pot",
            "available": False,
            "properties": {"brand": "Forge", "price": 23.0},
        },
        {"item_id": "a-3", "title": "Lid, blue", "properties": {"brand": "Forge", "price": 1006.5}},
    ]
    assert not caplog.messages
    interactions = read_interactions(tmp_path / "shop")
    times = [datetime(2025, 12, 1, 8, 30, tzinfo=UTC), datetime(2025, 7, 1, 7, 30, tzinfo=UTC)]
    assert sorted(interactions.timestamp_us.tolist()) == sorted(round(time.timestamp() * 1e6) for time in times)
    assert sorted(interactions.type_names) == ["add_to_cart", "view"]


def test_receipts_count_once_and_returns_are_removed(tmp_path: Path) -> None:
    """Receipts of three nights, each imported twice, the last one together with the first."""
    draw, nights = random.Random(0), list[list[str]]()
    bought: dict[str, Counter[str]] = defaultdict(Counter)
    sold: list[tuple[str, str, str]] = []
    for night in range(3):
        lines = []
        for number in range(8):
            receipt, card = f"4-{night}{number}", draw.choice(["", "ann", "jürg"])
            lines += [f"{receipt};;{card};{item};2;1.002,50;2{night}.10.2026;18:0{number}" for item in ("milk", "tea")]
            sold += [(receipt, card, item) for item in ("milk", "tea")]
            bought[card or f"till-{receipt}"].clear()
        for number, (receipt, card, item) in enumerate(draw.sample(sold, 4)):
            sold.remove((receipt, card, item))
            lines.append(f"4-R{night}{number};{receipt};{card};{item};-2;-1.002,50;2{night}.10.2026;19:00")
        nights.append(lines)
    for receipt, card, item in sold:
        bought[card or f"till-{receipt}"][f"{receipt}:{item}"] += 1
    nights[2] += nights[0]
    (script,) = blocks(RECEIPTS, "python")
    with started(tmp_path, "") as shop:
        environment = os.environ | {"LISAREC_URL": shop.url, "PYTHONPATH": str(ROOT / "clients")}
        for lines in nights:
            text = "\n".join(["Receipt;Cancels;Card;Item;Quantity;Amount;Date;Time", *lines])
            (tmp_path / "receipts.csv").write_text(text, encoding="cp1252")
            for _ in range(2):
                command = [sys.executable, "-c", script]
                subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=PATIENCE_S)
        found: dict[str, Counter[str]] = {}
        for user in bought:
            answer = httpx.get(f"{shop.url}/v1/users/{user}/events", params={"limit": 1_000}, timeout=PATIENCE_S)
            entries = answer.raise_for_status().json()["events"]
            taken_back = {entry["undo"] for entry in entries if "undo" in entry}
            events = [entry for entry in entries if "undo" not in entry and entry["event_id"] not in taken_back]
            assert all((event["type"], event["value"]) == ("purchase", 1002.5) for event in events)
            found[user] = Counter(f"{event['order_id']}:{event['item_id']}" for event in events)
    assert found == bought

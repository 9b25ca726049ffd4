"""Measure the playground with a large catalogue in headless Chromium: first paint, clicks and searches.

The catalogue has the weights of a trained model, codes with a similar distribution, and titles of a shop. The page
measures every figure itself: from the timestamp of a click or key event to the frame after the one that paints the
list.

    python -m benchmarks.service.playground --model models/ml-1m --items 100000
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer
from playwright.sync_api import Browser, Page, sync_playwright

from app.jobs.datasets import synthetic_shop
from app.jobs.loadtest import synthetic_catalogue
from benchmarks.harness.service_process import running_service
from benchmarks.machine import chromium
from model.artifact import model_directory
from model.artifact.item_table import ItemTable
from model.data.readers import read_items

SETTLE_MS = 400  # for rows to slide to their positions
SEARCHES = ("trail running shoes", "espresso cups, steel", "no. 231", "harbour", "zzz")
# runs before the page's own scripts; a list has been painted when the frame after its change begins
WATCH = """
    window.took = {}
    const begins = {}
    for (const kind of ["click", "input"])
        addEventListener(kind, event => begins[kind] = event.timeStamp, {capture: true})
    const watch = (id, kind) => new MutationObserver(() => {
        const begin = begins[kind]
        requestAnimationFrame(() => requestAnimationFrame(now => {
            if (begin === undefined) window.took["first " + id] ??= performance.now()
            else (window.took[id] ??= []).push(performance.now() - begin)
        }))
    }).observe(document.getElementById(id), {childList: true})
    document.addEventListener("DOMContentLoaded", () => {
        watch("recommendations", "click")
        watch("found", "input")
    })
"""


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory.")],
    items: Annotated[int, typer.Option(help="Items of the catalogue.")] = 100_000,
    rounds: Annotated[int, typer.Option(help="Pages that are opened.")] = 20,
    clicks: Annotated[int, typer.Option(help="Clicks, and keys as many as the searches have.")] = 60,
) -> None:
    """Serve a large catalogue and measure its playground."""
    with TemporaryDirectory() as directory:
        large = name_items(Path(directory), model, items)
        with running_service(large, "--playground") as url, sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=chromium(), args=["--no-sandbox", "--disable-dev-shm-usage"]
            )
            measure(browser, f"{url}/playground/", rounds, clicks)
            browser.close()


def name_items(directory: Path, model: Path, count: int) -> Path:
    """Write a model with this many items, each with a title and categories."""
    synthetic_catalogue.write_enlarged(directory / "unnamed", model, count, "trained")
    (directory / "shop").mkdir()
    synthetic_shop.generate(directory / "shop", shoppers=1)
    names = read_items(directory / "shop")
    goods = list(names.titles)
    large = model_directory.load(directory / "unnamed")
    places = [(goods[row % len(goods)], row // len(goods)) for row in range(count)]
    catalogue = ItemTable(
        [f"{good}-{copy}" for good, copy in places],
        [f"{names.titles[good]}, no. {copy}" for good, copy in places],
        [names.categories[good] for good, _ in places],
        np.asarray(large.items.counts),
    )
    model_directory.save(directory / "named", large.model, large.config, catalogue, {})
    return directory / "named"


def measure(browser: Browser, address: str, rounds: int, clicks: int) -> None:
    """Print how fast pages open, and how fast they respond to clicks and searches."""
    opened = [open_page(browser, address) for _ in range(rounds + 1)][1:]  # the first one is a warm-up
    report("first contentful paint", [paint for paint, _, _ in opened])
    report("recommendations painted", [listed for _, listed, _ in opened])
    report("bytes of the page", [size for _, _, size in opened], "")
    with visiting(browser, address) as page:
        click_and_search(page, clicks)


def open_page(browser: Browser, address: str) -> tuple[float, float, float]:
    """Return the milliseconds to the first paint and to the list, with an empty cache, and the transferred bytes."""
    with visiting(browser, address) as page:
        return (
            page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"),
            page.evaluate("took['first recommendations']"),
            page.evaluate("performance.getEntries().reduce((sum, {transferSize}) => sum + (transferSize ?? 0), 0)"),
        )


@contextmanager
def visiting(browser: Browser, address: str) -> Iterator[Page]:
    """Open the page with an empty cache, and yield it once the first list is visible."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.add_init_script(WATCH)
    page.goto(address)
    page.wait_for_function("() => took['first recommendations'] && took['first found']")
    yield page
    context.close()


def click_and_search(page: Page, clicks: int) -> None:
    """Print how long clicks and keys take to change a list."""
    rows = page.locator("#recommendations .item")
    for number in range(clicks):
        box = rows.nth(number % 10).bounding_box()
        assert box is not None
        page.mouse.click(box["x"] + 60, box["y"] + box["height"] / 2)
        page.wait_for_function("count => took.recommendations?.length > count", arg=number)
        page.wait_for_timeout(SETTLE_MS)
    report("click to new list", page.evaluate("took.recommendations"))
    for text in SEARCHES:
        page.fill("#query", "")
        page.locator("#query").press_sequentially(text, delay=80)
        page.wait_for_timeout(SETTLE_MS)
    report("key to what was found", page.evaluate("took.found"))


def report(what: str, values: list[float], unit: str = " ms") -> None:
    """Print the median, the 90th percentile and the maximum of the values."""
    found = np.array(values)
    print(
        f"{what:26} median {np.median(found):8,.0f}{unit}, 90 % within {np.quantile(found, 0.9):8,.0f}{unit}, "
        f"worst of {len(found)} {found.max():8,.0f}{unit}"
    )


if __name__ == "__main__":
    typer.run(main)

"""Take the documentation's screenshots of the playground from a running demo.

make demo    # in another terminal
python -m benchmarks.service.screenshots
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.machine import chromium

CLICKS = ("touring-bike-blue", "bike-helmet-blue", "bike-lights-blue")
WIDE: dict[str, Any] = {"viewport": {"width": 1280, "height": 1240}}
NARROW: dict[str, Any] = {"viewport": {"width": 390, "height": 1560}, "has_touch": True, "is_mobile": True}
SCREENSHOTS: dict[str, dict[str, Any]] = {
    "light": {**WIDE, "color_scheme": "light"},
    "dark": {**WIDE, "color_scheme": "dark"},
    "narrow": {**NARROW, "color_scheme": "light"},
}
SETTLE_MS = 2_000  # until the highlight of the last click has faded and the figures are drawn


def main(
    url: Annotated[str, typer.Option(help="Address of the demo.")] = "http://127.0.0.1:8000",
    out: Annotated[Path, typer.Option(help="Directory of the screenshots.")] = Path("docs/images"),
) -> None:
    """Save all screenshots in the directory."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        for name, options in SCREENSHOTS.items():
            path = out / f"playground-{name}.png"
            save_screenshot(browser, f"{url}/playground/", path, options)
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
        browser.close()


def save_screenshot(browser: Browser, address: str, path: Path, options: dict[str, Any]) -> None:
    """Save the page after three clicks; on a desktop, point at a recommendation to show its explanation."""
    context = browser.new_context(reduced_motion="reduce", **options)
    page = context.new_page()
    page.goto(address)
    page.click("#show-start")  # the screenshots do not show the first steps
    for item_id in CLICKS:
        click(page, item_id)
    page.wait_for_selector("#figures svg")
    page.wait_for_timeout(SETTLE_MS)
    if not options.get("has_touch"):
        page.hover("#recommendations li:nth-child(2) .item")
        page.wait_for_selector("#why em")
    page.screenshot(path=path)
    page.click("#reset")  # erase the visitor
    context.close()


def click(page: Page, item_id: str) -> None:
    """Search for the item, click it, and wait until it is in the history."""
    page.fill("#query", item_id.replace("-", " ").rpartition(" ")[0])
    page.click(f'#found .item[data-item-id="{item_id}"]')
    page.wait_for_selector(f'#history li[data-item-id="{item_id}"]')


if __name__ == "__main__":
    typer.run(main)

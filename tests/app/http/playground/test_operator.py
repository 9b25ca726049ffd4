"""Operator figures of the playground, and the browser benchmark that drives it."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect
from playwright.sync_api import TimeoutError as Timeout

from app.observability.metrics import LATENCY_BUCKETS_S, Metrics
from benchmarks.service import playground as benchmark
from model.artifact import model_directory
from tests.app.http.playground.conftest import visiting
from tests.waiting import wait_until

SCALES = "0 2 min ago now"  # below the largest value
FIGURES = re.compile(
    rf"events [\d.]*[1-9][\d.]*/s [\d.]+/s {SCALES} requests [\d.]*[1-9][\d.]*/s [\d.]+/s {SCALES} "
    rf"p50 latency ≈ [\d.]+ ms [\d.]+ ms {SCALES} p99 latency ≈ [\d.]+ ms [\d.]+ ms {SCALES} "
    rf"failed 0.0/s 1.0/s {SCALES}"
)


def test_the_operator_sees_figures(page: Page, url: str) -> None:
    figures = page.locator("#figures")
    expect(figures).to_contain_text("tiny in 1 process")
    with httpx.Client(base_url=url) as client:

        def shown() -> str:
            return " ".join(figures.all_inner_texts()[0].split())

        def are_shown() -> bool:
            client.post("/v1/events", json=[{"user_id": "bob", "item_id": "item-1"}] * 50).raise_for_status()
            return FIGURES.search(shown()) is not None

        wait_until(are_shown, shown)
    assert "log lag 2 h" in shown()
    heard = re.compile(r"^requests, last two minutes: from [\d.]+/s to [\d.]+/s$")
    expect(figures.locator("[role=img]").nth(1)).to_have_attribute("aria-label", heard)
    page.uncheck("#watch")
    with pytest.raises(Timeout), page.expect_request("**/metrics", timeout=2_500):
        pass


def test_figures_return_with_the_service(browser: Browser, url: str) -> None:
    with visiting(browser, url, expected="ERR_FAILED") as page:
        page.route("**/metrics", lambda route: route.abort())
        expect(page.locator("#figures")).to_contain_text("unavailable")
        page.unroute("**/metrics")
        expect(page.locator("#figures")).to_contain_text("tiny in 1 process")


def test_quantiles_are_computed_from_the_buckets(page: Page) -> None:
    """For requests between two scrapes, without health checks, like histogram_quantile of Prometheus."""
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
    printed = capsys.readouterr().out
    for what in ("first contentful paint", "recommendations painted", "click to new list", "key to what was found"):
        found = re.search(rf"{what} +median +([\d,]+) ms", printed)
        assert found is not None, printed
        assert int(found[1].replace(",", "")) > 0


def test_the_benchmark_names_every_item(model_dir: Path, tmp_path: Path) -> None:
    items = model_directory.load(benchmark.name_items(tmp_path, model_dir, 1000)).items
    assert len(items) == len(set(items.ids)) == len(set(items.titles)) == 1000
    assert items.titles[999] == items.titles[999 % 432].replace("no. 0", "no. 2")
    assert all(items.categories)

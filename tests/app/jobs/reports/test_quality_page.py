"""The page about a model's quality, read by a parser: complete, self-contained, and escaped."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser

from app.jobs.reports import example_lists
from app.jobs.reports.html import Html, tag
from app.jobs.reports.quality_page import Provenance, codeword_shares, page, write_page
from app.jobs.reports.quality_table import baselines_table, metrics_table, other_models_table
from app.jobs.reports.svg import BAR_THICKNESS, Axis, Point, Spot, bars, heat_map, lines, scatter
from model.artifact.item_table import ItemTable
from model.artifact.model_directory import Artifact
from model.config import Config, ModelConfig, TrainConfig
from model.evaluation.baselines import Baseline, Ease, Markov, Popularity
from model.evaluation.comparison import Comparison, Variant
from model.evaluation.evaluate import evaluate
from model.evaluation.report import Report
from model.metrics import metrics
from model.training.loop import Progress
from model.training.train import train
from tests.app.http.playground.conftest import serious

GRIDS: dict[str, list[Baseline]] = {
    "popularity": [Popularity()],
    "markov": [Markov(0.1), Markov(0.5)],
    "ease": [Ease(10.0, 0.0)],
}
WICKED = "</td></table><script>alert('&')</script>"
VOID = {"meta"}
MADE = Provenance(f"lisarec evaluate --model '{WICKED}'", datetime(2026, 11, 24, 18, 5, tzinfo=UTC), "0.2.0")


class Reader(HTMLParser):
    """Tags with attributes, and all text; a mismatched closing tag is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def count(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.tags)


@pytest.fixture(scope="module")
def models(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Artifact]:
    """Two seeds of a small model whose titles and names contain HTML."""
    wicked = []
    for seed in (0, 1):
        config = Config(model=ModelConfig(width=16), training=TrainConfig(epochs=1, seed=seed))
        made = train(data, tmp_path_factory.mktemp("models") / f"seed-{seed}", config, progress=Progress())
        items = ItemTable(made.items.ids, [WICKED] * len(made.items), made.items.categories, made.items.counts)
        wicked.append(replace(made, name=WICKED, items=items))
    return wicked


@pytest.fixture(scope="module")
def report(models: list[Artifact], data: Path) -> Report:
    return evaluate(models, data, None, None, GRIDS)


@pytest.fixture(scope="module")
def text(report: Report, models: list[Artifact]) -> str:
    return page(report, models, MADE)


class TestPage:
    def test_is_well_formed_and_complete(self, text: str) -> None:
        read = Reader(text)
        headings = (
            "Side by side",
            "How it was measured",
            "Metrics",
            "Several seeds",
            "By history length",
            "By item frequency",
            "Most recommended items",
            "Example users and their lists",
            "Use of codewords",
            "Training",
            "Validation",
        )
        assert all(heading in read.text for heading in headings)
        assert text.startswith("<!doctype html>")
        assert read.count("svg") == 2 * read.count("figure") == 12  # one for wide screens, one for narrow ones

    def test_begins_with_the_verdict_and_names_its_origin(self, text: str, report: Report) -> None:
        first, second = (unescape(words) for words in re.findall("<p[^>]*>(.*?)</p>", text)[:2])
        assert first == report.leaderboard.verdict
        assert second.startswith(report.leaderboard.in_plain_words)
        shown = Reader(text).text
        assert {MADE.command, "2026-11-24 18:05 UTC", "lisarec 0.2.0"} <= set(shown)

    def test_loads_no_resources_and_runs_no_scripts(self, text: str) -> None:
        assert "http://" not in text
        assert "https://" not in text
        read = Reader(text)
        assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in read.tags}
        assert not {"src", "href", "srcset"} & {name for _, attributes in read.tags for name in attributes}
        assert "url(" not in text
        assert "@import" not in text
        policies = [attributes["content"] for tag, attributes in read.tags if "http-equiv" in attributes]
        assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]

    def test_escapes_titles_and_names(self, text: str, report: Report) -> None:
        whole = Reader(text).text
        shown = whole[whole.index("Most recommended items") : whole.index("Use of codewords")]
        shown += whole[whole.index("Example users and their lists") :]
        drawn = report.drawn_users(20, 0)
        lists = report.models[0].recommended
        assert lists is not None
        histories = np.minimum(report.trial.events.histories.lengths[drawn], 10).sum()
        headings = 1 + len(drawn)  # of lists, by the name of their model
        assert shown.count(WICKED) == 10 + headings + histories + (lists[drawn, :10] >= 0).sum()
        assert f"Quality of {WICKED}" in whole

    def test_names_the_evaluation_protocol(self, text: str, report: Report) -> None:
        whole = " ".join(Reader(text).text)
        for rule in report.rules().values():
            assert (f"{rule:,}" if isinstance(rule, int) else str(rule)) in whole

    def test_shows_the_numbers_of_the_report(self, text: str, report: Report) -> None:
        shown, numbers = Reader(text).text, report.to_json()
        for value in report.first.metrics().values():
            assert f"{value:.4f}" in shown
        both = Variant(WICKED, report.models)
        for baseline in report.baselines:
            assert f"{metrics(baseline.ranks)['ndcg_at_10']:.4f}" in shown
            for name in ("ndcg_at_10", "hr_at_10"):
                margin = Comparison.of(both, Variant(baseline.name, [baseline])).differences[name]
                low, high = margin.interval_95
                assert {f"{margin.difference:+.4f}", f"{low:+.4f} to {high:+.4f}"} <= set(shown)
        for name, found in numbers["spread"].items():
            assert name in shown
            assert f"{found['standard_deviation']:.4f}" in shown

    def test_supports_dark_mode_and_screen_readers(self, text: str) -> None:
        assert "prefers-color-scheme: dark" in text
        read = Reader(text)
        assert all(attributes.get("aria-label") for tag, attributes in read.tags if tag == "svg")
        assert all(attributes.get("scope") for tag, attributes in read.tags if tag == "th")
        assert ("html", {"lang": "en"}) in read.tags

    def test_needs_neither_baselines_nor_seeds_nor_a_validation(self, models: list[Artifact], data: Path) -> None:
        model = models[0]
        epochs = [{**epoch, "ndcg_at_10": None, "hr_at_10": None} for epoch in model.metrics["epochs"]]
        alone = evaluate([model], data)
        shown = Reader(page(alone, [replace(model, metrics={"epochs": epochs})], MADE))
        assert not {"Several seeds", "Validation", "baselines"} & set(shown.text)
        assert any("nothing to compare it with" in text for text in shown.text)
        assert shown.count("figure") == 5
        assert Reader(page(alone, [replace(model, metrics={})], MADE)).count("figure") == 4

    def test_of_sampled_candidates_has_no_recommendations(self, models: list[Artifact], data: Path) -> None:
        shown = Reader(page(evaluate(models[:1], data, "loo_sampled100"), models[:1], MADE))
        assert not {"Most recommended items", "Example users and their lists"} & set(shown.text)
        assert "hr_at_10_sampled100" in shown.text

    def test_is_written_into_a_new_directory(self, report: Report, models: list[Artifact], tmp_path: Path) -> None:
        file = write_page(tmp_path / "new" / "report", report, models, MADE)
        assert file == tmp_path / "new" / "report" / "index.html"
        Reader(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def two_models(models: list[Artifact]) -> list[Artifact]:
    """The first seed, and the second one under the name of another model."""
    training = models[1].config.training.model_copy(update={"epochs": 2})
    config = models[1].config.model_copy(update={"training": training})
    return [models[0], replace(models[1], name="another", config=config)]


@pytest.fixture(scope="module")
def compared(two_models: list[Artifact], data: Path) -> Report:
    """Two models, without baselines."""
    return evaluate(two_models, data)


def test_nothing_is_clipped_on_any_screen(
    report: Report, models: list[Artifact], browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables, plots and words fit the page from small phones on, and colours have contrast."""
    monkeypatch.setattr(example_lists, "USERS", 4)  # a table each, all of one kind
    beside = [replace(model, name=f"a-rather-long-name-of-a-model-{place}") for place, model in enumerate(models * 2)]
    others = [Variant(model.name, [result]) for model, result in zip(beside, report.models * 2, strict=True)]
    wide = page(replace(report, others=others), models, MADE)
    cut_off = """() => [...document.querySelectorAll("body *:not(svg *):not(thead, thead *)")]
        .filter(one => one.getBoundingClientRect().right > innerWidth + 0.5 || one.scrollWidth > one.clientWidth + 1
                       && getComputedStyle(one).display !== "inline")
        .map(one => one.outerHTML.slice(0, 200))"""
    for scheme in ("light", "dark"):
        tab = browser.new_page(color_scheme=scheme)
        tab.set_content(wide)
        tab.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        for width in (320, 390, 700, 1000, 1440) if scheme == "light" else ():  # the scheme changes colours alone
            tab.set_viewport_size({"width": width, "height": 900})
            assert tab.evaluate(cut_off) == []
            text_px = "one => 12 * one.getBoundingClientRect().width / one.viewBox.baseVal.width"
            assert tab.locator("svg:visible").first.evaluate(text_px) >= 10
        tab.set_viewport_size({"width": 320, "height": 900})
        assert serious(tab) == []
        tab.close()


class TestUsers:
    def test_other_models_are_compared_with_the_first(self, compared: Report, two_models: list[Artifact]) -> None:
        shown, numbers = Reader(page(compared, two_models, MADE)).text, compared.to_json()
        other = numbers["other_models"]["another"]
        assert numbers["verdict"] in shown
        assert other["verdict"] in shown
        assert f"{other['metrics']['ndcg_at_10_full']:.4f}" in shown
        assert numbers["name"] == WICKED
        assert other_models_table(numbers).row_count == 2

    def test_hits_are_bold(self, compared: Report, two_models: list[Artifact]) -> None:
        drawn = compared.drawn_users(20, 3)
        found = [variant.results[0].ranks[drawn] for variant in (compared.first, *compared.others)]
        assert Reader(page(compared, two_models, MADE, 3)).count("strong") == (np.array(found) <= 10).sum() > 0

    def test_twenty_users_are_drawn_by_the_seed(self, compared: Report, two_models: list[Artifact]) -> None:
        pages = [page(compared, two_models, MADE, seed) for seed in (0, 0, 1)]
        assert pages[0] == pages[1] != pages[2]
        drawn = compared.drawn_users(20, 1).tolist()
        assert len(set(drawn)) == 20 == Reader(pages[2]).count("caption")
        captions = [text for text in Reader(pages[2]).text if "Actual next item" in text]
        users = [compared.trial.interactions.user_ids[compared.users[place]] for place in drawn]
        assert [caption.split(",")[0] for caption in captions] == users

    def test_titles_in_captions_keep_their_text_direction(self, compared: Report, two_models: list[Artifact]) -> None:
        captions = [text for text in Reader(page(compared, two_models, MADE)).text if "Actual next item" in text]
        assert all(re.search("next item: \u2068[^\u2068\u2069]+\u2069\\. ", caption) for caption in captions)

    def test_a_table_of_fewer_users_shows_them_all(self, compared: Report) -> None:
        everybody = compared.drawn_users(10**9, 0)
        assert everybody.tolist() == list(range(len(compared.ranks)))


def test_codeword_shares_count_the_training_events(models: list[Artifact]) -> None:
    model = models[0]
    expected = np.zeros((8, 32))
    for codes, count in zip(model.history_codes, model.items.counts, strict=True):
        for book, word in enumerate(codes):
            expected[book, word] += count
    np.testing.assert_allclose(codeword_shares(model), expected / model.items.counts.sum())


def test_tables_hold_the_same_numbers(report: Report) -> None:
    numbers = report.to_json()
    assert metrics_table(numbers).row_count == len(numbers["metrics"]) + len(numbers["recommended"])
    assert baselines_table(numbers).row_count == 1 + len(GRIDS)


def test_tables_have_the_mean_of_the_seeds_and_each_seed(report: Report) -> None:
    numbers = report.to_json()
    both, (ease, found) = numbers["models"], list(numbers["baselines"].items())[-1]
    metric = "ndcg_at_10_full"
    values = [model["metrics"][metric] for model in both]
    mean = sum(values) / 2
    difference = found["model_minus_baseline"][metric]["difference"]
    assert values[0] != values[1]
    assert difference == pytest.approx(mean - found["metrics"][metric])
    shown = metrics_table(numbers)
    assert [column.header for column in shown.columns] == ["metric", "mean of 2", "deviation", "seed 0", "seed 1"]
    row = list(numbers["metrics"]).index(metric)
    cells = [list(column.cells)[row] for column in shown.columns]
    assert (cells[1], cells[3:]) == (f"{mean:.4f}", [f"{value:.4f}" for value in values])
    model, *_, last = zip(*(column.cells for column in baselines_table(numbers).columns), strict=True)
    assert model[2] == f"{mean:.4f}"
    assert (last[0], last[3].split()[0]) == (ease, f"{difference:+.4f}")


@given(st.text(), st.text())
def test_content_of_tags_is_escaped(inside: str, attribute: str) -> None:
    element = tag("p", inside, title=attribute)
    read = Reader(element)
    assert [name for name, _ in read.tags] == ["p"]
    assert "<" not in element.removeprefix("<p").removesuffix("</p>").replace("&lt;", "")
    assert tag("div", element).count("<p") == 1
    assert not isinstance("<p>" + element, Html)  # pasted text is text again


def shapes(plot: Html, name: str) -> Iterator[dict[str, str]]:
    return (element.attrib for element in ElementTree.fromstring(plot).iter(name))


NUMBERS = st.floats(0, 1e6, allow_subnormal=False)
LABELS = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=8)
POINTS = st.lists(st.builds(Point, LABELS, NUMBERS, note=LABELS, interval=st.none()), min_size=1, max_size=20)


class TestPlots:
    @settings(max_examples=30)
    @given(POINTS)
    def test_lines_stay_within_the_plot_and_keep_the_order_of_values(self, points: list[Point]) -> None:
        plot = lines([("a & b", points), ("c", points)], "<title>", "x")
        heights = [float(circle["cy"]) for circle in shapes(plot, "circle")]
        assert len(heights) == len(points)
        assert all(0 <= height <= 280 for height in heights)
        by_value = sorted(zip([point.value for point in points], heights, strict=True))
        assert all(lower >= higher - 0.1 for (_, lower), (_, higher) in pairwise(by_value))

    @settings(max_examples=30)
    @given(POINTS)
    def test_bars_are_proportional_to_their_values(self, points: list[Point]) -> None:
        drawn = list(shapes(bars(points, "t", 320), "rect"))
        widths = np.array([float(bar["width"]) for bar in drawn])
        values = np.array([point.value for point in points])
        np.testing.assert_allclose(widths, values / max(values.max(), 1e-9) * 320, atol=0.06)
        tops = [float(bar["y"]) for bar in drawn]
        assert all(above + BAR_THICKNESS < below for above, below in pairwise(tops))

    @given(st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), min_size=1), st.booleans())
    def test_an_axis_covers_all_values(self, values: list[float], from_zero: bool) -> None:
        values = [abs(value) for value in values] if from_zero else values
        axis = Axis.around(values, from_zero)
        assert axis.low <= min(values)
        assert max(values) <= axis.high + 1e-9 * (abs(axis.low) + abs(axis.high) + 1)  # rounding, far below a pixel

    def test_a_scatter_plot_keeps_the_order_of_both_values(self) -> None:
        spots = [Spot("a & b", 512, 0.79), Spot("c", 1_000_000, 0.80), Spot("d", 4_096, 0.78)]
        marks = list(shapes(scatter(spots, "t", "bytes"), "{http://www.w3.org/2000/svg}circle"))
        across, down = ([float(mark[name]) for mark in marks] for name in ("cx", "cy"))
        assert np.argsort(across).tolist() == [0, 2, 1]
        assert np.argsort(down).tolist() == [1, 0, 2]
        assert (across[2] - across[0]) / (across[1] - across[0]) == pytest.approx(3 / np.log2(1e6 / 512), abs=1e-3)

    def test_labels_of_close_points_do_not_overlap(self) -> None:
        spots = [Spot("lower", 512, 0.7899), Spot("upper", 520, 0.79), Spot("far", 1_000_000, 0.78)]
        texts = ElementTree.fromstring(scatter(spots, "t", "bytes")).iter("{http://www.w3.org/2000/svg}text")
        height = {text.text: float(text.attrib["y"]) for text in texts}
        assert height["lower"] - height["upper"] >= 12

    def test_a_heat_map_is_darkest_at_the_maximum(self) -> None:
        shares = np.array([[0.5, 0.25, 0.25], [0.0, 0.1, 0.9]])
        shades: Any = [float(cell["fill-opacity"]) for cell in shapes(heat_map(shares, "t", "book", "word"), "rect")]
        np.testing.assert_allclose(shades, (shares / 0.9).ravel(), atol=0.001)

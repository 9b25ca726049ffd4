"""The page about a model's quality, read by a parser: whole, self-contained, and data is text in it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.jobs.datasets.synthetic_shop import generate
from app.jobs.reports.html import Html, tag
from app.jobs.reports.quality_page import codeword_shares, page, write_page
from app.jobs.reports.quality_table import baselines_table, metrics_table, other_models_table
from app.jobs.reports.svg import Axis, Point, Spot, bars, heat_map, lines, scatter
from model.artifact.item_table import ItemTable
from model.artifact.model_directory import Artifact
from model.config import Config, ModelConfig, TrainConfig
from model.evaluation.baselines import Baseline, Ease, Markov, Popularity
from model.evaluation.evaluate import evaluate
from model.evaluation.report import Report
from model.training.loop import EpochReport
from model.training.train import train

GRIDS: dict[str, list[Baseline]] = {
    "popularity": [Popularity()],
    "markov": [Markov(0.1), Markov(0.5)],
    "ease": [Ease(10.0, 0.0)],
}
WICKED = "</td></table><script>alert('&')</script>"
VOID = {"meta"}


class Silent:
    def stage(self, name: str) -> None: ...
    def batch(self, epoch: int, share: float, loss: float) -> None: ...
    def epoch(self, report: EpochReport) -> None: ...


class Reader(HTMLParser):
    """Tags with their attributes, and all text; an element that is closed wrongly is an error."""

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
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shop")
    generate(directory, shoppers=120)
    return directory


@pytest.fixture(scope="module")
def models(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Artifact]:
    """Two seeds of a small model whose every title and name is wicked."""
    wicked = []
    for seed in (0, 1):
        config = Config(model=ModelConfig(width=16), training=TrainConfig(epochs=1, seed=seed))
        made = train(data, tmp_path_factory.mktemp("models") / f"seed-{seed}", config, progress=Silent())
        items = ItemTable(made.items.ids, [WICKED] * len(made.items), made.items.categories, made.items.counts)
        wicked.append(replace(made, name=WICKED, items=items))
    return wicked


@pytest.fixture(scope="module")
def report(models: list[Artifact], data: Path) -> Report:
    return evaluate(models, data, None, None, GRIDS)


@pytest.fixture(scope="module")
def text(report: Report, models: list[Artifact]) -> str:
    return page(report, models[0])


class TestPage:
    def test_is_well_formed_and_has_every_section(self, text: str) -> None:
        read = Reader(text)
        headings = (
            "Metrics",
            "Several seeds",
            "Beside the baselines",
            "By history length",
            "By item frequency",
            "Recommended most",
            "Some users and their lists",
            "Use of codewords",
            "Training",
        )
        assert all(heading in read.text for heading in headings)
        assert read.count("svg") == 6

    def test_loads_nothing_and_runs_nothing(self, text: str) -> None:
        assert "http://" not in text
        assert "https://" not in text
        read = Reader(text)
        assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in read.tags}
        assert not {"src", "href", "srcset"} & {name for _, attributes in read.tags for name in attributes}
        assert "url(" not in text
        assert "@import" not in text
        policies = [attributes["content"] for tag, attributes in read.tags if "http-equiv" in attributes]
        assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]

    def test_shows_titles_and_names_as_text(self, text: str, report: Report) -> None:
        read = Reader(text)
        drawn = report.drawn_users(20, 0)
        lists = report.models[0].recommended
        assert lists is not None
        histories = np.minimum(report.trial.events.histories.lengths[drawn], 10).sum()
        headings = len(drawn)  # of lists, by the name of their model
        assert read.text.count(WICKED) == 10 + headings + histories + (lists[drawn, :10] >= 0).sum()
        assert f"Quality of {WICKED}" in read.text

    def test_says_by_which_rules_it_was_measured(self, text: str, report: Report) -> None:
        whole = " ".join(Reader(text).text)
        for rule in report.rules().values():
            assert (f"{rule:,}" if isinstance(rule, int) else str(rule)) in whole

    def test_shows_the_numbers_of_the_report(self, text: str, report: Report) -> None:
        shown, numbers = Reader(text).text, report.to_json()
        for value in numbers["metrics"].values():
            assert f"{value:.4f}" in shown
        for baseline in numbers["baselines"].values():
            margin = baseline["model_minus_baseline"]["ndcg_at_10_full"]
            low, high = margin["interval_95"]
            assert f"{margin['difference']:+.4f} ({low:+.4f} to {high:+.4f})" in shown
        for name, found in numbers["spread"].items():
            assert name in shown
            assert f"{found['standard_deviation']:.4f}" in shown

    def test_is_light_and_dark_and_can_be_read_aloud(self, text: str) -> None:
        assert "prefers-color-scheme: dark" in text
        read = Reader(text)
        assert all(attributes.get("aria-label") for tag, attributes in read.tags if tag == "svg")
        assert all(attributes.get("scope") for tag, attributes in read.tags if tag == "th")
        assert ("html", {"lang": "en"}) in read.tags

    def test_needs_neither_baselines_nor_seeds_nor_a_validation(self, models: list[Artifact], data: Path) -> None:
        model = models[0]
        epochs = [{**epoch, "ndcg_at_10": None, "hr_at_10": None} for epoch in model.metrics["epochs"]]
        shown = Reader(page(evaluate([model], data), replace(model, metrics={"epochs": epochs})))
        assert not {"Several seeds", "Beside the baselines"} & set(shown.text)
        assert shown.count("svg") == 4
        assert Reader(page(evaluate([model], data), replace(model, metrics={}))).count("svg") == 3

    def test_of_sampled_candidates_has_no_recommendations(self, models: list[Artifact], data: Path) -> None:
        shown = Reader(page(evaluate(models[:1], data, "loo_sampled100"), models[0]))
        assert not {"Recommended most", "Some users and their lists"} & set(shown.text)
        assert "hr_at_10_sampled100" in shown.text

    def test_is_written_into_a_directory_that_need_not_be_there(
        self, report: Report, models: list[Artifact], tmp_path: Path
    ) -> None:
        file = write_page(tmp_path / "new" / "report", report, models[0])
        assert file == tmp_path / "new" / "report" / "index.html"
        Reader(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def compared(models: list[Artifact], data: Path) -> Report:
    """The first seed beside the second one as if it were another model, without baselines."""
    training = models[1].config.training.model_copy(update={"epochs": 2})
    config = models[1].config.model_copy(update={"training": training})
    return evaluate([models[0], replace(models[1], name="another", config=config)], data)


class TestUsers:
    def test_other_models_stand_beside_the_first_with_a_verdict(self, compared: Report, models: list[Artifact]) -> None:
        shown, numbers = Reader(page(compared, models[0])).text, compared.to_json()
        other = numbers["other_models"]["another"]
        assert "Beside other models" in shown
        assert other["verdict"] in shown
        assert f"{other['metrics']['ndcg_at_10_full']:.4f}" in shown
        assert numbers["name"] == WICKED
        assert other_models_table(numbers).row_count == 2

    def test_what_came_is_bold_wherever_it_is_among_the_ten(self, compared: Report, models: list[Artifact]) -> None:
        drawn = compared.drawn_users(20, 3)
        found = [variant.results[0].ranks[drawn] for variant in (compared.first, *compared.others)]
        assert Reader(page(compared, models[0], 3)).count("strong") == (np.array(found) <= 10).sum() > 0

    def test_the_seed_draws_twenty_users(self, compared: Report, models: list[Artifact]) -> None:
        pages = [page(compared, models[0], seed) for seed in (0, 0, 1)]
        assert pages[0] == pages[1] != pages[2]
        drawn = compared.drawn_users(20, 1).tolist()
        assert len(set(drawn)) == 20 == Reader(pages[2]).count("caption")
        captions = [text for text in Reader(pages[2]).text if "Then came" in text]
        users = [compared.trial.interactions.user_ids[compared.users[place]] for place in drawn]
        assert [caption.split(",")[0] for caption in captions] == users

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


@given(st.text(), st.text())
def test_what_a_tag_holds_is_text_however_wicked(inside: str, attribute: str) -> None:
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
    def test_lines_stay_within_the_plot_and_order_the_values(self, points: list[Point]) -> None:
        plot = lines([("a & b", points), ("c", points)], "<title>", "x")
        heights = [float(circle["cy"]) for circle in shapes(plot, "circle")][:-1]
        assert len(heights) == len(points)
        assert all(0 <= height <= 280 for height in heights)
        by_value = sorted(zip([point.value for point in points], heights, strict=True))
        assert all(lower >= higher - 0.1 for (_, lower), (_, higher) in pairwise(by_value))

    @settings(max_examples=30)
    @given(POINTS)
    def test_bars_are_as_long_as_their_values(self, points: list[Point]) -> None:
        widths = np.array([float(bar["width"]) for bar in shapes(bars(points, "t"), "rect")])
        values = np.array([point.value for point in points])
        np.testing.assert_allclose(widths, values / max(values.max(), 1e-9) * 460, atol=0.06)

    @given(st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), min_size=1), st.booleans())
    def test_an_axis_holds_all_values(self, values: list[float], from_zero: bool) -> None:
        values = [abs(value) for value in values] if from_zero else values
        axis = Axis.around(values, from_zero)
        assert axis.low <= min(values)
        assert max(values) <= axis.high + 1e-9 * (abs(axis.low) + abs(axis.high) + 1)  # rounding, far below a pixel

    def test_a_scatter_is_in_the_order_of_amounts_and_values(self) -> None:
        spots = [Spot("a & b", 512, 0.79), Spot("c", 1_000_000, 0.80), Spot("d", 4_096, 0.78)]
        marks = list(shapes(scatter(spots, "t", "bytes"), "{http://www.w3.org/2000/svg}circle"))
        across, down = ([float(mark[name]) for mark in marks] for name in ("cx", "cy"))
        assert np.argsort(across).tolist() == [0, 2, 1]
        assert np.argsort(down).tolist() == [1, 0, 2]
        assert (across[2] - across[0]) / (across[1] - across[0]) == pytest.approx(3 / np.log2(1e6 / 512), abs=1e-3)

    def test_names_of_near_spots_stand_below_each_other(self) -> None:
        spots = [Spot("lower", 512, 0.7899), Spot("upper", 520, 0.79), Spot("far", 1_000_000, 0.78)]
        texts = ElementTree.fromstring(scatter(spots, "t", "bytes")).iter("{http://www.w3.org/2000/svg}text")
        height = {text.text: float(text.attrib["y"]) for text in texts}
        assert height["lower"] - height["upper"] >= 12

    def test_a_heat_map_is_darkest_where_most_is(self) -> None:
        shares = np.array([[0.5, 0.25, 0.25], [0.0, 0.1, 0.9]])
        shades: Any = [float(cell["fill-opacity"]) for cell in shapes(heat_map(shares, "t", "book", "word"), "rect")]
        np.testing.assert_allclose(shades, (shares / 0.9).ravel(), atol=0.001)

"""A self-contained HTML page about the quality of models, which loads nothing and runs no script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.jobs.reports.example_lists import example_lists
from app.jobs.reports.html import SHADES, Html, concatenated, details, figure, section, table, tag, with_note
from app.jobs.reports.page_style import style_for
from app.jobs.reports.quality_table import interval_text
from app.jobs.reports.side_by_side import metrics_section, side_by_side
from app.jobs.reports.svg import Point, heat_map, lines
from model.artifact.item_table import ItemTable
from model.artifact.model_directory import Artifact
from model.evaluation.comparison import Variant
from model.evaluation.evaluate import AnyModel, by_variant
from model.evaluation.leaderboard import Leaderboard
from model.evaluation.report import Report
from model.evaluation.trial import Result
from model.metrics import Bucket

MOST_RECOMMENDED = 10
MOST_LINES = len(SHADES)
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
TABLE_CLASS = re.compile(r'class="columns-(\d+)"')


@dataclass(frozen=True)
class Provenance:
    """The origin of a report.

    command  the command line that made it
    made_at  with its time zone
    version  of lisarec
    """

    command: str
    made_at: datetime
    version: str


def write_page(directory: Path, report: Report, models: Sequence[AnyModel], made: Provenance, seed: int = 0) -> Path:
    """Write ``index.html`` into the directory, which is created if needed; other arguments are those of ``page``."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "index.html"
    file.write_text(page(report, models, made, seed), encoding="utf-8")
    return file


def page(report: Report, models: Sequence[AnyModel], made: Provenance, seed: int = 0) -> str:
    """Return the whole document.

    models  the report's models; codewords and losses are those of the first one
    seed    draws the users whose lists are shown
    """
    numbers = report.to_json()
    first = models[0]
    assert isinstance(first, Artifact)
    title = f"Quality of {' and '.join(by_variant(models))}"
    sections = [
        _verdict(report.leaderboard, made),
        side_by_side(report, numbers),
        _rules(numbers),
        metrics_section(report, numbers),
        _seeds(numbers),
        _by_history_length(report),
        _by_item_frequency(report),
        _recommended(report, first.items),
        _codewords(first),
        _training(first),
        _validation(models),
        example_lists(report, first.items, seed),
    ]
    body = tag("body", tag("h1", title), *filter(None, sections))
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        tag("title", title),
        tag("style", Html(style_for(int(count) for count in TABLE_CLASS.findall(body)))),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en")


def _verdict(board: Leaderboard, made: Provenance) -> Html:
    about = (
        f"{board.in_plain_words} NDCG@10 is 1 where the item that came next is always listed first, "
        "and 0 where it is never among the first ten."
    )
    facts = {
        "Command": tag("code", made.command),
        "Made": tag("time", f"{made.made_at:%Y-%m-%d %H:%M %Z}", datetime=made.made_at.isoformat()),
        "Version": f"lisarec {made.version}",
    }
    return concatenated(tag("p", board.verdict, class_="verdict"), tag("p", about), _facts(facts))


def _facts(facts: dict[str, str]) -> Html:
    return tag("dl", *(concatenated(tag("dt", name), tag("dd", value)) for name, value in facts.items()))


def _rules(numbers: dict[str, Any]) -> Html:
    held_out = "each user's last event" if numbers["split"] == "loo" else "each later user's last event"
    rules = {
        "Protocol": f"{numbers['protocol']}: {held_out}, predicted from everything before it",
        "Split": f"{numbers['split']}, trained on {numbers['train_on']}",
        "Ties": numbers["tie_rule"],
        "Excluded seen items": numbers["seen_rule"],
        "Users": f"{numbers['users']:,}",
        "Items": f"{numbers['items']:,}, of which {numbers['cold_items']:,} are not in the training data",
        "Table": f"SHA-256 {numbers['data_sha256']}",
        "Generation": numbers["generation"],
    }
    return section("How it was measured", _facts({name: str(value) for name, value in rules.items()}))


def _seeds(numbers: dict[str, Any]) -> Html | None:
    if "spread" not in numbers:
        return None
    rows = [
        (name, f"{result['mean']:.4f}", f"{result['standard_deviation']:.4f}")
        for name, result in numbers["spread"].items()
    ]
    about = f"{len(numbers['models'])} models: " + "; ".join(
        f"generation {model['generation']}, seed {model['seed']}" for model in numbers["models"]
    )
    return section("Several seeds", tag("p", about), table(("metric", "mean", "standard deviation"), rows))


def _by_history_length(report: Report) -> Html:
    compared = {name: report.by_history_length(result) for name, result in _compared(report).items()}
    x_title = "events before the held-out one"
    return section("By history length", *_bucket_plot(compared, x_title, "history length"))


def _by_item_frequency(report: Report) -> Html:
    compared = {name: report.by_item_frequency(result) for name, result in _compared(report).items()}
    rules = report.rules()
    cold = f"{rules['cold_targets']:,} of the {rules['users']:,} held-out events are for items without training events."
    x_title = "training events of the held-out item"
    return section("By item frequency", tag("p", cold), *_bucket_plot(compared, x_title, "training events"))


def _compared(report: Report) -> dict[str, Result]:
    """Return the first seed of every model, and the best baseline; those for which a plot has lines come first."""
    models = {standing.name: standing.variant.results[0] for standing in report.leaderboard.models}
    best = report.best_baseline
    named = list((models | ({best.name: best} if best else {})).items())
    return dict(
        named if len(named) <= MOST_LINES else [*named[: MOST_LINES - 1], named[-1], *named[MOST_LINES - 1 : -1]]
    )


def _bucket_plot(compared: dict[str, list[Bucket]], x_title: str, property_name: str) -> tuple[Html, Html]:
    series = [
        (name, [Point(f"{b.first:,}", b.ndcg_at_10, b.ndcg_at_10_interval_95, f"({b.users:,} users)") for b in buckets])
        for name, buckets in compared.items()
    ]
    of_any, *_ = compared.values()
    rows = [
        (
            bucket.label,
            f"{bucket.users:,}",
            *(
                with_note(f"{buckets[place].ndcg_at_10:.4f}", interval_text(buckets[place].ndcg_at_10_interval_95))
                for buckets in compared.values()
            ),
        )
        for place, bucket in enumerate(of_any)
    ]
    columns = (property_name, "users", *(f"NDCG@10, {name}" for name in compared))
    caption = "NDCG@10, with 95% intervals. Each group begins at the number below it."
    return _line_plot(series, f"NDCG@10 by {property_name}", x_title, caption), details(table(columns, rows))


def _line_plot(
    series: Sequence[tuple[str, Sequence[Point]]], title: str, x_title: str, caption: str, from_zero: bool = True
) -> Html:
    """Return a figure of the first MOST_LINES series, with the names of the others in the caption."""
    shown, others = series[:MOST_LINES], [name for name, _ in series[MOST_LINES:]]
    left_out = f" Not drawn: {', '.join(others)}." if others else ""

    def draw(width: int) -> Html:
        return lines(shown, title, x_title, width, from_zero=from_zero)

    return figure(draw, caption + left_out, [name for name, _ in shown])


def _recommended(report: Report, items: ItemTable) -> Html | None:
    variants = [report.first, *report.others]
    if any(variant.results[0].recommended is None for variant in variants):
        return None
    columns = [_most_recommended(variant, items) for variant in variants]
    rows = [(str(row + 1), *(column[row] for column in columns)) for row in range(min(map(len, columns)))]
    about = "The items in the top 10 of the most users, the share of these users, and the items' training events."
    return section("Most recommended items", tag("p", about), table(["", *(one.name for one in variants)], rows))


def _most_recommended(variant: Variant, items: ItemTable) -> list[Html]:
    recommended = variant.results[0].recommended
    assert recommended is not None
    top = recommended[:, :10]
    often = np.bincount(top[top >= 0], minlength=len(items))
    return [
        with_note(items.titles[item] or items.ids[item], f"{often[item] / len(top):.1%}, {items.counts[item]:,} events")
        for item in np.argsort(-often, kind="stable")[:MOST_RECOMMENDED]
    ]


def _codewords(model: Artifact) -> Html:
    shares = codeword_shares(model)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(shares > 0, shares * np.log(shares), 0).sum(axis=1)
    rows = [
        (str(book), f"{np.exp(bits):.1f} of {shares.shape[1]}", str(int((row == 0).sum())))
        for book, (bits, row) in enumerate(zip(entropy, shares, strict=True))
    ]
    about = (
        f"Share of the training events of {model.name} whose item has the codeword: from 0, clear, to "
        f"{shares.max():.1%}, the strongest colour. An evenly used codebook is evenly coloured."
    )
    return section(
        "Use of codewords",
        figure(lambda width: heat_map(shares, "Use of the history codewords", "book", "word", width), about),
        details(table(("history codebook", "effective codewords (exp of the entropy)", "unused"), rows)),
    )


def codeword_shares(model: Artifact) -> NDArray[np.float64]:
    """Return each history codeword's share of the training events: (B, W), every row summing to 1."""
    codes, counts, words = model.history_codes, model.items.counts, model.config.model.history_codewords
    used = np.stack([np.bincount(book, counts, minlength=words) for book in codes.T])
    shares: NDArray[np.float64] = used / np.maximum(used.sum(axis=1, keepdims=True), 1)
    return shares


def _training(model: Artifact) -> Html | None:
    epochs = model.metrics.get("epochs", [])
    if not epochs:
        return None
    loss = [Point(str(epoch["epoch"] + 1), epoch["loss"]) for epoch in epochs]
    caption = f"Training loss of {model.name}"
    plot = _line_plot([(model.name, loss)], "Training loss by epoch", "epoch", caption, from_zero=False)
    columns = ("epoch", "loss", "HR@10", "NDCG@10", "seconds")
    rows = [
        (
            str(epoch["epoch"] + 1),
            f"{epoch['loss']:.4f}",
            *("" if epoch[key] is None else f"{epoch[key]:.4f}" for key in ("hr_at_10", "ndcg_at_10")),
            f"{epoch['elapsed_s']:.0f}",
        )
        for epoch in epochs
    ]
    return section("Training", plot, details(table(columns, rows)))


def _validation(models: Sequence[AnyModel]) -> Html | None:
    """Return the validation of the first seed of each model after every epoch."""
    series = []
    for name, seeds in by_variant(models).items():
        measured = [epoch for epoch in seeds[0].metrics.get("epochs", []) if epoch["ndcg_at_10"] is not None]
        if measured:
            series.append((name, [Point(str(epoch["epoch"] + 1), epoch["ndcg_at_10"]) for epoch in measured]))
    if not series:
        return None
    caption = "NDCG@10 on validation events, over the whole catalogue"
    return section("Validation", _line_plot(series, "Validation by epoch", "epoch", caption))

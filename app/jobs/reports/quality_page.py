"""One self-contained HTML page about the quality of a model: it loads nothing and runs no script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.jobs.reports.example_lists import example_lists
from app.jobs.reports.html import Html, concatenated, details, figure, section, table, tag
from app.jobs.reports.quality_table import (
    interval_text,
    margin_text,
    named,
    number_text,
    other_models_rows,
    settings_text,
    verdicts_of,
)
from app.jobs.reports.svg import Point, bars, heat_map, lines
from model.artifact.model_directory import Artifact
from model.evaluation.report import Report
from model.evaluation.trial import Result
from model.metrics import Bucket

MOST_RECOMMENDED = 10
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1f24; --quiet: #57606a; --rule: #d5dae0;
        --first: #0b62c4; --second: #a8500a; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171b; --text: #e6e9ed; --quiet: #9aa4af; --rule: #363c44; --first: #6cb2ff; --second: #f0a35e; } }
body { background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif; margin: 0 auto;
       max-width: 46rem; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
p, caption, figcaption { color: var(--quiet); } caption { text-align: left; } figure { margin: 1rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; overflow-wrap: normal; }
th, td { border-bottom: 1px solid var(--rule); padding: .25rem .6rem .25rem 0; text-align: left; vertical-align: top; }
dl { border: 1px solid var(--rule); border-radius: .4rem; display: grid; gap: .2rem 1rem;
     grid-template-columns: max-content 1fr; padding: .8rem 1rem; }
dt { color: var(--quiet); } dd { margin: 0; }
svg { display: block; height: auto; width: 100%; } svg text { fill: var(--text); font-size: 12px; }
.grid { stroke: var(--rule); } .whisker { stroke: var(--text); stroke-width: 1.5; }
.first.fill { fill: var(--first); } .second.fill { fill: var(--second); }
.stroke { fill: none; stroke-width: 2; } .first.stroke, .first.whisker { stroke: var(--first); }
.second.stroke, .second.whisker { stroke: var(--second); }
"""


def write_page(directory: Path, report: Report, model: Artifact, seed: int = 0) -> Path:
    """Write ``index.html`` into the directory, made where it is missing; the other arguments are those of ``page``."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "index.html"
    file.write_text(page(report, model, seed), encoding="utf-8")
    return file


def page(report: Report, model: Artifact, seed: int = 0) -> str:
    """The whole document.

    model  the report's first
    seed   draws the users whose lists are shown
    """
    numbers = report.to_json()
    title = f"Quality of {model.name}"
    sections = [
        _rules(numbers),
        _metrics(numbers),
        _seeds(numbers),
        _other_models(numbers),
        _baselines(numbers),
        _by_history_length(report),
        _by_item_frequency(report),
        _recommended(report, model),
        example_lists(report, model.items, seed),
        _codewords(model),
        _training(model),
    ]
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        tag("title", title),
        tag("style", Html(STYLE)),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", tag("h1", title), *filter(None, sections)), lang="en")


def _rules(numbers: dict[str, Any]) -> Html:
    held_out = "each user's last event" if numbers["split"] == "loo" else "each later user's last event"
    rules = {
        "Protocol": f"{numbers['protocol']}: {held_out}, predicted from everything before it",
        "Split": f"{numbers['split']}, trained on {numbers['train_on']}",
        "Ties": numbers["tie_rule"],
        "Seen items left out": numbers["seen_rule"],
        "Users": f"{numbers['users']:,}",
        "Items": f"{numbers['items']:,}, of which training never saw {numbers['cold_items']:,}",
        "Table": f"SHA-256 {numbers['data_sha256']}",
        "Generation": numbers["generation"],
    }
    return tag("dl", *(concatenated(tag("dt", name), tag("dd", str(value))) for name, value in rules.items()))


def _metrics(numbers: dict[str, Any]) -> Html:
    rows = [
        (name, f"{value:.4f}", interval_text(numbers["interval_95"].get(name)))
        for name, value in numbers["metrics"].items()
    ]
    rows += [(name, number_text(value), "") for name, value in numbers.get("recommended", {}).items()]
    about = (
        "Intervals by bootstrap over users. Coverage: share of the catalogue in somebody's top k. Novelty: mean "
        "self-information of the top 10, in bits. Popularity: their mean training events."
    )
    return section("Metrics", tag("p", about), table(("metric", "value", "95 % interval"), rows))


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


def _other_models(numbers: dict[str, Any]) -> Html | None:
    if "other_models" not in numbers:
        return None
    headings, rows = other_models_rows(numbers)
    about = "Differences are paired: the same users, with 95 % bootstrap intervals. Above 0 the first model is better."
    verdicts = [tag("p", verdict) for verdict in verdicts_of(numbers)]
    return section("Beside other models", *verdicts, tag("p", about), table(headings, rows))


def _baselines(numbers: dict[str, Any]) -> Html | None:
    if "baselines" not in numbers:
        return None
    scorers = {"this model": numbers} | numbers["baselines"]
    hit_rate, ndcg = (named(numbers, metric) for metric in ("hr_at_10", "ndcg_at_10"))
    points = [
        Point(name, result["metrics"][ndcg], result["interval_95"][ndcg], interval_text(result["interval_95"][ndcg]))
        for name, result in scorers.items()
    ]
    rows = [("this model", *(f"{numbers['metrics'][metric]:.4f}" for metric in (hit_rate, ndcg)), "", "", "")]
    rows += [
        (
            name,
            *(f"{result['metrics'][metric]:.4f}" for metric in (hit_rate, ndcg)),
            *(margin_text(result["model_minus_baseline"][metric]) for metric in (hit_rate, ndcg)),
            settings_text(result["settings"]),
        )
        for name, result in numbers["baselines"].items()
    ]
    columns = ("", hit_rate, ndcg, f"model minus it, {hit_rate}", f"model minus it, {ndcg}", "chosen on validation")
    skipped = [tag("p", f"{name} is left out: {reason}.") for name, reason in numbers["skipped_baselines"].items()]
    about = "Differences are paired: the same users, with 95 % bootstrap intervals. Above 0 the model is better."
    return section(
        "Beside the baselines",
        figure(bars(points, f"{ndcg} of this model and the baselines"), f"{ndcg}, with 95 % intervals"),
        tag("p", about),
        table(columns, rows),
        *skipped,
    )


def _by_history_length(report: Report) -> Html:
    compared = {name: report.by_history_length(result) for name, result in _compared(report).items()}
    x_title = "events before the held-out one; each group begins at the number shown"
    return section("By history length", *_bucket_plot(compared, x_title, "history length"))


def _by_item_frequency(report: Report) -> Html:
    compared = {name: report.by_item_frequency(result) for name, result in _compared(report).items()}
    rules = report.rules()
    cold = f"{rules['cold_targets']:,} of the {rules['users']:,} held-out events are of items that training never saw."
    x_title = "training events of the held-out item; each group begins at the number shown"
    return section("By item frequency", tag("p", cold), *_bucket_plot(compared, x_title, "training events"))


def _compared(report: Report) -> dict[str, Result]:
    """The model and the best baseline, by the names that plots give them."""
    best = report.best_baseline
    return {"this model": report.models[0]} | ({best.name: best} if best else {})


def _bucket_plot(compared: dict[str, list[Bucket]], x_title: str, property_name: str) -> tuple[Html, Html]:
    series = [
        (name, [Point(f"{b.first:,}", b.ndcg_at_10, b.ndcg_at_10_interval_95, f"({b.users:,} users)") for b in buckets])
        for name, buckets in compared.items()
    ]
    of_model, *_ = compared.values()
    rows = [
        (
            bucket.label,
            f"{bucket.users:,}",
            *(f"{buckets[place].ndcg_at_10:.4f}" for buckets in compared.values()),
            interval_text(bucket.ndcg_at_10_interval_95),
            f"{bucket.hr_at_10:.4f}",
        )
        for place, bucket in enumerate(of_model)
    ]
    columns = (property_name, "users", *(f"NDCG@10, {name}" for name in compared), "95 % interval", "HR@10")
    plot = lines(series, f"NDCG@10 by {property_name}", x_title)
    return figure(plot, "NDCG@10, with 95 % intervals"), details(table(columns, rows))


def _recommended(report: Report, model: Artifact) -> Html | None:
    recommended = report.models[0].recommended
    if recommended is None:
        return None
    top = recommended[:, :10]
    often = np.bincount(top[top >= 0], minlength=len(model.items))
    items = model.items
    rows = [
        (items.titles[item] or items.ids[item], f"{often[item] / len(top):.1%}", f"{items.counts[item]:,}")
        for item in np.argsort(-often, kind="stable")[:MOST_RECOMMENDED]
    ]
    about = "The items that stand in most users' top 10."
    return section("Recommended most", tag("p", about), table(("item", "users", "training events"), rows))


def _codewords(model: Artifact) -> Html:
    shares = codeword_shares(model)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(shares > 0, shares * np.log(shares), 0).sum(axis=1)
    rows = [
        (str(book), f"{np.exp(bits):.1f} of {shares.shape[1]}", str(int((row == 0).sum())))
        for book, (bits, row) in enumerate(zip(entropy, shares, strict=True))
    ]
    about = "Share of the training events whose item has the codeword; an evenly used codebook is evenly coloured."
    return section(
        "Use of codewords",
        figure(heat_map(shares, "Use of the history codewords", "book", "word"), about),
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
    figures = [figure(lines([("loss", loss)], "Training loss by epoch", "epoch", from_zero=False), "Training loss")]
    validated = [epoch for epoch in epochs if epoch["ndcg_at_10"] is not None]
    if validated:
        series = [
            (name, [Point(str(epoch["epoch"] + 1), epoch[key]) for epoch in validated])
            for name, key in (("HR@10", "hr_at_10"), ("NDCG@10", "ndcg_at_10"))
        ]
        figures.append(figure(lines(series, "Validation by epoch", "epoch"), "Validation, over the whole catalogue"))
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
    return section("Training", *figures, details(table(columns, rows)))

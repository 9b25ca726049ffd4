"""All models and baselines of an evaluation in one plot and one table, and a table of all metrics."""

from __future__ import annotations

from typing import Any

from app.jobs.reports.html import Html, figure, section, table, tag, with_note
from app.jobs.reports.quality_table import interval_text, named, number_text, verdicts_of
from app.jobs.reports.svg import Point, bars
from model.evaluation.comparison import JUDGED
from model.evaluation.leaderboard import Leaderboard, Standing
from model.evaluation.report import Report
from model.metrics import HEADLINES, beyond_accuracy

COLUMNS = ("ndcg_at_10", "hr_at_10")
ABOUT_MARGINS = (
    "The last columns say how much better {best} is than the row. These differences are paired: the same users, with "
    "95% bootstrap intervals. Above 0, {best} is better; where the interval contains 0, the difference may be chance."
)
ABOUT_LISTS = (
    "Coverage: share of the catalogue in somebody's top k. Novelty: mean self-information of the top 10, in bits. "
    "Popularity: their mean training events."
)


def side_by_side(report: Report, numbers: dict[str, Any]) -> Html:
    """Return a section with every model and baseline of a report, the best one first.

    numbers  those of ``report.to_json()``
    """
    board = report.leaderboard
    labels = [JUDGED[metric] for metric in COLUMNS]
    columns = ["", *labels, "Coverage@10", *(f"{board.best.name} minus it, {label}" for label in labels)]
    rows = [_row(standing, report) for standing in board.standings]
    skipped = [
        tag("p", f"{name} is left out: {reason}.") for name, reason in numbers.get("skipped_baselines", {}).items()
    ]
    about = ABOUT_MARGINS.format(best=board.best.name)
    margins = [tag("p", about)] if board.rival is not None else []
    pairs = [tag("p", verdict) for verdict in verdicts_of(numbers)]
    return section(
        "Side by side", _plot(board, report.trial.protocol), *margins, table(columns, rows), *skipped, *pairs
    )


def _plot(board: Leaderboard, protocol: str) -> Html:
    points = []
    for standing in board.standings:
        interval = standing.intervals["ndcg_at_10"]
        value, note = standing.metrics["ndcg_at_10"], interval_text(interval)
        points.append(Point(standing.name, value, interval, note, is_plain=standing.is_baseline))
    legend = ("models", "baselines") if len(board.models) < len(board.standings) else ()
    caption = f"NDCG@10 of the protocol {protocol}, with 95% intervals"
    return figure(lambda width: bars(points, "NDCG@10 of models and baselines", width), caption, legend)


def _row(standing: Standing, report: Report) -> list[str]:
    values = [with_note(f"{standing.metrics[name]:.4f}", interval_text(standing.intervals[name])) for name in COLUMNS]
    margins = ["" for _ in COLUMNS]
    if standing.best_minus is not None:
        found = [standing.best_minus[name] for name in COLUMNS]
        margins = [with_note(f"{each.difference:+.4f}", interval_text(each.interval_95, "+.4f")) for each in found]
    lists = _of_lists(standing, report)
    coverage = f"{lists['coverage_at_10']:.4f}" if lists else ""
    kind = f"baseline: {standing.about}" if standing.is_baseline and standing.about else standing.about or "baseline"
    return [with_note(standing.name, kind), *values, coverage, *margins]


def metrics_section(report: Report, numbers: dict[str, Any]) -> Html:
    """Return a section with every metric of every model, and of the best baseline."""
    board = report.leaderboard
    baselines = [standing for standing in board.standings if standing.is_baseline]
    shown = [*board.models, *baselines[:1]]
    rows = [[named(numbers, name), *(_value(standing, name) for standing in shown)] for name in shown[0].metrics]
    of_lists = [_of_lists(standing, report) for standing in shown]
    rows += [
        [name, *(number_text(values[name]) if values else "" for values in of_lists)] for name in of_lists[0] or ()
    ]
    about = f"Intervals by bootstrap over users. {ABOUT_LISTS}" if of_lists[0] else "Intervals by bootstrap over users."
    columns = ["metric", *(standing.name for standing in shown)]
    return section("Metrics", tag("p", about), table(columns, rows))


def _value(standing: Standing, name: str) -> Html:
    note = interval_text(standing.intervals[name]) if name in HEADLINES else ""
    return with_note(f"{standing.metrics[name]:.4f}", note)


def _of_lists(standing: Standing, report: Report) -> dict[str, float]:
    """Return the beyond-accuracy metrics of the first seed's lists; none if only some candidates were ranked."""
    recommended = standing.variant.results[0].recommended
    return {} if recommended is None else beyond_accuracy(recommended, report.trial.counts)

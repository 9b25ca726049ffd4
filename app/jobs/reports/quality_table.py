"""The tables of an evaluation, for a terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def metrics_table(numbers: dict[str, Any]) -> Table:
    """Return a table of every metric with its interval; ``numbers`` are those of ``Report.to_json``."""
    rules = f"ties {numbers['tie_rule']}, excluded seen items: {numbers['seen_rule']}"
    about = f"{numbers['users']:,} users, {numbers['items']:,} items, {rules}, table {numbers['data_sha256'][:16]}"
    models, spread = numbers.get("models", [numbers]), numbers.get("spread")
    columns = ["value", "95% interval"]
    if spread is not None:
        columns = [f"mean of {len(models)}", "deviation", *(f"seed {model['seed']}" for model in models)]
    table = Table("metric", *columns, title=numbers["protocol"], caption=about)
    for name in numbers["metrics"]:
        values = [f"{model['metrics'][name]:.4f}" for model in models]
        if spread is None:
            table.add_row(name, *values, interval_text(numbers["interval_95"].get(name)))
        else:
            table.add_row(name, *(f"{spread[name][key]:.4f}" for key in ("mean", "standard_deviation")), *values)
    for name in numbers.get("recommended", {}):
        values = [number_text(model["recommended"][name]) for model in models]
        table.add_row(name, *([] if spread is None else ["", ""]), *values)
    return table


def other_models_table(numbers: dict[str, Any]) -> Table:
    """Return a table of the first model and the others, with paired differences; several seeds have their means."""
    judged = [named(numbers, metric) for metric in ("hr_at_10", "ndcg_at_10")]
    means = means_of(numbers)
    table = Table("", "seeds", *judged, *(f"first minus it, {metric}" for metric in judged))
    seeds = str(len(numbers.get("models", [None])))
    table.add_row(numbers["name"], seeds, *(f"{means[metric]:.4f}" for metric in judged))
    for name, other in numbers["other_models"].items():
        values = [f"{other['metrics'][metric]:.4f}" for metric in judged]
        margins = [margin_text(other["first_minus_it"][metric]) for metric in judged]
        table.add_row(name, str(len(other["models"])), *values, *margins)
    return table


def means_of(numbers: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of the first model, averaged over its seeds."""
    return {name: each["mean"] for name, each in numbers.get("spread", {}).items()} or numbers["metrics"]


def verdicts_of(numbers: dict[str, Any]) -> list[str]:
    """Return the verdict of the comparison with each other model, one sentence each."""
    return [str(other["verdict"]) for other in numbers.get("other_models", {}).values()]


def baselines_table(numbers: dict[str, Any]) -> Table:
    """Return a table of the model, by the mean of its seeds, and the baselines, with paired differences."""
    hit_rate, ndcg = (named(numbers, metric) for metric in ("hr_at_10", "ndcg_at_10"))
    skipped = "; ".join(f"{name} not included: {reason}" for name, reason in numbers["skipped_baselines"].items())
    table = Table("", "HR@10", "NDCG@10", "NDCG@10, model minus baseline", caption=skipped or None)
    means = means_of(numbers)
    table.add_row("this model", *(f"{means[metric]:.4f}" for metric in (hit_rate, ndcg)), "")
    for name, baseline in numbers["baselines"].items():
        values = (f"{baseline['metrics'][metric]:.4f}" for metric in (hit_rate, ndcg))
        table.add_row(name, *values, margin_text(baseline["model_minus_baseline"][ndcg]))
    return table


def margin_text(margin: dict[str, Any]) -> str:
    """Return the difference to the other model, with its interval, as text."""
    return f"{margin['difference']:+.4f} ({interval_text(margin['interval_95'], '+.4f')})"


def interval_text(interval: tuple[float, float] | None, form: str = ".4f") -> str:
    """Return the bounds of an interval as text; empty if there is none."""
    return "" if interval is None else " to ".join(format(bound, form) for bound in interval)


def number_text(value: float) -> str:
    """Return a share with four decimals, or a count with one."""
    return f"{value:.4f}" if value < 10 else f"{value:,.1f}"


def named(numbers: dict[str, Any], metric: str) -> str:
    """Return the metric's name with its protocol, e.g. ``hr_at_10_full``."""
    return next(str(name) for name in numbers["metrics"] if name.startswith(f"{metric}_"))

"""The tables of an evaluation, for a terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def metrics_table(numbers: dict[str, Any]) -> Table:
    """Return a table of every metric with its interval; ``numbers`` are those of ``Report.to_json``."""
    rules = f"ties {numbers['tie_rule']}, seen items left out: {numbers['seen_rule']}"
    about = f"{numbers['users']:,} users, {numbers['items']:,} items, {rules}, table {numbers['data_sha256'][:16]}"
    several = "spread" in numbers
    columns = ["metric", "value", "95 % interval"]
    columns += [f"mean of {len(numbers['models'])}", "deviation"] if several else []
    table = Table(*columns, title=numbers["protocol"], caption=about)
    for name, value in numbers["metrics"].items():
        row = [name, f"{value:.4f}", interval_text(numbers["interval_95"].get(name))]
        if several:
            row += [f"{numbers['spread'][name][key]:.4f}" for key in ("mean", "standard_deviation")]
        table.add_row(*row)
    for name, value in numbers.get("recommended", {}).items():
        table.add_row(name, number_text(value), *[""] * (len(columns) - 2))
    return table


def baselines_table(numbers: dict[str, Any]) -> Table:
    """Return a table of the model and the baselines, with paired differences."""
    hit_rate, ndcg = (named(numbers, metric) for metric in ("hr_at_10", "ndcg_at_10"))
    skipped = "; ".join(f"{name} left out: {reason}" for name, reason in numbers["skipped_baselines"].items())
    table = Table("", "HR@10", "NDCG@10", "NDCG@10, model minus baseline", caption=skipped or None)
    table.add_row("this model", *(f"{numbers['metrics'][metric]:.4f}" for metric in (hit_rate, ndcg)), "")
    for name, baseline in numbers["baselines"].items():
        values = (f"{baseline['metrics'][metric]:.4f}" for metric in (hit_rate, ndcg))
        table.add_row(name, *values, margin_text(baseline, ndcg))
    return table


def margin_text(baseline: dict[str, Any], metric: str) -> str:
    """Return by how much the model is better than a baseline, with the interval."""
    margin = baseline["model_minus_baseline"][metric]
    return f"{margin['difference']:+.4f} ({interval_text(margin['interval_95'], '+.4f')})"


def interval_text(interval: tuple[float, float] | None, form: str = ".4f") -> str:
    """Return the bounds of an interval as text; nothing where there is none."""
    return "" if interval is None else " to ".join(format(bound, form) for bound in interval)


def settings_text(settings: dict[str, Any]) -> str:
    """Return settings by name as text."""
    return ", ".join(f"{name} {_setting_text(value)}" for name, value in settings.items())


def _setting_text(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def number_text(value: float) -> str:
    """Return a share with four decimals, or a count with one."""
    return f"{value:.4f}" if value < 10 else f"{value:,.1f}"


def named(numbers: dict[str, Any], metric: str) -> str:
    """The metric's name with its protocol, e.g. ``hr_at_10_full``."""
    return next(str(name) for name in numbers["metrics"] if name.startswith(f"{metric}_"))

"""The table that `lisarec bench` prints."""

from collections.abc import Sequence

from rich.table import Table

from app.jobs.loadtest.rate_sweep import Row


def bench_table(title: str, rows: Sequence[Row], p90_ms: float) -> Table:
    """Return a table with a line for each rate; a rate that the service did not keep up with is dim."""
    table = Table(
        title=title,
        caption="recommendations and events per second; latency in ms from the scheduled time; CPU µs per request: "
        "service / Redis / load generator, all on this machine; resident MB per process",
    )
    for column in ("rec/s", "events/s", "p50", "p90", "p99", "events' p99", "errors", "CPU µs", "MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        latencies = (f"{value:.1f}" for value in (row.p50_ms, row.p90_ms, row.p99_ms, row.events_p99_ms))
        table.add_row(
            f"{row.recommendations_per_s:,.0f}",
            f"{row.events_per_s:,.0f}",
            *latencies,
            " ".join(f"{count}x{status}" for status, count in row.errors.items()),
            f"{row.service_us:.0f}/{row.redis_us:.0f}/{row.generator_us:.0f}",
            " ".join(map(str, row.resident_mb)),
            style=None if row.keeps_up(p90_ms) else "dim",
        )
    return table

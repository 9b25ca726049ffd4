"""Measure an overload of three times the capacity, and the recovery from it; or memory over hours of steady load.

The load is an open loop, as in `lisarec bench`: clients do not slow down when the service does. They accept a 503 and
do not retry; the service has to send Retry-After.

An overload exits with 1 if accepted requests take longer than a second (p99), if an error other than 429 or 503
occurs, if memory grows by more than a tenth, or if latency has not recovered after 5 s. A soak measures one minute
after another. It exits with 1 if a request fails, or if the memory of a process grows by more than a fiftieth after the
first minute, which fills caches and pools.

    python -m benchmarks.service.overload --model models/ml-1m --capacity 1500
    python -m benchmarks.service.overload --model models/ml-1m --capacity 400 --soak-s 600
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from app.jobs.loadtest.rate_sweep import RateSweep, Row, enlarged_service
from app.jobs.loadtest.table import bench_table

USUAL_SHARE = 0.5  # of the capacity
OVERLOAD = 3.0
USUAL_S = 10.0
RECOVERED_AFTER_S = 5.0
SOAK_TURN_S = 60.0
MAX_P99_MS = 1_000.0
MAX_GROWTH_OF_OVERLOAD = 1.1
MAX_GROWTH_OF_SOAK = 1.02
CONNECTIONS = 400  # to each process, several times its concurrency; otherwise the clients would queue

console = Console(width=140)


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    capacity: Annotated[float, typer.Option(min=1, help="Recommendations per second, as `lisarec bench` found.")],
    items: Annotated[int, typer.Option(min=1)] = 100_000,
    seconds: Annotated[float, typer.Option(min=1, help="Of overload.")] = 60.0,
    soak_s: Annotated[float, typer.Option(min=0, help="Seconds at the capacity given, instead.")] = 0.0,
    processes: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Put a service with this many items under load, and print the results turn by turn."""
    usual = capacity * USUAL_SHARE
    if soak_s:
        turns = [(capacity, SOAK_TURN_S)] * max(2, round(soak_s / SOAK_TURN_S))
    else:
        # the first seconds after the overload show the recovery, the rest that it lasts
        turns = [(usual, USUAL_S), (OVERLOAD * capacity, seconds), (usual, RECOVERED_AFTER_S), (usual, USUAL_S)]
    rows = []
    with enlarged_service(model, items, "trained", processes, on_redis=True) as service:
        bench = RateSweep(service, CONNECTIONS)
        for rate, length_s in turns:
            rows.append(bench.measure(rate, length_s))
            console.print(rows[-1])
        console.print(bench_table(f"{items:,} items, capacity {capacity:,.0f}/s", rows, MAX_P99_MS))
        bench.close()
    missed = list(misses_of_soak(rows) if soak_s else misses_of_overload(*rows))
    for miss in missed:
        console.print(miss, style="red")
    if missed:
        raise typer.Exit(1)


def misses_of_overload(before: Row, over: Row, recovering: Row, after: Row) -> Iterator[str]:
    """Yield the violated requirements; `recovering` covers the first 5 s after the overload."""
    if over.p99_ms > MAX_P99_MS or over.events_p99_ms > MAX_P99_MS:
        yield f"under overload p99 was {over.p99_ms:.0f} ms, of events {over.events_p99_ms:.0f} ms"
    if not over.errors:
        yield "nothing was refused: that was no overload, name a higher --capacity"
    if not over.errors.keys() <= {"429", "503"} or over.unannounced:
        yield f"under overload there were {over.errors}, {over.unannounced} without Retry-After"
    if sum(over.resident_mb) > MAX_GROWTH_OF_OVERLOAD * sum(before.resident_mb):
        yield f"memory grew from {before.resident_mb} to {over.resident_mb} MB"
    if after.errors or after.p99_ms > MAX_P99_MS:
        yield f"{RECOVERED_AFTER_S:g} s later p99 was {after.p99_ms:.0f} ms, with {after.errors}"
    if not recovering.errors.keys() <= {"429", "503"}:
        yield f"within those {RECOVERED_AFTER_S:g} s there were {recovering.errors}"


def misses_of_soak(rows: list[Row]) -> Iterator[str]:
    """Yield the violated requirements of repeated runs under the same load."""
    if failed := [row.errors for row in rows if row.errors]:
        yield f"requests were not answered: {failed}"
    first, last = rows[0].resident_mb, rows[-1].resident_mb
    if max(late / early for early, late in zip(first, last, strict=True)) > MAX_GROWTH_OF_SOAK:
        yield f"memory grew from {first} MB in the first turn to {last} MB in the last"


if __name__ == "__main__":
    typer.run(main)

"""Three times what the service can do, and after that the usual again; or the usual for long, to see memory stay flat.

Open loop, as `lisarec bench`: the clients do not slow down when the service does. They take 503 for an answer and do
not come back; the service has to say when they might. Exit status 1 where what was accepted took longer than a second
(p99), anything else than 429 or 503 was answered, memory grew by a tenth, or the usual was not back within 5 s.

    python -m benchmarks.overload --model models/ml-1m --capacity 1500
    python -m benchmarks.overload --model models/ml-1m --soak-s 600 --capacity 400
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from app.bench import Bench, Row, of_size
from app.bench_table import bench_table

USUAL_SHARE = 0.5  # of the capacity
OVERLOAD = 3.0
USUAL_S = 10.0
RECOVERED_AFTER_S = 5.0
SOAKED_AT_ONCE_S = 60.0
KEPT_UP_MS = 1_000.0
GROWN = 1.1
CONNECTIONS = 400  # to each process, several times what it works on at a time; else the clients would queue

console = Console(width=140)


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    capacity: Annotated[float, typer.Option(min=1, help="Recommendations per second, as `lisarec bench` found.")],
    items: Annotated[int, typer.Option(min=1)] = 100_000,
    seconds: Annotated[float, typer.Option(min=1, help="Of overload.")] = 60.0,
    soak_s: Annotated[float, typer.Option(min=0, help="Seconds at the capacity given, instead.")] = 0.0,
    processes: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    with of_size(model, items, "trained", processes, on_redis=True) as service:
        bench = Bench(service, CONNECTIONS)
        usual = capacity * USUAL_SHARE
        if soak_s:
            turns = [(capacity, SOAKED_AT_ONCE_S)] * round(soak_s / SOAKED_AT_ONCE_S)
        else:
            # what is sent in the first seconds after the overload shows the recovery, the rest that it lasts
            turns = [(usual, USUAL_S), (OVERLOAD * capacity, seconds), (usual, RECOVERED_AFTER_S), (usual, USUAL_S)]
        rows = []
        for rate, length_s in turns:
            rows.append(bench.measure(rate, length_s))
            console.print(rows[-1])
        console.print(bench_table(f"{items:,} items, capacity {capacity:,.0f}/s", rows, KEPT_UP_MS))
        bench.close()
    missed = [] if soak_s else list(misses(*rows))
    for miss in missed:
        console.print(miss, style="red")
    if missed:
        raise typer.Exit(1)


def misses(before: Row, over: Row, recovering: Row, after: Row) -> Iterator[str]:
    """What was not as it should be, `recovering` being the first 5 s after the overload."""
    if over.p99_ms > KEPT_UP_MS or over.events_p99_ms > KEPT_UP_MS:
        yield f"under overload p99 was {over.p99_ms:.0f} ms, of events {over.events_p99_ms:.0f} ms"
    if not over.errors:
        yield "nothing was refused: that was no overload, name a higher --capacity"
    if not over.errors.keys() <= {"429", "503"} or over.unannounced:
        yield f"under overload there were {over.errors}, {over.unannounced} without Retry-After"
    if sum(over.resident_mb) > GROWN * sum(before.resident_mb):
        yield f"memory grew from {before.resident_mb} to {over.resident_mb} MB"
    if after.errors or after.p99_ms > KEPT_UP_MS:
        yield f"{RECOVERED_AFTER_S:g} s later p99 was {after.p99_ms:.0f} ms, with {after.errors}"
    if not recovering.errors.keys() <= {"429", "503"}:
        yield f"within those {RECOVERED_AFTER_S:g} s there were {recovering.errors}"


if __name__ == "__main__":
    typer.run(main)

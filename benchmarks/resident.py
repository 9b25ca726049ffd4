"""Whether the memory of a service's processes grows while it works: resident MB, minute after minute of mixed load.

The first minute fills caches and pools; what comes later than that must not grow by more than a fiftieth: exit status
1 where it does, or where a request was not answered, since a service that does nothing does not grow. Recommendations
and half as many events, of users with old and new histories, for items all over the catalogue.

    python -m benchmarks.resident --model models/ml-1m
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from app.bench import Bench, of_size

MAY_GROW = 1.02

console = Console()


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    items: Annotated[int, typer.Option(min=1, help="Of the catalogue.")] = 100_000,
    minutes: Annotated[int, typer.Option(min=2)] = 10,
    rate: Annotated[float, typer.Option(min=1, help="Recommendations per second.")] = 300,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of a minute, for those who cannot wait.")] = 60,
) -> None:
    with of_size(model, items, "trained", processes=2, on_redis=True) as service:
        bench = Bench(service)
        found, failed = [], False
        for minute in range(1, minutes + 1):
            row = bench.measure(rate, seconds)
            found.append(row.resident_mb)
            failed = failed or bool(row.errors)
            rates = f"{row.recommendations_per_s:,.0f} recommendations/s, {row.events_per_s:,.0f} events/s"
            resident = ", ".join(map(str, row.resident_mb))
            console.print(f"minute {minute}: {rates}, errors {row.errors or 'none'}; resident {resident} MB")
        bench.close()
    grown = max(last / first for first, last in zip(found[0], found[-1], strict=True))
    console.print(f"from the first minute to the last: {grown:.3f} times")
    raise typer.Exit(failed or grown > MAY_GROW)


if __name__ == "__main__":
    typer.run(main)

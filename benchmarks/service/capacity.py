"""Compute machine sizes: from users, events per second and items to cores, memory and disk.

The costs of a request, a user, an event and an item are measured on this machine. For each catalogue size, a service on
its own Redis answers two recommendations for each event, at a rate that it sustains; then its log is archived. The
table multiplies these costs, and leaves half of all cores and half of Redis' memory free.

    python -m benchmarks.service.capacity --model models/ml-1m
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import redis
import typer
from rich.console import Console
from rich.table import Table

from app.jobs.loadtest.rate_sweep import EVENTS_PER_RECOMMENDATION, HISTORY, USERS, RateSweep, enlarged_service
from benchmarks.harness.compose import ROOT

SIZES = (10_000, 100_000, 1_000_000)  # of the catalogue
SHARE_USED = 0.5  # of cores, and of Redis' memory, because an AOF rewrite needs it twice
PEAK_TO_MEAN = 3.0  # ratio of events per second; the mean gives the events of a day
TAIL_S = 3600.0  # time that an archived event stays in Redis, at the peak rate
AOF_TIMES = 3.0  # twice the memory before an AOF rewrite, and once more during it
MOST_GIB_OF_A_NODE = 64.0

console = Console(width=150)


@dataclass(frozen=True, slots=True)
class ShopSize:
    """The size of a shop."""

    users: int
    events_per_s: float
    items: int


SHOPS = (
    ShopSize(10_000, 1, 10_000),
    ShopSize(100_000, 10, 10_000),
    ShopSize(1_000_000, 100, 100_000),
    ShopSize(5_000_000, 500, 100_000),
    ShopSize(10_000_000, 1_000, 1_000_000),
    ShopSize(50_000_000, 5_000, 1_000_000),
)


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """CPU time of a request, where two of three are recommendations, and bytes, for one catalogue size.

    process  of one process of the service, including the model that it maps
    user     of one user in Redis: the newest state, and everything else except the log
    event    of one event in Redis, until it is archived
    """

    service_us: float
    redis_us: float
    process_bytes: float
    user_bytes: float
    event_bytes: float
    archived_event_bytes: float


def measure_costs(model: Path, items: int, rate: float, seconds: float) -> UnitCosts:
    """Measure the costs with a catalogue of this many items."""
    with enlarged_service(model, items, "trained", 1, on_redis=True) as service, closing(RateSweep(service)) as bench:
        assert service.redis_url is not None
        row = bench.measure(rate, seconds)
        if row.errors:
            raise RuntimeError(f"the service does not keep up with {rate:g} recommendations/s: {row.errors}")
        events = USERS * HISTORY + round(row.events_per_s * row.seconds)
        bytes_of_kind = _bytes_in_redis(service.redis_url)
        return UnitCosts(
            service_us=row.service_us,
            redis_us=row.redis_us,
            process_bytes=row.resident_mb[0] * 2**20,
            user_bytes=(bytes_of_kind["head"] + bytes_of_kind["state"]) / USERS,
            event_bytes=(bytes_of_kind["log"] + bytes_of_kind["index"]) / events,
            archived_event_bytes=_archived_bytes(service.redis_url) / events,
        )


def _bytes_in_redis(url: str) -> Counter[str]:
    """Return the total MEMORY USAGE by kind of key, as storage/redis/layout/keys.py names them."""
    bytes_of_kind: Counter[str] = Counter()
    with redis.Redis.from_url(url, decode_responses=True) as client:
        for key in client.scan_iter(count=1_000):
            size_bytes: Any = client.memory_usage(key, samples=0)
            bytes_of_kind[key.split("}:")[-1].split(":")[0]] += size_bytes
    return bytes_of_kind


def _archived_bytes(url: str) -> int:
    """Return the size of the archive of all posted events."""
    with TemporaryDirectory(prefix="lisarec-sizing-") as directory:
        command = [sys.executable, "-m", "app", "archive", "--redis-url", url, "--archive-dir", directory, "--once"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return sum(file.stat().st_size for file in Path(directory).rglob("*") if file.is_file())


@dataclass(frozen=True, slots=True)
class MachineSize:
    """The cores, memory and disk that a shop needs."""

    processes: int
    service_cores: float
    service_gib: float
    redis_cores: float
    redis_gib: float
    redis_nodes: int
    redis_disk_gib: float
    archive_gib_a_year: float


def machines_for(shop: ShopSize, costs: UnitCosts) -> MachineSize:
    """Compute the machines for a shop of this size."""
    requests_per_s = shop.events_per_s * (1 + 1 / EVENTS_PER_RECOMMENDATION)
    service_cores = requests_per_s * costs.service_us / 1e6 / SHARE_USED
    redis_cores = requests_per_s * costs.redis_us / 1e6 / SHARE_USED
    processes = max(2, math.ceil(service_cores))  # so that one can restart
    used = shop.users * costs.user_bytes + shop.events_per_s * TAIL_S * costs.event_bytes
    redis_gib = used / SHARE_USED / 2**30
    year = shop.events_per_s / PEAK_TO_MEAN * 365 * 86_400
    return MachineSize(
        processes=processes,
        service_cores=service_cores,
        service_gib=processes * costs.process_bytes / 2**30,
        redis_cores=redis_cores,
        redis_gib=redis_gib,
        redis_nodes=max(math.ceil(redis_cores), math.ceil(redis_gib / MOST_GIB_OF_A_NODE)),
        redis_disk_gib=AOF_TIMES * used / 2**30,
        archive_gib_a_year=year * costs.archived_event_bytes / 2**30,
    )


def costs_table(costs: dict[int, UnitCosts]) -> Table:
    """Return a table of the measured costs."""
    columns = ("items", "service, µs a request", "Redis, µs a request", "a process", "a user", "an event", "archived")
    table = Table(*columns, title="measured here")
    for items, cost in costs.items():
        sizes = (cost.user_bytes, cost.event_bytes, cost.archived_event_bytes)
        times = (f"{cost.service_us:.0f}", f"{cost.redis_us:.0f}", f"{cost.process_bytes / 1e6:.0f} MB")
        table.add_row(f"{items:,}", *times, *(f"{size:.0f} B" for size in sizes))
    return table


def sizes_table(costs: dict[int, UnitCosts]) -> Table:
    """Return a table of the machines that shops need."""
    columns = ("users", "events/s", "items", "service", "Redis", "Redis' disk", "archive a year")
    table = Table(*columns, title="needed at the peak, two recommendations for each event")
    for shop in SHOPS:
        size = machines_for(shop, costs[shop.items])
        nodes = "" if size.redis_nodes == 1 else f", {size.redis_nodes} nodes"
        table.add_row(
            *(f"{number:,.0f}" for number in (shop.users, shop.events_per_s, shop.items)),
            f"{size.processes} processes, {size.service_cores:.1f} cores, {size.service_gib:.1f} GiB",
            f"{size.redis_cores:.2f} cores, {size.redis_gib:.1f} GiB{nodes}",
            f"{size.redis_disk_gib:.1f} GiB",
            f"{size.archive_gib_a_year:,.1f} GiB",
        )
    return table


def main(
    model: Annotated[Path, typer.Option(help="Trained model.")],
    rate: Annotated[float, typer.Option(min=1, help="Recommendations per second while measuring.")] = 500.0,
    seconds: Annotated[float, typer.Option(min=1, help="For each size of the catalogue.")] = 15.0,
) -> None:
    """Measure the costs, and print the machines that shops need."""
    costs = {}
    for items in SIZES:
        with console.status(f"{items:,} items"):
            costs[items] = measure_costs(model, items, rate, seconds)
    console.print(costs_table(costs))
    console.print(sizes_table(costs))


if __name__ == "__main__":
    typer.run(main)

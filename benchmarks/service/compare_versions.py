"""Measure plain recommendations of two versions of the code in turns: requests and CPU time a request, and their ratio.

Each turn starts `lisarec serve` from one version on an empty embedded store, gives every user a history, and sends
`GET /v1/users/{id}/recommendations` in a closed loop. The load comes from wrk (Debian, Ubuntu: apt install wrk), which
leaves the cores to the service. Every turn serves the same model directory, enlarged to `--items`.

    git worktree add ../before a505549
    python -m benchmarks.service.compare_versions --model models/ml-1m --other ../before --items 100000
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import httpx
import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table

from app.jobs.loadtest.synthetic_catalogue import item_id, write_enlarged
from benchmarks.harness.service_process import free_port, wait_until_ready

ROOT = Path(__file__).parents[2]
USERS = 256
HISTORY = 30
WARM_UP_S = 3
SCRIPT = f"""
request = function()
  return wrk.format("GET", "/v1/users/user-" .. math.random(0, {USERS - 1}) .. "/recommendations")
end
"""

console = Console()


@dataclass(frozen=True)
class Turn:
    """One turn of one version: requests per second, and the service's CPU time a request."""

    rate: float
    cpu_us: float


def main(
    model: Annotated[Path, typer.Option(help="Trained model directory.")],
    other: Annotated[Path, typer.Option(help="Checkout of the other version.")],
    items: Annotated[int, typer.Option(min=1)] = 100_000,
    turns: Annotated[int, typer.Option(min=1, help="Of each version.")] = 5,
    seconds: Annotated[int, typer.Option(min=1, help="Of load in each turn.")] = 10,
    connections: Annotated[int, typer.Option(min=1)] = 16,
) -> None:
    """Print what each version answers, turn by turn, and the ratios of turns that follow each other."""
    if shutil.which("wrk") is None:
        console.print("wrk is missing; on Debian and Ubuntu: apt install wrk")
        raise typer.Exit(1)
    with TemporaryDirectory() as directory:
        enlarged = Path(directory) / "model"
        write_enlarged(enlarged, model, items, "trained")
        measured: list[tuple[Turn, Turn]] = []
        for number in range(turns):
            before, now = (_measure(code, enlarged, items, seconds, connections) for code in (other.resolve(), ROOT))
            measured.append((before, now))
            console.print(
                f"turn {number + 1}: {before.rate:,.0f} and {now.rate:,.0f} requests/s, "
                f"{before.cpu_us:.0f} and {now.cpu_us:.0f} µs of CPU each"
            )
    _print_table(measured, items, connections)


def _measure(code: Path, model: Path, items: int, seconds: int, connections: int) -> Turn:
    with _service(code, model) as (url, process):
        _post_histories(url, items)
        _load(url, WARM_UP_S, connections)
        begin_s = _cpu_s(process)
        answered = _load(url, seconds, connections)
        return Turn(answered / seconds, (_cpu_s(process) - begin_s) / answered * 1e6)


@contextmanager
def _service(code: Path, model: Path) -> Iterator[tuple[str, psutil.Process]]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    with TemporaryDirectory() as store:
        command = [sys.executable, "-P", "-m", "app", "serve", "--model", str(model), "--port", str(port)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LISAREC_")}
        service = subprocess.Popen(
            [*command, "--data-dir", store],
            cwd=code,
            env={**environment, "PYTHONPATH": str(code)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until_ready(url, service)
            yield url, psutil.Process(service.pid)
        finally:
            service.terminate()
            service.wait(timeout=60)


def _post_histories(url: str, items: int) -> None:
    rng = np.random.default_rng(0)
    with httpx.Client(base_url=url) as client:
        for user in range(USERS):
            rows = rng.integers(0, items, HISTORY)
            events = [{"user_id": f"user-{user}", "item_id": item_id(int(row))} for row in rows]
            client.post("/v1/events", json=events).raise_for_status()


def _load(url: str, seconds: int, connections: int) -> int:
    """Send requests in a closed loop; return how many were answered, all with 200."""
    with TemporaryDirectory() as directory:
        script = Path(directory) / "requests.lua"
        script.write_text(SCRIPT, encoding="utf-8")
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(script), url]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 60).stdout
    if "Non-2xx" in said or "Socket errors" in said:
        raise RuntimeError(said)
    answered = re.search(r"(\d+) requests in", said)
    if answered is None or answered[1] == "0":
        raise RuntimeError(said)
    return int(answered[1])


def _cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


def _print_table(measured: list[tuple[Turn, Turn]], items: int, connections: int) -> None:
    table = Table(title=f"{items:,} items, {connections} connections, medians of {len(measured)} turns")
    for column in ("", "other", "this", "this / other (median of the turns' ratios, least, most)"):
        table.add_column(column)
    for name, field in (("requests/s", "rate"), ("CPU of the service, µs a request", "cpu_us")):
        pairs = [(getattr(before, field), getattr(now, field)) for before, now in measured]
        ratios = [now / before for before, now in pairs]
        table.add_row(
            name,
            f"{statistics.median(before for before, _ in pairs):,.0f}",
            f"{statistics.median(now for _, now in pairs):,.0f}",
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f})",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)

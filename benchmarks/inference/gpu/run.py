"""Run all measurements that need a GPU, in at most ten minutes: correctness first, then speed.

Each stage is a process that updates DIR/STAGE.json after each measurement. If one fails, the others still run.
Measurements that would not fit into the time are skipped and listed. ``summary.json`` contains all results and the
machine. No network is needed. Without a device the first stage runs in Triton's interpreter, at small sizes;
``--quick`` then rehearses all stages, to show that they run.

    python -m benchmarks.inference.gpu.run --out DIR
    python -m benchmarks.inference.gpu.run --out DIR --quick
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.inference.gpu.device import machine
from benchmarks.inference.gpu.stage import (
    FAILED,
    RUNNING,
    SKIPPED,
    TIMED_OUT,
    StageOptions,
    StageResult,
    read_result,
    result_path,
    write_result,
)

# each stage's share of the time; later stages share what an earlier one leaves
STAGES = {"correctness": 0.2, "captured": 0.15, "scan_bandwidth": 0.1, "serving": 0.25, "training": 0.3}
WITHOUT_A_DEVICE = ("correctness",)
GRACE_S = 15.0  # after its time is up, until a stage is killed
SMALLEST_S = 5.0  # the shortest time in which a stage is started
NOT_A_VALUE = ("measured", "output")

console = Console(width=160)


def run_stage(name: str, options: StageOptions, end_s: float) -> StageResult:
    """Run one stage in its own process group until its time is up."""
    command = [sys.executable, "-m", "benchmarks.inference.gpu.worker", name, options.to_json()]
    result_path(options.out, name).unlink(missing_ok=True)  # from an earlier run
    process = subprocess.Popen(command, env=environment(options.device), start_new_session=True)
    try:
        process.wait(min(options.seconds + GRACE_S, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        end_group(process)
    result = read_result(options.out, name)
    if result.status == RUNNING:
        result.status = TIMED_OUT if process.returncode == -signal.SIGKILL else FAILED
        result.reason = f"the stage ended with {process.returncode} after {result.seconds:.0f} s"
        write_result(result_path(options.out, name), result)
    return result


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a stage and the processes that it has started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment(device: str) -> dict[str, str]:
    """Return the environment of a stage: without a device, Triton interprets its kernels on the CPU."""
    return os.environ | ({} if device == "cuda" else {"TRITON_INTERPRET": "1"})


def run_stages(options: StageOptions, names: list[str]) -> list[StageResult]:
    """Run the stages one after another; ``options.seconds`` are for all of them."""
    end_s = time.monotonic() + options.seconds
    results = []
    for place, name in enumerate(names):
        left_s = end_s - time.monotonic()
        shares = [STAGES[other] for other in names[place:]]
        if left_s < SMALLEST_S:
            result = StageResult(name, SKIPPED, "the time was up")
            write_result(result_path(options.out, name), result)
        else:
            result = run_stage(name, replace(options, seconds=left_s * shares[0] / sum(shares)), end_s)
        results.append(result)
        console.print(table_of(result))
    return results


def table_of(result: StageResult) -> Table:
    """Return the table of a stage."""
    title = f"{result.stage}: {result.status}, {result.seconds:.0f} s"
    table = Table("", "", title=Text(f"{title}\n{result.reason}" if result.reason else title))
    for row in result.rows:
        values = ", ".join(f"{name} {shown(value)}" for name, value in row.items() if name not in NOT_A_VALUE)
        table.add_row(Text(row["measured"]), Text(values))
    return table


def shown(value: Any) -> str:
    """Return a value in the format of the table."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def main(
    out: Annotated[Path, typer.Option(help="Directory to write the results into.")],
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes and few rounds.")] = False,
    budget_s: Annotated[float, typer.Option(min=1, help="Seconds that all stages may take.")] = 540.0,
    items: Annotated[list[int] | None, typer.Option(min=1, help="Size of the catalogues; repeatable.")] = None,
    model: Annotated[Path | None, typer.Option(help="Model directory to serve, and copies of its items.")] = None,
    data: Annotated[
        Path | None, typer.Option(envvar="LISAREC_DATA", help="Directory with the real data sets, to train on.")
    ] = None,
    stage: Annotated[list[str] | None, typer.Option(help="Just this stage; repeatable.")] = None,
) -> None:
    """Run all stages and print their tables.

    Exits with 1 if a stage fails or times out, a law does not hold, or there is no GPU to measure.
    """
    unknown = sorted(set(stage or ()) - STAGES.keys())
    if unknown:
        raise typer.BadParameter(f"no stage {unknown[0]!r}; there are: {', '.join(STAGES)}")
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    there = tuple(STAGES) if device == "cuda" or quick else WITHOUT_A_DEVICE
    names = [name for name in STAGES if name in there and name in (stage or STAGES)]
    options = StageOptions(out.resolve(), budget_s, device, quick, data, tuple(items or ()), model)
    found = machine(device) | {"command": shlex.join([sys.executable, *sys.argv])}
    console.print(Text(", ".join(f"{name} {value}" for name, value in found.items())))
    results = run_stages(options, names)
    summary = {"machine": found, "stages": [asdict(result) for result in results]}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if device == "cpu":
        left_out = [name for name in STAGES if name not in there]
        how = "the stages were rehearsed" if quick else f"{', '.join(left_out)} need one, and were left out"
        console.print(f"torch finds no GPU: {how}. No time above is one of a GPU.")
    is_good = all(result.is_good and result.status != TIMED_OUT for result in results)
    raise typer.Exit(0 if is_good and (quick or device == "cuda") else 1)


if __name__ == "__main__":
    typer.run(main)

"""Break everything at once, at random, and check afterwards that nothing acknowledged is lost, doubled or wrong.

Twelve clients append, read, undo, merge and erase, through two processes of the service that serve different models.
Meanwhile processes and servers are killed, stopped and restarted, models activated, rebuilt and put into experiments,
clocks jump by up to a year, and the store comes back empty or as it was before. At the end every user's log is held
against what clients were told, every state of both models against the fold of its log, and the histories of some users
are checked for linearizability and may be written for Elle. Exit status 1 where anything is wrong.

    python -m benchmarks.attack.chaos.run --model models/may --other models/june --store redis --seconds 1200
    python -m benchmarks.attack.chaos.run --model models/may --other models/june --store cluster --elle history.edn
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.attack.chaos.disruptions import Disruptions
from benchmarks.attack.chaos.elle import violations, write_history
from benchmarks.attack.chaos.environment import ChaosStore, chaos_environment
from benchmarks.attack.chaos.operations import Operation
from benchmarks.attack.chaos.verdict import ChaosVerdict, judge
from benchmarks.attack.chaos.workload import Workload
from model.artifact import model_directory

REPORT_EVERY_S = 30.0
SHOWN = 5  # faults of a kind
UNCLEAR = ("500", "501", "502")  # statuses that no request may get

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class ChaosSettings:
    """What a run is made of.

    models     model directories of one folder, one for each process
    left_out   kinds of disruptions
    directory  for data, logs and the record of all operations
    """

    models: Sequence[Path]
    store: ChaosStore
    seconds: float
    seed: int
    left_out: Sequence[str]
    directory: Path


async def chaos(settings: ChaosSettings) -> tuple[ChaosVerdict, Workload]:
    """Run clients and disruptions for so long; return the verdict on the store, and what was sent."""
    async with chaos_environment(settings.store, settings.models, settings.directory) as environment:
        workload = Workload(environment.addresses, model_directory.load(settings.models[0]).items.ids, settings.seed)
        disruptions = Disruptions(environment, settings.seed, settings.left_out)
        begin_s = time.monotonic()
        is_healed = False

        async def disrupt() -> None:
            nonlocal is_healed
            await disruptions.run(lambda: time.monotonic() - begin_s > settings.seconds)
            is_healed = True

        async def report() -> None:
            while True:
                await asyncio.sleep(REPORT_EVERY_S)
                console.print(
                    f"{time.monotonic() - begin_s:5.0f} s  {len(workload.record.operations):,} operations; "
                    f"{disruptions.injected.total():,} disruptions"
                )

        reporting = asyncio.create_task(report())
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(disrupt())
                tasks.create_task(workload.run(lambda: is_healed))
        finally:
            reporting.cancel()
        console.print(f"injected: {_counts(disruptions.injected)}")
        console.print(f"answers: {_counts(workload.answers)}")
        _write_record(workload, settings.directory / "operations.jsonl")
        await asyncio.gather(*(app.close() for app in environment.apps))
        store = await environment.open_store()
        try:
            return await judge(store, environment.generations(), workload.record), workload
        finally:
            await store.close()


def _write_record(workload: Workload, path: Path) -> None:
    lines = (json.dumps(asdict(operation)) for operation in workload.record.operations)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def list_operations(workload: Workload) -> list[Operation]:
    """Return the operations on the users whose whole logs were read."""
    return [operation for operation in workload.record.operations if operation.family < 0]


def unclear_answers(workload: Workload) -> Counter[str]:
    """Return how often requests were answered as none may be."""
    return Counter({name: times for name, times in workload.answers.items() if name.split(" ")[1] in UNCLEAR})


def main(  # noqa: PLR0913
    model: Annotated[Path, typer.Option(help="Model directory of the first process.")],
    other: Annotated[Path, typer.Option(help="Another one in the same folder, of the second process.")],
    store: Annotated[ChaosStore, typer.Option(help="What keeps the data.")] = "redis",
    seconds: Annotated[float, typer.Option(min=1)] = 1_200.0,
    seed: Annotated[int, typer.Option(help="Of what is sent and what is disrupted.")] = 1,
    without: Annotated[list[str] | None, typer.Option(help="A kind of disruption to leave out; repeatable.")] = None,
    elle: Annotated[Path | None, typer.Option(help="Write the histories for Elle here.", metavar="FILE")] = None,
    directory: Annotated[Path | None, typer.Option(help="For data, logs and record.", metavar="DIR")] = None,
) -> None:
    """Run the chaos, print what was found."""
    if model.resolve().parent != other.resolve().parent:
        raise typer.BadParameter("the models must lie in one folder, as those do that can be activated")
    with TemporaryDirectory(prefix="lisarec-chaos-", ignore_cleanup_errors=True) as temporary:
        settings = ChaosSettings([model, other], store, seconds, seed, without or (), directory or Path(temporary))
        verdict, workload = asyncio.run(chaos(settings))
    of_lists = list_operations(workload)
    not_linearizable = list(violations(of_lists))
    unclear = unclear_answers(workload)
    console.print(f"{store}, seed {seed}, {seconds:g} s: {verdict}")
    console.print(f"{len(of_lists):,} operations on lists, {len(not_linearizable)} faults of linearizability")
    for name, faults in {**verdict.faults(), "not linearizable": not_linearizable}.items():
        for fault in faults[:SHOWN]:
            console.print(f"  {name}: {fault}")
    if elle is not None:
        console.print(f"{write_history(of_lists, elle):,} operations written to {elle}")
    if unclear:
        console.print(f"unclear answers: {_counts(unclear)}")
    if unclear or not_linearizable or not verdict.is_correct:
        raise typer.Exit(1)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common()) or "none"


if __name__ == "__main__":
    typer.run(main)

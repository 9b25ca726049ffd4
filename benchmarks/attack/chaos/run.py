"""Break everything at once, at random, and check afterwards that nothing acknowledged is lost, doubled or wrong.

Twelve clients append, read, undo, merge and erase, through two processes of the service that serve different models.
An archiver works beside them. Meanwhile processes and servers are killed, stopped and restarted, models activated,
rebuilt and put into experiments, clocks jump by up to a year, replicas take over, and the store comes back empty or as
it was before: for a moment, or for good, which an operator accepts. At the end every user's log is held against what
clients were told, every state of both models against the fold of its log, the archive against the logs, and the
histories of some users are checked for linearizability and may be written for Elle. Exit status 1 where anything is
wrong, a call or a command of an operator failed without a reason, or a kind of disruption did not happen.

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

from app.cli.option_groups import ungrouped
from benchmarks.attack.chaos.correction_gate import CorrectionGate
from benchmarks.attack.chaos.disruptions import Disruptions, kinds_of
from benchmarks.attack.chaos.elle import violations, write_history
from benchmarks.attack.chaos.environment import ChaosEnvironment, ChaosStore, running
from benchmarks.attack.chaos.operations import Operation
from benchmarks.attack.chaos.operator_calls import UNEXPECTED
from benchmarks.attack.chaos.verdict import ChaosVerdict, judge
from benchmarks.attack.chaos.workload import Workload
from benchmarks.harness.fork_server import Weakness
from benchmarks.harness.retrying_clients import counts
from model.artifact import model_directory

REPORT_EVERY_S = 30.0
SHOWN = 5  # faults of a kind

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class ChaosSettings:
    """What a run is made of.

    models     model directories of one folder, one for each process
    replicas   of every primary of a cluster that must have an event before it is acknowledged
    kinds      of disruptions
    weakness   of the service, which the run has to notice
    directory  for data, logs and the record of all operations
    """

    models: Sequence[Path]
    store: ChaosStore
    seconds: float
    seed: int
    directory: Path
    kinds: Sequence[str]
    replicas: int = 1
    weakness: Weakness = "none"


@dataclass
class ChaosReport:
    """The results of a run.

    injected  how often each kind of disruption has happened
    missing   kinds that have not
    faults    by kind, without those of the verdict
    """

    verdict: ChaosVerdict
    workload: Workload
    injected: Counter[str]
    missing: Sequence[str]
    faults: dict[str, list[str]]

    def all_faults(self) -> dict[str, list[str]]:
        """Return all faults by kind; empty if there are none."""
        found = {**self.verdict.faults(), **self.faults, "did not happen": list(self.missing)}
        return {name: faults for name, faults in found.items() if faults}


async def chaos(settings: ChaosSettings) -> ChaosReport:
    """Run clients and disruptions for this long; return the results."""
    environment = ChaosEnvironment(
        settings.store, settings.models, settings.directory, settings.replicas, settings.weakness
    )
    gate = CorrectionGate()
    async with running(environment) as archiver:
        item_ids = model_directory.load(settings.models[0]).items.ids
        workload = Workload(environment.addresses, item_ids, settings.seed, gate)
        disruptions = Disruptions(environment, archiver, gate, settings.seed, settings.kinds)
        await _run(settings.seconds, workload, disruptions)
        await archiver.close()
        last_turn = await disruptions.operator.command("archive", "--once", "--keep-tail", "0")
        workload.record.losses = disruptions.servers.losses
        workload.record.takeovers = disruptions.servers.takeovers
        _write_record(workload, settings.directory / "operations.jsonl")
        await asyncio.gather(*(app.close() for app in environment.apps))
        store = await environment.open_store()
        try:
            archive = environment.archive if last_turn else None
            verdict = await judge(store, environment.generations(), workload.record, archive)
        finally:
            await store.close()
        faults = {
            "operator": disruptions.operator.faults,
            "not refused": disruptions.file.faults + disruptions.servers.faults,
            "given up": workload.given_up,
            "unclear answer": [f"{name}, {times} times" for name, times in unclear_answers(workload).items()],
            "not linearizable": list(violations(list_operations(workload))),
        }
        accepted = Counter({"failover accepted": disruptions.servers.failovers_accepted})
        injected = disruptions.injected + disruptions.operator.outcomes + accepted
        return ChaosReport(verdict, workload, injected, disruptions.missing, faults)


async def _run(seconds: float, workload: Workload, disruptions: Disruptions) -> None:
    begin_s = time.monotonic()
    is_healed = False

    def is_over() -> bool:
        return time.monotonic() - begin_s > seconds

    async def disrupt() -> None:
        nonlocal is_healed
        await disruptions.run(is_over)
        await disruptions.operator.require_success()
        is_healed = True

    async def report() -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            console.print(
                f"{time.monotonic() - begin_s:5.0f} s  {len(workload.record.operations):,} operations; "
                f"{disruptions.injected.total():,} disruptions"
            )

    workload.is_calm = lambda: is_over() and disruptions.waits_for_commands
    workload.is_disturbed = lambda: disruptions.operator.is_disturbed
    reporting = asyncio.create_task(report())
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(disrupt())
            tasks.create_task(workload.run(lambda: is_healed))
    finally:
        reporting.cancel()


def _write_record(workload: Workload, path: Path) -> None:
    lines = (json.dumps(asdict(operation)) for operation in workload.record.operations)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def list_operations(workload: Workload) -> list[Operation]:
    """Return the operations on users whose logs were read completely, except those with possible losses."""
    record = workload.record
    of_lists = [operation for operation in record.operations if operation.family < 0]
    shortened = {one.user_id for one in of_lists if record.losses_of(one) or record.is_beside_a_takeover(one)}
    return [operation for operation in of_lists if operation.user_id not in shortened]


def unclear_answers(workload: Workload) -> Counter[str]:
    """Return the number of responses that are never valid."""
    return Counter({name: times for name, times in workload.answers.items() if name.split(" ")[1] in UNEXPECTED})


@dataclass(frozen=True)
class RunOptions:
    """The options of a run except its output."""

    model: Annotated[Path, typer.Option(help="Model directory of the first process.")]
    other: Annotated[Path, typer.Option(help="Another one in the same folder, of the second process.")]
    store: Annotated[ChaosStore, typer.Option(help="What keeps the data.")] = "redis"
    seconds: Annotated[float, typer.Option(min=1)] = 1_200.0
    seed: Annotated[int, typer.Option(help="Of what is sent and what is disrupted.")] = 1
    without: Annotated[list[str] | None, typer.Option(help="A kind of disruption to leave out; repeatable.")] = None
    wait_replicas: Annotated[
        int, typer.Option(min=0, max=1, help="In a cluster: replicas that must have what is acknowledged.")
    ] = 1
    weakness: Annotated[Weakness, typer.Option(help="Of the service, which the run has to notice.")] = "none"

    def settings(self, directory: Path) -> ChaosSettings:
        """Return the settings of a run in the directory; raise BadParameter if the models are not in one folder."""
        if self.model.resolve().parent != self.other.resolve().parent:
            raise typer.BadParameter("the models must lie in one folder, as those do that can be activated")
        kinds = [kind for kind in kinds_of(self.store) if kind not in (self.without or ())]
        models = [self.model, self.other]
        return ChaosSettings(
            models, self.store, self.seconds, self.seed, directory, kinds, self.wait_replicas, self.weakness
        )


def main(
    options: RunOptions,
    elle: Annotated[Path | None, typer.Option(help="Write the histories for Elle here.", metavar="FILE")] = None,
    directory: Annotated[Path | None, typer.Option(help="For data, logs and record.", metavar="DIR")] = None,
) -> None:
    """Run the chaos and print the results."""
    with TemporaryDirectory(prefix="lisarec-chaos-", ignore_cleanup_errors=True) as temporary:
        report = asyncio.run(chaos(options.settings(directory or Path(temporary))))
    of_lists = list_operations(report.workload)
    console.print(f"injected: {counts(report.injected)}")
    console.print(f"answers: {counts(report.workload.answers)}")
    console.print(f"{options.store}, seed {options.seed}, {options.seconds:g} s: {report.verdict}")
    console.print(f"{len(report.workload.record.losses)} losses accepted; {len(of_lists):,} operations on lists judged")
    for name, faults in report.all_faults().items():
        console.print(f"  {name}: {len(faults):,}")
        for fault in faults[:SHOWN]:
            console.print(f"    {fault}")
    if elle is not None:
        console.print(f"{write_history(of_lists, elle):,} operations written to {elle}")
    if report.all_faults():
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(ungrouped(main))

"""Kill hosts, cut the network, restore old disks under load, and judge the result.

Three hosts, each a network namespace with an address of its own; frames between them take a millisecond, and one in a
thousand is lost. Archiver, trainer and a consumer of Kafka run on one of them; when it dies, they are started on
another one. Each fault is followed by what failed meanwhile and how long nobody was answered. At the end every record
must be committed, a round of the trainer must have ended where it was started last, and every user's log, in Redis and
archive, is held against what clients were told and consumers have committed. Exit status 1 where an acknowledged event
is lost or doubled, or something did not come back by itself. Needs root, or user namespaces, and keepalived.

    python -m benchmarks.machines.run --model models/ml-1m --kills 20 --cuts 20
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from benchmarks.harness.ledger import StoreVerdict
from benchmarks.machine import cpu
from benchmarks.machines.load import EVENTS, KINDS, LISTS, RECORDS, Load
from benchmarks.machines.network import enter, what_is_missing
from benchmarks.machines.site import HOSTS, Machine, Site, running_site
from model.artifact import model_directory

CALM_S = 1.0  # before each fault
AGAIN_WITHIN_S = 200.0  # on a busy machine; the consumer alone waits 30 s for an answer of a host that has died

console = Console(highlight=False, soft_wrap=True)


@dataclass
class Report:
    """The results of a run.

    waits     how long nobody of a third of the users was answered, by kind of fault and of request
    accepted  how often an operator had to accept a loss
    """

    waits: defaultdict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    failed: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    accepted: int = 0

    def print_table(self) -> None:
        """Print a row per kind of fault."""
        console.print(f"| fault | times | no {' | no '.join(f'{kind}: p50, p99 s' for kind in KINDS)} | answers |")
        console.print("|---|---|---|---|---|---|")
        for fault, answers in self.failed.items():
            cells = " | ".join(f"{np.percentile(self.waits[fault, kind], [50, 99]).round(1)}" for kind in KINDS)
            told = ", ".join(f"{answer} {number:,}" for answer, number in answers.most_common())
            console.print(f"| {fault} | {len(self.waits[fault, EVENTS])} | {cells} | {told} |")


class Faults:
    """Injects faults into the site one after another, each under load and followed by recovery."""

    def __init__(self, site: Site, load: Load, down_s: float) -> None:
        self.report = Report()
        self._site = site
        self._load = load
        self._down_s = down_s

    async def kill(self, machine: Machine, *, old_disk: bool) -> None:
        """Kill a host; the others continue without it before it returns, possibly with the disk of its last death."""
        begin_s = await self._begin()
        await self._site.kill(machine)
        await self._note("a host is killed", begin_s, self._until_taken, (EVENTS, LISTS))
        await asyncio.to_thread(self._site.put_disk if old_disk else self._site.keep_disk, machine)
        name = "it comes back with an old disk" if old_disk else "it comes back"
        await self._note(name, await self._begin(calm_s=0.0), lambda: self._site.bring_back(machine))

    async def cut(self, machine: Machine, others: list[Machine]) -> None:
        """Cut a host off from others for a while."""
        begin_s = await self._begin()
        self._site.network.part(machine.host, [other.host for other in others])
        name = "cut between two hosts" if len(others) == 1 else "cut between a host and all others"
        await self._note(name, begin_s, lambda: asyncio.sleep(self._down_s), (EVENTS, LISTS))
        self._site.network.heal()
        await self._note(f"{name}, healed", await self._begin(calm_s=0.0), self._site.settle)

    async def _begin(self, calm_s: float = CALM_S) -> float:
        await asyncio.sleep(calm_s)
        self._before = self._load.answers.copy()
        return time.monotonic()

    async def _note(
        self, fault: str, begin_s: float, work: Callable[[], Awaitable[None]], kinds: Sequence[str] = KINDS
    ) -> None:
        """Await the fault and the recovery of all responses; an operator helps if that takes too long.

        kinds  of requests; during a fault without records, whose consumer may be on a host that is cut off
        """
        await work()
        await self._until_taken(kinds)
        report, load = self.report, self._load
        for kind in KINDS:
            report.waits[fault, kind].append(load.longest_wait_s(kind, begin_s))
        report.failed[fault] += load.answers - self._before
        waits = ", ".join(f"{kind} {report.waits[fault, kind][-1]:.1f} s" for kind in KINDS)
        _say(f"{fault}: nobody of a third was answered for {waits}; {dict(load.answers - self._before)}")

    async def _until_taken(self, kinds: Sequence[str] = (EVENTS, LISTS)) -> None:
        """Wait until every third of the users has had responses for a whole second."""
        begin_s = time.monotonic()
        while time.monotonic() < begin_s + AGAIN_WITHIN_S:
            since_s = time.monotonic()
            await asyncio.sleep(1.0)
            if self._load.is_answered_since(since_s, kinds):
                return
        _say(f"not taken after {AGAIN_WITHIN_S:g} s; services refused the store {self._site.refusals()} times")
        self.report.accepted += 1
        await self._site.accept_loss()


def _say(what: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {what}")


@dataclass(frozen=True)
class Plan:
    """Kinds and numbers of faults; every other kill restores an old disk, every other cut isolates a host.

    timeout_ms  after which the cluster replaces a primary
    logs        where the logs of everything are kept
    """

    model: Path
    kills: int
    cuts: int
    timeout_ms: int
    seed: int
    logs: Path | None


async def break_machines(plan: Plan) -> tuple[Report, StoreVerdict]:
    """Run the plan and judge the result."""
    trained = model_directory.load(plan.model)
    async with running_site(plan.model, plan.timeout_ms, plan.logs) as site:
        load = Load(site.address, site.topic, trained.items.ids, HOSTS, plan.seed)
        faults = Faults(site, load, down_s=plan.timeout_ms / 1000 + 4)
        sending = asyncio.create_task(load.run())
        for number in range(plan.kills):
            await faults.kill(site.machines[number // 2 % HOSTS], old_disk=number % 2 == 1)
        for number in range(plan.cuts):
            one, *others = (site.machines[(number // 2 + step) % HOSTS] for step in range(HOSTS))
            await faults.cut(one, others[:1] if number % 2 == 0 else others)
        load.is_over = True
        await sending
        rounds, newest = await site.rounds()
        console.print(f"rounds of the trainer: {dict(rounds)}; where it was started last, {newest}")
        verdict = await site.judge(trained, load.ledger)
        console.print(
            f"{load.ledger.acknowledgements:,} events acknowledged by a primary and a replica, "
            f"{load.answers[f'{RECORDS} committed']:,} of them records of Kafka; {verdict}"
        )
    return faults.report, verdict


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    kills: Annotated[int, typer.Option(min=0, help="Of hosts.")] = 20,
    cuts: Annotated[int, typer.Option(min=0, help="Of the network: between two hosts, and one and all others.")] = 20,
    timeout_ms: Annotated[int, typer.Option("--node-timeout-ms", min=500, help="Of the cluster.")] = 5_000,
    seed: int = 0,
    logs: Annotated[Path | None, typer.Option(help="Directory for the logs of everything.")] = None,
    inside: Annotated[bool, typer.Option(hidden=True, help="Whether namespaces are this process's own.")] = False,
) -> None:
    """Break three hosts."""
    if not inside:
        if missing := what_is_missing():
            console.print(f"NOT RUN: {missing}")
            raise typer.Exit(2)
        enter("benchmarks.machines.run", [*sys.argv[1:], "--inside"])
    console.print(f"{cpu()}, {os.cpu_count()} cores")
    report, verdict = asyncio.run(break_machines(Plan(model.absolute(), kills, cuts, timeout_ms, seed, logs)))
    report.print_table()
    console.print(f"an operator had to accept a loss {report.accepted} times")
    if not verdict.is_correct or report.accepted:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

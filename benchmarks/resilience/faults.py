"""Check that events survive faults: none acknowledged is lost, none counts twice, every state is the fold of its log.

Every fault is injected here: connections are cut by proxies, processes killed and stopped, power is cut, disks are full
and slow, clocks jump. docs/measurements/reliability/faults.md says how, and what is promised. Exit status 1 where it
does not hold.

    python -m benchmarks.resilience.faults cuts --model models/ml-1m --store redis  # connections, kill -9, SIGSTOP
    python -m benchmarks.resilience.faults cuts --model models/ml-1m --store redis --without-guard  # has to fail
    python -m benchmarks.resilience.faults kills --model models/ml-1m --store sqlite  # kill -9 of app, writer and Redis
    python -m benchmarks.resilience.faults power --model models/ml-1m --store redis  # power cuts; fails with --everysec
    python -m benchmarks.resilience.faults failover --model models/ml-1m --wait-replicas 1  # primaries of a cluster
    python -m benchmarks.resilience.faults hang --model models/ml-1m  # a node of a cluster; others must not wait
    python -m benchmarks.resilience.faults episodes --model models/ml-1m --store redis  # disk, syncs, clocks, hanging
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness.fork_server import Weakness
from benchmarks.harness.ledger import StoreVerdict
from benchmarks.resilience.cluster_failover import failover
from benchmarks.resilience.connection_cuts import cuts
from benchmarks.resilience.degradations import BrokenPromise, episodes
from benchmarks.resilience.environment import ScenarioSettings, StoreKind
from benchmarks.resilience.hung_node import hang
from benchmarks.resilience.power_loss import power_cuts
from benchmarks.resilience.process_kills import kills
from benchmarks.resilience.scenario import console

SEED = 5

cli = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

ModelOption = Annotated[Path, typer.Option("--model", help="Model directory.")]
StoreOption = Annotated[StoreKind, typer.Option("--store", help="What keeps the data.")]
ReplicasOption = Annotated[int, typer.Option("--replicas", min=1, max=8, help="On Redis; on SQLite there is one.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of what is sent and when a fault comes.")]


@cli.command(name="cuts")
def run_cuts(
    model: ModelOption,
    store: StoreOption,
    events: Annotated[int, typer.Option(min=100, help="Distinct events.")] = 1_000_000,
    faults: Annotated[int, typer.Option(min=0)] = 10_000,
    replicas: ReplicasOption = 4,
    without_guard: Annotated[bool, typer.Option(help="Let no duplicate be recognised: it has to fail.")] = False,
    seed: SeedOption = SEED,
) -> None:
    """Cut connections everywhere, kill and stop processes, while a tenth of the events is sent again."""
    weakness: Weakness = "without-guard" if without_guard else "none"
    _judge(cuts(ScenarioSettings(model, store, replicas, seed), events, faults, weakness))


@cli.command(name="kills")
def run_kills(
    model: ModelOption,
    store: StoreOption,
    count: Annotated[int, typer.Option("--kills", min=1, help="Of each kind of process.")] = 200,
    replicas: ReplicasOption = 4,
    seed: SeedOption = SEED,
) -> None:
    """Kill -9 the app, a writer without HTTP, and Redis, at any moment of their work."""
    _judge(kills(ScenarioSettings(model, store, replicas, seed), count))


@cli.command(name="power")
def run_power(
    model: ModelOption,
    store: StoreOption,
    times: Annotated[int, typer.Option("--cuts", min=1)] = 50,
    replicas: ReplicasOption = 4,
    everysec: Annotated[
        bool, typer.Option(help="Sync Redis every second, SQLite at checkpoints: it has to fail.")
    ] = False,
    seed: SeedOption = SEED,
) -> None:
    """Cut the power of the machine that keeps the data: what was not synced is gone, or half there."""
    _judge(power_cuts(ScenarioSettings(model, store, replicas, seed), times, everysec=everysec))


@cli.command(name="episodes")
def run_episodes(
    model: ModelOption,
    store: StoreOption,
    outage_s: Annotated[float, typer.Option(help="How long each takes.")] = 4.0,
    replicas: ReplicasOption = 4,
    seed: SeedOption = SEED,
) -> None:
    """Fill the disk, let syncs crawl, stop who keeps the data, let clocks jump; and heal it again."""
    _judge(episodes(ScenarioSettings(model, store, replicas, seed), outage_s))


@cli.command(name="failover")
def run_failover(
    model: ModelOption,
    count: Annotated[int, typer.Option("--kills", min=1, help="Of primaries, one after the other.")] = 20,
    replicas: Annotated[
        int, typer.Option("--wait-replicas", min=0, max=1, help="Must have an event; with 0 some may be lost.")
    ] = 1,
    timeout_ms: Annotated[int, typer.Option("--node-timeout-ms", min=500, help="Of the cluster.")] = 2_000,
    seed: SeedOption = SEED,
) -> None:
    """Kill primaries of a Redis cluster that have a replica; without waiting for it, losses are only printed."""
    verdict = asyncio.run(failover(model, count, replicas, timeout_ms, seed))
    is_expected = not replicas and not (verdict.duplicated or verdict.unsent or verdict.unfolded)
    if not (verdict.is_correct or is_expected):
        raise typer.Exit(1)


@cli.command(name="hang")
def run_hang(
    model: ModelOption,
    seconds: Annotated[float, typer.Option(help="Of each phase, in which all nodes answer or one hangs.")] = 10.0,
    turns: Annotated[int, typer.Option(min=1, help="Of both phases; their medians count.")] = 3,
    seed: SeedOption = SEED,
) -> None:
    """Stop a node of a Redis cluster with SIGSTOP: users of the other nodes are answered as before."""
    if misses := asyncio.run(hang(model, seconds, seed, turns)):
        console.print(*misses, sep="\n")
        raise typer.Exit(1)


def _judge(work: Coroutine[Any, Any, StoreVerdict]) -> None:
    try:
        verdict = asyncio.run(work)
    except BrokenPromise as exc:
        console.print(exc)
        raise typer.Exit(1) from None
    if not verdict.is_correct:
        raise typer.Exit(1)


if __name__ == "__main__":
    cli()

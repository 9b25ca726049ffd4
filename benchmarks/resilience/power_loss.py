"""Cut the power of the machine that keeps the data, and hold the store against its promise."""

from __future__ import annotations

import asyncio
import random
import signal

from benchmarks.harness.faults.faulty_machine import FaultyMachine
from benchmarks.harness.ledger import StoreVerdict
from benchmarks.resilience.environment import EnvironmentOptions, ScenarioSettings, accept_loss
from benchmarks.resilience.scenario import Scenario, console, scenario

SYNC_S = 0.02  # between a write and the end of its sync there is something to lose
SLOW_SYNC_S = 1.5  # longer than a moment: what was just acknowledged is not synced
MOMENT_S = (0.0, 1.0)  # after something was acknowledged


async def power_cuts(settings: ScenarioSettings, cuts: int, *, everysec: bool) -> StoreVerdict:
    """Cut the power so often.

    everysec  let Redis sync every second and SQLite at its checkpoints, as some would to be faster
    """
    rng = random.Random(settings.seed)
    async with scenario(
        settings,
        options=EnvironmentOptions(
            on_machine=True,
            weakness="unsynced" if everysec else "none",
            redis_options=["--appendfsync", "everysec"] if everysec else [],
        ),
    ) as run:
        machine = run.environment.machine
        assert machine is not None
        machine.slow_syncs(SLOW_SYNC_S if everysec else SYNC_S)
        async with run.under_load():
            changed = sum([await _cut(run, machine, rng, loses=everysec) for _ in range(cuts)])
        console.print(f"{machine.syncs:,} syncs; power cuts changed {changed:,} files")
        return await run.verdict()


async def _cut(run: Scenario, machine: FaultyMachine, rng: random.Random, *, loses: bool) -> int:
    """Return how many files were not on the disk as the process had them.

    loses  a Redis may come back without acknowledged events, which the operator accepts then
    """
    await run.next_acknowledgement()
    await asyncio.sleep(rng.uniform(*MOMENT_S))
    store_process = run.environment.store_process
    await store_process.end(signal.SIGKILL)
    if not machine.syncs:
        raise RuntimeError("nothing was ever synced: the machine is not below the process")
    changed = machine.cut_power(rng)
    run.faults.note(f"{store_process.kind}: power cut")
    await store_process.start()
    if loses and run.environment.redis is not None:
        await accept_loss(run.environment.store_address)
    return changed

"""Cut connections everywhere, kill and stop processes, and hold the store against its promise."""

from __future__ import annotations

import asyncio
import random

from benchmarks.harness.fork_server import Weakness
from benchmarks.harness.ledger import StoreVerdict
from benchmarks.resilience.environment import EnvironmentOptions, ScenarioSettings
from benchmarks.resilience.scenario import Scenario, scenario

RESENT_SHARE = 0.1
CUTS_PER_PROCESS_FAULT = 100  # connections are cut so often for each process that is killed or stopped
STOPPED_S = (0.3, 3.0)  # Redis's clients give up after 2 s


async def cuts(settings: ScenarioSettings, events: int, faults: int, weakness: Weakness) -> StoreVerdict:
    """Send the events and a tenth of them again, with as many faults among them."""
    async with scenario(
        settings,
        events=events,
        faults=faults,
        resent_share=RESENT_SHARE,
        options=EnvironmentOptions(weakness=weakness),
    ) as run:
        async with run.under_load(lambda: len(run.load.ledger) >= events and run.faults.count >= faults):
            if faults:
                await _process_faults(run, events, max(4, faults // CUTS_PER_PROCESS_FAULT), settings.seed)
        return await run.verdict()


async def _process_faults(run: Scenario, events: int, count: int, seed: int) -> None:
    """Kill and stop replicas and the keeper of the data in turn, spread over the events."""
    rng = random.Random(seed)
    for number in range(count):
        while run.load.ledger.acknowledgements < events * (number + 0.5) / count:
            await run.next_acknowledgement()
        process = run.environment.store_process if number % 2 else rng.choice(run.environment.apps)
        is_kill = number % 4 < 2
        if is_kill:
            process.kill()
        else:
            await process.stop_for(rng.uniform(*STOPPED_S))
        run.faults.note(f"{process.kind}: {'kill -9' if is_kill else 'SIGSTOP'}")
        await asyncio.sleep(0)

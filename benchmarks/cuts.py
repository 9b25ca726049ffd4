"""The law while connections are cut everywhere, and processes killed and stopped."""

from __future__ import annotations

import asyncio
import random

from benchmarks.ledger import Verdict
from benchmarks.load import RESENT_SHARE
from benchmarks.nursery import Weakness
from benchmarks.trial import Setting, Trial, trial

CUTS_PER_PROCESS_FAULT = 100  # connections are cut so often for each process that is killed or stopped
STOPPED_S = (0.3, 3.0)  # Redis's clients give up after 2 s


async def cuts(setting: Setting, events: int, faults: int, weakness: Weakness) -> Verdict:
    """Send the events and a tenth of them again, with as many faults among them."""
    async with trial(setting, events=events, faults=faults, resent_share=RESENT_SHARE, weakness=weakness) as run:
        async with run.loaded(lambda: len(run.load.ledger) >= events and run.faults.count >= faults):
            if faults:
                await _process_faults(run, events, max(4, faults // CUTS_PER_PROCESS_FAULT), setting.seed)
        return await run.verdict()


async def _process_faults(run: Trial, events: int, count: int, seed: int) -> None:
    """Kill and stop replicas and the keeper of the data in turn, spread over the events."""
    rng = random.Random(seed)
    for number in range(count):
        while run.load.ledger.acknowledgements < events * (number + 0.5) / count:
            await run.next_acknowledgement()
        victim = run.stage.keeper if number % 2 else rng.choice(run.stage.apps)
        is_kill = number % 4 < 2
        if is_kill:
            victim.kill()
        else:
            await victim.stop_for(rng.uniform(*STOPPED_S))
        run.faults.note(f"{victim.kind}: {'kill -9' if is_kill else 'SIGSTOP'}")
        await asyncio.sleep(0)

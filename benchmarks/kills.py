"""The law while processes are killed at any moment of their work: the app, a writer without HTTP, Redis."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Sequence

from benchmarks.ledger import Ledger, Verdict
from benchmarks.nursery import nursery
from benchmarks.trial import Setting, Trial, console, trial
from benchmarks.victim import Victim

MOMENT_S = (0.0, 0.3)  # after something was acknowledged
WRITTEN_USERS = 20
BACKLOG = 2_000  # requests that a writer has before it
BATCH_SIZES = (1, 10)


async def kills(setting: Setting, count: int) -> Verdict:
    """Kill each kind of process so often."""
    rng = random.Random(setting.seed)
    async with trial(setting) as run:
        redis = [] if run.stage.redis is None else [run.stage.redis]
        slowest_s = 0.0
        async with run.loaded():
            # Redis first: killed this often it never gets to rewriting its log, which then takes ever longer to read
            for victims in (redis, run.stage.apps):
                for number in range(count if victims else 0):
                    slowest_s = max(slowest_s, await _kill(run, victims[number % len(victims)], rng))
            await _kill_writers(run, count, rng)
        console.print(f"events were acknowledged again {slowest_s:.1f} s after a kill, at the latest")
        return await run.verdict()


async def _kill(run: Trial, victim: Victim, rng: random.Random) -> float:
    """Kill the process soon after something was acknowledged; returns how long it took until something was again."""
    await run.next_acknowledgement()
    await asyncio.sleep(rng.uniform(*MOMENT_S))
    await victim.end(signal.SIGKILL)
    run.faults.note(f"{victim.kind}: kill -9")
    killed_s = time.monotonic()
    await victim.start()
    await run.next_acknowledgement()
    return time.monotonic() - killed_s


async def _kill_writers(run: Trial, count: int, rng: random.Random) -> None:
    """Each writer begins with what the one before it had not confirmed when it was killed."""
    backlog: list[list[int]] = []
    for number in range(count):
        backlog += [_batch(run.load.ledger, rng) for _ in range(BACKLOG - len(backlog))]
        taken = await _write_and_kill(run, number, backlog, rng)
        for line in taken:
            run.load.ledger.acknowledge(backlog[line])
        backlog = [batch for line, batch in enumerate(backlog) if line not in taken]
        run.faults.note("writer: kill -9")


def _batch(ledger: Ledger, rng: random.Random) -> list[int]:
    return [ledger.new(f"written-{rng.randrange(WRITTEN_USERS)}", time.time()) for _ in range(rng.choice(BATCH_SIZES))]


async def _write_and_kill(run: Trial, number: int, backlog: Sequence[Sequence[int]], rng: random.Random) -> set[int]:
    """Returns the lines of the backlog that the writer has confirmed."""
    stage, ledger = run.stage, run.load.ledger
    events, taken = (stage.directory / f"writer-{number}-{name}" for name in ("events", "taken"))
    events.write_text("\n".join(json.dumps([ledger.body(event) for event in batch]) for batch in backlog))
    taken.touch()
    arguments = ["writer", stage.store_address, str(stage.model), str(events), str(taken)]

    async def has_written() -> bool:
        return taken.stat().st_size > 0

    writer = Victim("writer", lambda: nursery().spawn(arguments, stage.directory / "writer.log"), has_written)
    await writer.start()
    await asyncio.sleep(rng.uniform(*MOMENT_S))
    await writer.end(signal.SIGKILL)
    await writer.close()
    return {int(line) for line in taken.read_text().split("\n")[:-1]}  # what is cut off was not confirmed

"""Kill processes at any moment of their work: the app, a writer without HTTP, Redis."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Sequence

from benchmarks.harness.fork_server import fork_server
from benchmarks.harness.ledger import Ledger, StoreVerdict
from benchmarks.harness.supervised_process import SupervisedProcess
from benchmarks.resilience.environment import ScenarioSettings
from benchmarks.resilience.scenario import Scenario, console, scenario

MOMENT_S = (0.0, 0.3)  # after something was acknowledged
WRITTEN_USERS = 20
BACKLOG = 2_000  # requests that a writer has before it
BATCH_SIZES = (1, 10)


async def kills(settings: ScenarioSettings, count: int) -> StoreVerdict:
    """Kill each kind of process so often."""
    rng = random.Random(settings.seed)
    async with scenario(settings) as run:
        redis = [] if run.environment.redis is None else [run.environment.redis]
        slowest_s = 0.0
        async with run.under_load():
            # Redis first: killed this often it never gets to rewriting its log, which then takes ever longer to read
            for processes in (redis, run.environment.apps):
                for number in range(count if processes else 0):
                    slowest_s = max(slowest_s, await _kill(run, processes[number % len(processes)], rng))
            await _kill_writers(run, count, rng)
        console.print(f"events were acknowledged again {slowest_s:.1f} s after a kill, at the latest")
        return await run.verdict()


async def _kill(run: Scenario, process: SupervisedProcess, rng: random.Random) -> float:
    """Kill the process soon after something was acknowledged; returns how long it took until something was again."""
    await run.next_acknowledgement()
    await asyncio.sleep(rng.uniform(*MOMENT_S))
    await process.end(signal.SIGKILL)
    run.faults.note(f"{process.kind}: kill -9")
    killed_s = time.monotonic()
    await process.start()
    await run.next_acknowledgement()
    return time.monotonic() - killed_s


async def _kill_writers(run: Scenario, count: int, rng: random.Random) -> None:
    """Each writer begins with what the one before it had not confirmed when it was killed."""
    backlog: list[list[int]] = []
    for number in range(count):
        backlog += [_batch(run.load.ledger, rng) for _ in range(BACKLOG - len(backlog))]
        confirmed = await _write_and_kill(run, number, backlog, rng)
        for line in confirmed:
            run.load.ledger.acknowledge(backlog[line])
        backlog = [batch for line, batch in enumerate(backlog) if line not in confirmed]
        run.faults.note("writer: kill -9")


def _batch(ledger: Ledger, rng: random.Random) -> list[int]:
    return [ledger.new(f"written-{rng.randrange(WRITTEN_USERS)}", time.time()) for _ in range(rng.choice(BATCH_SIZES))]


async def _write_and_kill(run: Scenario, number: int, backlog: Sequence[Sequence[int]], rng: random.Random) -> set[int]:
    """Returns the lines of the backlog that the writer has confirmed."""
    environment, ledger = run.environment, run.load.ledger
    events, confirmed = (environment.directory / f"writer-{number}-{name}" for name in ("events", "taken"))
    events.write_text("\n".join(json.dumps([ledger.body(event) for event in batch]) for batch in backlog))
    confirmed.touch()
    arguments = ["writer", environment.store_address, str(environment.model), str(events), str(confirmed)]

    async def has_written() -> bool:
        return confirmed.stat().st_size > 0

    writer = SupervisedProcess(
        "writer", lambda: fork_server().spawn(arguments, environment.directory / "writer.log"), has_written
    )
    await writer.start()
    await asyncio.sleep(rng.uniform(*MOMENT_S))
    await writer.end(signal.SIGKILL)
    await writer.close()
    return {int(line) for line in confirmed.read_text().split("\n")[:-1]}  # what is cut off was not confirmed

"""Fill a disk, slow syncs, stop a process or move clocks for some seconds, and require clear answers meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness.ledger import StoreVerdict
from benchmarks.harness.retrying_clients import HOT_USERS, NO_ANSWER, TRANSPORT_ERRORS, HttpConnection, counts
from benchmarks.resilience.environment import EnvironmentOptions, FaultEnvironment, ScenarioSettings
from benchmarks.resilience.scenario import Scenario, console, scenario

RECOVERY_WITHIN_S = 10.0
SYNC_S = 3.0  # longer than Redis's clients wait
JUMP_S = 3600.0
READ_WITHIN_S = 5.0
ANSWERED_WITHIN_S = 200.0  # on a busy machine; else within the time of the episode
POLL_EVERY_S = 0.05
BEGUN_AFTER_S = 0.2  # what was under way when an episode began is answered by then
TMPFS_BYTES = 192 << 20

UNAVAILABLE = "503 storage_unavailable"


class BrokenPromise(Exception):
    """A promise was broken in an episode; the message says which."""


@dataclass(frozen=True)
class Degradation:
    """A degradation of the environment for some seconds.

    begin, heal  start and end it
    expected     responses to events that must occur; 200 and any 503 may occur too
    reads        allowed responses to requests for recommendations
    """

    name: str
    begin: Callable[[], Awaitable[None] | None]
    heal: Callable[[], Awaitable[None] | None]
    expected: tuple[str, ...] = ("200",)
    reads: tuple[str, ...] = ("200",)


async def episodes(settings: ScenarioSettings, outage_s: float) -> StoreVerdict:
    """Degrade the environment in each way for this long; raise BrokenPromise where answers or recovery are not good."""
    async with scenario(settings, options=EnvironmentOptions(on_machine=True)) as run:
        async with run.under_load():
            for degradation in _degradations(run.environment):
                await _inject(degradation, run, outage_s)
        verdict = await run.verdict()
    if verdict.is_correct:
        with TemporaryDirectory(prefix="lisarec-faults-") as directory, _tmpfs(Path(directory) / "data") as is_mounted:
            if is_mounted:
                return await _full_tmpfs(settings, Path(directory), outage_s)
        console.print("no tmpfs can be mounted here: only the machine below the process had a full disk")
    return verdict


async def _full_tmpfs(settings: ScenarioSettings, directory: Path, outage_s: float) -> StoreVerdict:
    async with scenario(settings, directory=directory) as run:
        ballast = run.environment.data / "ballast"
        degradation = Degradation("tmpfs full", lambda: _fill(ballast), ballast.unlink, (UNAVAILABLE,))
        async with run.under_load():
            await _inject(degradation, run, outage_s)
        return await run.verdict()


def _degradations(environment: FaultEnvironment) -> Iterator[Degradation]:
    machine, store_process, clocks = environment.machine, environment.store_process, environment.clocks
    assert machine is not None

    def jump(by_s: float) -> None:
        for clock in clocks:
            clock.jump_clock(by_s)

    def stopped(expected: tuple[str, ...], reads: tuple[str, ...]) -> Degradation:
        stop, go_on = (lambda number=number: store_process.send(number) for number in (signal.SIGSTOP, signal.SIGCONT))
        return Degradation(f"{store_process.kind} stopped", stop, go_on, expected, reads)

    yield Degradation("disk full", lambda: machine.fill_disk(True), lambda: machine.fill_disk(False), (UNAVAILABLE,))
    slow = f"syncs take {SYNC_S:g} s"
    yield Degradation(slow, lambda: machine.slow_syncs(SYNC_S), lambda: machine.slow_syncs(0), ())
    if environment.redis is None:
        yield stopped((), (NO_ANSWER,))
    else:
        yield stopped((UNAVAILABLE,), ("200",))
        yield Degradation("redis gone", store_process.end, store_process.start, (UNAVAILABLE,))
    yield Degradation("clocks an hour ahead", lambda: jump(JUMP_S), lambda: jump(0))
    # after a minute, the service would refuse the times of clients: they are an hour ahead of its own
    yield Degradation("clocks an hour back", lambda: jump(-JUMP_S), lambda: jump(0))


async def _inject(degradation: Degradation, run: Scenario, outage_s: float) -> None:
    await run.next_acknowledgement()
    await _await_optional(degradation.begin())
    await asyncio.sleep(BEGUN_AFTER_S)
    before = run.load.answers.copy()
    reads = await _recommendations(run.environment, outage_s)
    answers = await _answers_since(before, run, degradation.expected)
    await _await_optional(degradation.heal())
    healed_s = time.monotonic()
    await run.next_acknowledgement()
    recovery_s = time.monotonic() - healed_s
    run.faults.note(degradation.name)
    console.print(
        f"{degradation.name}: events {counts(answers)}; recommendations {counts(reads)}; "
        f"the first 2xx {recovery_s:.1f} s after it was healed"
    )
    require_clear_answers(degradation, answers, reads, recovery_s)


async def _answers_since(before: Counter[str], run: Scenario, expected: tuple[str, ...]) -> Counter[str]:
    """Return the answers to events; wait for those that are expected."""
    give_up_at_s = time.monotonic() + ANSWERED_WITHIN_S
    while any(run.load.answers[answer] == before[answer] for answer in expected) and time.monotonic() < give_up_at_s:
        await asyncio.sleep(POLL_EVERY_S)
    return run.load.answers - before


def require_clear_answers(
    degradation: Degradation, answers: Counter[str], reads: Counter[str], recovery_s: float
) -> None:
    """Raise BrokenPromise where an answer was unclear, or recovery took too long."""
    clear = {"200", *degradation.expected, *degradation.reads}
    broken = [f"events were answered by {answer}" for answer in answers if answer not in clear and answer[:3] != "503"]
    broken += [f"no event was answered by {answer}" for answer in degradation.expected if not answers[answer]]
    broken += [f"recommendations were answered by {answer}" for answer in reads if answer not in degradation.reads]
    if recovery_s > RECOVERY_WITHIN_S:
        broken.append(f"it took {recovery_s:.1f} s to recover")
    if broken:
        raise BrokenPromise(f"{degradation.name}: {'; '.join(broken)}")


async def _recommendations(environment: FaultEnvironment, seconds: float) -> Counter[str]:
    """Ask for hot users' recommendations all the time; how often which status was the answer."""
    answers: Counter[str] = Counter()
    connection = HttpConnection(environment.address)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        user = answers.total() % HOT_USERS
        try:
            async with asyncio.timeout(READ_WITHIN_S):
                status, _ = await connection.request("GET", f"/v1/users/hot-{user}/recommendations")
            answers[str(status)] += 1
        except TRANSPORT_ERRORS:
            answers[NO_ANSWER] += 1
        await asyncio.sleep(0.1)
    connection.close()
    return answers


async def _await_optional(result: Awaitable[None] | None) -> None:
    if result is not None:
        await result


@contextmanager
def _tmpfs(directory: Path) -> Iterator[bool]:
    """A small file system of its own, where this user may mount one."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def _fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))

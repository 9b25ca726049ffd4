"""Whether events survive faults: none that was acknowledged is lost, none counts twice, every state is the fold of its log.

Every fault is injected here: connections cut by proxies, processes killed and stopped, power cut, disks full and slow,
clocks that jump. docs/faults.md says what is promised. Exit status 1 where it does not hold.

    python -m benchmarks.faults law --model models/ml-1m --store redis            # connections, kills, stops; long
    python -m benchmarks.faults law --model models/ml-1m --store redis --without-guard    # has to fail
    python -m benchmarks.faults kills --model models/ml-1m --store sqlite         # kill -9 of app, writer, Redis
    python -m benchmarks.faults power --model models/ml-1m --store redis          # power cuts; --everysec has to fail
    python -m benchmarks.faults episodes --model models/ml-1m --store redis       # full, slow, stopped, clock jumps
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.ledger import Ledger, Verdict
from benchmarks.load import TRANSPORT_ERRORS, Connection, Load
from benchmarks.nursery import Weakness, nursery
from benchmarks.stage import Stage, StoreKind, stage
from benchmarks.victim import Victim
from model import artifact
from model.artifact import Artifact

REPORT_EVERY_S = 10.0
SEED = 5
CUT_AHEAD = 1.05  # cuts run a little ahead of the events, so that none is missing at the end
CUTS_PER_PROCESS_FAULT = 100  # connections are cut this often for each process that is killed or stopped
STOPPED_S = (0.3, 3.0)  # Redis's clients give up after 2 s
RECOVERY_WITHIN_S = 10.0
OUTAGE_S = 4.0
READ_WITHIN_S = 5.0
SYNC_S = 0.005  # of a disk whose power is cut: between a write and the end of its sync there is something to lose
TMPFS_BYTES = 192 << 20

cli = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)
console = Console(highlight=False, soft_wrap=True)

ModelOption = Annotated[Path, typer.Option(help="Model directory.")]
StoreOption = Annotated[StoreKind, typer.Option(help="What keeps the data.")]
ReplicasOption = Annotated[int, typer.Option(min=1, max=8, help="On Redis; SQLite has one.")]


class Faults:
    """How many of which were injected, and whether another one is due: they keep pace with the events.

    progress  share of the events that is acknowledged
    """

    def __init__(self, wanted: int, progress: Callable[[], float]) -> None:
        self.wanted = wanted
        self.injected: Counter[str] = Counter()
        self._progress = progress

    @property
    def count(self) -> int:
        return self.injected.total()

    def note(self, kind: str) -> None:
        self.injected[kind] += 1

    def is_due(self) -> bool:
        return self.count < self.wanted * min(1.0, CUT_AHEAD * self._progress())


# ---- the law


@cli.command()
def law(
    model: ModelOption,
    store: StoreOption,
    events: Annotated[int, typer.Option(min=100, help="Distinct events.")] = 1_000_000,
    faults: Annotated[int, typer.Option(min=0)] = 10_000,
    replicas: ReplicasOption = 4,
    without_guard: Annotated[bool, typer.Option(help="Let no duplicate be recognised; then this has to fail.")] = False,
    seed: int = SEED,
) -> None:
    """Cut connections everywhere, kill and stop processes, while clients resend what they have sent before."""
    trained = artifact.load(model)
    weakness: Weakness = "without-guard" if without_guard else "none"
    _finish(asyncio.run(_law(trained, model, store, events, faults, replicas, weakness, seed)))


async def _law(
    trained: Artifact, model: Path, kind: StoreKind, events: int, wanted: int, replicas: int, weakness: Weakness, seed: int
) -> Verdict:
    ledger = Ledger(trained.items.ids, seed)
    faults = Faults(wanted, lambda: ledger.acknowledgements / events)
    with _directory() as directory:
        async with stage(
            kind, model, directory, replicas=replicas, weakness=weakness, is_due=faults.is_due, note=faults.note
        ) as made:
            load = Load(made.address, ledger, seed)
            async with _reported(load, faults, events), _background(_process_faults(made, ledger, faults, events)):
                await load.run(lambda: len(ledger) >= events and faults.count >= wanted)
            return await _judged(made, trained, load, faults)


async def _process_faults(made: Stage, ledger: Ledger, faults: Faults, events: int) -> None:
    """Kill and stop replicas and Redis in turn, spread over the events."""
    rng = random.Random(SEED)
    count = max(4, faults.wanted // CUTS_PER_PROCESS_FAULT) if faults.wanted else 0
    for number in range(count):
        while ledger.acknowledgements < events * (number + 0.5) / count:
            await asyncio.sleep(0.01)
        victim = made.keeper if number % 2 else rng.choice(made.apps)
        is_kill = number % 4 < 2
        if is_kill:
            victim.kill()
        else:
            await victim.stop_for(rng.uniform(*STOPPED_S))
        faults.note(f"{victim.name.split()[0]}: {'kill -9' if is_kill else 'SIGSTOP'}")


# ---- kill -9


@cli.command()
def kills(
    model: ModelOption,
    store: StoreOption,
    count: Annotated[int, typer.Option("--kills", min=1, help="Of each kind of process.")] = 200,
    replicas: ReplicasOption = 4,
    seed: int = SEED,
) -> None:
    """Kill -9 the app, a writer without HTTP, and Redis, each at any moment of its work."""
    trained = artifact.load(model)
    _finish(asyncio.run(_kills(trained, model, store, count, replicas, seed)))


async def _kills(trained: Artifact, model: Path, kind: StoreKind, count: int, replicas: int, seed: int) -> Verdict:
    rng = random.Random(seed)
    ledger = Ledger(trained.items.ids, seed)
    faults = Faults(0, lambda: 0)
    with _directory() as directory:
        async with stage(kind, model, directory, replicas=replicas) as made:
            load = Load(made.address, ledger, seed, resent_share=0)
            async with _loaded(load, faults):
                for number in range(count):
                    await _kill(made.apps[number % len(made.apps)], load, faults, rng)
                if made.redis is not None:
                    for _ in range(count):
                        await _kill(made.redis, load, faults, rng)
                await _kill_writers(made, ledger, faults, count, rng)
            return await _judged(made, trained, load, faults)


async def _kill(victim: Victim, load: Load, faults: Faults, rng: random.Random) -> None:
    """Kill the process soon after something was acknowledged; returns when it works again."""
    await _next_acknowledgement(load)
    await asyncio.sleep(rng.uniform(0, 0.3))
    ends = victim.ends
    victim.kill()
    faults.note(f"{victim.name.split()[0]}: kill -9")
    while victim.ends == ends:
        await asyncio.sleep(0.01)
    await victim.start()


async def _kill_writers(made: Stage, ledger: Ledger, faults: Faults, count: int, rng: random.Random) -> None:
    """Each writer goes on where the one before was killed: it begins with what that one had not yet confirmed."""
    events, taken = made.directory / "writer-events", made.directory / "writer-taken"
    open_lines: list[list[int]] = []
    for _ in range(count):
        open_lines += [
            [ledger.new(f"written-{rng.randrange(20)}", time.time()) for _ in range(rng.choice((1, 10)))]
            for _ in range(2_000 - len(open_lines))
        ]
        lines = (json.dumps([ledger.body(number) for number in line]) for line in open_lines)
        events.write_text("\n".join(lines))
        taken.write_text("")
        arguments = ["writer", made.store_address, str(made.model), str(events), str(taken)]
        writer = Victim("writer", lambda a=arguments: nursery().spawn(a, made.directory / "writer.log"), _at_once)  # type: ignore[misc]
        await writer.start()
        while not taken.stat().st_size and writer.ends == 0:
            await asyncio.sleep(0.005)
        await asyncio.sleep(rng.uniform(0, 0.3))
        await writer.end(signal.SIGKILL)
        await writer.close()
        faults.note("writer: kill -9")
        # a number that is cut off was not confirmed
        done = {int(line) for line in taken.read_text().split("\n")[:-1]}
        for number in done:
            ledger.acknowledge(open_lines[number])
        open_lines = [line for number, line in enumerate(open_lines) if number not in done]


async def _at_once() -> bool:
    return True


# ---- power cuts


@cli.command()
def power(
    model: ModelOption,
    store: StoreOption,
    cuts: Annotated[int, typer.Option(min=1)] = 50,
    replicas: ReplicasOption = 4,
    everysec: Annotated[
        bool, typer.Option(help="Redis syncs every second, SQLite at its checkpoints; then this has to fail.")
    ] = False,
    seed: int = SEED,
) -> None:
    """Cut the power of the machine that keeps the data: what was not synced is gone, or half there."""
    trained = artifact.load(model)
    _finish(asyncio.run(_power(trained, model, store, cuts, replicas, everysec, seed)))


async def _power(
    trained: Artifact, model: Path, kind: StoreKind, cuts: int, replicas: int, everysec: bool, seed: int
) -> Verdict:
    rng = random.Random(seed)
    ledger = Ledger(trained.items.ids, seed)
    faults = Faults(0, lambda: 0)
    with _directory() as directory:
        async with stage(
            kind,
            model,
            directory,
            replicas=replicas,
            weakness="unsynced" if everysec else "none",
            redis_options=["--appendfsync", "everysec"] if everysec else [],
            on_machine=True,
        ) as made:
            load = Load(made.address, ledger, seed, resent_share=0)
            changed = 0
            assert made.machine is not None
            made.machine.slow_syncs(SYNC_S)
            async with _loaded(load, faults):
                for _ in range(cuts):
                    changed += await _cut_power(made, load, faults, rng)
            console.print(f"{made.machine.syncs:,} syncs; {changed:,} files changed by power cuts")
            return await _judged(made, trained, load, faults)


async def _cut_power(made: Stage, load: Load, faults: Faults, rng: random.Random) -> int:
    assert made.machine is not None
    await _next_acknowledgement(load)
    await asyncio.sleep(rng.uniform(0, 1))
    await made.keeper.end(signal.SIGKILL)
    if not made.machine.syncs:
        raise RuntimeError("nothing was ever synced: the machine is not below the process")
    changed = made.machine.cut_power(rng)
    faults.note(f"{made.keeper.name.split()[0]}: power cut")
    await made.keeper.start()
    return changed


# ---- episodes


@dataclass(frozen=True)
class Episode:
    """A time in which something is wrong.

    begin, heal  make it so, and end it
    expected     answers to events that have to be seen; beside them 200 and any 503 may be
    reads        how requests for recommendations may be answered
    """

    name: str
    begin: Callable[[], Awaitable[None] | None]
    heal: Callable[[], Awaitable[None] | None]
    expected: tuple[str, ...] = ("200",)
    reads: tuple[str, ...] = ("200",)


@dataclass
class Outcome:
    episode: str
    answers: Counter[str]
    reads: Counter[str]
    recovery_s: float


@cli.command()
def episodes(
    model: ModelOption,
    store: StoreOption,
    outage_s: Annotated[float, typer.Option(help="How long each takes.")] = OUTAGE_S,
    replicas: ReplicasOption = 4,
    seed: int = SEED,
) -> None:
    """Fill the disk, make syncs slow, stop the keeper of the data, let clocks jump; then heal."""
    trained = artifact.load(model)
    _finish(asyncio.run(_episodes(trained, model, store, outage_s, replicas, seed)))


async def _episodes(
    trained: Artifact, model: Path, kind: StoreKind, outage_s: float, replicas: int, seed: int
) -> Verdict:
    ledger = Ledger(trained.items.ids, seed)
    faults = Faults(0, lambda: 0)
    with _directory() as directory:
        async with stage(kind, model, directory, replicas=replicas, on_machine=True) as made:
            load = Load(made.address, ledger, seed, resent_share=0)
            async with _loaded(load, faults):
                for episode in _machine_episodes(made):
                    _require(await _live_through(episode, load, made, outage_s), episode)
                    faults.note(episode.name)
            verdict = await _judged(made, trained, load, faults)
    if not verdict.is_right:
        return verdict
    with _directory() as directory, _tmpfs(directory) as is_mounted:
        if not is_mounted:
            console.print("no tmpfs can be mounted here: the full disk was the machine's below the process alone")
            return verdict
        return await _full_tmpfs(trained, model, kind, directory, outage_s, replicas, seed)


async def _full_tmpfs(
    trained: Artifact, model: Path, kind: StoreKind, directory: Path, outage_s: float, replicas: int, seed: int
) -> Verdict:
    ledger = Ledger(trained.items.ids, seed)
    faults = Faults(0, lambda: 0)
    async with stage(kind, model, directory, replicas=replicas) as made:
        ballast = directory / "data" / "ballast"
        episode = Episode("tmpfs full", lambda: _fill(ballast), ballast.unlink, *_full_disk(kind))
        load = Load(made.address, ledger, seed, resent_share=0)
        async with _loaded(load, faults):
            _require(await _live_through(episode, load, made, outage_s), episode)
            faults.note(episode.name)
        return await _judged(made, trained, load, faults)


def _full_disk(kind: StoreKind) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return ("503 storage_unavailable",), ("200",)


def _machine_episodes(made: Stage) -> Iterator[Episode]:
    machine = made.machine
    assert machine is not None

    def clocks(by_s: float) -> None:
        for one in made.clocks:
            one.jump_clock(by_s)

    yield Episode("disk full", lambda: machine.fill_disk(True), lambda: machine.fill_disk(False), *_full_disk(made.kind))
    yield Episode("syncs take 3 s", lambda: machine.slow_syncs(3), lambda: machine.slow_syncs(0), ())
    is_redis = made.redis is not None
    yield Episode(
        f"{'Redis' if is_redis else 'app'} stopped",
        lambda: made.keeper.send(signal.SIGSTOP),
        lambda: made.keeper.send(signal.SIGCONT),
        ("503 storage_unavailable",) if is_redis else (),
        ("200",) if is_redis else ("no answer",),
    )
    if is_redis:
        yield Episode("Redis gone", lambda: made.keeper.end(), lambda: made.keeper.start(), ("503 storage_unavailable",))
    yield Episode("clocks an hour ahead", lambda: clocks(3600), lambda: clocks(0))
    # events with a time of the clients' clocks are an hour ahead then
    yield Episode("clocks an hour back", lambda: clocks(-3600), lambda: clocks(0), ("422 invalid_events",))


async def _live_through(episode: Episode, load: Load, made: Stage, outage_s: float) -> Outcome:
    await _next_acknowledgement(load)
    await _done(episode.begin())
    await asyncio.sleep(0.2)  # what was under way when it began
    before = load.answers.copy()
    reads = await _recommendations(made, outage_s)
    answers = load.answers - before
    await _done(episode.heal())
    healed_s = time.monotonic()
    async with asyncio.timeout(60):
        await _next_acknowledgement(load)
    outcome = Outcome(episode.name, answers, reads, time.monotonic() - healed_s)
    console.print(
        f"{outcome.episode}: events {_counts(answers)}; recommendations {_counts(reads)}; "
        f"the first 2xx {outcome.recovery_s:.1f} s after it was healed"
    )
    return outcome


def _require(outcome: Outcome, episode: Episode) -> None:
    """Raise RuntimeError where answers are missing or unclear, or it took too long to recover."""
    clear = {"200", *episode.expected, *episode.reads}
    unclear = [answer for answer in outcome.answers if answer not in clear and not answer.startswith("503 ")]
    missing = [answer for answer in episode.expected if not outcome.answers[answer]]
    failed_reads = [answer for answer in outcome.reads if answer not in episode.reads]
    if unclear or missing or failed_reads or outcome.recovery_s > RECOVERY_WITHIN_S:
        raise RuntimeError(f"{episode.name}: {unclear=} {missing=} {failed_reads=} recovery {outcome.recovery_s:.1f} s")


async def _recommendations(made: Stage, seconds: float) -> Counter[str]:
    """Ask for hot users' recommendations all the time; how often which status was the answer."""
    answers: Counter[str] = Counter()
    connection = Connection(made.address)
    end_s = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end_s:
        number += 1
        try:
            async with asyncio.timeout(READ_WITHIN_S):
                status, _ = await connection.request("GET", f"/v1/users/hot-{number % 8}/recommendations")
            answers[str(status)] += 1
        except TRANSPORT_ERRORS:
            answers["no answer"] += 1
        await asyncio.sleep(0.1)
    connection.close()
    return answers


@contextmanager
def _tmpfs(directory: Path) -> Iterator[bool]:
    """A small file system of its own below the directory, where the user may mount one."""
    data = directory / "data"
    data.mkdir()
    options = f"size={TMPFS_BYTES}"
    may = os.geteuid() == 0
    if not may or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", data], check=False).returncode:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", data], check=True)


def _fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


# ---- what all of them do


async def _done(result: Awaitable[None] | None) -> None:
    if result is not None:
        await result


async def _next_acknowledgement(load: Load) -> None:
    seen_s = load.last_acknowledged_s
    while load.last_acknowledged_s == seen_s:
        await asyncio.sleep(0.005)


@asynccontextmanager
async def _loaded(load: Load, faults: Faults) -> AsyncIterator[None]:
    """Let the load run meanwhile; afterwards everything that was sent is acknowledged."""
    is_over = False
    async with _reported(load, faults):
        running = asyncio.create_task(load.run(lambda: is_over))
        try:
            yield
            is_over = True
            await running
        finally:
            running.cancel()
            await asyncio.wait([running])


@asynccontextmanager
async def _background(work: Awaitable[None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def _reported(load: Load, faults: Faults, events: int | None = None) -> AsyncIterator[None]:
    """Print now and then how far it is."""

    async def report() -> None:
        begin_s = time.monotonic()
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            elapsed_s = time.monotonic() - begin_s
            done = load.ledger.acknowledgements
            share = f" of {events:,}" if events else ""
            rate = f"{done / elapsed_s:,.0f}/s"
            console.print(f"{elapsed_s:5.0f} s  {done:,}{share} events, {rate}; {faults.count:,} faults")

    async with _background(report()):
        yield


async def _judged(made: Stage, trained: Artifact, load: Load, faults: Faults) -> Verdict:
    console.print(f"faults: {faults.count:,} ({_counts(faults.injected)})")
    console.print(f"answers: {_counts(load.answers)}")
    verdict = await made.judge(trained, load.ledger)
    console.print(f"{made.kind}: {verdict}")
    return verdict


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common()) or "none"


@contextmanager
def _directory() -> Iterator[Path]:
    with TemporaryDirectory(prefix="lisarec-faults-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def _finish(verdict: Verdict) -> None:
    if not verdict.is_right:
        raise typer.Exit(1)


if __name__ == "__main__":
    cli()

"""One run of the fault bench: a stage, the load on it, the faults that were injected, and in the end the verdict."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from benchmarks.ledger import Ledger, Verdict
from benchmarks.load import Load
from benchmarks.stage import Stage, StoreKind, stage
from model import artifact

REPORT_EVERY_S = 10.0
RECOVERY_WITHIN_S = 60.0  # else the bench gives up
CUT_AHEAD = 1.05  # faults run a little ahead of the events, so that none is missing at the end

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Setting:
    """What every kind of trial is told."""

    model: Path
    store: StoreKind
    replicas: int
    seed: int


class Faults:
    """Which faults were injected how often, and whether another one is due: they keep pace with the events.

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


class Trial:
    def __init__(self, made: Stage, load: Load, faults: Faults, trained: artifact.Artifact) -> None:
        self.stage = made
        self.load = load
        self.faults = faults
        self._trained = trained
        self._running: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def loaded(self, is_enough: Callable[[], bool] | None = None) -> AsyncIterator[None]:
        """Let the load run meanwhile, and then until it is enough; afterwards all that was sent is acknowledged."""
        is_over = False
        running = self._running = asyncio.create_task(
            self.load.run(lambda: is_over and (is_enough is None or is_enough()))
        )
        try:
            async with _background(self._report()):
                yield
                is_over = True
                await running
        finally:
            running.cancel()
            await asyncio.wait([running])

    async def next_acknowledgement(self) -> None:
        """Returns when events are acknowledged that were not until now."""
        seen_s = self.load.last_acknowledged_s
        async with asyncio.timeout(RECOVERY_WITHIN_S):
            while self.load.last_acknowledged_s == seen_s:
                if self._running is not None and self._running.done():
                    self._running.result()
                await asyncio.sleep(0.005)

    async def verdict(self) -> Verdict:
        console.print(f"faults: {self.faults.count:,} ({counts(self.faults.injected)})")
        console.print(f"answers: {counts(self.load.answers)}")
        console.print(f"{self.load.hot_rate:.0f} events/s of each hot user")
        verdict = await self.stage.judge(self._trained, self.load.ledger)
        console.print(f"{self.stage.kind}: {verdict}")
        return verdict

    async def _report(self) -> None:
        """Print now and then how far it is."""
        begin_s = time.monotonic()
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            elapsed_s, done = time.monotonic() - begin_s, self.load.ledger.acknowledgements
            console.print(
                f"{elapsed_s:5.0f} s  {done:,} events, {done / elapsed_s:,.0f}/s; {self.faults.count:,} faults"
            )


@asynccontextmanager
async def trial(
    setting: Setting,
    *,
    events: int = 1,
    faults: int = 0,
    resent_share: float = 0.0,
    directory: Path | None = None,
    **stage_options: Any,
) -> AsyncIterator[Trial]:
    """A stage that is ready, and a load that is not running yet.

    events, faults  so many cuts of connections, spread over so many events
    resent_share    of the events are sent again on purpose; 0 where a resend could hide a loss
    directory       for everything; None: a temporary one
    """
    trained = artifact.load(setting.model)
    ledger = Ledger(trained.items.ids, setting.seed)
    wanted = Faults(faults, lambda: ledger.acknowledgements / events)
    with _temporary(directory) as place:
        async with stage(
            setting.store,
            setting.model,
            place,
            replicas=setting.replicas,
            is_due=wanted.is_due,
            note=wanted.note,
            **stage_options,
        ) as made:
            yield Trial(made, Load(made.address, ledger, setting.seed, resent_share=resent_share), wanted, trained)


def counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common()) or "none"


@contextmanager
def _temporary(directory: Path | None) -> Iterator[Path]:
    if directory is not None:
        yield directory
        return
    with TemporaryDirectory(prefix="lisarec-faults-", ignore_cleanup_errors=True) as made:
        yield Path(made)


@asynccontextmanager
async def _background(work: Awaitable[None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])

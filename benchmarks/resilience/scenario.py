"""A run of the fault bench: the environment, the load on it, the faults that are injected, and the verdict."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from benchmarks.harness.ledger import Ledger, StoreVerdict
from benchmarks.harness.retrying_clients import RetryingClients, counts
from benchmarks.resilience.environment import (
    EnvironmentOptions,
    FaultEnvironment,
    Faults,
    ScenarioSettings,
    fault_environment,
)
from model.artifact import model_directory

REPORT_EVERY_S = 10.0
RECOVERY_WITHIN_S = 200.0  # on a busy machine; else the bench gives up

DEFAULT_OPTIONS = EnvironmentOptions()

console = Console(highlight=False, soft_wrap=True)


class Scenario:
    """An environment, the load on it, and the faults that are injected into it."""

    def __init__(
        self, environment: FaultEnvironment, load: RetryingClients, faults: Faults, trained: model_directory.Artifact
    ) -> None:
        self.environment = environment
        self.load = load
        self.faults = faults
        self._trained = trained
        self._running: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def under_load(self, is_enough: Callable[[], bool] | None = None) -> AsyncIterator[None]:
        """Run the load within the block, and afterwards until it is enough and every sent event is acknowledged."""
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
        """Wait until events are acknowledged that were not until now."""
        seen_s = self.load.last_acknowledged_s
        async with asyncio.timeout(RECOVERY_WITHIN_S):
            while self.load.last_acknowledged_s == seen_s:
                if self._running is not None and self._running.done():
                    self._running.result()
                await asyncio.sleep(0.005)

    async def verdict(self) -> StoreVerdict:
        """End the replicas, print the results, and return the verdict on the store."""
        console.print(f"faults: {self.faults.count:,} ({counts(self.faults.injected)})")
        console.print(f"answers: {counts(self.load.answers)}")
        console.print(f"{self.load.hot_rate:.0f} events/s of each hot user")
        verdict = await self.environment.judge(self._trained, self.load.ledger)
        console.print(f"{self.environment.kind}: {verdict}")
        return verdict

    async def _report(self) -> None:
        """Print the progress at intervals."""
        begin_s = time.monotonic()
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            elapsed_s, done = time.monotonic() - begin_s, self.load.ledger.acknowledgements
            console.print(
                f"{elapsed_s:5.0f} s  {done:,} events, {done / elapsed_s:,.0f}/s; {self.faults.count:,} faults"
            )


@asynccontextmanager
async def scenario(
    settings: ScenarioSettings,
    *,
    events: int = 1,
    faults: int = 0,
    resent_share: float = 0.0,
    directory: Path | None = None,
    options: EnvironmentOptions = DEFAULT_OPTIONS,
) -> AsyncIterator[Scenario]:
    """Start an environment that is ready, and a load that does not run yet.

    events, faults  so many cuts of connections, spread over so many events
    resent_share    of the events are sent again on purpose; 0 where a resend could hide a loss
    directory       for everything; None: a temporary one
    """
    trained = model_directory.load(settings.model)
    ledger = Ledger(trained.items.ids, settings.seed)
    planned = Faults(faults, lambda: ledger.acknowledgements / events)
    with _temporary(directory) as place:
        async with fault_environment(settings, place, options, planned) as environment:
            load = RetryingClients(environment.address, ledger, settings.seed, resent_share=resent_share)
            yield Scenario(environment, load, planned, trained)


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

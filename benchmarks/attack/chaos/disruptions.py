"""What the chaos run does to the processes, the store, the clocks and the models, at random and several at once."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.attack.chaos.environment import ChaosEnvironment
from benchmarks.harness.retrying_clients import NO_ANSWER, TRANSPORT_ERRORS, HttpConnection
from benchmarks.harness.supervised_process import SupervisedProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LANES = 2  # disruptions at a time
PAUSE_S = (0.2, 2.0)
READY_WITHIN_S = 180.0
REBUILT_WITHIN_S = 120.0
JUMPS_S = (3_600.0, 86_400.0, 365 * 86_400.0)


class Disruptions:
    """Disrupts an environment until it is told to end.

    injected  how often each kind was injected
    """

    def __init__(self, environment: ChaosEnvironment, seed: int, left_out: Sequence[str] = ()) -> None:
        self.injected: Counter[str] = Counter()
        self._environment = environment
        self._seed = seed
        self._store = asyncio.Lock()
        self._apps = [asyncio.Lock() for _ in environment.apps]
        self._file_copy: Path | None = None
        self._kinds: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "app killed": self._kill_app,
            "app restarted": self._restart_app,
            "app stopped": self._stop_app,
            "clock jumped": self._jump_clock,
            "model activated": self._activate,
            "experiment changed": self._change_experiment,
            "model rebuilt": self._rebuild,
            "store lost": self._lose_store,
            "store older": self._age_store,
        }
        if environment.servers:
            self._kinds |= {
                "redis killed": self._kill_server,
                "redis restarted": self._restart_server,
                "redis stopped": self._stop_server,
            }
        for kind in left_out:
            self._kinds.pop(kind, None)

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Disrupt until it is over; everything is healed and ready then."""
        async with asyncio.TaskGroup() as lanes:
            for number in range(LANES):
                lanes.create_task(self._lane(random.Random(self._seed * LANES + number), is_over))
        await self._all_ready()

    async def _lane(self, rng: random.Random, is_over: Callable[[], bool]) -> None:
        while not is_over():
            kind = rng.choice(list(self._kinds))
            await self._kinds[kind](rng)
            self.injected[kind] += 1
            await asyncio.sleep(rng.uniform(*PAUSE_S))

    async def _kill_app(self, rng: random.Random) -> None:
        async with self._app(rng) as number:
            await self._restart(self._environment.apps[number], signal.SIGKILL)

    async def _restart_app(self, rng: random.Random) -> None:
        async with self._app(rng) as number:
            await self._restart(self._environment.apps[number], signal.SIGTERM)

    async def _stop_app(self, rng: random.Random) -> None:
        async with self._app(rng) as number:
            await self._environment.apps[number].stop_for(rng.uniform(0.2, 2.0))

    async def _jump_clock(self, rng: random.Random) -> None:
        async with self._app(rng) as number:
            clock = self._environment.clocks[number]
            clock.jump_clock(rng.choice((-1, 1)) * rng.choice(JUMPS_S))
            await asyncio.sleep(rng.uniform(0.5, 4.0))
            clock.jump_clock(0)

    async def _activate(self, rng: random.Random) -> None:
        await self._ask(rng, "POST", f"/v1/admin/generations/{rng.choice(self._environment.models).name}/activate")

    async def _change_experiment(self, rng: random.Random) -> None:
        if rng.random() < 0.5:
            await self._ask(rng, "DELETE", "/v1/admin/experiment")
        else:
            shares = {model.name: 1 / len(self._environment.models) for model in self._environment.models}
            await self._ask(rng, "PUT", "/v1/admin/experiment", {"name": "chaos", "shares": shares})

    async def _rebuild(self, rng: random.Random) -> None:
        """Rebuild a model's states; every other time the command is killed on its way."""
        model = str(rng.choice(self._environment.models))
        killed_after_s = rng.uniform(0.05, 1.5) if rng.random() < 0.5 else REBUILT_WITHIN_S
        await self._environment.run_command("rebuild", "--model", model, killed_after_s=killed_after_s)

    async def _kill_server(self, rng: random.Random) -> None:
        async with self._store:
            await self._restart(rng.choice(self._environment.servers).process, signal.SIGKILL)

    async def _restart_server(self, rng: random.Random) -> None:
        async with self._store:
            await self._restart(rng.choice(self._environment.servers).process, signal.SIGTERM)

    async def _stop_server(self, rng: random.Random) -> None:
        async with self._store:
            await rng.choice(self._environment.servers).process.stop_for(rng.uniform(0.2, 3.0))

    async def _lose_store(self, rng: random.Random) -> None:
        """For some seconds there is an empty Redis, or no file of SQLite."""
        async with self._store_and_apps():
            if not self._environment.servers:
                with self._environment.replaced_file(None):
                    await asyncio.sleep(rng.uniform(1.0, 3.0))
                return
            async with rng.choice(self._environment.servers).holding(None):
                await asyncio.sleep(rng.uniform(1.0, 3.0))

    async def _age_store(self, rng: random.Random) -> None:
        """For some seconds the store is as it was when it was copied; the first time it is copied."""
        async with self._store_and_apps():
            if not self._environment.servers:
                if self._file_copy is not None:
                    with self._environment.replaced_file(self._file_copy):
                        await asyncio.sleep(rng.uniform(1.0, 3.0))
                self._file_copy = await asyncio.to_thread(self._environment.copy_file)
                return
            server = rng.choice(self._environment.servers)
            if server.snapshot.exists():
                async with server.holding(server.snapshot):
                    await asyncio.sleep(rng.uniform(1.0, 3.0))
            await server.copy()

    async def _ask(self, rng: random.Random, method: str, path: str, body: object = None) -> None:
        connection = HttpConnection(rng.choice(self._environment.addresses))
        try:
            status, _ = await connection.request(method, path, body)
            self.injected[f"{method} of an operator: {status}"] += 1
        except TRANSPORT_ERRORS:
            self.injected[f"{method} of an operator: {NO_ANSWER}"] += 1
        finally:
            connection.close()

    async def _restart(self, process: SupervisedProcess, number: signal.Signals) -> None:
        await process.end(number)
        await process.start()

    @asynccontextmanager
    async def _app(self, rng: random.Random) -> AsyncIterator[int]:
        """Take one app for a disruption of its own."""
        number = rng.randrange(len(self._apps))
        async with self._apps[number]:
            yield number

    @asynccontextmanager
    async def _store_and_apps(self) -> AsyncIterator[None]:
        """Take everything: a process that starts on an empty or older store cannot know what it lacks."""
        async with AsyncExitStack() as stack:
            for lock in (self._store, *self._apps):
                await stack.enter_async_context(lock)
            await self._all_ready()
            yield

    async def _all_ready(self) -> None:
        await asyncio.gather(*(process.is_ready_within(READY_WITHIN_S) for process in self._processes()))

    def _processes(self) -> Iterable[SupervisedProcess]:
        return [*(server.process for server in self._environment.servers), *self._environment.apps]

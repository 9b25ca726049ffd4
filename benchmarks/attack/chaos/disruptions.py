"""Disruptions of the chaos run: processes, store, clocks and models, at random and several at once."""

from __future__ import annotations

import asyncio
import http.client
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from email.utils import parsedate_to_datetime

from benchmarks.attack.chaos.correction_gate import CorrectionGate
from benchmarks.attack.chaos.environment import ChaosEnvironment, ChaosStore
from benchmarks.attack.chaos.operator_calls import Operator
from benchmarks.attack.chaos.store_disruptions import (
    Disruption,
    FileDisruptions,
    ServerDisruptions,
    restarted,
    stopped,
)
from benchmarks.harness.faults.tcp_proxy import Address
from benchmarks.harness.supervised_process import SupervisedProcess

LANES = 3  # disruptions at a time
ATTEMPTS = 5  # at a kind that did not happen yet, when the time is over
PAUSE_S = (0.1, 1.0)
READY_WITHIN_S = 300.0
JUMPS_S = (3_600.0, 86_400.0, 365 * 86_400.0)

KINDS = (
    "app killed",
    "app restarted",
    "app stopped",
    "clock jumped",
    "archiver killed",
    "model activated",
    "experiment changed",
    "model rebuilt",
    "rebuild killed",
    "store repaired",
    "store lost",
    "store older",
)
KINDS_OF_COMMANDS = {"model rebuilt", "rebuild killed", "store repaired"}  # which give way to requests
KINDS_OF_REDIS = ("redis killed", "redis restarted", "redis stopped", "loss accepted")
KINDS_OF_CLUSTER = ("primary replaced", "lagging replica took over")


def kinds_of(store: ChaosStore) -> tuple[str, ...]:
    """Return the kinds of disruptions for a store."""
    of_redis = KINDS_OF_REDIS if store != "sqlite" else ()
    return (*KINDS, *of_redis, *(KINDS_OF_CLUSTER if store == "cluster" else ()))


class Disruptions:
    """Disrupts an environment until the run is over.

    injected  how often each kind has happened: it was seen to, and not only tried
    """

    def __init__(
        self,
        environment: ChaosEnvironment,
        archiver: SupervisedProcess,
        gate: CorrectionGate,
        seed: int,
        kinds: Collection[str],
    ) -> None:
        self.injected: Counter[str] = Counter()
        self.operator = Operator(environment)
        self.file = FileDisruptions(environment, self.operator)
        self.servers = ServerDisruptions(environment, self.operator, gate)
        self._environment = environment
        self._archiver = archiver
        self._seed = seed
        self._rng = random.Random(seed)
        self._tried: Counter[str] = Counter()  # since the time is over
        self._running: Counter[str] = Counter()
        self._deck: list[str] = []
        self._apps = [asyncio.Lock() for _ in environment.apps]
        known = self._kinds_of_processes() | (self.servers if environment.servers else self.file).kinds()
        self._kinds = {kind: known[kind] for kind in kinds}

    def _kinds_of_processes(self) -> dict[str, Disruption]:
        return {
            "app killed": lambda rng: self._restart_app(rng, signal.SIGKILL),
            "app restarted": lambda rng: self._restart_app(rng, signal.SIGTERM),
            "app stopped": self._stop_app,
            "clock jumped": self._jump_clock,
            "archiver killed": self._kill_archiver,
            "model activated": self._activate,
            "experiment changed": self._change_experiment,
            "model rebuilt": self._rebuild,
            "rebuild killed": self._kill_rebuild,
            "store repaired": self._repair,
        }

    @property
    def missing(self) -> list[str]:
        """Return the kinds that have not happened yet."""
        return [kind for kind in self._kinds if not self.injected[kind]]

    @property
    def waits_for_commands(self) -> bool:
        """Return whether only commands are running."""
        return self._running.keys() <= KINDS_OF_COMMANDS

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Disrupt until the run is over and each kind has happened; afterwards everything is healed and ready."""
        async with asyncio.TaskGroup() as lanes:
            for number in range(LANES):
                lanes.create_task(self._lane(random.Random(self._seed * LANES + number), is_over))
        servers = self._environment.servers
        await asyncio.gather(
            *(server.settle() for server in servers),
            *(app.is_ready_within(READY_WITHIN_S) for app in self._environment.apps),
        )

    async def _lane(self, rng: random.Random, is_over: Callable[[], bool]) -> None:
        while (kind := self._next_kind(is_over())) is not None:
            self._running[kind] += 1
            has_happened = await self._kinds[kind](rng)
            self.injected[kind] += has_happened  # another lane may have added one meanwhile
            self._running -= Counter([kind])  # a kind of which none is running is no key of it
            await asyncio.sleep(rng.uniform(*PAUSE_S))

    def _next_kind(self, is_over: bool) -> str | None:
        """Deal all kinds in random order before one repeats; at the end, those that have not happened.

        What another one prevented is tried again when nothing else goes on.
        """
        if is_over:
            attempts = 1 if self._running.total() else ATTEMPTS
            left = [kind for kind in self.missing if self._tried[kind] < attempts and not self._running[kind]]
            if not left:
                return None
            self._tried[kind := self._rng.choice(left)] += 1
            return kind
        if not self._deck:
            self._deck = self._rng.sample(list(self._kinds), len(self._kinds))
        return self._deck.pop()

    # ---- processes

    async def _restart_app(self, rng: random.Random, number: signal.Signals) -> bool:
        async with self._app(rng) as app, self._app_may_start():
            return await restarted(self._environment.apps[app], number)

    async def _stop_app(self, rng: random.Random) -> bool:
        async with self._app(rng) as app:
            return await stopped(self._environment.apps[app], rng.uniform(0.2, 2.0))

    async def _jump_clock(self, rng: random.Random) -> bool:
        async with self._app(rng) as app:
            clock, address = self._environment.clocks[app], self._environment.addresses[app]
            by_s = rng.choice((-1, 1)) * rng.choice(JUMPS_S)
            clock.jump_clock(by_s)
            await asyncio.sleep(rng.uniform(1.5, 4.0))  # the server makes a new date every second
            seen_s = await asyncio.to_thread(_date_of, address)
            clock.jump_clock(0)
            return seen_s is not None and abs(seen_s - time.time() - by_s) < 60

    async def _kill_archiver(self, rng: random.Random) -> bool:
        before = self._environment.archived_positions()
        is_killed = await restarted(self._archiver, signal.SIGKILL)
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        return is_killed and bool(before)

    # ---- operators

    async def _activate(self, rng: random.Random) -> bool:
        name = rng.choice(self._environment.models).name
        return await self.operator.call(self._address(rng), "POST", f"/v1/admin/generations/{name}/activate")

    async def _change_experiment(self, rng: random.Random) -> bool:
        shares = {model.name: 1 / len(self._environment.models) for model in self._environment.models}
        experiment = {"name": "chaos", "shares": shares}
        begun = await self.operator.call(self._address(rng), "PUT", "/v1/admin/experiment", experiment)
        await asyncio.sleep(rng.uniform(0.0, 3.0))
        return await self.operator.call(self._address(rng), "DELETE", "/v1/admin/experiment") and begun

    async def _rebuild(self, rng: random.Random) -> bool:
        return bool(await self.operator.command("rebuild", "--model", str(rng.choice(self._environment.models))))

    async def _kill_rebuild(self, rng: random.Random) -> bool:
        model = str(rng.choice(self._environment.models))
        after_s = rng.uniform(0.05, 1.5)
        while has_ended := await self.operator.command("rebuild", "--model", model, killed_after_s=after_s):
            after_s /= 2  # it was too quick
        return has_ended is None

    async def _repair(self, _: random.Random) -> bool:
        return bool(await self.operator.command("repair"))

    # ---- who may disrupt what

    def _address(self, rng: random.Random) -> Address:
        return rng.choice(self._environment.addresses)

    @asynccontextmanager
    async def _app(self, rng: random.Random) -> AsyncIterator[int]:
        """Reserve an app for a disruption."""
        number = rng.randrange(len(self._apps))
        async with self._apps[number]:
            with self.operator.disturbance():
                yield number

    def _app_may_start(self) -> AbstractAsyncContextManager[object]:
        """Return a context in which apps may start: on SQLite, while the file is in place."""
        return nullcontext() if self._environment.servers else self.file.file


def _date_of(address: Address) -> float | None:
    """Return the time of the service's clock from the Date header."""
    connection = http.client.HTTPConnection(*address, timeout=10)
    try:
        connection.request("GET", "/healthz")
        date = connection.getresponse().getheader("date")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return None if date is None else parsedate_to_datetime(date).timestamp()

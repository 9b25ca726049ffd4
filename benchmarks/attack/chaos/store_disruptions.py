"""Disruptions of the store in the chaos run: of Redis servers, or of the SQLite file."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path

from uuid_utils import UUID, uuid7

from benchmarks.attack.chaos.correction_gate import CorrectionGate
from benchmarks.attack.chaos.environment import KEYS, ChaosEnvironment
from benchmarks.attack.chaos.operations import AcceptedLoss
from benchmarks.attack.chaos.operator_calls import Operator
from benchmarks.attack.chaos.servers import Server
from benchmarks.attack.chaos.verdict import archived_events, original
from benchmarks.attack.chaos.workload import OWN_ID
from benchmarks.harness.faults.tcp_proxy import Address
from benchmarks.harness.ledger import TENANT
from benchmarks.harness.retrying_clients import TRANSPORT_ERRORS, HttpConnection
from benchmarks.harness.supervised_process import SupervisedProcess

REFUSED_WITHIN_S = 200.0
PROBE_EVERY_S = 0.1
LAG_S = 1.0  # of a replica
ARCHIVED_WITHIN_S = 300.0
ARCHIVED_EVENTS = 10  # of those that a loss would have taken: some of their users may be erased later

Disruption = Callable[[random.Random], Awaitable[bool]]
"""Disrupts something, and returns whether that has happened."""


class StoreDisruptions:
    """Disruptions of the store of an environment.

    losses   that were accepted
    faults   losses that no service has noticed, and archivers that do nothing
    """

    def __init__(self, environment: ChaosEnvironment, operator: Operator) -> None:
        self.losses: list[AcceptedLoss] = []
        self.faults: list[str] = []
        self._environment = environment
        self._operator = operator

    async def _noticed(self, what: str, before: Mapping[Path, int]) -> bool:
        is_noticed = await self._environment.is_noticed(before, REFUSED_WITHIN_S)
        if not is_noticed:
            self.faults.append(f"no service has refused {what}")
        return is_noticed


class FileDisruptions(StoreDisruptions):
    """The SQLite file is missing or replaced."""

    def __init__(self, environment: ChaosEnvironment, operator: Operator) -> None:
        super().__init__(environment, operator)
        self.file = asyncio.Lock()
        self._copy: Path | None = None

    def kinds(self) -> dict[str, Disruption]:
        """Return the action of each kind."""
        return {"store lost": self._lose, "store older": self._age}

    async def _lose(self, rng: random.Random) -> bool:
        return await self._replace(rng, None)

    async def _age(self, rng: random.Random) -> bool:
        """Replace the file by an older copy for some seconds."""
        is_noticed = await self._replace(rng, self._copy or await self._copied())
        self._copy = await self._copied()
        return is_noticed

    async def _copied(self) -> Path:
        async with self.file:
            return await asyncio.to_thread(self._environment.copy_file)

    async def _replace(self, rng: random.Random, snapshot: Path | None) -> bool:
        async with self.file:
            before = self._environment.log_sizes()
            with self._operator.disturbance(), self._environment.replaced_file(snapshot):
                is_noticed = await self._noticed("no file" if snapshot is None else "an older file", before)
                await asyncio.sleep(rng.uniform(0.5, 3.0))
            return is_noticed


class ServerDisruptions(StoreDisruptions):
    """Redis servers are killed, stopped, emptied or rolled back, and replicas take over.

    takeovers           of replicas, from and until
    failovers_accepted  where a replica that took over lacked entries, of which not one may have been acknowledged
                        unless nobody waited for replicas
    """

    def __init__(self, environment: ChaosEnvironment, operator: Operator, gate: CorrectionGate) -> None:
        super().__init__(environment, operator)
        self.takeovers: list[tuple[float, float]] = []
        self.failovers_accepted = 0
        self._gate = gate

    def kinds(self) -> dict[str, Disruption]:
        """Return the action of each kind."""
        return {
            "store lost": self._lose,
            "store older": self._age,
            "redis killed": lambda rng: self._restart(rng, signal.SIGKILL),
            "redis restarted": lambda rng: self._restart(rng, signal.SIGTERM),
            "redis stopped": self._stop,
            "loss accepted": self._accept_loss,
            "primary replaced": lambda rng: self._fail_over(rng, lagged=False),
            "lagging replica took over": lambda rng: self._fail_over(rng, lagged=True),
        }

    async def _restart(self, rng: random.Random, number: signal.Signals) -> bool:
        async with self._server(rng) as server:
            node = rng.choice(server.nodes)
            was_running = node.process.is_running()
            await node.end(number)
            await node.process.start()
            return was_running

    async def _stop(self, rng: random.Random) -> bool:
        async with self._server(rng) as server:
            return await stopped(rng.choice(server.nodes).process, rng.uniform(0.2, 3.0))

    async def _lose(self, rng: random.Random) -> bool:
        """Empty a server for some seconds."""
        async with self._server(rng) as server:
            is_archived = self._environment.is_archived_beyond(server, {}) or await self._archived_beyond(server)
            return is_archived and await self._hold(rng, server, None)

    async def _age(self, rng: random.Random) -> bool:
        """Roll a server back for some seconds, to a copy that the archive detects as too old."""
        async with self._server(rng) as server:
            if not server.snapshot.exists():
                await server.copy()
            is_noticed = await self._archived_beyond(server) and await self._hold(rng, server, server.snapshot)
            await server.copy()
            return is_noticed

    async def _accept_loss(self, rng: random.Random) -> bool:
        """Roll a server back permanently, and let an operator accept the loss."""
        async with self._only_server(rng) as server, self._gate.closed():
            since_s = await server.copy()
            if not await self._archived_later_than(server, time.time()):
                return False
            await asyncio.sleep(rng.uniform(0.5, 2.0))
            before = self._environment.log_sizes()
            await server.go_back()
            is_noticed = await self._noticed("a store that went back", before)
            found = await asyncio.to_thread(archived_events, self._environment.archive)
            is_accepted = await self._operator.accept_loss()
            archived = frozenset(original(*key) for key in found)
            self.losses.append(AcceptedLoss(since_s, time.monotonic(), archived, is_noticed))
            return is_accepted

    async def _fail_over(self, rng: random.Random, *, lagged: bool) -> bool:
        """Let a replica take over. Unreplicated events may be lost, which must be detected and accepted."""
        may_lose = self._environment.replicas == 0
        async with self._only_server(rng) as server, AsyncExitStack() as stack:
            if may_lose:
                await stack.enter_async_context(self._gate.closed())
            since_s, before = time.monotonic(), self._environment.log_sizes()
            self._gate.epoch += 1

            async def lag() -> None:
                await asyncio.sleep(LAG_S)
                if may_lose:  # otherwise nothing is taken without the replica
                    await self._all_take(server)

            await server.fail_over(lag if lagged else None)
            is_noticed = await self._refused(server, before)
            if is_noticed:
                self.failovers_accepted += await self._operator.accept_loss()
            if may_lose:
                self.losses.append(AcceptedLoss(since_s, time.monotonic(), frozenset(), is_noticed))
            self.takeovers.append((since_s, time.monotonic()))
            self._gate.epoch += 1
        return True

    async def _refused(self, server: Server, before: Mapping[Path, int]) -> bool:
        """Return whether a service refuses the server before each has accepted an event on it."""
        refusing = asyncio.create_task(self._environment.is_noticed(before, REFUSED_WITHIN_S))
        taking = asyncio.create_task(self._all_take(server))
        await asyncio.wait([refusing, taking], return_when=asyncio.FIRST_COMPLETED)
        is_refused = refusing.done() and refusing.result()
        for task in (refusing, taking):
            task.cancel()
        await asyncio.wait([refusing, taking])
        return is_refused

    async def _all_take(self, server: Server) -> bool:
        """Wait until every service has accepted an event on the server."""
        await asyncio.gather(*(self._taken(address, server) for address in self._environment.addresses))
        return True

    async def _taken(self, address: Address, server: Server) -> None:
        """Wait until the service has accepted an event of an unrecorded user of the server."""
        users = (f"probe-{number}" for number in count())
        user_id = next(name for name in users if self._has_user(server, name))
        while True:
            event = {"event_id": str(uuid7()), "user_id": user_id, "item_id": "probed"}
            connection = HttpConnection(address)
            try:
                if (await connection.request("POST", "/v1/events", event))[0] == 200:
                    return
            except TRANSPORT_ERRORS:
                pass
            finally:
                connection.close()
            await asyncio.sleep(PROBE_EVERY_S)

    async def _hold(self, rng: random.Random, server: Server, snapshot: Path | None) -> bool:
        before = self._environment.log_sizes()
        async with server.holding(snapshot):
            is_noticed = await self._noticed("an empty store" if snapshot is None else "an older store", before)
            await asyncio.sleep(rng.uniform(0.5, 3.0))
        return is_noticed

    async def _archived_beyond(self, server: Server) -> bool:
        """Wait for new entries of the server in the archive, on which starting processes rely; return if they came."""
        before = self._environment.archived_positions()
        return await self._archives(lambda: self._environment.is_archived_beyond(server, before))

    async def _archived_later_than(self, server: Server, unix_s: float) -> bool:
        """Wait for events of the server from after that time in the archive; return if they came."""

        def has_later_events() -> bool:
            archived = archived_events(self._environment.archive)
            ids = [original(*key)[1] for key in archived if self._has_user(server, key[0])]
            return sum(_made_at_s(event_id) > unix_s for event_id in ids) >= ARCHIVED_EVENTS

        return await self._archives(has_later_events)

    def _has_user(self, server: Server, user_id: str) -> bool:
        return self._environment.is_on(server, KEYS.user(TENANT, user_id).head)

    async def _archives(self, has_enough: Callable[[], bool]) -> bool:
        give_up_at_s = time.monotonic() + ARCHIVED_WITHIN_S
        while not await asyncio.to_thread(has_enough):
            if time.monotonic() > give_up_at_s:
                self.faults.append(f"nothing was archived for {ARCHIVED_WITHIN_S:g} s; archiver.log says why")
                return False
            await asyncio.sleep(0.5)
        return True

    @asynccontextmanager
    async def _server(self, rng: random.Random) -> AsyncIterator[Server]:
        """Reserve a server; it is intact again afterwards."""
        server = rng.choice(self._environment.servers)
        async with server.lock:
            with self._operator.disturbance():
                yield server
                await server.settle()

    @asynccontextmanager
    async def _only_server(self, rng: random.Random) -> AsyncIterator[Server]:
        """Reserve a server and keep all others undisturbed, because a loss is accepted for all of them."""
        async with AsyncExitStack() as stack:
            for server in self._environment.servers:
                await stack.enter_async_context(server.lock)
            with self._operator.disturbance():
                chosen = rng.choice(self._environment.servers)
                yield chosen
                await chosen.settle()


def _made_at_s(event_id: str) -> float:
    """Return the Unix time in a UUIDv7; 0 for ids of clients."""
    return 0.0 if event_id.startswith(OWN_ID) else UUID(event_id).timestamp / 1_000


async def restarted(process: SupervisedProcess, number: signal.Signals) -> bool:
    """Stop the process with a signal and restart it; return whether it ran before and ended."""
    was_running = process.is_running()
    await process.end(number)
    is_gone = not process.is_running()
    await process.start()
    return was_running and is_gone


async def stopped(process: SupervisedProcess, seconds: float) -> bool:
    """Freeze the process for this long; return whether it was running."""
    stopping = asyncio.create_task(process.stop_for(seconds))
    await asyncio.sleep(seconds / 2)
    is_stopped = process.is_stopped()
    await stopping
    return is_stopped

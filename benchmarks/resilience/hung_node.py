"""Stop one node of a cluster with SIGSTOP under load, and measure how long users of the other nodes wait meanwhile.

All nodes answer, then one hangs, in turns. The law: the median over the turns of those users' median waiting time is at
most twice as long while the node hangs, plus 20 ms.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
from uuid_utils import uuid7

from benchmarks.harness.faults.tcp_proxy import Address
from benchmarks.harness.retrying_clients import NO_ANSWER, TRANSPORT_ERRORS, HttpConnection, counts
from benchmarks.resilience.cluster_failover import PRIMARIES, running_cluster, users_of
from benchmarks.resilience.scenario import console
from model.artifact import model_directory

NODE_TIMEOUT_MS = 600_000  # no replica takes over
USERS = 200  # of each node
CLIENTS = 4  # of each kind and node
PAUSE_S = 0.02  # of a client between two requests
MAX_FACTOR, MAX_MORE_MS = 2.0, 20.0

Kind = Literal["events", "recommendations"]


@dataclass
class Answers:
    """The answers to one kind of request."""

    kinds: Counter[str] = field(default_factory=Counter)
    ms: list[float] = field(default_factory=list)

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the latencies."""
        return float(np.percentile(self.ms, percent))

    def __str__(self) -> str:
        p50, p99, longest = (self.percentile_ms(percent) for percent in (50, 99, 100))
        return f"p50 {p50:,.1f} ms, p99 {p99:,.1f} ms, longest {longest:,.0f} ms; {counts(self.kinds)}"


Phase = Mapping[Kind, Answers]
"""The answers to each kind of request in some seconds."""


class Load:
    """Clients of users of one node, or of several: each sends one request after the other."""

    def __init__(self, address: Address, users: Sequence[str], items: Sequence[str], seed: int) -> None:
        self._address = address
        self._users = users
        self._items = items
        self._random = random.Random(seed)

    async def begin(self) -> None:
        """Send an event of each user, so that all of them get personal recommendations."""
        events = [{"event_id": str(uuid7()), "user_id": user_id, "item_id": self._items[0]} for user_id in self._users]
        connection = HttpConnection(self._address)
        status, body = await connection.request("POST", "/v1/events", events)
        connection.close()
        if status != 200:
            raise RuntimeError(f"the first events were answered by {status}: {body}")

    async def measure(self, seconds: float) -> Phase:
        """Send requests of both kinds for so long."""
        found: dict[Kind, Answers] = {"events": Answers(), "recommendations": Answers()}
        end_s = time.monotonic() + seconds
        await asyncio.gather(*(self._send_until(end_s, kind, found[kind]) for kind in found for _ in range(CLIENTS)))
        return found

    async def _send_until(self, end_s: float, kind: Kind, answers: Answers) -> None:
        connection = HttpConnection(self._address)
        while time.monotonic() < end_s:
            begin_s = time.perf_counter()
            answer = await self._answer(connection, kind, self._random.choice(self._users))
            answers.ms.append(1000 * (time.perf_counter() - begin_s))
            answers.kinds[answer] += 1
            await asyncio.sleep(PAUSE_S)
        connection.close()

    async def _answer(self, connection: HttpConnection, kind: Kind, user_id: str) -> str:
        event = {"event_id": str(uuid7()), "user_id": user_id, "item_id": self._random.choice(self._items)}
        try:
            if kind == "events":
                status, body = await connection.request("POST", "/v1/events", event)
            else:
                status, body = await connection.request("GET", f"/v1/users/{user_id}/recommendations")
        except TRANSPORT_ERRORS:
            return NO_ANSWER
        if status != 200:
            return f"{status} {body['error']['code']}"
        return str(body.get("source", "200"))


async def hang(model: Path, seconds: float, seed: int, turns: int) -> list[str]:
    """Measure while all nodes answer and while one hangs, in turns; return what is not as promised."""
    items = model_directory.load(model).items.ids
    with TemporaryDirectory(prefix="lisarec-hang-", ignore_cleanup_errors=True) as directory:
        async with running_cluster(model, Path(directory), 0, NODE_TIMEOUT_MS) as (pairs, address, _):
            hanging = pairs[0].nodes[pairs[0].primary()]
            own = Load(address, list(islice(users_of(0), USERS)), items, seed)
            of_others = [user_id for number in range(1, PRIMARIES) for user_id in islice(users_of(number), USERS)]
            others = Load(address, of_others, items, seed + 1)
            await own.begin()
            await others.begin()
            await _phase("warming up", own, others, seconds)
            quiet, hung = [], []
            for _ in range(turns):
                quiet.append(await _phase("all nodes answer", own, others, seconds))
                hanging.send(signal.SIGSTOP)
                hung.append(await _phase("one of three hangs", own, others, seconds))
                hanging.send(signal.SIGCONT)
    return misses(quiet, hung)


async def _phase(name: str, own: Load, others: Load, seconds: float) -> Phase:
    found_of_own, found = await asyncio.gather(own.measure(seconds), others.measure(seconds))
    for kind, answers in found.items():
        console.print(f"{name}: {kind} of other nodes: {answers}")
        console.print(f"{name}: {kind} of that node: {found_of_own[kind]}")
    return found


def misses(quiet: Sequence[Phase], hung: Sequence[Phase]) -> list[str]:
    """Print how long users of the other nodes wait in both kinds of phases; return where they wait too long."""
    found = []
    for kind in quiet[0]:
        quiet_ms, ms = (median(phase[kind].percentile_ms(50) for phase in phases) for phases in (quiet, hung))
        most_ms = MAX_FACTOR * quiet_ms + MAX_MORE_MS
        line = f"{kind} of users of other nodes: p50 {quiet_ms:.1f} -> {ms:.1f} ms, of at most {most_ms:.1f} ms"
        console.print(line)
        if ms > most_ms:
            found.append(line)
        answers = sum((phase[kind].kinds for phase in hung), Counter[str]())
        if set(answers) - {"200", "personalised", "blended"}:
            found.append(f"{kind} of users of other nodes were answered by {counts(answers)}")
    return found

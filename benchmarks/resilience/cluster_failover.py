"""Kill primaries of a cluster of three under load, each with a replica, and check what was acknowledged before.

Before the first kill, and every other one, the replica lags: it is stopped and its connection is cut. Events are then
acknowledged that it does not have, as when a machine or its network dies. Without waiting for replicas they are lost.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from redis.crc import key_slot
from uuid_utils import uuid7

from app.serving.served_generation import generation_of
from benchmarks.harness.compose import RedisUsers, make_users, node_command
from benchmarks.harness.faults.tcp_proxy import Address
from benchmarks.harness.fork_server import fork_server
from benchmarks.harness.ledger import TENANT, Ledger, StoreVerdict, judge
from benchmarks.harness.redis_cluster import HOST, ClusterAdmin, command, free_node_port, slots_of, wait_until
from benchmarks.harness.retrying_clients import NO_ANSWER, TRANSPORT_ERRORS, HttpConnection, RetryingClients, counts
from benchmarks.harness.service_process import free_port
from benchmarks.harness.supervised_process import SupervisedProcess, is_loaded, is_ready, spawn_program
from benchmarks.harness.topology import program
from benchmarks.resilience.environment import accept_loss
from benchmarks.resilience.scenario import console
from model.artifact import model_directory
from storage.redis.layout.keys import Keyspace
from storage.redis.store import PARTITIONS, RedisStore

PRIMARIES = 3
MOMENT_S = (0.2, 0.6)  # of load before a kill
LAG_S = 0.3  # where nothing can be acknowledged without the replica
AGAIN_WITHIN_S = 600.0  # on a busy machine
PROBE_EVERY_S = 0.05


@dataclass(frozen=True)
class ReplicatedPair:
    """Two nodes that share some slots: whichever is the primary, and its replica."""

    number: int
    nodes: dict[int, SupervisedProcess]  # by port
    admin: ClusterAdmin

    def primary(self) -> int:
        """Return the port of the node that is the primary now."""
        (port,) = [port for port in self.nodes if self.admin.is_primary(port)]
        return port

    def replica(self) -> int:
        """Return the port of the other node."""
        primary = self.primary()
        (port,) = [port for port in self.nodes if port != primary]
        return port


@dataclass
class Outage:
    """The answers that clients got from the kill until a write to the lost slots was acknowledged."""

    lagged: bool
    until_taken_over_s: float = 0.0
    until_written_s: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)  # to events of the lost slots
    reads: Counter[str] = field(default_factory=Counter)  # recommendations for their users, by source
    others: Counter[str] = field(default_factory=Counter)  # to events of other slots

    def __str__(self) -> str:
        lag = ", the replica lagging" if self.lagged else ""
        return (
            f"kill -9{lag}: its replica took over after {self.until_taken_over_s:.1f} s and writes went again after "
            f"{self.until_written_s:.1f} s; until then events of the lost slots: "
            f"{counts(self.answers)}; recommendations for their users: {counts(self.reads)}; events of other slots: "
            f"{counts(self.others)}"
        )


async def failover(model: Path, kills: int, replicas: int, timeout_ms: int, seed: int) -> StoreVerdict:
    """Kill primaries so often while a service waits for so many replicas before it acknowledges an event."""
    trained = model_directory.load(model)
    ledger, rng = Ledger(trained.items.ids, seed), random.Random(seed)
    with TemporaryDirectory(prefix="lisarec-failover-", ignore_cleanup_errors=True) as directory:
        async with running_cluster(model, Path(directory), replicas, timeout_ms) as (pairs, address, url):
            load = RetryingClients(address, ledger, seed, resent_share=0.0)  # a resend could hide a loss
            is_over = False
            sending = asyncio.create_task(load.run(lambda: is_over))
            for number in range(kills):
                lagged = number % 2 == 0
                pair, accept = pairs[number % PRIMARIES], None if replicas else partial(accept_loss, url)
                console.print(str(await _kill(pair, address, load, rng, lagged=lagged, on_takeover=accept)))
            is_over = True
            await sending
            console.print(f"answers: {counts(load.answers)}")
            store = await RedisStore.open(url, [generation_of(trained)])
            try:
                verdict = await judge(store, generation_of(trained), ledger)
            finally:
                await store.close()
    console.print(f"{ledger.acknowledgements:,} events acknowledged, waiting for {replicas} replicas; {verdict}")
    return verdict


async def _kill(
    pair: ReplicatedPair,
    address: Address,
    load: RetryingClients,
    rng: random.Random,
    *,
    lagged: bool,
    on_takeover: Callable[[], Awaitable[None]] | None = None,
) -> Outage:
    """Kill the primary of a pair; returns when the pair is whole again."""
    primary, replica = await asyncio.to_thread(lambda: (pair.primary(), pair.replica()))
    await _acknowledged(load)
    await asyncio.sleep(rng.uniform(*MOMENT_S))
    if lagged:
        pair.nodes[replica].send(signal.SIGSTOP)
        with pair.admin.client(primary) as node:
            command(node, "CLIENT", "KILL", "TYPE", "replica")
        await (_acknowledged_without_replica(load.ledger, pair) if on_takeover else asyncio.sleep(LAG_S))
    await pair.nodes[primary].end(signal.SIGKILL)
    pair.nodes[replica].send(signal.SIGCONT)
    outage, begin_s = Outage(lagged), time.monotonic()

    async def begin_again() -> None:
        """As the replica of the one that took over: with one that is waited for, nothing is acknowledged before."""
        await asyncio.to_thread(wait_until, lambda: pair.admin.is_primary(replica))
        outage.until_taken_over_s = time.monotonic() - begin_s
        if on_takeover is not None:
            await on_takeover()
        await pair.nodes[primary].start()

    await asyncio.gather(begin_again(), _watch(outage, pair, address))
    admin = pair.admin
    await asyncio.to_thread(wait_until, lambda: not admin.is_primary(primary) and admin.is_in_sync(primary))
    return outage


async def _acknowledged(load: RetryingClients) -> None:
    seen_s = load.last_acknowledged_s
    async with asyncio.timeout(AGAIN_WITHIN_S):
        while load.last_acknowledged_s == seen_s:
            await asyncio.sleep(0.005)


async def _acknowledged_without_replica(ledger: Ledger, pair: ReplicatedPair) -> None:
    """Wait until an event of the pair's slots that is sent from now on is acknowledged."""
    first = len(ledger)
    async with asyncio.timeout(AGAIN_WITHIN_S):
        while not any(
            ledger.acknowledged[number] and is_stored_by(pair.number, ledger.user_ids[number])
            for number in range(first, len(ledger))
        ):
            await asyncio.sleep(0.005)


async def _watch(outage: Outage, pair: ReplicatedPair, address: Address) -> None:
    """Send events of the lost slots, and of others, until the lost ones are taken again."""
    begin_s = time.monotonic()
    lost, other = users_of(pair.number), users_of((pair.number + 1) % PRIMARIES)

    async def keep_on(users: Iterator[str], answers: Counter[str], reads: Counter[str] | None) -> None:
        connection = HttpConnection(address)
        try:
            while (answer := await _answer(connection, next(users))) != "200" or reads is None:
                answers[answer] += 1
                if reads is not None:
                    reads[await _source(connection, next(users))] += 1
                await asyncio.sleep(PROBE_EVERY_S)
        finally:
            connection.close()

    others = asyncio.create_task(keep_on(other, outage.others, None))
    try:
        async with asyncio.timeout(AGAIN_WITHIN_S):
            await keep_on(lost, outage.answers, outage.reads)
    finally:
        others.cancel()
        await asyncio.wait([others])
    outage.until_written_s = time.monotonic() - begin_s


def users_of(pair_number: int) -> Iterator[str]:
    """Yield users of partitions in the pair's slots, who are in no ledger."""
    users = (f"probe-{number}" for number in count())
    return (user_id for user_id in users if is_stored_by(pair_number, user_id))


def is_stored_by(pair_number: int, user_id: str) -> bool:
    """Return whether the user's partition is in the pair's slots."""
    head = Keyspace("lisarec", PARTITIONS).user(TENANT, user_id).head
    return key_slot(head.encode()) in slots_of(pair_number, PRIMARIES)


async def _answer(connection: HttpConnection, user_id: str) -> str:
    event = {"event_id": str(uuid7()), "user_id": user_id, "item_id": "probed"}
    try:
        status, body = await connection.request("POST", "/v1/events", event)
    except TRANSPORT_ERRORS:
        return NO_ANSWER
    return "200" if status == 200 else f"{status} {body['error']['code']}"


async def _source(connection: HttpConnection, user_id: str) -> str:
    try:
        status, body = await connection.request("GET", f"/v1/users/{user_id}/recommendations")
    except TRANSPORT_ERRORS:
        return NO_ANSWER
    return str(body["source"]) if status == 200 else str(status)


@asynccontextmanager
async def running_cluster(
    model: Path, directory: Path, replicas: int, timeout_ms: int
) -> AsyncIterator[tuple[list[ReplicatedPair], Address, str]]:
    """Run the nodes and a service on them; yields the pairs, the service's address and the cluster's URL."""
    async with AsyncExitStack() as stack:
        ports = [free_node_port() for _ in range(2 * PRIMARIES)]
        users = make_users(directory)
        nodes = {port: _node(directory, users, port, timeout_ms) for port in ports}
        for node in nodes.values():
            stack.push_async_callback(node.close)
        await asyncio.gather(*(node.start() for node in nodes.values()))
        primaries, others = ports[:PRIMARIES], ports[PRIMARIES:]
        admin = ClusterAdmin(users)
        await asyncio.to_thread(admin.form, primaries, others)
        pairs = [
            ReplicatedPair(number, {port: nodes[port], other: nodes[other]}, admin)
            for number, (port, other) in enumerate(zip(primaries, others, strict=True))
        ]
        url = users.cluster_url(ports)
        address = (HOST, free_port())
        service = ["serve", "--model", str(model), "--host", HOST, "--port", str(address[1]), "--redis-url", url]
        environment = {"LISAREC_REDIS_REPLICAS": str(replicas)}
        log = directory / "app.log"
        app = SupervisedProcess(
            "app", lambda: fork_server().spawn(service, log, environment=environment), lambda: is_ready(address)
        )
        stack.push_async_callback(app.close)
        await app.start()
        yield pairs, address, url


def _node(directory: Path, users: RedisUsers, port: int, timeout_ms: int) -> SupervisedProcess:
    data = directory / str(port)
    data.mkdir()
    shell, *start = node_command(program("redis-server"), data, users, port, "--cluster-node-timeout", str(timeout_ms))
    start = [program(shell), *start]
    return SupervisedProcess(
        "redis", lambda: spawn_program(start, directory / f"{port}.log"), lambda: is_loaded(users, port)
    )

"""Forms a Redis cluster of empty local servers, and queries its state."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from typing import Any, Protocol
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from benchmarks.harness.service_process import free_port

HOST = "127.0.0.1"
SLOTS = 16384
BUS = 10_000  # offset of the port of a node's cluster bus
NODE_PORTS = 20_000, 22_700  # the system assigns neither these ports nor those of their buses to connections
ANSWER_WITHIN_S = 60.0
SETTLED_WITHIN_S = 300.0


def free_node_port() -> int:
    """Return a port that is free together with that of its bus. No other call returns it."""
    while True:
        port = free_port(NODE_PORTS)
        with socket.socket() as bus, suppress(OSError):
            bus.bind((HOST, port + BUS))
            return port


def slots_of(number: int, count: int) -> range:
    """Return the slots of primary `number` of `count`."""
    return range(number * SLOTS // count, (number + 1) * SLOTS // count)


def cluster_client(url: str) -> redis.RedisCluster:
    """Return a client of the cluster of this node, which closes its connections; those of ``from_url`` stay open."""
    place = urlsplit(url)
    assert place.hostname is not None
    assert place.port is not None
    return redis.RedisCluster(host=place.hostname, port=place.port, username=place.username, password=place.password)


class Admin(Protocol):
    """An object that knows the operator's login."""

    def admin_url(self, port: int) -> str:
        """Return the URL with which an operator logs in to the server on this port."""


class ClusterAdmin:
    """Forms a cluster of nodes, each on its own port, and queries its state, as the operator."""

    def __init__(self, users: Admin) -> None:
        self._users = users

    def form(self, primaries: Sequence[int], replicas: Sequence[int] = ()) -> None:
        """Form a cluster of the servers on these ports; raise TimeoutError if it takes too long.

        The slots are divided evenly, and the replicas are assigned in turn.
        """
        ports = [*primaries, *replicas]
        for number, port in enumerate(primaries):
            with self.client(port) as node:
                command(node, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                command(node, "CLUSTER", "ADDSLOTS", *slots_of(number, len(primaries)))
        with self.client(ports[0]) as first:
            for port in ports[1:]:
                command(first, "CLUSTER", "MEET", urlsplit(self._users.admin_url(port)).hostname, port)
        wait_until(lambda: all(len(self.nodes(port)) == len(ports) for port in ports))
        for primary, replica in zip(cycle(primaries), replicas, strict=False):
            self._replicate(primary, replica)
        wait_until(lambda: all(map(self.is_complete, ports)))
        wait_until(lambda: all(self.is_in_sync(port) for port in replicas))

    def is_complete(self, port: int) -> bool:
        """Return whether the node on this port serves, and knows who owns each slot; it serves before it knows that."""
        state = self.info(port)
        return state["cluster_state"] == "ok" and state["cluster_slots_ok"] == str(SLOTS)

    def is_in_sync(self, replica: int) -> bool:
        """Return whether the replica on this port is connected to its primary."""
        with self.client(replica) as node:
            return bool(node.info("replication").get("master_link_status") == "up")

    def is_primary(self, port: int) -> bool:
        """Return whether the node on this port is a primary, even one without slots."""
        with self.client(port) as node:
            return bool(node.info("replication")["role"] == "master")

    def nodes(self, port: int) -> dict[str, list[str]]:
        """Return the flags of all nodes that the node on this port knows, by node id."""
        with self.client(port) as node:
            lines = command(node, "CLUSTER", "NODES").decode().splitlines()
        return {name: flags.split(",") for name, _address, flags, *_ in map(str.split, lines)}

    def info(self, port: int) -> dict[str, str]:
        """Return the state of the cluster according to the node on this port."""
        with self.client(port) as node:
            return dict(command(node, "CLUSTER INFO"))

    @contextmanager
    def client(self, port: int) -> Iterator[Any]:
        """Connect to the node on this port."""
        url = self._users.admin_url(port)
        with redis.Redis.from_url(
            url, socket_timeout=ANSWER_WITHIN_S, retry=Retry(NoBackoff(), 0), protocol=2
        ) as connection:
            yield connection

    def _replicate(self, primary: int, replica: int) -> None:
        with self.client(primary) as node:
            name = command(node, "CLUSTER", "MYID").decode()
        wait_until(lambda: name in self.nodes(replica))
        with self.client(replica) as node:
            command(node, "CLUSTER", "REPLICATE", name)


def is_whole(node: Any) -> bool:
    """Return whether the node sees three primaries and three replicas, all connected."""
    try:
        state = command(node, "CLUSTER INFO")
        known = command(node, "CLUSTER NODES")
    except redis.RedisError:
        return False
    linked = [one for one in known.values() if one["connected"] and "fail" not in one["flags"]]
    replicas = [one for one in linked if "slave" in one["flags"]]
    is_served = state["cluster_state"] == "ok" and state["cluster_size"] == "3"
    return is_served and len(linked) == 6 and len(replicas) == 3


def command(node: Any, *args: object) -> Any:
    """Send a command whose result redis-py does not type."""
    return node.execute_command(*args)


async def wait_until_settled(condition: Callable[[], bool], every_s: float = 0.05) -> None:
    """Wait for a condition of nodes, which does not hold while one of them does not answer.

    raises  TimeoutError  when it takes longer than SETTLED_WITHIN_S
    """

    async with asyncio.timeout(SETTLED_WITHIN_S):
        while not await asyncio.to_thread(_holds, condition):
            await asyncio.sleep(every_s)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition of nodes, as `wait_until_settled` does."""
    give_up_at_s = time.monotonic() + SETTLED_WITHIN_S
    while not _holds(condition):
        if time.monotonic() > give_up_at_s:
            raise TimeoutError(f"the cluster did not get there within {SETTLED_WITHIN_S:g} s")
        time.sleep(0.05)


def _holds(condition: Callable[[], bool]) -> bool:
    with suppress(redis.RedisError):
        return condition()
    return False

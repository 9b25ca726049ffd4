"""Making a Redis cluster of empty servers on this machine, and asking it how it is."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

CLUSTER_CONFIG = Path(__file__).parent.parent / "docker" / "redis-cluster.conf"
HOST = "127.0.0.1"
SLOTS = 16384
BUS = 10_000  # from a node's port to that of its bus
PORTS = range(21_000, 32_000)  # below those that the system gives out
FORM_WITHIN_S = 60.0

_next_port = iter([*PORTS[os.getpid() % len(PORTS) :], *PORTS])


def free_node_port() -> int:
    """A port that is free together with the one of the bus that belongs to it; each is given once."""
    for port in _next_port:
        with socket.socket() as client, socket.socket() as bus:
            try:
                client.bind((HOST, port))
                bus.bind((HOST, port + BUS))
            except OSError:
                continue
            return port
    raise OSError("no port is free for a node of a cluster")


def node_options(timeout_ms: int) -> tuple[str, ...]:
    """Options of a server that will be a node."""
    return ("--include", str(CLUSTER_CONFIG), "--cluster-node-timeout", str(timeout_ms))


def form(primaries: Sequence[int], replicas: Sequence[int] = ()) -> None:
    """Make a cluster of the servers on these ports: slots are shared evenly, the nth replica is the nth primary's.

    raises TimeoutError
    """
    ports = [*primaries, *replicas]
    for number, port in enumerate(primaries):
        with client(port) as node:
            command(node, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            command(node, "CLUSTER", "ADDSLOTS", *slots_of(number, len(primaries)))
    with client(ports[0]) as first:
        for port in ports[1:]:
            command(first, "CLUSTER", "MEET", HOST, port)
    wait_until(lambda: all(len(nodes(port)) == len(ports) for port in ports))
    for primary, replica in zip(primaries, replicas, strict=False):
        _replicate(primary, replica)
    wait_until(lambda: all(info(port)["cluster_state"] == "ok" for port in ports))
    wait_until(lambda: all(is_in_sync(port) for port in replicas))


def slots_of(number: int, count: int) -> range:
    """Of the nth of so many primaries."""
    return range(number * SLOTS // count, (number + 1) * SLOTS // count)


def _replicate(primary: int, replica: int) -> None:
    with client(primary) as node:
        name = command(node, "CLUSTER", "MYID").decode()
    wait_until(lambda: name in nodes(replica))
    with client(replica) as node:
        command(node, "CLUSTER", "REPLICATE", name)


def is_in_sync(replica: int) -> bool:
    with client(replica) as node:
        return bool(node.info("replication").get("master_link_status") == "up")


def is_primary(port: int) -> bool:
    """Of a node that answers; a primary without slots is one too."""
    with client(port) as node:
        return bool(node.info("replication")["role"] == "master")


def nodes(port: int) -> dict[str, list[str]]:
    """What the node at the port knows of all: flags by name."""
    with client(port) as node:
        lines = command(node, "CLUSTER", "NODES").decode().splitlines()
    return {name: flags.split(",") for name, _address, flags, *_ in map(str.split, lines)}


def info(port: int) -> dict[str, str]:
    with client(port) as node:
        return dict(command(node, "CLUSTER INFO"))


def command(node: Any, *args: object) -> Any:
    return node.execute_command(*args)


@contextmanager
def client(port: int) -> Iterator[Any]:
    with redis.Redis(HOST, port, socket_timeout=5, retry=Retry(NoBackoff(), 0), protocol=2) as made:
        yield made


def wait_until(is_so: Callable[[], bool], within_s: float = FORM_WITHIN_S) -> None:
    """raises TimeoutError"""
    give_up_at_s = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > give_up_at_s:
            raise TimeoutError(f"the cluster did not get there within {within_s:g} s")
        time.sleep(0.05)

"""The Redis servers from which the chaos run removes data, with or without a replica."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.redis_cluster import SETTLED_WITHIN_S, ClusterAdmin, command, wait_until_settled
from benchmarks.harness.supervised_process import SupervisedProcess

KEPT_OF_A_NODE = "nodes.conf"  # who a node is, and which slots it has
PIPE_OF_START = shutil.ignore_patterns(".redis-start.*")  # by which docker/redis/redis-start reads the server's log


@dataclass
class Node:
    """A Redis server and its data directory."""

    port: int
    process: SupervisedProcess
    data: Path

    async def end(self, number: signal.Signals) -> None:
        """Stop the server; a replica that writes its first append-only file ignores SIGTERM."""
        try:
            await self.process.end(number)
        except TimeoutError:
            await self.process.end(signal.SIGKILL)

    def put(self, snapshot: Path | None) -> None:
        """Replace the lost data by a copy of the snapshot or by nothing; the node keeps its identity."""
        kept = self.data / KEPT_OF_A_NODE
        identity = kept.read_bytes() if kept.exists() else None
        shutil.rmtree(self.data)
        if snapshot is None:
            self.data.mkdir()
        else:
            shutil.copytree(snapshot, self.data)
        if identity is not None:
            kept.write_bytes(identity)


@dataclass
class Server:
    """Nodes with the same data: a primary and an optional replica.

    slots  of the cluster; None without one
    lock   whoever breaks it holds this, until it is whole again
    """

    nodes: list[Node]
    snapshot: Path
    admin: ClusterAdmin
    slots: range | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def copy(self) -> float:
        """Copy the current data; return the monotonic time before which everything is included."""
        async with self._down(signal.SIGTERM) as primary:
            ended_s = time.monotonic()
            shutil.rmtree(self.snapshot, ignore_errors=True)
            await asyncio.to_thread(shutil.copytree, primary.data, self.snapshot, ignore=PIPE_OF_START)
        return ended_s

    @asynccontextmanager
    async def holding(self, snapshot: Path | None) -> AsyncIterator[None]:
        """Within the block the server has the data of the copy, or none; afterwards its own again."""
        away = {node.port: node.data.with_name(f"{node.data.name}-away") for node in self.nodes}
        async with self._down(signal.SIGTERM):
            for node in self.nodes:
                await asyncio.to_thread(shutil.copytree, node.data, away[node.port])
                await asyncio.to_thread(node.put, snapshot)
        try:
            yield
        finally:
            async with self._down(signal.SIGKILL):
                for node in self.nodes:
                    await asyncio.to_thread(node.put, away[node.port])
                    shutil.rmtree(away[node.port])

    async def go_back(self) -> None:
        """Replace the data by the copy permanently."""
        async with self._down(signal.SIGTERM):
            for node in self.nodes:
                await asyncio.to_thread(node.put, self.snapshot)

    async def fail_over(self, lag: Callable[[], Awaitable[None]] | None = None) -> None:
        """Kill the primary, and start it again once its replica has taken over.

        lag  what happens before, and the replica lacks: as where a network dies, and then a machine
        """
        primary, replica = await self._primary_and_replica()
        if lag is not None:
            replica.process.send(signal.SIGSTOP)
            with self.admin.client(primary.port) as connection:
                command(connection, "CLIENT", "KILL", "TYPE", "replica")
            await lag()
        await primary.process.end(signal.SIGKILL)
        replica.process.send(signal.SIGCONT)
        await wait_until_settled(lambda: self.admin.is_primary(replica.port))
        await primary.process.start()
        await self.settle()

    async def settle(self) -> None:
        """Wait until one node is the primary and the other one is in sync."""
        await asyncio.gather(*(node.process.is_ready_within(SETTLED_WITHIN_S) for node in self.nodes))
        if len(self.nodes) > 1:
            await wait_until_settled(self._is_whole)

    @asynccontextmanager
    async def _down(self, number: signal.Signals) -> AsyncIterator[Node]:
        """Stop all nodes within the block, so that none takes over; yields the primary, which stays the primary."""
        primary, *replicas = await self._primary_and_replica() if len(self.nodes) > 1 else self.nodes
        for node in (*replicas, primary):
            await node.end(number)
        try:
            yield primary
        finally:
            for node in (primary, *replicas):
                await node.process.start()
            await self.settle()

    async def _primary_and_replica(self) -> tuple[Node, Node]:
        await self.settle()
        one, other = self.nodes
        return (one, other) if await asyncio.to_thread(self.admin.is_primary, one.port) else (other, one)

    def _is_whole(self) -> bool:
        primaries = [node for node in self.nodes if self.admin.is_primary(node.port)]
        return len(primaries) == 1 and all(
            self.admin.is_in_sync(node.port) for node in self.nodes if node not in primaries
        )

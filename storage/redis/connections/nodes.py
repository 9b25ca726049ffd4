"""Connections to the nodes of a cluster, or to a single server. A node is identified by its URL."""

import asyncio
import copy
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import Redis
from redis.asyncio.connection import Connection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.driver_info import DriverInfo
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from storage.errors import FailureCause, StorageError, StorageUnavailable
from storage.redis.connections.circuit_breaker import CircuitBreaker
from storage.redis.connections.host_lookup import HostLookup
from storage.redis.connections.lean_calls import LeanConnection, LeasedConnections, SafePool
from storage.redis.connections.password_file import split_password_file
from storage.redis.connections.tls import tls_remedy

MAX_CONNECTIONS = 16  # to each node
RECONNECT_EVERY_S = 1.0
DRIVER = DriverInfo()  # shared by all connections, because each would otherwise look up the version of redis-py

# uvloop raises RuntimeError when a connection breaks during a write, and redis-py passes it on.
CONNECTION_ERRORS = (RedisError, OSError, RuntimeError)

# Prefixes of error replies, including those that a script passes on.
CAUSES_OF_REFUSALS: Mapping[str, FailureCause] = {
    "maxmemory": "memory_full",
    "read only": "read_only",
    "NOREPLICAS": "too_few_replicas",
    "No space left": "disk_full",
    "MISCONF": "disk_error",
    "no permission": "refused",
    "no head": "damaged",
    "no index": "damaged",
}

CHECK_LOGIN = "Check the user in LISAREC_REDIS_URL, and LISAREC_REDIS_PASSWORD_FILE or LISAREC_REDIS_PASSWORD"

Argument: TypeAlias = str | bytes | int

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Command:
    """A command that accesses this key, and otherwise only keys in the same slot."""

    key: str
    args: tuple[Argument, ...]

    @classmethod
    def of(cls, *args: Argument) -> "Command":
        """Return a command whose first argument is its key."""
        return cls(str(args[1]), args)


@dataclass(frozen=True, slots=True)
class ReplicaAcks:
    """The number of replicas that must have a write before it is acknowledged, and the timeout.

    synced  whether it must be on their disks, and on the server's own disk even without replicas: uses WAITAOF, of
            Redis 7.2 and later, instead of WAIT
    """

    replicas: int = 0
    timeout_s: float = 1.0
    synced: bool = False

    @property
    def are_required(self) -> bool:
        """Whether writes wait for replicas."""
        return self.replicas > 0 or self.synced

    @property
    def command(self) -> tuple[Argument, ...]:
        """The command that waits."""
        timeout_ms = max(1, round(self.timeout_s * 1000))  # 0 would wait for ever
        return ("WAITAOF", 1, self.replicas, timeout_ms) if self.synced else ("WAIT", self.replicas, timeout_ms)

    def failure_in(self, reply: Any) -> StorageUnavailable | None:
        """Return the error for the command's reply; None if there were enough replicas."""
        if isinstance(reply, Exception):
            return StorageUnavailable(f"Redis failed: {reply}", failure_cause(reply))
        local, replicas = reply if self.synced else (1, reply)
        if local >= 1 and replicas >= self.replicas:
            return None
        if local < 1:
            return StorageUnavailable("Redis has not synced the write yet; send it again", "timeout")
        return StorageUnavailable(
            f"only {replicas} of {self.replicas} Redis replicas have the write; send it again", "unconfirmed"
        )


@dataclass(frozen=True, slots=True)
class _Node:
    """The connections to a node, including leased ones, and the circuit breaker for all of them."""

    client: Redis
    leased: LeasedConnections
    circuit: CircuitBreaker


class NodeClients:
    """The connections to each node. They belong to the event loop that first uses them.

    After a timeout, all calls to the node fail at once until it answers again, without waiting or using a connection.
    """

    def __init__(self, connect_timeout_s: float, socket_timeout_s: float, acks: ReplicaAcks) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._socket_timeout_s = socket_timeout_s + (acks.timeout_s if acks.are_required else 0)
        self._pool_timeout_s = socket_timeout_s
        self._acks = acks
        self._nodes: dict[str, _Node] = {}
        self._connected: Counter[str] = Counter()
        self._reconnect_at_s: dict[str, float] = {}

    def add(self, url: str) -> None:
        """Add a node; raise ValueError if the URL is not valid."""

        bare_url, password_file = split_password_file(url)

        async def count_and_connect(connection: Connection) -> None:
            self._connected[url] += 1
            await (connection.on_connect() if password_file is None else password_file.log_in(connection))

        pool = SafePool.from_url(
            bare_url,
            credential_provider=password_file,
            max_connections=MAX_CONNECTIONS,
            driver_info=DRIVER,
            timeout=self._pool_timeout_s,
            socket_connect_timeout=self._connect_timeout_s,
            socket_timeout=self._socket_timeout_s,
            retry=Retry(NoBackoff(), 0),  # redis-py would retry ten times, even commands that may have been executed
            protocol=2,
            redis_connect_func=count_and_connect,
        )
        pool.connection_class = type(
            "LeanConnection", (LeanConnection, pool.connection_class), {"lookup": HostLookup()}
        )
        client = Redis.from_pool(pool)
        circuit = CircuitBreaker(f"Redis at {address(url)}", partial(client.execute_command, "PING"))
        self._nodes[url] = _Node(client, LeasedConnections(pool), circuit)

    @property
    def urls(self) -> list[str]:
        """The nodes that were added."""
        return list(self._nodes)

    def connected(self, url: str) -> int:
        """Return the number of connections made to the node so far."""
        return self._connected[url]

    async def reconnect(self, url: str) -> None:
        """Close the connections to the node after their use, at most once a second; new ones look up its name again."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._reconnect_at_s.get(url, 0.0):
            return
        self._reconnect_at_s[url] = now_s + RECONNECT_EVERY_S
        pool = self._nodes[url].client.connection_pool
        await pool.update_active_connections_for_reconnect()
        for connection in [*pool._available_connections]:  # noqa: SLF001
            await connection.disconnect(nowait=True)  # if this waited, a call could take one that is being closed

    async def is_in_cluster(self, url: str) -> bool:
        """Ask a node whether it belongs to a cluster; one that rejects the question counts as a single server."""
        try:
            return is_cluster_mode(await self.call(url, "HELLO"))
        except AuthenticationError:
            raise
        except ResponseError as exc:  # the server is too old, or the user lacks the permission
            logger.info("cannot determine whether Redis is a cluster: %s", exc)
            return False

    async def call(self, url: str, *args: Argument) -> Any:
        """Execute one command on the node."""
        node = self._reachable(url)
        execute: Callable[..., Awaitable[Any]] = node.client.execute_command  # redis-py has no more precise type
        if node.leased.takes(args[0]):
            execute = node.leased.call
        try:
            return await execute(*args)
        except RedisTimeoutError:
            node.circuit.open()
            raise

    def _reachable(self, url: str) -> _Node:
        """Return the node; raise TimeoutError at once if its circuit is open."""
        if url not in self._nodes:
            self.add(url)
        node = self._nodes[url]
        node.circuit.require_closed()
        return node

    async def send(
        self,
        places: Mapping[str | None, list[int]],
        commands: Sequence[Command],
        replies: list[Any],
        *,
        in_transaction: bool = False,
        wait_for_replicas: bool = False,
        asking: bool = False,
    ) -> None:
        """Send the commands at these positions to their nodes, and store the replies at the same positions.

        If a command fails, its reply is an exception. The node is None if no node owns the slot.

        asking  whether the nodes only import the slots, after an ASK
        """

        async def send(url: str | None, own: list[int]) -> None:
            try:
                if url is None:
                    raise ClusterDownError("CLUSTERDOWN no node of the cluster has the slot")
                sent = await self._pipeline(
                    url,
                    [commands[place].args for place in own],
                    in_transaction=in_transaction,
                    wait_for_replicas=wait_for_replicas,
                    asking=asking,
                )
            except CONNECTION_ERRORS as exc:
                sent = [exc] * len(own)
            for place, reply in zip(own, sent, strict=True):
                replies[place] = reply

        if len(places) == 1:  # a separate task would cost as much as everything else here
            await send(*next(iter(places.items())))
        elif places:
            await asyncio.gather(*(send(url, own) for url, own in places.items()))

    async def _pipeline(
        self,
        url: str,
        commands: Sequence[tuple[Argument, ...]],
        *,
        in_transaction: bool,
        wait_for_replicas: bool,
        asking: bool,
    ) -> list[Any]:
        """Execute the commands on the node, on one connection; exceptions are in place of failed replies."""
        in_transaction = in_transaction and len(commands) > 1
        wait_for_replicas = wait_for_replicas and self._acks.are_required
        if len(commands) == 1 and not asking and not wait_for_replicas:  # the overhead of a pipeline would dominate
            try:
                return [await self.call(url, *commands[0])]
            except ResponseError as exc:
                return [exc]
        node = self._reachable(url)
        async with node.client.pipeline(transaction=False) as pipe:  # ASKING and WAIT need one connection
            if in_transaction:
                pipe.execute_command("MULTI")
            for command in commands:
                if asking:
                    pipe.execute_command("ASKING")
                pipe.execute_command(*command)
            if in_transaction:
                pipe.execute_command("EXEC")
            if wait_for_replicas:
                pipe.execute_command(*self._acks.command)
            try:
                replies = await pipe.execute(raise_on_error=False)
            except RedisTimeoutError:
                node.circuit.open()
                raise
        failure = self._acks.failure_in(replies.pop()) if wait_for_replicas else None
        if in_transaction:
            executed = replies.pop()
            if isinstance(executed, Exception):  # a command could not even be queued
                first = next((reply for reply in replies if isinstance(reply, Exception)), executed)
                executed = [first] * len(commands)
            replies = executed
        elif asking:
            replies = replies[1::2]
        if failure is not None:
            # replicas cannot lack anything of a command that was rejected
            replies = [failure if _has_written(reply) else reply for reply in replies]
        return replies

    async def close(self) -> None:
        """Close all connections."""
        for node in self._nodes.values():
            await node.circuit.close()
            with suppress(*CONNECTION_ERRORS):
                await node.client.aclose(close_connection_pool=True)


def is_cluster_mode(hello: Sequence[Any]) -> bool:
    """Return from a server's reply to HELLO whether it belongs to a cluster.

    Every user may send HELLO, and every server since 6.2 supports it.
    """
    return dict(zip(hello[::2], hello[1::2], strict=True)).get(b"mode") == b"cluster"


def _has_written(reply: Any) -> bool:
    """Return whether a script has written, or has found what was written: a script that rejects a change replies 0.

    A commit replies to a rejected change with the events that are logged. The caller takes these for durable, so
    replicas must have them as well.
    """
    return not isinstance(reply, Exception) and reply != 0


def storage_error(cause: Exception) -> StorageError:
    """Return a new error for each waiter, because a raised exception collects the traceback of its waiter."""
    error: StorageError
    if isinstance(cause, CONNECTION_ERRORS):
        error = StorageUnavailable(failure_text(cause), failure_cause(cause))
    elif isinstance(cause, StorageError):
        error = copy.copy(cause)
    else:
        error = StorageError(f"the request could not be applied: {cause!r}")
    error.__cause__ = cause
    return error


def failure_text(failure: Exception) -> str:
    """Return what happened, and the remedy if it is known."""
    remedy = CHECK_LOGIN if isinstance(failure, AuthenticationError) else tls_remedy(failure)
    return " ".join(filter(None, [f"Redis failed: {failure}", remedy]))


def failure_cause(failure: Exception) -> FailureCause:
    """Return the cause, for operators, of a failed connection or an error reply."""
    if isinstance(failure, AuthenticationError) or is_withheld(failure) or tls_remedy(failure):
        return "refused"
    if isinstance(failure, RedisTimeoutError | TimeoutError) or isinstance(failure.__cause__, TimeoutError):
        return "timeout"
    if isinstance(failure, BusyLoadingError):
        return "loading"
    if isinstance(failure, ClusterDownError) or not isinstance(failure, ResponseError):
        return "unreachable"
    text = str(failure)
    return next((cause for sign, cause in CAUSES_OF_REFUSALS.items() if sign in text), "failed")


def is_withheld(reply: object) -> bool:
    """Return whether the server reserves a command for others. Managed servers reply that it is unknown."""
    return isinstance(reply, NoPermissionError) or (
        isinstance(reply, ResponseError) and "unknown command" in str(reply).lower()
    )


def node_urls(url: str) -> list[str]:
    """Return one URL for each HOST:PORT in this one."""
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    if "," not in hosts:
        return [url]
    return [urlunsplit(parts._replace(netloc=f"{credentials}{at}{host}")) for host in hosts.split(",")]


def address(url: str) -> str:
    """Return the address in a URL, which may be shown: it has no user and no password."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return parts.path if parts.scheme == "unix" else f"{host}:{parts.port or 6379}"

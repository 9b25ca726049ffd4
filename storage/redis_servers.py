"""Where the Redis store's commands go: to one server, or to the nodes of a cluster on which their keys lie.

A server says itself whether it belongs to a cluster. Then there is a client for each node and a map of slots, which is
mended by every MOVED and read again after every failure; nothing is sent twice unless a node said that it did nothing.
"""

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    MovedError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from storage.errors import StorageError, StorageUnavailable
from storage.redis_layout import Argument, Script

MAX_CONNECTIONS = 16  # to each node
SETTLE_WITHIN_S = 2.0  # for commands that are sent on to where their slot has gone, or wait until its keys are together
PAUSE_S = 0.05
SCANNED_AT_ONCE = 1000  # keys looked at in one command, about half a millisecond in which Redis does nothing else
NO_CLUSTER = "several servers are named, and one of them is in no cluster; name only that one"
ONE_SERVER = ""  # in the place of a node's URL

# RuntimeError is how uvloop says that a connection broke while it was written to; redis-py passes it on.
CONNECTION_ERRORS = (RedisError, OSError, RuntimeError)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Command:
    """One that touches this key, and others of the same slot only."""

    key: str
    args: tuple[Argument, ...]

    @classmethod
    def of(cls, *args: Argument) -> "Command":
        """Of a command whose first argument is its key."""
        return cls(str(args[1]), args)


def script_call(script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Command:
    return Command(keys[0], ("EVALSHA", script.sha, len(keys), *keys, *args))


@dataclass(frozen=True, slots=True)
class Copies:
    """How many replicas must have what is acknowledged, and how long that may take.

    synced  on their disks, and on that of the server itself, also where there are none: WAITAOF, of Redis 7.2 and
            later, instead of WAIT
    """

    replicas: int = 0
    timeout_s: float = 1.0
    synced: bool = False

    @property
    def are_wanted(self) -> bool:
        return self.replicas > 0 or self.synced

    @property
    def command(self) -> tuple[Argument, ...]:
        timeout_ms = max(1, round(self.timeout_s * 1000))  # 0 would be for ever
        return ("WAITAOF", 1, self.replicas, timeout_ms) if self.synced else ("WAIT", self.replicas, timeout_ms)

    def lacking(self, reply: Any) -> StorageUnavailable | None:
        """What the reply to the command says, if not that there are enough."""
        if isinstance(reply, Exception):
            return StorageUnavailable(f"Redis failed: {reply}")
        local, replicas = reply if self.synced else (1, reply)
        if local >= 1 and replicas >= self.replicas:
            return None
        if local < 1:
            return StorageUnavailable("Redis has not synced it yet; send it again")
        return StorageUnavailable(f"{replicas} replicas of Redis have it, not {self.replicas}; send it again")


class RedisServers:
    """The server, or the cluster, that a URL leads to; of a cluster it may name several nodes: HOST:PORT,HOST:PORT.

    It belongs to the event loop in which it is used first. Every failure is a StorageError.
    """

    def __init__(self, url: str, *, connect_timeout_s: float, socket_timeout_s: float, copies: Copies) -> None:
        """raises ValueError when the URL cannot be used"""
        self.is_cluster = False
        self.copies = copies
        self._seeds = urls_of_nodes(url)
        self._connect_timeout_s = connect_timeout_s
        self._socket_timeout_s = socket_timeout_s + (copies.timeout_s if copies.are_wanted else 0)
        self._pool_timeout_s = socket_timeout_s
        self._is_known = False
        self._clients: dict[str, Redis] = {seed: self._new_client(seed) for seed in self._seeds}
        self._owners: list[str | None] = [ONE_SERVER]  # URL of the node that has a slot
        self._replicas: set[str] = set()
        self._asked: set[str] = set()  # nodes that commands were sent on to, which may have no slot yet
        self._refreshing: asyncio.Task[None] | None = None

    def _new_client(self, url: str) -> Redis:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=self._pool_timeout_s,
            socket_connect_timeout=self._connect_timeout_s,
            socket_timeout=self._socket_timeout_s,
            retry=Retry(NoBackoff(), 0),  # by itself redis-py sends ten times, also what timed out and may be done
            protocol=2,
        )
        return Redis.from_pool(pool)

    def _client(self, url: str) -> Redis:
        if url == ONE_SERVER:
            return self._clients[self._seeds[0]]
        if url not in self._clients:
            self._clients[url] = self._new_client(url)
        return self._clients[url]

    async def connect(self) -> None:
        """Find out where commands go, unless that is known.

        raises  StorageUnavailable  when no server answers
                StorageError        when several were named that are no cluster
        """
        if self._is_known:
            return
        failure: Exception = RuntimeError("no server is named")
        for seed in self._seeds:
            try:
                self.is_cluster = await _is_in_cluster(self._client(seed))
                if self.is_cluster:
                    self._learn(seed, await execute(self._client(seed), "CLUSTER", "SLOTS"))
            except CONNECTION_ERRORS as exc:
                failure = exc
                continue
            if not self.is_cluster and len(self._seeds) > 1:
                raise StorageError(NO_CLUSTER)
            self._is_known = True
            return
        raise failure_of(failure) from failure

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])
        for client in self._clients.values():
            with suppress(*CONNECTION_ERRORS):
                await client.aclose(close_connection_pool=True)

    def node_of(self, key: str) -> str:
        """Something that is equal for keys of the same node, as far as is known now."""
        return self._owners[self._slot(key)] or ""

    # ---- commands

    async def call(self, *args: Argument) -> Any:
        """One command whose first argument is its key."""
        return await self.one(Command.of(*args))

    async def one(self, command: Command, *, copied: bool = False) -> Any:
        (reply,) = await self.settled([command], copied=copied)
        if isinstance(reply, Exception):
            raise failure_of(reply) from reply
        return reply

    async def values(self, groups: Sequence[Sequence[str]]) -> list[list[bytes | None] | Exception]:
        """The values of keys, or why they cannot be read; those of a group share a slot and are read at one moment."""
        if not self.is_cluster:
            keys = [key for group in groups for key in group]
            stored = iter(await self.one(Command.of("MGET", *keys)) if keys else [])
            return [[next(stored) for _ in group] for group in groups]
        found = await self.settled([Command.of("MGET", *group) for group in groups], with_try_again=True)
        for place, values in enumerate(found):
            if isinstance(values, TryAgainError):
                found[place] = await self._values_one_by_one(groups[place])
        return found

    async def _values_one_by_one(self, keys: Sequence[str]) -> list[bytes | None] | Exception:
        """While a slot is on its way to another node, some keys of a user may be here and others there.

        The last key first: a state that is older than the head only lacks what was logged in between.
        """
        values: list[bytes | None] = []
        for key in reversed(keys):
            (value,) = await self.settled([Command.of("GET", key)])
            if isinstance(value, Exception):
                return value
            values.append(value)
        return values[::-1]

    async def settled(
        self, commands: Sequence[Command], *, together: bool = False, copied: bool = False, with_try_again: bool = False
    ) -> list[Any]:
        """Replies in order, exceptions in the place of those that failed; what a node sent on has been sent there."""
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + SETTLE_WITHIN_S
        redirected = MovedError if with_try_again else MovedError | TryAgainError
        replies = await self.batch(commands, together=together, copied=copied)
        while again := [place for place, reply in enumerate(replies) if isinstance(reply, redirected)]:
            if loop.time() > give_up_at_s:
                break
            if any(isinstance(replies[place], TryAgainError) for place in again):
                await asyncio.sleep(PAUSE_S)
            sent = await self.batch([commands[place] for place in again], together=together, copied=copied)
            for place, reply in zip(again, sent, strict=True):
                replies[place] = reply
        return replies

    async def batch(self, commands: Sequence[Command], *, together: bool = False, copied: bool = False) -> list[Any]:
        """Send each command once to the node of its key, and on to where that one says that the key is being moved.

        returns   replies in order, exceptions in the place of those that failed; a MovedError or TryAgainError says
                  that nothing was done, and after a MovedError the command would go to the right node
        together  synced once, where one server can do so
        copied    succeeds only with as many copies as acknowledging takes
        raises    StorageUnavailable  when no node could be reached
        """
        if not commands:
            return []
        replies: list[Any] = [None] * len(commands)
        places: defaultdict[str | None, list[int]] = defaultdict(list)
        for place, command in enumerate(commands):
            places[self._owners[self._slot(command.key)]].append(place)
        await self._send_to(places, commands, replies, together=together, copied=copied)
        asked: defaultdict[str | None, list[int]] = defaultdict(list)
        for place, reply in enumerate(replies):
            if isinstance(reply, AskError) and not isinstance(reply, MovedError):
                asked[self._url(reply, self._owners[self._slot(commands[place].key)])].append(place)
        self._asked.update(filter(None, asked))
        await self._send_to(asked, commands, replies, asking=True, copied=copied)
        for place, reply in enumerate(replies):
            if isinstance(reply, MovedError):
                slot = self._slot(commands[place].key)
                self._owners[slot] = self._url(reply, self._owners[slot])
        if any(isinstance(reply, MovedError | ClusterDownError) or _is_away(reply) for reply in replies):
            self._refresh()
        if replies and all(map(_is_away, replies)):
            raise failure_of(replies[0]) from replies[0]
        return replies

    async def _send_to(
        self,
        places: Mapping[str | None, list[int]],
        commands: Sequence[Command],
        replies: list[Any],
        *,
        together: bool = False,
        copied: bool = False,
        asking: bool = False,
    ) -> None:
        async def send(url: str | None, own: list[int]) -> None:
            try:
                if url is None:
                    raise ClusterDownError("CLUSTERDOWN no node of the cluster has the slot")
                sent = await self._pipeline(
                    url, [commands[place].args for place in own], together=together, copied=copied, asking=asking
                )
            except CONNECTION_ERRORS as exc:
                sent = [exc] * len(own)
            for place, reply in zip(own, sent, strict=True):
                replies[place] = reply

        if len(places) == 1:  # a task of its own would cost as much as all else here
            await send(*next(iter(places.items())))
        elif places:
            await asyncio.gather(*(send(url, own) for url, own in places.items()))

    async def _pipeline(
        self, url: str, commands: Sequence[tuple[Argument, ...]], *, together: bool, copied: bool, asking: bool
    ) -> list[Any]:
        """All on one connection, as ASKING and WAIT need it."""
        # a transaction of a cluster cannot span slots
        in_transaction = together and len(commands) > 1 and not self.is_cluster
        is_waited_for = copied and self.copies.are_wanted
        if len(commands) == 1 and not asking and not is_waited_for:  # of a pipeline most would be its own work
            try:
                return [await execute(self._client(url), *commands[0])]
            except ResponseError as exc:
                return [exc]
        async with self._client(url).pipeline(transaction=False) as pipe:
            if in_transaction:
                pipe.execute_command("MULTI")
            for command in commands:
                if asking:
                    pipe.execute_command("ASKING")
                pipe.execute_command(*command)
            if in_transaction:
                pipe.execute_command("EXEC")
            if is_waited_for:
                pipe.execute_command(*self.copies.command)
            replies = await pipe.execute(raise_on_error=False)
        lacking = self.copies.lacking(replies.pop()) if is_waited_for else None
        if in_transaction:
            executed = replies.pop()
            if isinstance(executed, Exception):  # something could not even be queued
                first = next((reply for reply in replies if isinstance(reply, Exception)), executed)
                executed = [first] * len(commands)
            replies = executed
        elif asking:
            replies = replies[1::2]
        if lacking is not None:
            # what was refused did nothing that somebody would have to have
            replies = [lacking if _has_written(reply) else reply for reply in replies]
        return replies

    # ---- every node

    async def everywhere(self, *args: Argument, replicas: bool = False) -> list[Any]:
        """The replies of all servers that have slots or are getting some, exceptions in the place of those that failed.

        raises  StorageUnavailable  when all failed to answer
        """
        owners = {url for url in self._owners if url is not None}
        urls = sorted(owners | self._asked | (self._replicas if replicas else set()))
        replies = await asyncio.gather(*(self._on(url, *args) for url in urls), return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, CONNECTION_ERRORS):
                raise reply
        if not replies or all(map(_is_away, replies)):
            self._refresh()
            failure = replies[0] if replies else ClusterDownError("no node of the cluster has slots")
            assert isinstance(failure, Exception)
            raise failure_of(failure) from failure
        return replies

    async def scan(self, pattern: str) -> AsyncIterator[list[str]]:
        """Keys of all servers; one that is moved from node to node meanwhile may be missed."""
        for url in sorted({url for url in self._owners if url is not None}):
            cursor = None
            while cursor != 0:
                with translated():
                    cursor, found = await self._on(url, "SCAN", cursor or 0, "MATCH", pattern, "COUNT", SCANNED_AT_ONCE)
                if found:
                    yield [key.decode() for key in found]

    async def _on(self, url: str, *args: Argument) -> Any:
        return await execute(self._client(url), *args)

    # ---- the map of slots

    def _slot(self, key: str) -> int:
        return key_slot(key.encode()) if self.is_cluster else 0

    def _url(self, redirection: AskError, answered: str | None) -> str:
        """Where a node sends us; one that does not know its own host means the one that it was asked at."""
        return _at(answered or self._seeds[0], str(redirection.host), int(redirection.port))

    def _learn(self, asked: str, slots: Sequence[Any]) -> None:
        """Take over what CLUSTER SLOTS says."""
        owners: list[str | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        replicas = set()
        for first, last, *nodes in slots:
            urls = [_at(asked, (host or b"").decode(), int(port)) for host, port, *_ in nodes]
            owners[first : last + 1] = urls[:1] * (last + 1 - first)
            replicas.update(urls[1:])
        self._owners, self._replicas, self._asked = owners, replicas, set()

    def _refresh(self) -> None:
        """Read the map again, soon."""
        if self.is_cluster and self._refreshing is None:
            self._refreshing = asyncio.create_task(self._read_map())

    async def _read_map(self) -> None:
        try:
            for url in random.sample(list(self._clients), len(self._clients)):
                with suppress(*CONNECTION_ERRORS):
                    self._learn(url, await self._on(url, "CLUSTER", "SLOTS"))
                    break
            await asyncio.sleep(PAUSE_S)
        finally:
            self._refreshing = None


def urls_of_nodes(url: str) -> list[str]:
    """A URL for each HOST:PORT in this one."""
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    if "," not in hosts:
        return [url]
    return [urlunsplit(parts._replace(netloc=f"{credentials}{at}{host}")) for host in hosts.split(",")]


def _at(url: str, host: str, port: int) -> str:
    """The same with another host, if that is known, and port."""
    parts = urlsplit(url)
    credentials, at, _ = parts.netloc.rpartition("@")
    host = parts.hostname or "" if host in ("", "?") else host
    return urlunsplit(parts._replace(netloc=f"{credentials}{at}{f'[{host}]' if ':' in host else host}:{port}"))


async def execute(client: Redis, *args: Argument) -> Any:
    call: Callable[..., Awaitable[Any]] = client.execute_command  # redis-py does not say more of it
    return await call(*args)


async def _is_in_cluster(client: Redis) -> bool:
    try:
        return is_of_cluster(await execute(client, "HELLO"))
    except AuthenticationError:
        raise
    except ResponseError as exc:  # a server that is too old, or a user who may not ask
        logger.info("Redis does not tell whether it is a cluster: %s", exc)
        return False


def is_of_cluster(hello: Sequence[Any]) -> bool:
    """By the server's answer to HELLO, which every user may send and every server since 6.2 knows."""
    return dict(zip(hello[::2], hello[1::2], strict=True)).get(b"mode") == b"cluster"


def _has_written(reply: Any) -> bool:
    """By the reply of a script: 0 says that it did nothing, as do several of them where it was told several things."""
    if isinstance(reply, list):
        return not reply or any(one != 0 for one in reply)
    return not isinstance(reply, Exception) and reply != 0


def _is_away(reply: Any) -> bool:
    """Whether in the place of a reply there is the failure of a connection."""
    return isinstance(reply, CONNECTION_ERRORS) and not isinstance(reply, ResponseError)


@contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except CONNECTION_ERRORS as exc:
        raise failure_of(exc) from exc


def failure_of(cause: Exception) -> StorageError:
    """One for each waiter: a raised exception collects the traceback of who waits."""
    failure: StorageError
    if isinstance(cause, CONNECTION_ERRORS):
        failure = StorageUnavailable(f"Redis failed: {cause}")
    elif isinstance(cause, StorageError):
        failure = type(cause)(str(cause))
    else:
        failure = StorageError(f"the request could not be applied: {cause!r}")
    failure.__cause__ = cause
    return failure

"""Routes the commands of a Redis store to one server, or to the cluster nodes that own the keys.

A server reports whether it belongs to a cluster. Every MOVED corrects the slot map, which is read again after every
failure. A command is only resent after a node has replied that it did not execute it.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, ReadOnlyError, ResponseError, TryAgainError

from storage.errors import StorageError
from storage.redis.connections.nodes import (
    CONNECTION_ERRORS,
    Argument,
    Command,
    NodeClients,
    ReplicaAcks,
    node_urls,
    storage_error,
)
from storage.redis.connections.password_file import split_password_file
from storage.redis.connections.tls import require_usable

REDIRECT_FOR_S = 2.0  # commands whose slot has moved, or whose keys are still on two nodes, are resent for this long
PAUSE_S = 0.05
SCAN_COUNT = 1000  # keys examined per command, which blocks Redis for about half a millisecond
NO_CLUSTER = "the URL names several servers, but one of them is not in a cluster; name only one server"


class SlotMap:
    """The nodes that own the slots, as currently known. A single server owns the only slot.

    is_cluster  whether there are several slots, each owned by a node
    """

    def __init__(self, server: str) -> None:
        self.is_cluster = False
        self._seed = server
        self._owners: list[str | None] = [server]  # by slot
        self._replicas: set[str] = set()
        self._importing: set[str] = set()  # nodes named by an ASK, which may not own a slot yet

    def learn(self, source: str, slots: Sequence[Any]) -> None:
        """Replace the map with a node's reply to CLUSTER SLOTS."""
        owners: list[str | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        replicas = set()
        for first, last, *nodes in slots:
            urls = [_with_address(source, (host or b"").decode(), int(port)) for host, port, *_ in nodes]
            owners[first : last + 1] = urls[:1] * (last + 1 - first)
            replicas.update(urls[1:])
        self.is_cluster = True
        self._owners, self._replicas, self._importing = owners, replicas, set()

    def node_of(self, key: str) -> str | None:
        """Return the node that owns the key's slot; None if no node does."""
        return self._owners[key_slot(key.encode()) if self.is_cluster else 0]

    def by_node(self, commands: Iterable[Command]) -> dict[str | None, list[int]]:
        """Group the positions of the commands by the node that owns their keys."""
        positions: defaultdict[str | None, list[int]] = defaultdict(list)
        for position, command in enumerate(commands):
            positions[self._owners[key_slot(command.key.encode()) if self.is_cluster else 0]].append(position)
        return positions

    def keys_by_node(self, keys: Iterable[str]) -> dict[str | None, list[str]]:
        """Group keys by the node that owns their slots."""
        by_node: defaultdict[str | None, list[str]] = defaultdict(list)
        for key in keys:
            by_node[self.node_of(key)].append(key)
        return by_node

    def ask_target(self, key: str, redirection: AskError) -> str:
        """Return the node that imports the key's slot, according to the slot's owner."""
        target = self._target(key, redirection)
        self._importing.add(target)
        return target

    def apply_moved(self, key: str, redirection: MovedError) -> None:
        """Record the new owner of the key's slot."""
        self._owners[key_slot(key.encode()) if self.is_cluster else 0] = self._target(key, redirection)

    def primaries(self) -> list[str]:
        """Return the nodes that own slots, in a fixed order."""
        return sorted({url for url in self._owners if url is not None})

    @property
    def is_complete(self) -> bool:
        """Whether every slot has an owner."""
        return None not in self._owners

    def nodes(self, *, replicas: bool) -> list[str]:
        """Return the nodes that own or import slots, and optionally the replicas, in a fixed order."""
        return sorted({*self.primaries(), *self._importing, *(self._replicas if replicas else ())})

    def _target(self, key: str, redirection: AskError) -> str:
        """Return the URL of a redirection. An empty host means the node that sent it."""
        answered = self.node_of(key) or self._seed
        return _with_address(answered, str(redirection.host), int(redirection.port))


class RedisServers:
    """The server or cluster at a URL; for a cluster it may contain several nodes: HOST:PORT,HOST:PORT.

    It belongs to the event loop that first uses it. Every failure is a StorageError.
    """

    def __init__(self, url: str, *, connect_timeout_s: float, socket_timeout_s: float, acks: ReplicaAcks) -> None:
        """Raise ValueError if the URL, or a file that it names, cannot be used."""
        self.acks = acks
        self._seeds = node_urls(url)
        self._nodes = NodeClients(connect_timeout_s, socket_timeout_s, acks)
        for seed in self._seeds:
            require_usable(split_password_file(seed)[0])
            self._nodes.add(seed)
        self.slots = SlotMap(self._seeds[0])
        self._is_connected = False
        self._refreshing: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Detect whether this is a single server or a cluster, unless that is known.

        raises  StorageUnavailable  when no server answers
                StorageError        when the URL names several servers that are not a cluster
        """
        if self._is_connected:
            return
        failure: Exception = RuntimeError("the URL names no server")
        for seed in self._seeds:
            try:
                is_cluster = await self._nodes.is_in_cluster(seed)
                if is_cluster:
                    self.slots.learn(seed, await self._nodes.call(seed, "CLUSTER", "SLOTS"))
            except CONNECTION_ERRORS as exc:
                failure = exc
                continue
            if not is_cluster and len(self._seeds) > 1:
                raise StorageError(NO_CLUSTER)
            self._is_connected = True
            return
        raise storage_error(failure) from failure

    async def close(self) -> None:
        """Close all connections."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])
        await self._nodes.close()

    async def call(self, *args: Argument) -> Any:
        """Execute one command whose first argument is its key."""
        (reply,) = await self.call_all([Command.of(*args)])
        return reply

    async def call_all(
        self, commands: Sequence[Command], *, in_transaction: bool = False, wait_for_replicas: bool = False
    ) -> list[Any]:
        """Execute commands as `execute_all` does; raise StorageError if one fails."""
        replies = await self.execute_all(commands, in_transaction=in_transaction, wait_for_replicas=wait_for_replicas)
        for reply in replies:
            if isinstance(reply, Exception):
                raise storage_error(reply) from reply
        return replies

    async def read(self, groups: Sequence[Sequence[str]]) -> list[list[bytes | None] | Exception]:
        """Return the values of keys, or the error of each group that cannot be read.

        The keys of a group share a slot and are read atomically.
        """
        if not self.slots.is_cluster:
            stored = iter(await self._read_from_server(keys) if (keys := [*chain.from_iterable(groups)]) else [])
            return [[next(stored) for _ in group] for group in groups]
        found = await self.execute_all([Command.of("MGET", *group) for group in groups], return_try_again=True)
        for position, values in enumerate(found):
            if isinstance(values, TryAgainError):
                found[position] = await self._read_one_by_one(groups[position])
        return found

    async def _read_from_server(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read keys of a single server without the overhead of `call`, which handles refusals by reading again."""
        try:
            return list(await self._nodes.call(self.slots.node_of(keys[0]) or "", "MGET", *keys))
        except ResponseError:
            return list(await self.call("MGET", *keys))
        except CONNECTION_ERRORS as exc:
            raise storage_error(exc) from exc

    async def _read_one_by_one(self, keys: Sequence[str]) -> list[bytes | None] | Exception:
        """Read keys whose slot is being migrated, so that they may be on two nodes.

        The last key is read first: a state that is older than the head only lacks the entries logged in between.
        """
        values: list[bytes | None] = []
        for key in reversed(keys):
            (value,) = await self.execute_all([Command.of("GET", key)])
            if isinstance(value, Exception):
                return value
            values.append(value)
        return values[::-1]

    async def execute_all(
        self,
        commands: Sequence[Command],
        *,
        in_transaction: bool = False,
        wait_for_replicas: bool = False,
        return_try_again: bool = False,
    ) -> list[Any]:
        """Execute commands as `send` does, and resend those that a node redirected.

        return_try_again  whether a TryAgainError is returned as a reply; otherwise its command is resent
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + REDIRECT_FOR_S
        redirections = MovedError if return_try_again else MovedError | TryAgainError
        replies = await self.send(commands, in_transaction=in_transaction, wait_for_replicas=wait_for_replicas)
        while redirected := [place for place, reply in enumerate(replies) if isinstance(reply, redirections)]:
            if loop.time() > deadline_s:
                break
            if any(isinstance(replies[place], TryAgainError) for place in redirected):
                await asyncio.sleep(PAUSE_S)
            again = [commands[place] for place in redirected]
            sent = await self.send(again, in_transaction=in_transaction, wait_for_replicas=wait_for_replicas)
            for place, reply in zip(redirected, sent, strict=True):
                replies[place] = reply
        return replies

    async def send(
        self, commands: Sequence[Command], *, in_transaction: bool = False, wait_for_replicas: bool = False
    ) -> list[Any]:
        """Send each command once to the node of its key, and on to a node named by an ASK.

        returns            replies in order, with exceptions in place of failed ones; MovedError and TryAgainError mean
                           that the command was not executed, and after a MovedError the slot map names the
                           right node for it
        in_transaction     sync once, if this is a single server
        wait_for_replicas  succeed only with as many replicas as an acknowledgement requires
        raises             StorageUnavailable  when no node could be reached
        """
        if not commands:
            return []
        replies: list[Any] = [None] * len(commands)
        in_transaction = in_transaction and not self.slots.is_cluster  # MULTI cannot span slots
        places = self.slots.by_node(commands)
        await self._nodes.send(
            places, commands, replies, in_transaction=in_transaction, wait_for_replicas=wait_for_replicas
        )
        failures = [(place, reply) for place, reply in enumerate(replies) if isinstance(reply, Exception)]
        if failures:
            await self._follow(failures, commands, replies, wait_for_replicas=wait_for_replicas)
        return replies

    async def _follow(
        self,
        failures: Sequence[tuple[int, Exception]],
        commands: Sequence[Command],
        replies: list[Any],
        *,
        wait_for_replicas: bool,
    ) -> None:
        """Send commands on after an ASK, correct the slot map, and leave a server that has become a replica."""
        asked: dict[str | None, list[int]] = {}
        for place, reply in failures:
            if isinstance(reply, AskError) and not isinstance(reply, MovedError):
                asked.setdefault(self.slots.ask_target(commands[place].key, reply), []).append(place)
        await self._nodes.send(asked, commands, replies, asking=True, wait_for_replicas=wait_for_replicas)
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, MovedError):
                self.slots.apply_moved(command.key, reply)
            elif isinstance(reply, ReadOnlyError) and (url := self.slots.node_of(command.key)):
                await self.reconnect(url)  # its name may lead to the new primary already
        if any(isinstance(reply, MovedError | ClusterDownError) or _is_unreachable(reply) for reply in replies):
            self._refresh_slots()
        if all(map(_is_unreachable, replies)):
            raise storage_error(replies[0]) from replies[0]

    # ---- one node, or all nodes

    def connected(self, url: str) -> int:
        """Return the number of connections made to a node so far; if it changes, the server may be another one."""
        return self._nodes.connected(url)

    async def reconnect(self, url: str) -> None:
        """Close the connections to a node after their use, at most once a second; new ones look up its name again."""
        await self._nodes.reconnect(url)

    async def call_node(self, url: str, *commands: tuple[Argument, ...]) -> list[Any]:
        """Execute commands on a node in one round trip; error replies are returned in place of replies.

        raises  StorageUnavailable  when the node failed to answer a command
        """
        replies: list[Any] = [None] * len(commands)
        places: dict[str | None, list[int]] = {url: list(range(len(commands)))} if commands else {}
        await self._nodes.send(places, [Command("", args) for args in commands], replies)
        for reply in replies:
            if isinstance(reply, CONNECTION_ERRORS) and not _is_refusal(reply):
                raise storage_error(reply) from reply
        return replies

    async def call_all_nodes(self, *commands: tuple[Argument, ...], replicas: bool = False) -> list[list[Any]]:
        """Execute commands on all servers that own or import slots, in one round trip to each.

        returns                     the replies of each server, with exceptions in place of failed ones
        raises  StorageUnavailable  when no server answered
        """
        urls, count = self.slots.nodes(replicas=replicas), len(commands)
        starts = [number * count for number in range(len(urls))]
        replies: list[Any] = [None] * count * len(urls)
        places: dict[str | None, list[int]] = {
            url: list(range(start, start + count)) for url, start in zip(urls, starts, strict=True)
        }
        await self._nodes.send(places, [Command("", args) for args in commands] * len(urls), replies)
        if all(map(_is_unreachable, replies)):
            self._refresh_slots()
            failure = replies[0] if replies else ClusterDownError("no node of the cluster has slots")
            raise storage_error(failure) from failure
        return [replies[start : start + count] for start in starts]

    def require_all_slots(self) -> None:
        """Raise StorageUnavailable if a slot has no node, as far as is known."""
        if not self.slots.is_complete:
            self._refresh_slots()
            raise storage_error(ClusterDownError("a slot of the cluster has no node"))

    async def scan(self, pattern: str) -> AsyncIterator[list[str]]:
        """Yield keys of all servers; a key that moves between nodes during the scan may be missed."""
        for url in self.slots.primaries():
            cursor = None
            while cursor != 0:
                command = ("SCAN", cursor or 0, "MATCH", pattern, "COUNT", SCAN_COUNT)
                try:
                    cursor, found = await self._nodes.call(url, *command)
                except CONNECTION_ERRORS as exc:
                    raise storage_error(exc) from exc
                if found:
                    yield [key.decode() for key in found]

    def _refresh_slots(self) -> None:
        """Read the slot map again in the background."""
        if self.slots.is_cluster and self._refreshing is None:
            self._refreshing = asyncio.create_task(self._read_slots())

    async def _read_slots(self) -> None:
        try:
            for url in random.sample(self._nodes.urls, len(self._nodes.urls)):
                with suppress(*CONNECTION_ERRORS):
                    self.slots.learn(url, await self._nodes.call(url, "CLUSTER", "SLOTS"))
                    break
            await asyncio.sleep(PAUSE_S)
        finally:
            self._refreshing = None


def _is_refusal(reply: Exception) -> bool:
    """Return whether the server rejects a command because of its data.

    A node that is cut off from its cluster reports its own state, not that of its data, so it must be asked again.
    """
    return isinstance(reply, ResponseError) and not isinstance(reply, ClusterDownError)


def _is_unreachable(reply: Any) -> bool:
    """Return whether the reply is a connection error."""
    return isinstance(reply, CONNECTION_ERRORS) and not isinstance(reply, ResponseError)


def _with_address(url: str, host: str, port: int) -> str:
    """Return the URL with another port, and with another host if it is known."""
    parts = urlsplit(url)
    credentials, at, _ = parts.netloc.rpartition("@")
    host = parts.hostname or "" if host in ("", "?") else host
    return urlunsplit(parts._replace(netloc=f"{credentials}{at}{f'[{host}]' if ':' in host else host}:{port}"))

"""The servers of a Redis store, checked before their first use, and the values stored once for all users."""

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import chain
from typing import Any

from redis.exceptions import AuthenticationError, NoScriptError

from storage.archive.async_reader import AsyncArchiveReader
from storage.errors import StorageError, StorageUnavailable, StoreUnused
from storage.redis.connections.client import RedisServers
from storage.redis.connections.nodes import MAX_CONNECTIONS, Argument, is_withheld, storage_error
from storage.redis.layout.keys import GENERATION_FIELD, LAYOUT_VERSION, UNUSED, Keyspace, begins_with
from storage.redis.layout.lost_entries import LOST_FIELD, META, encode_lost
from storage.redis.scripts.script import Script
from storage.redis.scripts.store_scripts import STORE_SCRIPTS
from storage.redis.session.data_loss_check import ServerTrust
from storage.redis.session.server_settings import POLICY, SAFE_SETTINGS, keeps_events, reported_settings
from storage.state.generation import Generation

OLDEST_SERVER = (6, 2)
OLDEST_WITH_WAITAOF = (7, 2)
COVERAGE = "cluster-require-full-coverage"
WITHHELD = (
    "Redis does not tell whether its %s. Make sure that it is, or that what acknowledges events is as durable: "
    "what it loses otherwise may not be noticed"
)
EARLIER_LAYOUT = (
    "'{key}' was written by an earlier lisarec (layout {found}, this one knows {known}); "
    "run 'lisarec backup' with that version, and 'lisarec restore' with this one under another key prefix"
)

logger = logging.getLogger(__name__)


class RedisSession:
    """Servers whose version, data layout and settings are checked once they can be reached.

    trust          whether they still have all acknowledged events, checked for every write
    lacks_archive  whether to warn if older parts of the log are in an archive
    must_exist     whether servers that no service has used are an error
    is_closed      whether new calls are rejected
    """

    def __init__(
        self,
        servers: RedisServers,
        keys: Keyspace,
        archive: AsyncArchiveReader,
        *,
        lacks_archive: bool,
        must_exist: bool,
    ) -> None:
        self.servers = servers
        self.keys = keys
        self.is_closed = False
        self._lacks_archive, self._must_exist = lacks_archive, must_exist
        self._is_checked = False
        self._archive_id = ""
        self._fields: dict[str, str] = {}  # fields of PREFIX:meta that this process has ensured
        self.trust = ServerTrust(servers, keys, archive, self._fields)
        # Folding missing states must not use up the connections to a node that the rounds of all users need.
        self._background = defaultdict[str | None, asyncio.Semaphore](lambda: asyncio.Semaphore(MAX_CONNECTIONS // 2))

    @property
    def has_single_server(self) -> bool:
        """Whether it is known that there is no cluster."""
        return self._is_checked and not self.servers.slots.is_cluster

    def refuse_calls(self) -> None:
        """Reject new calls from now on. Accepted calls can still be completed."""
        self.is_closed = True

    async def require_open(self) -> None:
        """Check the servers before their first use; raise StorageUnavailable once the store is closed."""
        if self.is_closed:
            raise StorageUnavailable("the store is closed", "closed")
        await self.check()

    async def require_whole(self) -> None:
        """Raise StorageError unless all servers may be written to."""
        await self.require_open()
        for partition in range(self.keys.partitions):
            await self.trust.require(self.keys.log(partition))

    async def check(self) -> None:
        """Check before the first use that the servers and their data are usable.

        raises  StorageUnavailable  when the servers cannot be reached, or refuse the user or a command
                StorageError        when they are too old, or their data have another layout
        """
        if self._is_checked:
            return
        await self.servers.connect()
        asked = (("CONFIG GET", name) for name in (*SAFE_SETTINGS, COVERAGE))
        replies = await self.servers.call_all_nodes(("INFO",), *asked, replicas=True)
        self._check_versions([info for info, *_ in replies])
        await self._check_layout()
        self._check_settings([reported_settings(*of_server) for of_server in replies])
        await self._load_scripts()
        self._is_checked = True

    async def prepare_writes(self, generations: Sequence[Generation]) -> None:
        """Check the servers before their first use, and register generations before their states are written."""
        await self.check()
        await self.register(generations)

    async def call(self, *command: Argument) -> Any:
        """Execute one command whose first argument is its key."""
        return await self.servers.call(*command)

    async def run(
        self, script: Script, keys: Sequence[str], args: Sequence[Argument], *, wait_for_replicas: bool = False
    ) -> Any:
        """Run a script, and load it first if a server has lost it."""
        command = script.command(keys, args)
        (reply,) = await self.servers.execute_all([command], wait_for_replicas=wait_for_replicas)
        if isinstance(reply, NoScriptError):
            await self._load_scripts()
            (reply,) = await self.servers.execute_all([command], wait_for_replicas=wait_for_replicas)
        if isinstance(reply, Exception):
            raise storage_error(reply) from reply
        return reply

    async def write(
        self, script: Script, keys: Sequence[str], args: Sequence[Argument], *, wait_for_replicas: bool = False
    ) -> Any:
        """Run a script that writes, on a server that is trusted before and after.

        A script that logs entries returns the id of its last entry.
        """
        await self.trust.require(keys[0])
        reply = await self.run(script, keys, args, wait_for_replicas=wait_for_replicas)
        refused = await self.trust.acknowledge({keys[0]: reply if isinstance(reply, bytes) else None})
        for failure in refused.values():
            raise failure
        return reply

    async def reload_lost_scripts(self, replies: Sequence[Any]) -> bool:
        """Load the scripts again if a reply shows that a server has lost one; return whether one has."""
        is_lost = any(isinstance(reply, NoScriptError) for reply in replies)
        if is_lost:
            await self._load_scripts()
        return is_lost

    async def partition_keys(self, beginning: str) -> AsyncIterator[list[str]]:
        """Yield the keys of partitions that begin so behind the hash tag, as `RedisServers.scan` does."""
        async for found in self.servers.scan(self.keys.pattern(beginning)):
            if keys := [key for key in found if begins_with(beginning, key)]:
                yield keys

    def background_limit(self, key: str) -> asyncio.Semaphore:
        """Return the semaphore that limits calls outside rounds to the key's node."""
        return self._background[self.servers.slots.node_of(key)]

    async def ping(self) -> None:
        """Return when all servers can be read, and together have all slots."""
        await self.require_open()
        for (reply,) in await self.servers.call_all_nodes(("PING",)):
            if isinstance(reply, Exception):
                raise storage_error(reply) from reply
        self.servers.require_all_slots()

    async def close(self) -> None:
        """Close all connections."""
        await self.trust.close()
        await self.servers.close()

    # ---- values stored once

    async def register(self, generations: Sequence[Generation]) -> None:
        """Register the generations before their first state is written, because erasing a user requires it."""
        for generation in generations:
            await self.note(f"{GENERATION_FIELD}{generation.tag.hex()}", "1")

    async def note(self, field: str, value: str) -> None:
        """Set a field of PREFIX:meta unless it is set; set it again if a server returns without it."""
        if field not in self._fields:
            await self.call("HSETNX", self.keys.meta, field, value)
            self._fields[field] = value

    async def registered_tags(self) -> set[str]:
        """Return the tags, in hex, of all generations that ever had a state."""
        fields = [*self._fields, *(field.decode() for field in await self.call("HKEYS", self.keys.meta))]
        return {field.removeprefix(GENERATION_FIELD) for field in fields if field.startswith(GENERATION_FIELD)}

    async def archive_id(self) -> str:
        """Return the id of the archive; empty if there is none.

        The id never changes, so a known id is returned even if the server is unavailable.
        """
        try:
            self._archive_id = (await self.call("HGET", self.keys.meta, "archive") or b"").decode()
        except StorageUnavailable:
            if not self._archive_id:
                raise
        return self._archive_id

    async def secret(self) -> bytes:
        """Return the 32 random bytes that are created once for the data."""
        await self.require_open()
        read = ("HGET", self.keys.meta, "secret")
        secret = await self.call(*read)
        if secret is None:
            await self.trust.require(self.keys.meta)  # a server that has lost its data had a secret
            await self.call("HSETNX", self.keys.meta, "secret", secrets.token_hex(32))
            secret = await self.call(*read)
        self._fields["secret"] = secret.decode()
        return bytes.fromhex(self._fields["secret"])

    # ---- checks

    def _check_versions(self, infos: Sequence[Any]) -> None:
        for info in infos:
            if isinstance(info, Mapping) and "redis_version" in info:
                version = str(info["redis_version"])
                if _version_number(version) < OLDEST_SERVER:
                    raise StorageError(f"Redis {version} is too old for lisarec, which needs 6.2 or later")
                if self.servers.acks.synced and _version_number(version) < OLDEST_WITH_WAITAOF:
                    raise StorageError(
                        f"Redis {version} cannot tell what its replicas have synced, 7.2 can; wait for replicas without"
                    )
            elif isinstance(info, Mapping) or is_withheld(info):  # the scripts will report this
                logger.info("Redis does not tell its version")
            elif not self.servers.slots.is_cluster or isinstance(info, AuthenticationError):
                raise storage_error(info) from info

    async def _check_layout(self) -> None:
        wanted = {"layout": LAYOUT_VERSION, "partitions": self.keys.partitions}
        read = ("HMGET", self.keys.meta, *wanted)
        if None in await self.call(*read):
            # in this order, because another process may be creating the store at the same time
            has_logs = await self._has_logs()
            if self._must_exist and not has_logs:
                raise StoreUnused(UNUSED.format(prefix=self.keys.prefix))
            is_gone = has_logs and None in await self.call(*read)
            lost = {LOST_FIELD: encode_lost({META: ""}, 0)} if is_gone else {}
            for name, value in (wanted | lost).items():
                await self.call("HSETNX", self.keys.meta, name, value)
        found = dict(zip(wanted, map(int, await self.call(*read)), strict=True))
        if self._lacks_archive and await self.archive_id():
            logger.warning("older parts of the log are in an archive, and no archive directory is given")
        if found["layout"] < LAYOUT_VERSION:
            raise StorageError(EARLIER_LAYOUT.format(key=self.keys.meta, found=found["layout"], known=LAYOUT_VERSION))
        if found != wanted:
            raise StorageError(
                f"'{self.keys.meta}' was written with {found}, but this lisarec uses {wanted}; "
                "run the version that wrote it, or choose another key prefix"
            )

    async def _has_logs(self) -> bool:
        numbers = await self.servers.read([[self.keys.seq(number)] for number in range(self.keys.partitions)])
        return any(isinstance(found, list) and found != [None] for found in numbers)

    def _check_settings(self, servers: Sequence[Mapping[str, str]]) -> None:
        """Warn of settings that differ from docker/redis/redis.conf and redis-cluster.conf, or are not reported."""
        values = {name: {found[name] for found in servers if name in found} for name in (*SAFE_SETTINGS, COVERAGE)}
        for name, safe in SAFE_SETTINGS.items():
            for value in values[name] - {safe}:
                if name != POLICY or not keeps_events(value):
                    logger.warning("Redis may lose acknowledged events: its %s is %s, not %s", name, value, safe)
        if self.servers.slots.is_cluster:
            for value in values[COVERAGE] - {"no"}:
                logger.warning("one lost node will stop the whole cluster of Redis: its %s is %s", COVERAGE, value)
        withheld = [f"{name} is {safe}" for name, safe in SAFE_SETTINGS.items() if not values[name]]
        if withheld:
            logger.warning(WITHHELD, " and ".join(withheld))

    async def _load_scripts(self) -> None:
        loads = (("SCRIPT LOAD", script.text) for script in STORE_SCRIPTS)
        for reply in chain.from_iterable(await self.servers.call_all_nodes(*loads)):
            if isinstance(reply, Exception) and not self.servers.slots.is_cluster:
                raise storage_error(reply) from reply


def _version_number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))

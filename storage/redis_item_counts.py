"""Item counts of the Redis store: what the archive has, and the newest entries of every stream behind it."""

from collections.abc import Awaitable, Callable, Collection

from storage.archive_lookups import AsyncArchiveReader
from storage.item_counts import MAX_NEWEST_ENTRIES, ArchivedItemCounts, ItemCounts, add_counts, count_items_of_events
from storage.redis_layout import Keyspace, partition_page
from storage.redis_servers import Command, RedisServers, failure_of

ARCHIVE_TIMEOUT_S = 60.0  # three columns of all its files


class RedisItemCounts:
    """Counts for a store, which gives it the servers once they can be used, and the id of the archive if it has one."""

    def __init__(
        self,
        servers: Callable[[], Awaitable[RedisServers]],
        keys: Keyspace,
        archive: AsyncArchiveReader,
        archive_id: Callable[[], Awaitable[str]],
    ) -> None:
        self._servers = servers
        self._keys = keys
        self._archive = archive
        self._archive_id = archive_id
        self._archived: dict[tuple[str, Collection[str]], ArchivedItemCounts] = {}

    async def __call__(self, tenant: str, types: Collection[str]) -> ItemCounts:
        """raises StorageUnavailable when the servers, or the archive that there is, cannot be read"""
        servers = await self._servers()
        archived = await self._of_archive(tenant, frozenset(types))
        commands = [self._newest(number, archived) for number in range(self._keys.partitions)]
        events = []
        for reply in await servers.settled(commands):
            if isinstance(reply, Exception):
                raise failure_of(reply) from reply
            page = partition_page(reply, is_complete=True)
            events += [entry.event for owner, entry in page.entries if owner == tenant]
        counts = count_items_of_events(events, types)
        return counts if archived is None else add_counts(archived.counts, counts)

    async def _of_archive(self, tenant: str, types: frozenset[str]) -> ArchivedItemCounts | None:
        archive_id = await self._archive_id()
        if not archive_id or not self._archive.is_configured:
            return None
        known = self._archived.get((tenant, types))
        found = await self._archive.read(ArchivedItemCounts.query(known, archive_id, tenant, types), ARCHIVE_TIMEOUT_S)
        self._archived[tenant, types] = found
        return found

    def _newest(self, number: int, archived: ArchivedItemCounts | None) -> Command:
        after = 0 if archived is None else archived.manifest.seq(number)
        at_most = MAX_NEWEST_ENTRIES // self._keys.partitions
        return Command.of("XREVRANGE", self._keys.log(number), "+", after + 1, "COUNT", at_most)

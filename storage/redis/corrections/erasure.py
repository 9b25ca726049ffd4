"""Erasure in Redis: one step hides a user, and many short ones remove the content of the user's entries.

The first step removes the user's head, index and states, and logs the erasure. The user's entries are then still in the
log of the partition. The log is copied without them, page by page, with other commands in between. A process that dies
before the end leaves a mark in the partition, and the copy. The next erasure in that partition continues it, even one
of the same user or of nobody, and so does the archiver before it has Redis rewrite its append-only file.
"""

import secrets
from collections.abc import Sequence

from storage.errors import StorageError
from storage.redis.corrections.undo_and_merge import RedisCorrections
from storage.redis.layout.head import Head, MergeStage
from storage.redis.layout.keys import User, erasing_key
from storage.redis.log.lost_users import USER_IS_LOST
from storage.redis.scripts.corrections import ERASE, REWRITE_LOG, erase_arguments, rewrite_arguments
from storage.redis.session.redis_session import RedisSession


class RedisErasure:
    """Erases users, with all users that were merged into them, and what else there is of a tenant."""

    def __init__(self, session: RedisSession, corrections: RedisCorrections) -> None:
        self._session = session
        self._corrections = corrections

    async def length(self, user: User, limit: int) -> int:
        """Return how many entries an erasure of the user copies: the partition logs of the user and of each alias."""
        await self._session.require_open()
        target = await self._corrections.resolve(user)
        has_properties = await self._session.call("HEXISTS", target.properties, target.name)
        if not has_properties and not await self._session.call("EXISTS", target.head, target.aliases):
            return 0
        entries = int(await self._session.call("XLEN", target.log))
        return min(limit, entries * (1 + int(await self._session.call("SCARD", target.aliases))))

    async def erase(self, user: User) -> None:
        """Erase the user, the user they were merged into, and all other users that were merged into that one.

        The heads that lead from the user to the others are removed last. So erasing the same user again, after a
        process died, finds the rest. Events posted for the user meanwhile may be logged for the others, who are then
        erased again.
        """
        await self._session.require_open()
        chain = await self._corrections.merge_chain(user)
        await self._corrections.require_whole(*chain)
        for link in reversed(chain):
            await self._erase_with_aliases(link, chain)
        for link in reversed(chain[1:]):
            await self._hide(link)
            await self._rewrite_log(link)
            await self._corrections.wait_for_replicas(link)

    async def erase_tenant(self, tenant: str) -> None:
        """Remove the tenant's items, scenarios, counts and generations; the audit log stays.

        The generations go last, with the name of each after the keys that only it leads to.
        """
        await self._session.require_open()
        keys, items = self._session.keys, self._session.keys.items(tenant)
        names = [name.decode() for name in await self._session.call("HKEYS", items.scenarios)]
        of_items = [items.version, items.changes, *items.parts, items.vectors, items.vector_bytes, items.property_types]
        counts = [items.trends, items.trend_clock, items.visitors, items.order_counts, items.order_clock, items.tallies]
        of_lists = [items.scenarios, items.scenarios_revision, *map(items.scenario, names)]
        await self._session.call("UNLINK", *of_items, items.code_changes, items.codes, *counts, *of_lists)
        tags = await self._session.call("HKEYS", keys.generations(tenant))
        live = [keys.live(tenant, bytes.fromhex(tag.decode())) for tag in tags]
        for key in (keys.experiment(tenant), keys.active(tenant), *live, keys.generations(tenant)):
            await self._session.call("UNLINK", key)

    async def _erase_with_aliases(self, user: User, chain: Sequence[User]) -> None:
        """Erase the user, after all users that were or are being merged into them, except those in the chain."""
        while True:
            for alias in await self._aliases(user):
                if alias not in chain and await self._is_merged_into(alias, user):
                    await self._erase_with_aliases(alias, chain)
                elif alias not in chain:
                    await self._rewrite_log(alias)  # an interrupted erasure may have left content behind
            await self._hide(user)
            erased = await self._aliases(user)
            if not any([alias not in chain and await self._is_merged_into(alias, user) for alias in erased]):
                break
        if erased:
            await self._session.call("SREM", user.aliases, *(alias.user_id for alias in erased))
        await self._rewrite_log(user)  # last, because it takes longest: a kill leaves nothing that only its user finds
        await self._corrections.wait_for_replicas(user)

    async def _hide(self, user: User) -> None:
        tags = await self._session.registered_tags()
        is_lost = await self._corrections.is_lost(user)
        await self._session.write(ERASE, *erase_arguments(user, secrets.token_hex(8), tags, is_lost=is_lost))
        late = await self._session.registered_tags() - tags  # a generation may have written its first states meanwhile
        if late:
            await self._session.call("DEL", *map(user.state_of_tag, late))

    async def _rewrite_log(self, user: User) -> None:
        """Return when the log of the user's partition contains no content that was erased before this call."""
        key = erasing_key(user.partition)
        awaited = erasures = await self._session.call("ZRANGE", key, 0, -1)
        while set(awaited).intersection(erasures):
            await self._session.write(REWRITE_LOG, *rewrite_arguments(user.partition, erasures))
            erasures = await self._session.call("ZRANGE", key, 0, -1)

    async def _aliases(self, user: User) -> list[User]:
        """Return the users that were merged into this one, or are about to be."""
        user_ids = sorted(await self._session.call("SMEMBERS", user.aliases))
        return [self._session.keys.user(user.tenant, user_id.decode()) for user_id in user_ids]

    async def _is_merged_into(self, alias: User, user: User) -> bool:
        """Return whether the alias was merged into the user; raise StorageError if Redis has lost the answer."""
        value = await self._session.call("GET", alias.head)
        await self._corrections.require_whole(alias)
        if value is None:
            await self._corrections.merge_chain(alias)  # raises StorageError if there is an index without a head
            if await self._corrections.is_lost(alias):
                raise StorageError(USER_IS_LOST, "damaged")
        head = Head.of(value)
        return head.merge in (MergeStage.DECIDED, MergeStage.DONE) and head.merge_target == user.user_id

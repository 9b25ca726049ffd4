"""Erasure in Redis: one step hides a user, and many short ones remove the content of the user's entries.

The first step removes the user's head, index and states, and logs the erasure. The user's entries are then still in the
log of the partition. The log is copied without them, page by page, with other commands in between. A process that dies
before the end leaves a mark in the partition, and the copy. The next erasure in that partition continues it, even one
of the same user or of nobody, and so does the archiver before it has Redis rewrite its append-only file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from storage.errors import StorageError, StorageUnavailable
from storage.redis.corrections.undo_and_merge import CONTENTION, RedisCorrections
from storage.redis.layout.head import Head, MergeStage
from storage.redis.layout.keys import User, erasing_key, user_of
from storage.redis.log.lost_users import USER_IS_LOST
from storage.redis.scripts.corrections import ERASE, REWRITE_LOG, erase_arguments, rewrite_arguments
from storage.redis.session.redis_session import RedisSession

ATTEMPTS = 20  # to erase a user who is merged into others meanwhile
RETRY_FOR_S = 30.0  # while others are merged into a user


@dataclass(slots=True)
class _Unhidden:
    """A user to be hidden.

    target        the id of the user that this one may have been merged into, or nothing
    pending       aliases to be erased, if they are merged into the user, and removed from the set
    give_up_at_s  if there are still new aliases then
    """

    user: User
    target: str
    pending: list[User]
    give_up_at_s: float


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
        hidden again. If one of them is merged into somebody else meanwhile, everything is done again.
        """
        await self._session.require_open()
        for _ in range(ATTEMPTS):
            if await self._erase_chain(await self._corrections.merge_chain(user)):
                return
        raise StorageUnavailable(CONTENTION, "contention")

    async def _erase_chain(self, chain: Sequence[User]) -> bool:
        """Erase the users of a merge chain; return False if one was merged into somebody else, before the first is."""
        await self._corrections.require_whole(*chain)
        first, *others = zip(chain, [*(link.user_id for link in chain[1:]), ""], strict=True)
        for link, target in reversed(others):
            if not await self._erase_with_aliases(link, target, chain):
                return False
        if not await self._hide_with_aliases(*first, chain):
            return False
        for link, target in reversed(others):
            if not await self._hide_with_aliases(link, target, chain):
                await self.erase(link)
        for link in chain:
            await self._remove_content(link)
        return True

    async def erase_tenant(self, tenant: str) -> None:
        """Remove the tenant's items, scenarios, counts and generations; the audit log stays.

        First, complete what killed merges and erasures have left of users whom no log shows. The generations go last,
        with the name of each after the keys that only it leads to.
        """
        await self._session.require_open()
        async for found in self._session.servers.scan(self._session.keys.pattern_of_users(tenant)):
            for user in {user for user in map(user_of, found) if user.tenant == tenant}:
                await self.erase(user)
        for number in range(self._session.keys.partitions):
            await self._rewrite_log(self._session.keys.partition(number))
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

    async def _erase_with_aliases(self, user: User, target: str, chain: Sequence[User]) -> bool:
        """Hide the user, as in `_hide_with_aliases`, and remove the content of the user's entries."""
        if not await self._hide_with_aliases(user, target, chain):
            return False
        await self._remove_content(user)
        return True

    async def _hide_with_aliases(self, user: User, target: str, chain: Sequence[User]) -> bool:
        """Erase the user's aliases, and theirs, except those in the chain, and then hide the user.

        Only the set of the aliases leads to them, so each stays in it until it is erased.

        target   the user that this one may have been merged into, or nothing
        returns  False if this one was merged into somebody else
        raises   StorageUnavailable  when others are merged into the user again and again
        """
        path = [await self._unhidden(user, target, chain, math.inf)]  # each of them is an alias of the one before
        while path:
            last = path[-1]
            if time.monotonic() > last.give_up_at_s:
                raise StorageUnavailable(CONTENTION, "contention")
            if last.pending:
                alias = last.pending[-1]
                if await self._is_merged_into(alias, last.user):
                    path.append(await self._unhidden(alias, last.user.user_id, chain, last.give_up_at_s))
                    continue
                await self._remove_content(alias)  # an interrupted erasure may have left some behind, too
                if await self._is_removed(alias, last.user):
                    last.pending.pop()
            elif Head.of(await self._session.call("GET", last.user.head)).merge_target not in ("", last.target):
                path.pop()
                if not path:
                    return False
            elif await self._hide(last, chain):
                path.pop()
            else:
                last.give_up_at_s = min(last.give_up_at_s, time.monotonic() + RETRY_FOR_S)
        return True

    async def _unhidden(self, user: User, target: str, chain: Sequence[User], give_up_at_s: float) -> _Unhidden:
        pending = (await self._aliases(user)).difference(chain)
        return _Unhidden(user, target, list(pending), give_up_at_s)

    async def _is_removed(self, alias: User, user: User) -> bool:
        """Remove an erased alias from the set; return False if it came back and was merged into the user again."""
        if await self._is_merged_into(alias, user):
            return False
        await self._session.call("SREM", user.aliases, alias.user_id)
        if not await self._is_merged_into(alias, user):
            return True
        await self._session.call("SADD", user.aliases, alias.user_id)  # it was noted before the other command
        return False

    async def _hide(self, unhidden: _Unhidden, chain: Sequence[User]) -> bool:
        """Hide the user; return False if there are aliases to erase before the user is hidden, or hidden again."""
        user = unhidden.user
        is_lost = await self._corrections.is_lost(user)
        tags = await self._session.registered_tags()
        arguments = erase_arguments(user, unhidden.target, chain, tags=tags, is_lost=is_lost)
        is_hidden = bool(await self._session.write(ERASE, *arguments))
        late = await self._session.registered_tags() - tags  # a generation may have written its first states meanwhile
        if is_hidden and late:
            await self._session.call("DEL", *map(user.state_of_tag, late))
        unhidden.pending += (await self._aliases(user)).difference(chain)
        return is_hidden and not unhidden.pending

    async def _remove_content(self, user: User) -> None:
        await self._rewrite_log(user.partition)  # takes longest
        await self._corrections.wait_for_replicas(user)

    async def _rewrite_log(self, partition: str) -> None:
        """Return when the log of the partition contains no content that was erased before this call."""
        key = erasing_key(partition)
        awaited = erasures = await self._session.call("ZRANGE", key, 0, -1)
        while set(awaited).intersection(erasures):
            await self._session.write(REWRITE_LOG, *rewrite_arguments(partition, erasures))
            erasures = await self._session.call("ZRANGE", key, 0, -1)

    async def _aliases(self, user: User) -> set[User]:
        """Return the users that were merged into this one, or are about to be."""
        user_ids = await self._session.call("SMEMBERS", user.aliases)
        return {self._session.keys.user(user.tenant, user_id.decode()) for user_id in user_ids}

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

"""Users with events in the archive that Redis does not know, because it has lost their keys."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import suppress

from storage.archive.async_reader import AsyncArchiveReader
from storage.archive.reader import ArchiveSnapshot
from storage.errors import StorageError
from storage.redis.layout.keys import User
from storage.redis.layout.stream_entries import parse_stream_page
from storage.redis.log.user_log import STREAM_PAGE
from storage.redis.session.redis_session import RedisSession
from storage.state.event import digest

TIMEOUT_S = 1.0
PROBE_EVERY_S = 5.0
USER_IS_LOST = "a user has archived events but no head; rebuild it from the archive with 'lisarec repair'"

logger = logging.getLogger(__name__)


class LostUsers:
    """Distinguishes new users from those whose head and index were lost after all their events were archived.

    The first call waits for an archive that does not respond. From then on all users count as new until it responds,
    because a shop has new visitors even without its archive.
    """

    def __init__(self, session: RedisSession, archive: AsyncArchiveReader) -> None:
        self._session = session
        self._archive = archive
        self._probing: asyncio.Task[None] | None = None

    @property
    def is_archive_available(self) -> bool:
        """Whether an archive is configured and responded to the last call."""
        return self._archive.is_configured and self._probing is None

    async def close(self) -> None:
        """Stop the work in the background."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait([self._probing])

    async def require_none(self, users: Iterable[User]) -> None:
        """Raise StorageError if one of these users, who have no head, is lost."""
        if await self.among(list(users)):
            raise StorageError(USER_IS_LOST, "damaged")

    async def among(self, users: Collection[User]) -> set[User]:
        """Return the lost ones among these users, who have no head.

        The archive has the events of an erased user until the archiver's next run; the log names the user.
        """
        lost: set[User] = set()
        held = await self._held(users)
        while held:
            kept = [user for user, through in held.items() if not await self._is_erased(user, through)]
            now = await self._held(kept)  # the archiver may have continued, and trimmed the erasure
            lost.update(user for user in kept if now.get(user) == held[user])
            held = {user: through for user, through in now.items() if user not in lost}
        return lost

    async def _held(self, users: Collection[User]) -> dict[User, int]:
        """Return the users in the archive, with the last archived SEQ of their partitions' logs."""
        if not users or not self.is_archive_available or not (archive_id := await self._session.archive_id()):
            return {}
        by_tenant: defaultdict[str, list[User]] = defaultdict(list)
        for user in users:
            by_tenant[user.tenant].append(user)

        def held(snapshot: ArchiveSnapshot) -> dict[User, int]:
            snapshot.require(archive_id, 0, 0)
            return {
                user: snapshot.manifest.seq(user.partition_number)
                for tenant, own in by_tenant.items()
                for user, is_held in zip(own, snapshot.holds_users(tenant, [one.user_id for one in own]), strict=True)
                if is_held
            }

        try:
            return await self._archive.read(held, TIMEOUT_S)
        except StorageError as exc:
            logger.warning("cannot read from the archive whether users are new: %s", exc)
            if self._probing is None:
                self._probing = asyncio.create_task(self._probe())
            return {}

    async def _probe(self) -> None:
        """Return when the archive responds again."""
        is_away = True
        while is_away:
            await asyncio.sleep(PROBE_EVERY_S)
            with suppress(StorageError):
                await self._archive.read(lambda snapshot: snapshot.manifest, TIMEOUT_S)
                is_away = False
        self._probing = None

    async def _is_erased(self, user: User, through: int) -> bool:
        """Return whether the log has an erasure of the user after that entry."""
        after, erased = str(through + 1), (user.tenant, digest(user.user_id))
        while page := await self._session.call("XRANGE", user.log, after, "+", "COUNT", STREAM_PAGE):
            if erased in parse_stream_page(page, is_complete=False).erased:
                return True
            after = f"({page[-1][0].decode()}"
        return False

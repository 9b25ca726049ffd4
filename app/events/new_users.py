"""Who sends events, and which of their users are new: each takes memory of the store for as long as it is kept."""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

from app.errors import TooManyNewUsersAtOnce
from app.schemas.events import MAX_PUBLIC_NEW_USERS
from storage.protocol import EventStore

MAX_REMEMBERED = 50_000  # users, in each of two sets; some 10 MB


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sends a request of events.

    is_public        it has a page's key, which everybody can read
    count_new_users  counts users that the request brings, and raises when they are too many; None: nobody counts
    run_apart        runs what takes milliseconds where nobody else waits for it, by what it costs; None: it runs here
    """

    is_public: bool = False
    count_new_users: Callable[[int], Awaitable[None]] | None = None
    run_apart: Callable[[Callable[[], Any], float], Awaitable[Any]] | None = None


ANYBODY = Sender()  # where there are no keys


class NewUsers:
    """Finds the users of one tenant that have no events yet. It remembers those that were seen lately.

    A user who is erased may be remembered: then the quota has one user more.
    """

    def __init__(self, store: EventStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._recent: set[str] = set()
        self._older: set[str] = set()

    async def admit(self, user_ids: Collection[str], sender: Sender) -> None:
        """Count those of the users who are new for the sender.

        raises  TooManyNewUsersAtOnce, TooManyNewUsers  when they are too many
                StorageError                            when nobody can tell who is new
        """
        assert sender.count_new_users is not None  # else nobody asks
        unknown = {user_id for user_id in user_ids if user_id not in self._recent and user_id not in self._older}
        if not unknown:
            return
        new = await self._store.users_without_log(self._tenant, unknown)
        if sender.is_public and len(new) > MAX_PUBLIC_NEW_USERS:
            raise TooManyNewUsersAtOnce(
                f"a request with a page key may have at most {MAX_PUBLIC_NEW_USERS} new users; "
                "nothing was applied, split it"
            )
        if new:
            await sender.count_new_users(len(new))
        self._remember(unknown - new)

    def _remember(self, user_ids: Collection[str]) -> None:
        if len(self._recent) + len(user_ids) > MAX_REMEMBERED:
            self._recent, self._older = set(), self._recent
        self._recent.update(user_ids)

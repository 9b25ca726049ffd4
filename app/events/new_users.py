"""Senders of events, and the limits on their new users, each of whom takes memory of the store."""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

from app.errors import TooManyNewUsersAtOnce
from app.schemas.events import MAX_PUBLIC_NEW_USERS
from storage.protocol import EventStore

MAX_REMEMBERED = 50_000  # users, in each of two sets; about 10 MB


@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of a request with events.

    is_public        whether it uses a page key, which everybody can read
    event_types      the types of events that it may post; empty for all
    count_new_users  counts the new users of the request, and raises if there are too many; None for no limit
    run_apart        runs long work by its cost without delaying other requests; None to run it here
    """

    is_public: bool = False
    event_types: Collection[str] = ()
    count_new_users: Callable[[int], Awaitable[None]] | None = None
    run_apart: Callable[[Callable[[], Any], float], Awaitable[Any]] | None = None


ANYBODY = Sender()  # used if there are no keys


class NewUsers:
    """Finds the users of one tenant that have no events yet, and remembers recently seen users.

    An erased user may still be remembered; the quota then admits one more user.
    """

    def __init__(self, store: EventStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._recent: set[str] = set()
        self._older: set[str] = set()

    async def admit(self, user_ids: Collection[str], sender: Sender) -> None:
        """Count the users that are new, on behalf of the sender.

        raises  TooManyNewUsersAtOnce, TooManyNewUsers  when there are too many
                StorageError                            when the store cannot determine which users are new
        """
        assert sender.count_new_users is not None  # otherwise this is not called
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
        self._remember(unknown)  # new ones too: who sends again what the store refused pays once

    def _remember(self, user_ids: Collection[str]) -> None:
        if len(self._recent) + len(user_ids) > MAX_REMEMBERED:
            self._recent, self._older = set(), self._recent
        self._recent.update(user_ids)

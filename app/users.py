"""What the service remembers of one user, for people to read."""

from app.catalogue import Catalogue
from app.errors import UserNotFound
from app.schemas import UserState
from storage.state import Generation, recent_items
from storage.store import UserStore


class Users:
    """Reads the states of one tenant's users."""

    def __init__(self, name: str, generation: Generation, catalogue: Catalogue, store: UserStore, tenant: str) -> None:
        self._name = name
        self._generation = generation
        self._catalogue = catalogue
        self._store = store
        self._tenant = tenant

    async def state(self, user_id: str) -> UserState:
        """The user's state as of the newest acknowledged event.

        raises  UserNotFound  when the user has no event
                StorageError  when the store cannot be read
        """
        (value,) = await self._store.states(self._tenant, [user_id], self._generation)
        if value is None:
            raise UserNotFound("no event of this user is known")
        states = self._generation.decode_many([value])
        state = states[0]
        item_ids = self._catalogue.item_ids
        return UserState(
            user_id=user_id,
            generation=self._name,
            event_count=int(state["event_count"]),
            last_item_id=item_ids[state["last_item"]] if state["last_item"] >= 0 else None,
            recent_items=[item_ids[row] for row in recent_items(state)],
            histogram=self._generation.histograms(states)[0].tolist(),
        )

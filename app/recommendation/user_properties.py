"""Reads the properties of users whose requests have expressions about them."""

from collections.abc import Mapping

from app.catalogue.expressions.columns import ItemValue
from app.catalogue.item_properties import stored
from app.catalogue.overrides.item_overrides import ItemOverrides
from storage.protocol import PropertyStore
from storage.records import PropertyType, property_type


class UserPropertyReader:
    """Reads properties of one tenant's users."""

    def __init__(self, store: PropertyStore, tenant: str, overrides: ItemOverrides) -> None:
        self._store = store
        self._tenant = tenant
        self._overrides = overrides

    @property
    def types(self) -> Mapping[str, PropertyType]:
        """The types of users' properties by name."""
        return self._overrides.held.types["user"]

    async def read(self, user_id: str) -> dict[str, ItemValue]:
        """Return the user's properties.

        raises  StorageError  when they cannot be read now, because a rule about users can then not be evaluated
        """
        values = await self._store.of_user(self._tenant, user_id)
        types = self.types  # the types that this process has read; another process may just have changed one
        return {name: stored(value) for name, value in values.items() if types.get(name) == property_type(value)}

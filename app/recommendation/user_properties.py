"""Reads the properties of users whose requests have expressions about them."""

from __future__ import annotations

from collections.abc import Mapping

from app.catalogue.expressions.columns import ItemValue
from app.catalogue.item_overrides import ItemOverrides
from app.catalogue.item_properties import stored
from app.observability.metrics import StoreMetrics
from storage.errors import StorageError
from storage.protocol import PropertyStore
from storage.records import PropertyType


class UserPropertyReader:
    """Reads properties of one tenant's users."""

    def __init__(self, store: PropertyStore, tenant: str, overrides: ItemOverrides, metrics: StoreMetrics) -> None:
        self._store = store
        self._tenant = tenant
        self._overrides = overrides
        self._metrics = metrics

    @property
    def types(self) -> Mapping[str, PropertyType]:
        """The types of users' properties by name."""
        return self._overrides.types["user"]

    async def read(self, user_id: str) -> dict[str, ItemValue]:
        """Return the user's properties; none where they cannot be read now, which is reported."""
        try:
            values = await self._store.of_user(self._tenant, user_id)
        except StorageError as exc:
            self._metrics.failures.report(exc)
            return {}
        return {name: stored(value) for name, value in values.items()}

"""The items that a tenant's served models or shop have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.overrides.item_overrides import ItemOverrides


class Served(Protocol):
    """A served generation, with its catalogue."""

    @property
    def catalogue(self) -> LiveCatalogue:
        """The items that it recommends."""
        ...


class Vocabulary:
    """Determines which items of events are currently known.

    overrides      the items that the shop has set
    served         returns the served generations
    refresh_items  reads all changes of items up to now; raises StorageError
    """

    def __init__(
        self,
        overrides: ItemOverrides,
        served: Callable[[], Sequence[Served]],
        refresh_items: Callable[[], Awaitable[None]],
    ) -> None:
        self._overrides = overrides
        self._served = served
        self._refresh_items = refresh_items

    async def unknown_items(self, item_ids: Collection[str]) -> set[str]:
        """Return the items that no served catalogue has and the shop has not set.

        raises  StorageError  when the shop's items cannot be read
        """
        unknown = self._unknown(item_ids)
        if unknown:  # another process may have just accepted the item from the shop
            await self._refresh_items()
            unknown = self._unknown(unknown)
        return unknown

    def _unknown(self, item_ids: Collection[str]) -> set[str]:
        catalogues = [served.catalogue.row_of for served in self._served()]
        return {
            item_id
            for item_id in item_ids
            if item_id not in self._overrides and not any(item_id in rows for rows in catalogues)
        }

"""The items that a tenant's served models or shop have."""

from collections.abc import Awaitable, Callable, Collection, Sequence

from app.catalogue.live_catalogue import LiveCatalogue
from app.catalogue.overrides.item_overrides import ItemOverrides


class Vocabulary:
    """Determines which items of events are currently known.

    overrides      the items that the shop has set
    catalogues     returns the catalogues of the served generations
    refresh_items  reads all changes of items up to now; raises StorageError
    """

    def __init__(
        self,
        overrides: ItemOverrides,
        catalogues: Callable[[], Sequence[LiveCatalogue]],
        refresh_items: Callable[[], Awaitable[None]],
    ) -> None:
        self._overrides = overrides
        self._catalogues = catalogues
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
        rows_of_items = [catalogue.row_of for catalogue in self._catalogues()]
        return {
            item_id
            for item_id in item_ids
            if item_id not in self._overrides and not any(item_id in rows for rows in rows_of_items)
        }

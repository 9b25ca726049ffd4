"""Item updates through the API: if one item of a request is invalid, none is updated."""

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from app.errors import MAX_DETAILS, ErrorDetail, InvalidItems, InvalidRequest, ItemNotFound, details_of, validate
from app.schemas.items import MAX_ITEMS, Item, ItemsTaken, ItemWords, PostedItem
from app.schemas.properties import TypesSoFar
from app.serving.property_types import refusal_detail
from app.serving.switcher import GenerationSwitcher
from storage.errors import PropertyRefused, VectorRefused
from storage.items.vectors import NO_VECTOR, encode
from storage.protocol import UserStore
from storage.records import ITEM_TIMES, ItemEntry, PropertyType

NO_ITEM = "the body does not describe an item"
REFUSED = "nothing was applied; correct the items in `details` and send all items again"


class ItemUpdates:
    """Updates the items of one tenant. Each update is applied in this process before it is acknowledged."""

    def __init__(self, store: UserStore, switcher: GenerationSwitcher, tenant: str) -> None:
        self._store = store
        self._switcher = switcher
        self._tenant = tenant

    async def put(self, item_id: str, body: object) -> Item:
        """Apply the parsed body of ``PUT /v1/items/{item_id}``. Return the updated item.

        raises  InvalidRequest  when the body is not valid
                StorageError    when the store did not accept it; resending is safe
        """
        words = validate(ItemWords, body, NO_ITEM, {"types": await self.types_for([body])})
        entry = _entry(item_id, words)
        try:
            await self._put([entry])
        except (PropertyRefused, VectorRefused) as exc:
            raise InvalidRequest(NO_ITEM, [_detail(exc, [entry])]) from None
        return self.item(item_id)

    async def post(self, entries: Sequence[ItemEntry]) -> ItemsTaken:
        """Apply the items of a body; raise InvalidItems, and StorageError as `put` does."""
        try:
            await self._put(entries)
        except (PropertyRefused, VectorRefused) as exc:
            raise InvalidItems(REFUSED, [_detail(exc, entries)]) from None
        learned = self._switcher.current.artifact.items.rows.rows_of([entry.item_id for entry in entries])
        return ItemsTaken(accepted=len(entries), unknown_items=len(entries) - len(learned))

    async def types_for(self, bodies: Sequence[object]) -> dict[str, PropertyType]:
        """Return the types required of the properties in parsed bodies; raise StorageError."""
        if not any(isinstance(body, dict) and body.get("properties") for body in bodies):
            return {}
        return dict((await self._store.properties.held(self._tenant)).types["item"])

    def item(self, item_id: str) -> Item:
        """Return the current state of the item.

        raises  ItemNotFound  when neither the model nor the shop has it
        """
        item = self._switcher.current.catalogue.item(item_id)
        if item is None:
            raise ItemNotFound("this item is unknown; PUT it, or train a model with it")
        return item

    async def _put(self, entries: Sequence[ItemEntry]) -> None:
        await self._store.put_items(self._tenant, entries)
        await self._switcher.refresh_items()


def parse_items(bodies: Sequence[object], types: Mapping[str, PropertyType]) -> list[ItemEntry]:
    """Return the entries of the parsed body of ``POST /v1/items``.

    types  types of properties; the type of any other property is that of its first value

    raises  InvalidItems  when there are none or too many, or some are invalid; it names the first 20 of these, and why
    """
    if not 1 <= len(bodies) <= MAX_ITEMS:
        raise InvalidItems(f"a request must have 1 to {MAX_ITEMS:,} items; nothing was applied")
    types_so_far: TypesSoFar = dict(types)
    entries: list[ItemEntry] = []
    faults: list[list[ErrorDetail]] = []
    for index, body in enumerate(bodies):
        try:
            item = PostedItem.model_validate(body, context={"types": types_so_far})
            entries.append(_entry(item.item_id, item))
        except ValidationError as exc:
            faults.append(details_of(exc, index))
        if len(faults) == MAX_DETAILS:
            break
    if faults:
        raise InvalidItems(REFUSED, [details[0] for details in faults])
    return entries


def _entry(item_id: str, words: ItemWords) -> ItemEntry:
    categories = None if words.categories is None else tuple(dict.fromkeys(words.categories))
    times = {name: getattr(words, name) for name in ITEM_TIMES if name in words.model_fields_set}
    vector = None if words.vector is None else encode(words.vector)
    if words.vector is None and "vector" in words.model_fields_set:
        vector = NO_VECTOR
    return ItemEntry(item_id, words.title, categories, words.available, {**words.properties, **times}, vector)


def _detail(refused: PropertyRefused | VectorRefused, entries: Sequence[ItemEntry]) -> ErrorDetail:
    if isinstance(refused, PropertyRefused):
        return refusal_detail(refused, [entry.properties for entry in entries])
    reason = f"{refused}; to change the length, delete all vectors with 'lisarec items drop-vectors' and put new ones"
    return ErrorDetail(field="vector", reason=reason)

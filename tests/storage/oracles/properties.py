"""Properties of known types, with random values."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from hypothesis import strategies as st

from storage.protocol import UserStore
from storage.records import PropertyType, PropertyTypes, PropertyValue

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
TIMES = st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))
PROPERTIES: Mapping[str, tuple[PropertyType, st.SearchStrategy[PropertyValue]]] = {
    "brand": ("text", TEXTS),
    "price": ("number", st.floats(allow_nan=False, allow_infinity=False)),
    "organic": ("boolean", st.booleans()),
    "expires": ("time", TIMES),
    "_tags": ("set", st.lists(TEXTS, max_size=3, unique=True).map(sorted).map(tuple)),
}
VALUES = {name: st.none() | values for name, (_, values) in PROPERTIES.items()}
PATCHES = st.fixed_dictionaries({}, optional={**VALUES, "available_from": st.none() | TIMES})


async def types(store: UserStore, tenant: str = "main") -> PropertyTypes:
    """Return the types of the tenant's properties."""
    return (await store.properties.held(tenant)).types

"""Types of properties: the first writer decides, for all processes and permanently."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.errors import PartlyRead, PropertyRefused, StorageError
from storage.maintenance.backup import backup, restore
from storage.protocol import UserStore
from storage.records import (
    MAX_PAGE_BYTES,
    MAX_PROPERTIES,
    ItemCodes,
    ItemEntry,
    PropertyOwner,
    PropertyType,
    PropertyTypes,
    PropertyValue,
)
from tests.storage.contract.stores import new_address, opened, stored_properties
from tests.storage.oracles.properties import types
from tests.storage.oracles.random_events import fresh_user, make_generation

GENERATION = make_generation()
VALUES: dict[PropertyType, PropertyValue] = {
    "text": "red",
    "number": 1.5,
    "boolean": False,
    "time": datetime(2026, 1, 2, tzinfo=UTC),
    "set": ("a", "b"),
}


def item(name: str, value: PropertyValue | None, item_id: str = "tea") -> ItemEntry:
    return ItemEntry(item_id, properties={name: value})


async def properties(store: UserStore, tenant: str = "main") -> dict[str, object]:
    return {entry.item_id: entry.properties for entry in (await store.item_changes(tenant, 0, 1000)).entries}


async def refusal(call: Awaitable[object]) -> PropertyRefused | None:
    try:
        await call
    except PropertyRefused as refused:
        return refused
    return None


async def test_the_first_value_decides_the_type(address: str) -> None:
    async with opened(address, GENERATION) as store, opened(address, GENERATION) as other:
        for held, value in VALUES.items():
            name = f"p_{held}"
            await store.put_items("main", [item(name, value)])
            for given, wrong in VALUES.items():
                refused = await refusal(other.put_items("main", [ItemEntry("cup", "Cup"), item(name, wrong)]))
                assert refused is None if given == held else refused is not None
                if refused is not None:
                    assert (refused.name, refused.given, refused.held) == (name, given, held)
        assert (await properties(other))["tea"] == {f"p_{held}": value for held, value in VALUES.items()}
        expected = {"item": {f"p_{held}": held for held in VALUES}, "user": {}}
        assert await types(store) == (await other.pointers()).held.types == expected


async def test_refused_values_change_nothing(address: str) -> None:
    async with opened(address, GENERATION) as store:
        await store.put_items("main", [item("price", 1.0)])
        batch = [item("brand", "Ada", "cup"), item("price", "much", "cup")]
        assert await refusal(store.put_items("main", batch)) is not None
        assert await refusal(store.put_items("main", [item("size", 1.0), item("size", "L", "cup")])) is not None
        assert await refusal(store.put_items("main", [item("available_from", "soon")])) is not None
        assert await properties(store) == {"tea": {"price": 1.0}}
        assert await types(store) == {"item": {"price": "number"}, "user": {}}
        assert (await store.pointers()).items_version == 1


def test_errors_can_be_copied_for_each_waiter() -> None:
    for failure in (
        PropertyRefused("price", "text", "number"),
        PartlyRead(StorageError("why", "closed"), {"ada": None}),
    ):
        copied = copy.copy(failure)
        assert (str(copied), vars(copied), type(copied)) == (str(failure), vars(failure), type(failure))


async def test_a_type_stays_when_the_last_value_is_taken_away(address: str) -> None:
    async with opened(address, GENERATION) as store:
        await store.put_items("main", [item("price", 1.0), item("brand", None)])
        await store.put_items("main", [item("price", None)])
        assert await properties(store) == {"tea": {}}
        assert await refusal(store.put_items("main", [item("price", "much")])) is not None
        await store.put_items("main", [item("brand", ("a",))])


async def test_concurrent_first_values_have_one_winner(address: str) -> None:
    async with opened(address, GENERATION) as one, opened(address, GENERATION) as other:
        for number in range(20):
            name = f"p{number}"
            outcomes = await asyncio.gather(
                refusal(one.put_items("main", [item(name, 1.0, f"one{number}")])),
                refusal(other.put_items("main", [item(name, "1", f"other{number}")])),
            )
            assert [outcome is None for outcome in outcomes].count(True) == 1
            held = (await types(other))["item"][name]
            assert held == ("number" if outcomes[0] is None else "text")
            assert f"{'other' if outcomes[0] is None else 'one'}{number}" not in await properties(one)


async def test_declarations_are_atomic_and_separate_by_owner(address: str) -> None:
    async with opened(address, GENERATION) as store, opened(address, GENERATION, tenant="shop") as shop:
        await store.properties.declare("main", {"item": {"price": "number", "size": "text"}})
        await store.properties.declare("main", {"item": {"price": "number"}})
        await store.properties.declare("main", {"item": {"size": "text"}, "user": {"price": "text"}})
        wrongs: list[PropertyTypes] = [
            {"item": {"new": "text", "size": "set"}},
            {"item": {"new": "text"}, "user": {"price": "set"}},
        ]
        for wrong in wrongs:
            assert await refusal(store.properties.declare("main", wrong)) is not None
        assert await refusal(store.put_items("main", [item("price", "much")])) is not None
        await shop.put_items("shop", [item("price", "much")])
        expected = {"item": {"price": "number", "size": "text"}, "user": {"price": "text"}}
        assert await types(shop) == expected
        assert (await shop.pointers()).held.types == {"item": {"price": "text"}, "user": {}}


@dataclass(frozen=True)
class Put:
    owner: PropertyOwner
    of: str
    name: str
    value: PropertyValue | None


@dataclass(frozen=True)
class TakeBack:
    owner: PropertyOwner
    name: str


OWNERS, NAMES = st.sampled_from(["item", "user"]), st.sampled_from(["price", "brand"])
PUTS = st.builds(Put, OWNERS, st.sampled_from(["tea", "cup"]), NAMES, st.none() | st.sampled_from([*VALUES.values()]))


@dataclass
class Oracle:
    """Dicts of the values of items and users, and of the held types."""

    values: dict[tuple[str, str], dict[str, PropertyValue]] = field(default_factory=dict)
    types: dict[str, dict[str, PropertyType]] = field(default_factory=lambda: {"item": {}, "user": {}})

    def take(self, step: Put | TakeBack) -> bool:
        held = self.types[step.owner]
        if isinstance(step, TakeBack):
            for (owner, _), own in self.values.items():
                if owner == step.owner:
                    own.pop(step.name, None)
            held.pop(step.name, None)
            return True
        if step.value is not None:
            given = next(name for name, value in VALUES.items() if value == step.value)
            if held.setdefault(step.name, given) != given:
                return False
        own = self.values.setdefault((step.owner, step.of), {})
        if step.value is None:
            own.pop(step.name, None)
        else:
            own[step.name] = step.value
        return True


async def is_taken(store: UserStore, tenant: str, step: Put | TakeBack) -> bool:
    if isinstance(step, TakeBack):
        return await refusal(store.properties.declare(tenant, {step.owner: {step.name: None}})) is None
    if step.owner == "item":
        return await refusal(store.put_items(tenant, [item(step.name, step.value, step.of)])) is None
    return await refusal(store.properties.put_of_user(tenant, step.of, {step.name: step.value})) is None


@given(st.lists(PUTS | PUTS | st.builds(TakeBack, OWNERS, NAMES), max_size=14))
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_removed_property_is_gone_and_its_name_is_free(address: str, steps: list[Put | TakeBack]) -> None:
    async def law() -> None:
        tenant, oracle = fresh_user(), Oracle()
        async with opened(address, GENERATION) as store, opened(address, GENERATION) as other:
            for number, step in enumerate(steps):
                taken = await is_taken(store if number % 2 else other, tenant, step)
                assert taken == oracle.take(step), step
            expected = {of: own for (owner, of), own in oracle.values.items() if owner == "item"}
            assert await properties(other, tenant) == expected
            of_users = {of: own for (owner, of), own in oracle.values.items() if owner == "user" and own}
            assert {user: own async for of, user, own in other.properties.of_users() if of == tenant} == of_users
            for user, own in of_users.items():
                assert await store.properties.of_user(tenant, user) == own
            assert await types(store, tenant) == oracle.types
            changes = await store.item_changes(tenant, 0, 1000)
            assert changes.held == await other.properties.held(tenant)

    asyncio.run(law())


async def test_removed_values_are_deleted_with_the_next_change(address: str) -> None:
    async with opened(address, GENERATION) as store:
        for number in range(3):
            for value in ("x" * 1_000, float(number)):
                put: dict[str, PropertyValue | None] = {"price": value}
                times: dict[str, PropertyValue | None] = {"available_from": VALUES["time"]}
                await store.put_items("main", [ItemEntry("tea", properties={**put, **times})])
                await store.properties.put_of_user("main", "ada", put)
                assert await properties(store) == {"tea": {**put, **times}}
                assert await store.properties.of_user("main", "ada") == put
                await store.properties.declare("main", {"item": {"price": None}, "user": {"price": None}})
                assert await properties(store) == {"tea": times}
                assert await store.properties.of_user("main", "ada") == {}
        await store.put_items("main", [item("brand", "Ada")])
        await store.properties.put_of_user("main", "ada", {"city": "Ulm"})
        stored = await stored_properties(address)
        assert len(stored) == 2
        assert not any("price" in text for text in stored)


async def test_the_number_of_properties_is_limited(address: str) -> None:
    async with opened(address, GENERATION) as store:
        names = [f"p{number}" for number in range(MAX_PROPERTIES)]
        await store.properties.declare("main", {"item": dict.fromkeys(names[:-1], "number")})
        two = ItemEntry("tea", properties={names[-1]: 1.0, "more": 1.0})
        refused = await refusal(store.put_items("main", [two]))
        assert refused is not None
        assert refused.held is None
        await store.put_items("main", [item(names[-1], 1.0)])
        assert await refusal(store.put_items("main", [item("more", 1.0)])) is not None
        assert await refusal(store.properties.declare("main", {"item": {"more": "text"}})) is not None
        change: dict[str, PropertyType | None] = {"more": "text", names[0]: None}
        await store.properties.declare("main", {"item": change})
        await store.properties.declare("main", {"item": {names[0]: "number", "more": None}})
        full = dict.fromkeys(names, 2.0)
        await store.put_items("main", [ItemEntry("tea", properties={**full, "published_at": VALUES["time"]})])
        await store.properties.declare("main", {"user": dict.fromkeys(names, "text")})
        assert (await properties(store))["tea"] == {**full, "published_at": VALUES["time"]}


async def test_pages_of_large_values_are_short_and_complete(address: str) -> None:
    async with opened(address, GENERATION) as store:
        text, count = "x" * 100_000, 3 * MAX_PAGE_BYTES // 100_000
        for number in range(count):
            await store.put_items("main", [item("text", text, f"i{number}")])
            await store.put_item_codes("main", [ItemCodes(f"i{number}", GENERATION.tag, 1, 0.0, b"\0", b"\1")])
        version, found, coded = 0, [], []
        while (page := await store.item_changes("main", version, 1000)).version > version:
            assert sum(len(str(entry.properties)) for entry in page.entries) < 2 * MAX_PAGE_BYTES
            found += [entry.item_id for entry in page.entries]
            coded += [codes.item_id for codes in page.codes]
            version = page.version
        assert found == coded == [f"i{number}" for number in range(count)]


@pytest.mark.parametrize("kind", ["sqlite", "redis-server"])
async def test_a_backup_contains_properties_and_types(address: str, tmp_path: Path, kind: str) -> None:
    values: dict[str, PropertyValue | None] = dict(VALUES.items())
    entry = ItemEntry("tea", "Tea", properties=values | {"available_until": VALUES["time"]})
    async with opened(address, GENERATION) as store:
        await store.put_items("main", [item("p_text", 1.0), item("gone", "x")])
        await store.properties.put_of_user("main", "ada", {"gone": "x"})
        gone: dict[str, PropertyType | None] = {"p_text": None, "gone": None}
        await store.properties.declare("main", {"item": gone, "user": gone})
        await store.put_items("main", [entry])
        await store.properties.declare("main", {"item": {"unused": "set"}})
        await store.properties.declare("declared", {"user": {"age": "number"}})
        await backup(store, tmp_path / "all.gz")
        held = await types(store)
    async with opened(new_address(kind, tmp_path / "restored"), GENERATION) as store:
        await restore(store, tmp_path / "all.gz")
        assert (await store.item_changes("main", 0, 9)).entries == [entry]
        assert [user async for user in store.properties.of_users()] == []
        assert await types(store) == held
        assert await types(store, "declared") == {"item": {}, "user": {"age": "number"}}

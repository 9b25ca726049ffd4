"""Vectors of items: every store and process returns the newest ones, and all have the same length."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import storage.maintenance.vectors
from storage.errors import PropertyRefused, VectorRefused
from storage.items.vectors import MAX_NUMBERS, NO_VECTOR, decode, encode, numbers_in
from storage.maintenance.backup import backup, restore
from storage.maintenance.vectors import drop_vectors
from storage.protocol import UserStore
from storage.records import ItemEntry
from tests.storage.contract.stores import new_address, opened
from tests.storage.oracles.random_events import fresh_user, make_generation

GENERATION = make_generation()
ITEMS = ("a", "b", "c:1")
ENTRIES = st.builds(
    lambda item_id, vector: ItemEntry(item_id, vector=vector),
    st.sampled_from(ITEMS),
    st.sampled_from([None, NO_VECTOR, encode([1, 2]), encode([-3, 1]), encode([1, 2, 3])]),
)
laws = settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])


async def refusal(call: Awaitable[object]) -> VectorRefused | None:
    try:
        await call
    except VectorRefused as refused:
        return refused
    return None


async def vectors(store: UserStore, tenant: str) -> dict[str, bytes]:
    return await store.vectors.of_items(tenant, [*ITEMS, "unknown"])


@laws
@given(st.lists(st.lists(ENTRIES, min_size=1, max_size=4), max_size=6))
def test_the_newest_vectors_win_and_lengths_are_equal(address: str, batches: list[list[ItemEntry]]) -> None:
    """A request with another length changes nothing, unless no vector is left."""

    async def law() -> None:
        tenant, expected = fresh_user(), dict[str, bytes]()
        async with opened(address, GENERATION, tenant=tenant) as store, opened(address, tenant=tenant) as other:
            for number, batch in enumerate(batches):
                writer, reader = (store, other) if number % 2 else (other, store)
                before = await reader.item_changes(tenant, 0, 100)
                given = [len(one.vector) for one in batch if one.vector]
                held = [len(vector) for vector in expected.values()]
                refused = await refusal(writer.put_items(tenant, batch))
                assert (refused is None) == (len({*given, *held}) <= 1 or not given)
                if refused is not None:
                    assert refused.held == (held or given)[0] // 2 != refused.given
                    assert (await reader.item_changes(tenant, 0, 100)) == before
                    continue
                for one in batch:
                    if one.vector is not None:
                        expected[one.item_id] = one.vector
                        if one.vector == NO_VECTOR:
                            del expected[one.item_id]
                assert await vectors(reader, tenant) == expected
                assert await reader.vectors.numbers(tenant) == next((len(one) // 2 for one in expected.values()), 0)
                changes = await reader.item_changes(tenant, before.version, 100)
                assert {entry.item_id for entry in changes.entries} == {one.item_id for one in batch}
                assert all(entry.vector is None for entry in changes.entries)
            assert await vectors(other, f"{tenant}-other") == {}
        async with opened(address, tenant=tenant) as again:
            assert await vectors(again, tenant) == expected

    asyncio.run(law())


async def test_items_with_a_refused_property_or_vector_change_nothing(address: str) -> None:
    tenant = fresh_user()
    async with opened(address, GENERATION, tenant=tenant) as store:
        await store.put_items(tenant, [ItemEntry("a", properties={"price": 1.0}, vector=encode([1, 2]))])
        with pytest.raises(PropertyRefused):
            await store.put_items(tenant, [ItemEntry("a", properties={"price": "1"}, vector=encode([2, 1]))])
        assert await vectors(store, tenant) == {"a": encode([1, 2])}
        with pytest.raises(VectorRefused, match="have 2 numbers each, but this one has 1"):
            await store.put_items(tenant, [ItemEntry("a", properties={"size": "L"}, vector=encode([1]))])
        assert set((await store.properties.held(tenant)).types["item"]) == {"price"}


async def test_a_backup_contains_vectors(address: str, tmp_path: Path) -> None:
    tenant = fresh_user()
    expected = {item_id: encode([number + 1, 2, 3]) for number, item_id in enumerate(ITEMS)}
    async with opened(address, GENERATION, tenant=tenant) as store:
        entries = [ItemEntry(item_id, f"title of {item_id}", vector=one) for item_id, one in expected.items()]
        await store.put_items(tenant, entries)
        await backup(store, tmp_path / "backup")
    for kind in ("sqlite", "redis-server"):
        async with opened(new_address(kind, tmp_path / kind), GENERATION, tenant=tenant) as restored:
            await restore(restored, tmp_path / "backup")
            assert await vectors(restored, tenant) == expected
            assert {one.title for one in (await restored.item_changes(tenant, 0, 100)).entries} == {
                f"title of {item_id}" for item_id in ITEMS
            }


async def test_dropping_all_vectors_of_a_tenant_allows_another_length(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.maintenance.vectors, "VECTORS_PAGE", 2)
    tenant, neighbour = fresh_user(), fresh_user()
    async with opened(address, GENERATION, tenant=tenant) as store:
        entries = [ItemEntry(item_id, "title", vector=encode([1, 2])) for item_id in ITEMS]
        for one in (tenant, neighbour):
            await store.put_items(one, [*entries, ItemEntry("without", "title")])
        before = await store.item_changes(tenant, 0, 100)
        assert [await drop_vectors(store, tenant) for _ in range(2)] == [len(ITEMS), 0]
        assert await vectors(store, tenant) == {}
        assert await store.vectors.numbers(tenant) == 0
        assert set(await vectors(store, neighbour)) == {*ITEMS}
        changes = await store.item_changes(tenant, before.version, 100)
        assert {(entry.item_id, entry.title) for entry in changes.entries} == {(one, "title") for one in ITEMS}
        await store.put_items(tenant, [ItemEntry("a", vector=encode([1, 2, 3]))])
        assert await store.vectors.numbers(tenant) == 3


async def test_many_vectors_are_read_in_pages(address: str) -> None:
    tenant, own = fresh_user(), {f"i{number}": encode([number + 1, 1]) for number in range(1_203)}
    async with opened(address, GENERATION, tenant=tenant) as store:
        entries = [ItemEntry(item_id, vector=vector) for item_id, vector in own.items()]
        for begin in range(0, len(entries), 500):
            await store.put_items(tenant, entries[begin : begin + 500])
        assert await store.vectors.of_items(tenant, [*own]) == own
        assert await store.vectors.of_items(tenant, []) == {}


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_a_vector_keeps_its_direction(numbers: list[float]) -> None:
    if not any(numbers):
        with pytest.raises(ValueError, match="at least one of them not 0"):
            encode(numbers)
        return
    vector = encode(numbers)
    assert numbers_in(vector) == len(numbers)
    (found,) = decode([vector])
    scaled = np.array(numbers) / np.abs(numbers).max()
    np.testing.assert_allclose(found, scaled / np.linalg.norm(scaled), atol=1e-3)


@pytest.mark.parametrize("numbers", [[], [1.0] * (MAX_NUMBERS + 1), [np.nan, 1.0], [np.inf], [0.0, 0.0]])
def test_invalid_vectors_are_not_encoded(numbers: Sequence[float]) -> None:
    with pytest.raises(ValueError, match="a vector"):
        encode(numbers)

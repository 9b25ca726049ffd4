"""What is said of items: whatever the store, the order and the process, everybody finds what was said last."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.backup import backup, restore
from storage.errors import StorageError
from storage.protocol import UserStore
from storage.records import ItemEntry, NamedGeneration, TenantPointers
from tests.storage.contract.stores import new_address, opened
from tests.storage.oracles.random_events import click, fresh_user, make_generation

GENERATION = make_generation()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ENTRIES = st.builds(
    ItemEntry,
    st.sampled_from(["a", "b", "c:1", "d.d"]),
    st.none() | TEXTS,
    st.none() | st.lists(TEXTS, max_size=3).map(tuple),
    st.none() | st.booleans(),
)
Said = dict[str, list[object]]

laws = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])


def said(batches: Sequence[Sequence[ItemEntry]]) -> Said:
    """Title, categories and availability by item, as a reader of the whole conversation would know them."""
    known: Said = {}
    for entry in (entry for batch in batches for entry in batch):
        item_id, *parts = astuple(entry)
        before = known.pop(item_id, [None, None, None])  # what was changed last stands last
        known[item_id] = [old if new is None else new for old, new in zip(before, parts, strict=True)]
    return known


async def changes(
    store: UserStore, tenant: str, after: int = 0, at_once: int = 2
) -> tuple[dict[str, list[object]], int]:
    found: dict[str, list[object]] = {}
    while page := (await store.item_changes(tenant, after, at_once)).entries:
        assert len(page) <= at_once
        found |= {entry.item_id: list(astuple(entry)[1:]) for entry in page}
        after = (await store.item_changes(tenant, after, at_once)).version
    return found, after


@given(st.lists(st.lists(ENTRIES, min_size=1, max_size=5), max_size=5), st.integers(0, 5))
@laws
def test_who_reads_the_changes_in_pages_knows_what_was_said_last(
    address: str, batches: list[list[ItemEntry]], known: int
) -> None:
    async def law() -> None:
        tenant = fresh_user()
        async with opened(address, GENERATION, tenant=tenant) as store, opened(address, tenant=tenant) as other:
            for batch in batches[:known]:
                await store.put_items(tenant, batch)
            before, version = await changes(other, tenant)
            for batch in batches[known:]:
                await store.put_items(tenant, batch)
            since, newest = await changes(other, tenant, version)
            everything, _ = await changes(store, tenant)
            assert list(everything.items()) == list(said(batches).items())
            assert {item_id: everything[item_id] for item_id in since} == since
            assert before | since == everything
            assert since.keys() == {entry.item_id for batch in batches[known:] for entry in batch}
            assert await other.pointers() == TenantPointers(None, newest)
            assert newest == sum(map(len, batches))

    asyncio.run(law())


def test_tenants_and_the_pointer_are_apart(address: str) -> None:
    async def law() -> None:
        async with opened(address, GENERATION) as main, opened(address, GENERATION, tenant="a/b") as shop:
            named = NamedGeneration("june", GENERATION.tag)
            await main.generations.activate(named)
            await shop.put_items("a/b", [ItemEntry("x", "Kettle"), ItemEntry("y", available=False)])
            assert (await main.pointers(), await shop.pointers()) == (TenantPointers(named, 0), TenantPointers(None, 2))
            assert await changes(main, "main") == ({}, 0)
            assert await main.item_tenants() == ["a/b"]

    asyncio.run(law())


def test_two_writers_at_once_lose_nothing(address: str) -> None:
    async def law() -> None:
        async with opened(address, GENERATION) as one, opened(address, GENERATION) as other:
            await asyncio.gather(
                *(one.put_items("main", [ItemEntry(f"i{n}", title=f"t{n}")]) for n in range(6)),
                *(other.put_items("main", [ItemEntry(f"i{n}", available=False)]) for n in range(6)),
            )
            found, version = await changes(one, "main", at_once=5)
            assert found == {f"i{n}": [f"t{n}", None, False] for n in range(6)}
            assert version == 12

    asyncio.run(law())


def test_what_cannot_be_stored_changes_nothing(address: str) -> None:
    async def law() -> None:
        async with opened(address, GENERATION) as store:
            with pytest.raises(StorageError):
                await store.put_items("main", [ItemEntry("a", "fine"), ItemEntry("b", "\ud800")])
            assert await changes(store, "main") == ({}, 0)

    asyncio.run(law())


@pytest.mark.parametrize("kind", ["sqlite", "redis-server"])
def test_a_back_up_brings_the_items_of_all_tenants_back(address: str, tmp_path: Path, kind: str) -> None:
    async def law() -> None:
        batches = [[ItemEntry(f"i{n}", f"t{n}", ("a", "b")) for n in range(1200)], [ItemEntry("i3", available=False)]]
        async with opened(address, GENERATION) as store:
            await store.append("main", [click("e1", "ada", 1)])
            for batch in batches:
                await store.put_items("main", batch)
                await store.put_items("shop", batch[:1])
            assert await backup(store, tmp_path / "all.gz") == 1
        async with opened(new_address(kind, tmp_path / "restored"), GENERATION) as store:
            assert await restore(store, tmp_path / "all.gz") == 1
            assert (await changes(store, "main", at_once=500))[0] == said(batches)
            assert (await changes(store, "shop"))[0] == said([batches[0][:1], batches[1]])
            assert len(await store.events("main", "ada")) == 1

    asyncio.run(law())

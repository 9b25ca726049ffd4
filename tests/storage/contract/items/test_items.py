"""Changes of items and their codes: every store and process returns the newest values."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.errors import StorageError
from storage.maintenance.backup import backup, restore
from storage.protocol import UserStore
from storage.records import HeldProperties, ItemCodes, ItemEntry, NamedGeneration, PropertyTypes, TenantPointers
from tests.storage.contract.stores import new_address, opened
from tests.storage.oracles.properties import PATCHES, PROPERTIES, TEXTS
from tests.storage.oracles.random_events import click, fresh_user, make_generation

GENERATION = make_generation()
ENTRIES = st.builds(
    ItemEntry,
    st.sampled_from(["a", "b", "c:1", "d.d"]),
    st.none() | TEXTS,
    st.none() | st.lists(TEXTS, max_size=3).map(tuple),
    st.none() | st.booleans(),
    PATCHES,
)
CODES = st.builds(
    ItemCodes,
    st.sampled_from(["a", "b", "c:1", 'é"!']),
    st.sampled_from([GENERATION.tag, b"gen two\0"]),
    st.integers(0, 100),
    st.floats(allow_nan=False),
    st.binary(max_size=4),
    st.binary(max_size=4),
)
Batch = list[ItemEntry] | list[ItemCodes]
BATCHES = st.lists(
    st.one_of(st.lists(ENTRIES, min_size=1, max_size=5), st.lists(CODES, min_size=1, max_size=5)), max_size=5
)
EARLIER_BACKUP = Path(__file__).parents[2] / "earlier_backups" / "version-2-items.jsonl.gz"
Values = dict[str, list[Any]]
CodesOf = dict[tuple[str, bytes], ItemCodes]

laws = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])


def expected_values(batches: Sequence[Batch]) -> Values:
    """Title, categories, availability and properties by item, after all batches in order."""
    known: Values = {}
    for entry in (entry for batch in batches for entry in batch if isinstance(entry, ItemEntry)):
        *before, properties = known.pop(entry.item_id, [None, None, None, {}])  # what was changed last stands last
        parts = [entry.title, entry.categories, entry.available]
        properties = {name: value for name, value in {**properties, **entry.properties}.items() if value is not None}
        known[entry.item_id] = [old if new is None else new for old, new in zip(before, parts, strict=True)]
        known[entry.item_id].append(properties)
    return known


def expected_codes(batches: Sequence[Batch]) -> CodesOf:
    """Newest codes by item and generation, in the order of their last write."""
    known: CodesOf = {}
    for codes in (codes for batch in batches for codes in batch if isinstance(codes, ItemCodes)):
        known.pop((codes.item_id, codes.tag), None)
        known[codes.item_id, codes.tag] = codes
    return known


def expected_types(batches: Sequence[Batch]) -> PropertyTypes:
    entries = (entry for batch in batches for entry in batch if isinstance(entry, ItemEntry))
    values = [named for entry in entries for named in entry.properties.items()]
    known = {name: PROPERTIES[name][0] for name, value in values if value is not None and name in PROPERTIES}
    return {"item": known, "user": {}}


async def put(store: UserStore, tenant: str, batch: Batch) -> None:
    entries = [one for one in batch if isinstance(one, ItemEntry)]
    codes = [one for one in batch if isinstance(one, ItemCodes)]
    await (store.put_items(tenant, entries) if entries else store.put_item_codes(tenant, codes))


async def codes_after(store: UserStore, tenant: str, after: int = 0, at_once: int = 2) -> CodesOf:
    found: CodesOf = {}
    while (page := await store.item_changes(tenant, after, at_once)).version > after:
        found |= {(codes.item_id, codes.tag): codes for codes in page.codes}
        after = page.version
    assert (page.entries, page.codes) == ([], [])
    return found


async def changes(store: UserStore, tenant: str, after: int = 0, at_once: int = 2) -> tuple[Values, int]:
    found: Values = {}
    while (page := await store.item_changes(tenant, after, at_once)).version > after:
        assert 0 < len(page.entries) + len(page.codes) <= at_once
        found |= {entry.item_id: list(astuple(entry)[1:-1]) for entry in page.entries}
        after = page.version
    return found, after


def codes_of(item_id: str, evidence: int = 10) -> ItemCodes:
    return ItemCodes(item_id, GENERATION.tag, evidence, -0.1, b"\0\xff", b"\1")


@given(BATCHES, st.integers(0, 5))
@laws
def test_pages_of_changes_give_the_newest_values(address: str, batches: list[Batch], known: int) -> None:
    async def law() -> None:
        tenant = fresh_user()
        async with opened(address, GENERATION, tenant=tenant) as store, opened(address, tenant=tenant) as other:
            for batch in batches[:known]:
                await put(store, tenant, batch)
            before, version = await changes(other, tenant)
            for batch in batches[known:]:
                await put(store, tenant, batch)
            since, newest = await changes(other, tenant, version)
            everything, _ = await changes(store, tenant)
            assert list(everything.items()) == list(expected_values(batches).items())
            assert {item_id: everything[item_id] for item_id in since} == since
            assert before | since == everything
            assert since.keys() == expected_values(batches[known:]).keys()
            assert list((await codes_after(store, tenant)).items()) == list(expected_codes(batches).items())
            assert await codes_after(other, tenant, version) == expected_codes(batches[known:])
            assert await other.pointers() == TenantPointers(None, newest, None, HeldProperties(expected_types(batches)))
            assert newest == sum(map(len, batches))

    asyncio.run(law())


async def test_tenants_have_separate_items_and_pointers(address: str) -> None:
    async with opened(address, GENERATION) as main, opened(address, GENERATION, tenant="a/b") as shop:
        named = NamedGeneration("june", GENERATION.tag)
        await main.generations.activate(named)
        await shop.put_items("a/b", [ItemEntry("x", "Kettle"), ItemEntry("y", available=False)])
        assert (await main.pointers(), await shop.pointers()) == (TenantPointers(named, 0), TenantPointers(None, 2))
        assert await changes(main, "main") == ({}, 0)
        assert sorted(await main.tenants()) == ["a/b", "main"]
        await shop.put_item_codes("c", [codes_of("x")])
        assert sorted(await main.tenants()) == ["a/b", "c", "main"]
        assert (await shop.item_changes("a/b", 0, 9)).codes == []


async def test_concurrent_writers_lose_no_change(address: str) -> None:
    async with opened(address, GENERATION) as one, opened(address, GENERATION) as other:
        await asyncio.gather(
            *(one.put_items("main", [ItemEntry(f"i{n}", title=f"t{n}")]) for n in range(6)),
            *(other.put_items("main", [ItemEntry(f"i{n}", available=False)]) for n in range(6)),
            *(other.put_item_codes("main", [codes_of(f"i{n}")]) for n in range(6)),
        )
        found, version = await changes(one, "main", at_once=5)
        assert found == {f"i{n}": [f"t{n}", None, False, {}] for n in range(6)}
        assert {of.item_id for of in (await codes_after(one, "main")).values()} == found.keys()
        assert version == 18


async def test_a_batch_with_an_invalid_text_changes_nothing(address: str) -> None:
    async with opened(address, GENERATION) as store:
        with pytest.raises(StorageError):
            await store.put_items("main", [ItemEntry("a", "fine"), ItemEntry("b", "\ud800")])
        assert await changes(store, "main") == ({}, 0)


@pytest.mark.parametrize("kind", ["sqlite", "redis-server"])
async def test_a_backup_restores_items_of_all_tenants(address: str, tmp_path: Path, kind: str) -> None:
    batches: list[list[ItemEntry]]
    batches = [[ItemEntry(f"i{n}", f"t{n}", ("a", "b")) for n in range(1200)], [ItemEntry("i3", available=False)]]
    codes = [codes_of(f"i{n}", evidence=n) for n in range(1200)]
    async with opened(address, GENERATION) as store:
        await store.append("main", [click("e1", "ada", 1)])
        for batch in batches:
            await store.put_items("main", batch)
            await store.put_items("shop", batch[:1])
        await store.put_item_codes("main", codes)
        await store.put_item_codes("third", codes[:1])
        assert await backup(store, tmp_path / "all.gz") == 1
    async with opened(new_address(kind, tmp_path / "restored"), GENERATION) as store:
        assert await restore(store, tmp_path / "all.gz") == 1
        assert (await changes(store, "main", at_once=500))[0] == expected_values(batches)
        assert (await changes(store, "shop"))[0] == expected_values([batches[0][:1], batches[1]])
        assert list((await codes_after(store, "main", at_once=500)).values()) == codes
        assert list((await codes_after(store, "third")).values()) == codes[:1]
        assert len(await store.events("main", "ada")) == 1


@pytest.mark.parametrize("kind", ["sqlite", "redis-server"])
async def test_a_backup_of_an_earlier_version_restores_items_and_codes(tmp_path: Path, kind: str) -> None:
    """Its codes are items named "ITEM!TAG"; unreadable ones are skipped."""
    of_first, of_second = bytes(range(3, 11)), bytes(range(2, 10))
    async with opened(new_address(kind, tmp_path), GENERATION) as store:
        assert await restore(store, EARLIER_BACKUP) == 3
        assert sorted(await store.tenants()) == ["main", "shop"]
        found = await store.item_changes("main", 0, 100)
        assert found.entries == [
            ItemEntry("kettle", "Kettle", ("kitchen", "water")),
            ItemEntry("cup", available=False),
            ItemEntry("item1", "Tea!"),
        ]
        assert found.codes == [
            ItemCodes("kettle", b"gen two\0", 0, 0.1, of_second, b"\xff\2"),
            ItemCodes("kettle", GENERATION.tag, 30, -0.3333333333333333, of_first, b"\xff\3"),
        ]
        shop = await store.item_changes("shop", 0, 100)
        assert (shop.entries, [(codes.item_id, codes.bias) for codes in shop.codes]) == ([], [("pot", 1e300)])


async def test_dropping_a_generation_deletes_its_codes(address: str) -> None:
    """Except the newest, so that readers see no earlier version of the items."""
    tenant, other = fresh_user(), b"gen two\0"
    first = [replace(codes_of(f"i{number}"), tag=other) for number in range(1500)]
    async with opened(address, GENERATION, tenant=tenant) as store:
        await store.put_item_codes(tenant, first)
        await store.put_item_codes(tenant, [codes_of("i1"), replace(codes_of("newest"), tag=other)])
        await store.put_item_codes(f"{tenant}-other", first[:1])
        version = (await store.pointers()).items_version
        await store.generations.drop(other)
        assert {*await codes_after(store, tenant, at_once=100)} == {("i1", GENERATION.tag), ("newest", other)}
        assert (await store.pointers()).items_version == version
        await store.put_item_codes(tenant, [codes_of("i2")])
        await store.generations.drop(other)
        assert {*await codes_after(store, tenant)} == {("i1", GENERATION.tag), ("i2", GENERATION.tag)}
        assert {*await codes_after(store, f"{tenant}-other")} == {("i0", other)}

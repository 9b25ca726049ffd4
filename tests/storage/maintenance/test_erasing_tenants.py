"""Erasure of a tenant leaves other tenants unchanged."""

from __future__ import annotations

import sqlite3
from contextlib import AsyncExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from storage.errors import StorageUnavailable
from storage.maintenance.tenants import erase_tenant, erase_users
from storage.protocol import UserStore
from storage.records import ItemEntry, TenantPointers
from storage.redis.corrections.erasure import RedisErasure
from storage.sqlite.database import FILE_NAME
from storage.state.event import digest
from tests.storage.contract.stores import new_address, opened
from tests.storage.oracles.filled_tenants import GENERATION, USERS, fill, fill_items
from tests.storage.oracles.random_events import click
from tests.storage.redis.servers import running_server
from tests.waiting import until


async def users_in(store: UserStore, tenant: str) -> set[str]:
    """Users that the store knows by an event, a state or a property."""
    logged = set[str]()
    async for page in store.log():
        erased = {user for owner, user in page.erased if owner == tenant}  # the archive may still have their entries
        logged = {user_id for user_id in logged if digest(user_id) not in erased}
        logged |= {entry.record.user_id for owner, entry in page.entries if owner == tenant}
    states = await store.states(tenant, USERS, GENERATION)
    folded = {user for user, state in zip(USERS, states, strict=True) if state is not None}
    return logged | folded | {user async for owner, user, _ in store.properties.of_users() if owner == tenant}


async def test_all_users_of_a_tenant_are_erased_even_after_an_interruption(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(address, GENERATION) as store:
        for tenant in ("main", "books"):
            await fill(store, tenant)
        others = await users_in(store, "main")
        assert others == {*USERS, "only-properties"}
        erase, calls = store.erase, 0

        async def erase_or_die(*args: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 70:
                raise StorageUnavailable("killed")
            await erase(*args)

        with monkeypatch.context() as patch:
            patch.setattr(store, "erase", erase_or_die)
            with pytest.raises(StorageUnavailable):
                await erase_users(store, "books")
        assert 0 < len(await users_in(store, "books")) < len(others)
        progress = list[int]()
        assert await erase_users(store, "books", progress.append) > 0
        assert progress == sorted(progress)
        assert await users_in(store, "books") == set()
        assert await users_in(store, "main") == others
        assert await erase_users(store, "books") == 0


async def kept_of(store: UserStore, tenant: str) -> list[Any]:
    """All data of a tenant besides users; the audit log comes last."""
    changes = await store.item_changes(tenant, 0, 10_000)
    vectors = await store.vectors.of_items(tenant, [entry.item_id for entry in changes.entries])
    scenarios = [(await store.scenarios.scenarios(tenant)).newest, await store.scenarios.versions(tenant, "front")]
    trends = sorted(await store.trends(tenant, 10_000))  # without their numbers, which decay
    counts = [await store.orders.counts(tenant), trends, await store.tallies(tenant)]
    served = [await store.generations.known(), (await store.pointers()) != TenantPointers(None, 0)]
    held = list(chain(*(await store.properties.held(tenant)).types.values()))
    audited = [await store.audit.keys_seen(tenant), *await store.audit.entries(tenant)]
    return [changes.entries, changes.codes, vectors, held, *scenarios, *counts, *served, audited]


async def test_only_the_audit_log_of_a_tenant_remains(address: str) -> None:
    async with opened(address, GENERATION) as main, opened(address, GENERATION, tenant="a/b") as shop:
        await fill_items(main, "main", 3)
        await fill_items(shop, "a/b", 700)
        others, (*own, audited) = await kept_of(main, "main"), await kept_of(shop, "a/b")
        assert all(own)
        await fill(shop, "a/b")
        assert await erase_tenant(shop, "a/b") > 0
        assert await erase_tenant(shop, "a/b") == 0
        *left, audited_now = await kept_of(shop, "a/b")
        assert (any(left), audited_now) == (False, audited)
        assert await kept_of(main, "main") == others
        await shop.put_items("a/b", [ItemEntry("new", "Cup")])  # as a later tenant of the same name does
        assert (await shop.item_changes("a/b", 0, 9)).entries == [ItemEntry("new", "Cup")]


@pytest.mark.parametrize("kind", ["sqlite", "redis-server"])
async def test_tenants_with_similar_names_keep_their_data(kind: str, tmp_path: Path) -> None:
    address, names = new_address(kind, tmp_path), ["*", "main", "a/b", "a", "a/b/c", "a%2Fb", "generations:a", "[a]"]
    async with AsyncExitStack() as stack:
        stores = {name: await stack.enter_async_context(opened(address, GENERATION, tenant=name)) for name in names}
        for name, store in stores.items():
            await fill_items(store, name, 1)
            await store.append(name, [click("e", USERS[0])])
        held = {name: (await kept_of(store, name), await users_in(store, name)) for name, store in stores.items()}
        for name in names:
            assert await erase_tenant(stores[name], name) == 1
            *left, _ = await kept_of(stores[name], name)
            assert (any(left), await users_in(stores[name], name)) == (False, set())
            del held[name]
            for other, expected in held.items():
                assert (await kept_of(stores[other], other), await users_in(stores[other], other)) == expected


@pytest.mark.parametrize("kind", ["sqlite", "redis-server"])
async def test_no_other_data_of_an_erased_tenant_remain(kind: str, tmp_path: Path) -> None:
    address = new_address(kind, tmp_path)
    async with opened(address, GENERATION, tenant="books") as store:
        await fill_items(store, "books", 3)
        await fill(store, "books")
        await erase_tenant(store, "books")
    if kind == "sqlite":
        with closing(sqlite3.connect(next(tmp_path.rglob(FILE_NAME)))) as db:
            tables = [name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE sql LIKE '%tenant TEXT%'")]
            rows = {name: db.execute(f"SELECT * FROM {name} WHERE tenant = 'books'").fetchall() for name in tables}
        assert {name for name, found in rows.items() if found} == {"audit", "notes", "erasures"}
        assert [name for _, name, _ in rows["notes"]] == ["keys-seen"]
    else:
        prefix = address.split(" ")[1]
        found = running_server("redis-server").client.scan_iter(f"{prefix}:*books*")
        assert {key.decode().removeprefix(f"{prefix}:{{items:books}}:") for key in found} == {"audit", "keys-seen"}


async def test_a_kill_during_a_log_rewrite_leaves_no_id_of_a_merged_visitor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def die(*_: object) -> None:
        raise StorageUnavailable("killed")

    server, address = running_server("redis-server").client, new_address("redis-server", tmp_path)
    _, prefix = address.split(" ")
    async with opened(address, GENERATION) as store:
        await store.append("books", [click("e", "ann")])
        await store.merge("books", "ann", "visitor")
        with monkeypatch.context() as patch:
            patch.setattr(RedisErasure, "_rewrite_log", die)
            with pytest.raises(StorageUnavailable):
                await erase_users(store, "books")

        async def finds_nobody() -> bool:
            return await erase_users(store, "books") == 0

        await until(finds_nobody)  # the erasure of the other id goes on
        await until(lambda: not list(server.scan_iter(f"{prefix}:*books/*")))

"""A tenant leaves: all of its users are erased, and nobody else's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from storage.errors import StorageUnavailable
from storage.maintenance.users import erase_users
from storage.protocol import UserStore
from storage.redis.corrections.erasure import RedisErasure
from storage.state.event import digest
from tests.storage.contract.stores import new_address, opened
from tests.storage.oracles.random_events import click, make_generation
from tests.storage.redis.servers import running_server

GENERATION = make_generation()
USERS = [f"user-{number}" for number in range(150)]


async def fill(store: UserStore, tenant: str) -> None:
    for begin in range(0, len(USERS), 50):
        await store.append(tenant, [click(f"e{n}", user) for user in USERS[begin : begin + 50] for n in range(3)])
    await store.merge(tenant, "user-0", "user-1")
    await store.append(tenant, [click("late", "user-1")])
    await store.properties.put_of_user(tenant, "user-2", {"member": True})
    await store.properties.put_of_user(tenant, "only-properties", {"member": True})


async def users_in(store: UserStore, tenant: str) -> set[str]:
    """Whoever the store knows by an event, a state or a property."""
    logged = set[str]()
    async for page in store.log():
        erased = {user for owner, user in page.erased if owner == tenant}  # the archive may still have their entries
        logged = {user_id for user_id in logged if digest(user_id) not in erased}
        logged |= {entry.record.user_id for owner, entry in page.entries if owner == tenant}
    states = await store.states(tenant, USERS, GENERATION)
    folded = {user for user, state in zip(USERS, states, strict=True) if state is not None}
    return logged | folded | {user async for owner, user, _ in store.properties.of_users() if owner == tenant}


async def test_all_users_of_a_tenant_are_erased_and_no_others_also_when_it_was_interrupted(
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


async def test_a_kill_while_a_log_is_rewritten_leaves_no_id_of_a_merged_visitor(
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
        assert await erase_users(store, "books") == 0
    assert list(server.scan_iter(f"{prefix}:*books/*")) == []

"""Versions of scenarios: equal to lists in a dict, through concurrent writers and backups."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.maintenance.backup import backup, restore
from storage.protocol import UserStore
from storage.records import MAX_SCENARIO_VERSIONS
from tests.storage.contract.stores import new_address, opened
from tests.storage.oracles.random_events import fresh_user, make_generation

GENERATION = make_generation()
NAMES = ["home", "a/b:c", "scenarios", "ü"]
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)

Step = tuple[str, str, str | None]
STEPS = st.tuples(st.sampled_from(NAMES), TEXTS, st.one_of(st.none(), st.none(), st.sampled_from(NAMES))).filter(
    lambda step: step[0] != step[2]
)
laws = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


async def add(store: UserStore, tenant: str, name: str, text: str, dropped: str | None = None) -> None:
    while not await store.scenarios.add(
        tenant, name, text, believed=await store.scenarios.revision(tenant), dropped=dropped
    ):
        pass


async def known(store: UserStore, tenant: str) -> dict[str, list[str]]:
    versions = {name: await store.scenarios.versions(tenant, name) for name in NAMES}
    newest = {name: of_name[-1] for name, of_name in versions.items() if of_name}
    assert (await store.scenarios.scenarios(tenant)).newest == newest
    return {name: of_name for name, of_name in versions.items() if of_name}


@given(st.lists(STEPS, max_size=12))
@laws
def test_versions_equal_plain_lists(address: str, steps: list[Step]) -> None:
    async def law() -> None:
        tenant, oracle = fresh_user(), defaultdict[str, list[str]](list)
        revisions = []
        async with opened(address, GENERATION) as store, opened(address, GENERATION) as other:
            for number, (name, text, dropped) in enumerate(steps):
                revisions.append(await store.scenarios.revision(tenant))
                await add(store if number % 2 else other, tenant, name, text, dropped)
                oracle[name].append(text)
                oracle.pop(str(dropped), None)
            assert await known(store, tenant) == await known(other, tenant) == oracle
            assert await known(store, fresh_user()) == {}
            assert len(set(revisions)) == len(steps)
            assert revisions[:1] in ([], [""])

    asyncio.run(law())


async def test_only_the_newest_versions_are_kept(address: str) -> None:
    tenant = fresh_user()
    async with opened(address, GENERATION) as store:
        await add(store, tenant, "other", "stays")
        for number in range(MAX_SCENARIO_VERSIONS + 3):
            await add(store, tenant, "home", str(number))
        kept = await store.scenarios.versions(tenant, "home")
        assert kept == [str(number) for number in range(3, MAX_SCENARIO_VERSIONS + 3)]
        assert await store.scenarios.versions(tenant, "other") == ["stays"]


async def test_concurrent_versions_are_all_kept(address: str) -> None:
    tenant = fresh_user()
    async with opened(address, GENERATION) as store, opened(address, GENERATION) as other:
        revision = await store.scenarios.revision(tenant)
        outcomes = await asyncio.gather(
            *(one.scenarios.add(tenant, "home", "first", believed=revision) for one in (store, other) * 2)
        )
        assert sorted(outcomes) == [False, False, False, True]
        texts = [str(number) for number in range(20)]
        await asyncio.gather(
            *(add(store if number % 2 else other, tenant, "home", text) for number, text in enumerate(texts))
        )
        found = await other.scenarios.versions(tenant, "home")
        assert (found[0], sorted(found[1:])) == ("first", sorted(texts))


@pytest.mark.parametrize("kind", ["sqlite", "redis-server"])
async def test_a_backup_restores_all_versions_once(address: str, tmp_path: Path, kind: str) -> None:
    async with opened(address, GENERATION) as store:
        for tenant in ("main", "a/b"):
            for number in range(3):
                await add(store, tenant, "home", f"{tenant} {number}")
            await add(store, tenant, "ü", '{"ü": "\\u0000"}')
        before = {tenant: await known(store, tenant) for tenant in ("main", "a/b")}
        await backup(store, tmp_path / "all.gz")
    async with opened(new_address(kind, tmp_path / "restored"), GENERATION) as store:
        await add(store, "main", "home", "main 0")  # as a call that was interrupted
        for _ in range(2):
            await restore(store, tmp_path / "all.gz", resume=True)
            assert {tenant: await known(store, tenant) for tenant in ("main", "a/b")} == before

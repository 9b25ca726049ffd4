"""Tallies, the experiment and the secret: the same in every process and after a restart."""

import asyncio

import pytest

from storage.errors import StorageUnavailable
from storage.records import OTHER, NamedGeneration, Tally
from tests.storage.contract.stores import opened
from tests.storage.oracles.random_events import fresh_user, make_generation

GENERATION = make_generation()


async def test_tallies_add_up_and_experiments_are_shared(address: str) -> None:
    tenant = fresh_user()
    async with opened(address, GENERATION, tenant=tenant) as one, opened(address, tenant=tenant) as other:
        assert await one.tallies(tenant) == {}
        counts: dict[Tally, float] = {("a", "b|", 7): 2, ("c",): 1, ("ü", ""): 0, ("d",): 0.125, ("e",): 1e9}
        await asyncio.gather(*(store.add_tallies(tenant, counts) for store in (one, other, one)))
        await one.add_tallies(tenant, {})
        await other.add_tallies(f"{tenant}-other", {("c",): 7})
        assert (await one.pointers()).experiment is None
        await one.generations.set_experiment('{"ü": 1}')
        assert (await other.pointers()).experiment == '{"ü": 1}'
        secrets = await asyncio.gather(one.secret(), other.secret())
        assert len(secrets[0]) == 32
        assert len(set(secrets[0])) > 8
    async with opened(address, tenant=tenant) as again:
        assert await again.tallies(tenant) == {tally: 3 * count for tally, count in counts.items()}
        assert {await again.secret(), *secrets} == {secrets[0]}
        assert (await again.pointers()).experiment is not None
        await again.generations.set_experiment(None)
        assert (await again.pointers()).experiment is None
    for call in (again.tallies(tenant), again.secret(), again.add_tallies(tenant, {("a",): 1})):
        with pytest.raises(StorageUnavailable):
            await call


async def test_dropping_a_generation_deletes_its_tallies(address: str) -> None:
    """But none of generations with the same or another name, as after renaming a folder."""

    def of(generation: str) -> dict[Tally, float]:
        lists: dict[Tally, float] = {("shown", generation, "", 3): 2, ("chosen", generation, "june", 1, "click"): 1}
        return lists | {("value", generation, "june", 1, "click"): 0.5}

    tenant = fresh_user()
    async with opened(address, GENERATION, tenant=tenant) as store, opened(address, tenant=tenant) as other:
        for name, tag in (("old", b"1"), ("again", b"2"), ("again", b"3"), ("new", b"4")):
            await store.generations.announce(NamedGeneration(name, tag), 0)
        await store.generations.activate(NamedGeneration("new", b"4"))
        others: dict[Tally, float] = {("scenario-list", "old", "", "full"): 1, ("c",): 1}
        kept = of("new") | of("again") | of(OTHER) | of("renamed") | others
        await other.add_tallies(tenant, kept | of("old"))
        await other.add_tallies(f"{tenant}-other", of("old"))
        for tag in (b"1", b"2"):
            await store.generations.drop(tag)
            assert await other.tallies(tenant) == kept
        await store.generations.drop(b"3")
        assert await store.tallies(tenant) == {tally: n for tally, n in kept.items() if "again" not in tally}
        assert await store.tallies(f"{tenant}-other") == of("old")

"""Tallies, the experiment and the secret: the same in every process, and after a restart."""

import asyncio

import pytest

from storage.errors import StorageUnavailable
from storage.records import Tally
from tests.storage.contract.stores import opened
from tests.storage.oracles.random_events import fresh_user, make_generation

GENERATION = make_generation()


def test_tallies_of_all_processes_add_up_and_notes_are_shared(address: str) -> None:
    async def law() -> None:
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

    asyncio.run(law())

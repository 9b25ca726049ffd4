"""Properties of users: equal to a dict, through merges, erasures and backups."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.errors import MergeRefused, PropertyRefused, StorageBusy
from storage.maintenance.backup import backup, restore
from storage.protocol import UserStore
from storage.records import PropertyValue
from storage.sqlite.database import FILE_NAME
from tests.storage.contract.stores import new_address, opened
from tests.storage.oracles.properties import VALUES, types
from tests.storage.oracles.random_events import click, fresh_user, make_generation

GENERATION = make_generation()
USERS = ["ada", "bob", "cy/1", "visitor:7"]
NAMES = st.sampled_from(USERS)
PATCHES = st.fixed_dictionaries({}, optional=VALUES)
Properties = dict[str, PropertyValue]
Patch = dict[str, PropertyValue | None]


@dataclass(frozen=True)
class Put:
    user: str
    patch: Patch


@dataclass(frozen=True)
class Click:
    user: str
    event_id: str


@dataclass(frozen=True)
class Merge:
    user: str
    visitor: str


@dataclass(frozen=True)
class Erase:
    user: str


STEPS = st.one_of(
    st.builds(Put, NAMES, PATCHES),
    st.builds(Put, NAMES, PATCHES),
    st.builds(Click, NAMES, st.integers(0, 9).map(str)),
    st.builds(Merge, NAMES, NAMES),
    st.builds(Erase, NAMES),
)
laws = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass
class Oracle:
    """Dicts of merges, and of the properties of users that are not merged."""

    became: dict[str, str] = field(default_factory=dict)
    properties: dict[str, Properties] = field(default_factory=dict)

    def of(self, user: str) -> str:
        return self.of(self.became[user]) if user in self.became else user

    def take(self, step: Put | Click | Merge | Erase) -> None:
        match step:
            case Put(user, patch):
                after = {**self.properties.get(self.of(user), {}), **patch}
                kept = {name: value for name, value in after.items() if value is not None}
                self.properties[self.of(user)] = kept
            case Merge(user, visitor):
                if visitor not in self.became and self.of(user) != visitor:
                    target = self.of(user)
                    filling, own = self.properties.pop(visitor, {}), self.properties.get(target, {})
                    self.properties[target] = {**filling, **own}
                    self.became[visitor] = target
            case Erase(user):
                gone = {other for other in USERS if self.of(other) == self.of(user)}
                self.properties = {other: own for other, own in self.properties.items() if other not in gone}
                self.became = {other: into for other, into in self.became.items() if other not in gone}

    def known(self) -> dict[str, Properties]:
        return {user: self.properties.get(self.of(user), {}) for user in USERS}


async def take(store: UserStore, tenant: str, step: Put | Click | Merge | Erase) -> None:
    match step:
        case Put(user, patch):
            await store.properties.put_of_user(tenant, user, patch)
        case Click(user, event_id):
            await store.append(tenant, [click(event_id, user, 1)])
        case Merge(user, visitor):
            with suppress(MergeRefused):
                await store.merge(tenant, user, visitor)
        case Erase(user):
            await store.erase(tenant, user)


async def known(store: UserStore, tenant: str) -> dict[str, Properties]:
    return {user: await store.properties.of_user(tenant, user) for user in USERS}


async def listed(store: UserStore, tenant: str) -> dict[str, Properties]:
    return {user: own async for of, user, own in store.properties.of_users() if of == tenant}


@given(st.lists(STEPS, max_size=10))
@laws
def test_properties_equal_a_dict(address: str, tmp_path: Path, steps: list[Put | Click | Merge | Erase]) -> None:
    async def law() -> None:
        tenant, oracle = fresh_user(), Oracle()
        async with opened(address, GENERATION) as store, opened(address, GENERATION) as other:
            for number, step in enumerate(steps):
                await take(store if number % 2 else other, tenant, step)
                oracle.take(step)
            assert await known(store, tenant) == await known(other, tenant) == oracle.known()
            assert await listed(store, tenant) == {user: own for user, own in oracle.properties.items() if own}

    asyncio.run(law())


@pytest.mark.parametrize("kind", ["sqlite", "redis-server"])
async def test_a_backup_restores_user_properties(address: str, tmp_path: Path, kind: str) -> None:
    steps: list[Put | Click | Merge | Erase] = [
        Put("ada", {"price": 1.0, "brand": "x", "_tags": ("a",)}),
        Click("bob", "e1"),
        Put("bob", {"brand": "y", "organic": True}),
        Merge("ada", "bob"),
        Put("bob", {"_tags": None}),
        Put("cy/1", {"price": 2.0}),
        Put("visitor:7", {"price": 3.0}),
        Erase("visitor:7"),
    ]
    oracle = Oracle()
    async with opened(address, GENERATION) as store:
        for tenant in ("main", "a/b"):
            for step in steps:
                await take(store, tenant, step)
        for step in steps:
            oracle.take(step)
        await backup(store, tmp_path / "all.gz")
        held = await types(store)
    async with opened(new_address(kind, tmp_path / "restored"), GENERATION) as store:
        await restore(store, tmp_path / "all.gz")
        assert await known(store, "main") == await known(store, "a/b") == oracle.known()
        assert oracle.known()["bob"] == {"price": 1.0, "brand": "x", "organic": True}
        assert await types(store) == held
        await store.erase("main", "bob")
        assert await listed(store, "main") == {"cy/1": {"price": 2.0}}


async def test_restored_users_share_commits(tmp_path: Path) -> None:
    users = [f"u{n}" for n in range(160)]
    async with opened(new_address("sqlite", tmp_path / "one"), GENERATION) as store:
        await asyncio.gather(*(store.properties.put_of_user("main", user, {"brand": user}) for user in users))
        await backup(store, tmp_path / "all.gz")
    async with opened(new_address("sqlite", tmp_path / "two"), GENERATION) as store:
        before = commits(tmp_path / "two")
        await restore(store, tmp_path / "all.gz")
        assert await listed(store, "main") == {user: {"brand": user} for user in users}
    assert commits(tmp_path / "two") - before < len(users) / 2


def commits(directory: Path) -> int:
    """Number of commits to a SQLite store."""
    with closing(sqlite3.connect(directory / FILE_NAME)) as db:
        (number,) = db.execute("PRAGMA application_id").fetchone()
    return int(number)


async def test_user_types_behave_like_item_types_and_are_separate(address: str) -> None:
    async with opened(address, GENERATION) as store, opened(address, GENERATION) as other:
        outcomes = await asyncio.gather(
            store.properties.put_of_user("main", "ada", {"age": 30.0}),
            other.properties.put_of_user("main", "bob", {"age": "30"}),
            return_exceptions=True,
        )
        assert sum(isinstance(outcome, PropertyRefused) for outcome in outcomes) == 1
        await store.properties.declare("main", {"item": {"age": "set"}})
        found = await known(store, "main")
        assert sorted(map(len, found.values())) == [0, 0, 0, 1]
        with pytest.raises(PropertyRefused):
            await store.properties.put_of_user("main", "ada", {"city": "Ulm", "age": ("a",)})
        assert await known(other, "main") == found
        await store.properties.put_of_user("main", "ada", {"available_from": "a text, of users"})


async def test_puts_during_merges_and_erasures_are_kept_once(address: str) -> None:
    """Each put belongs to the user of that moment or is erased; merged and erased users have nothing."""
    async with opened(address, GENERATION) as store, opened(address, GENERATION) as other:
        for number in range(10):
            tenant = fresh_user()
            await store.properties.put_of_user(tenant, "visitor", {"a": 1.0, "b": 1.0})
            await store.properties.put_of_user(tenant, "ada", {"a": 2.0})
            await asyncio.gather(
                store.merge(tenant, "ada", "visitor"),
                other.properties.put_of_user(tenant, "visitor", {"c": float(number)}),
                other.properties.put_of_user(tenant, "ada", {"d": float(number)}),
            )
            merged = {"a": 2.0, "b": 1.0, "c": float(number), "d": float(number)}
            for one in (store, other):
                for user in ("ada", "visitor"):
                    assert await one.properties.of_user(tenant, user) == merged
            put, _ = await asyncio.gather(
                other.properties.put_of_user(tenant, "visitor", {"e": 1.0}),
                store.erase(tenant, "ada"),
                return_exceptions=True,
            )
            assert put is None or isinstance(put, StorageBusy)
            left = [await store.properties.of_user(tenant, user) for user in ("ada", "visitor")]
            assert left[0] == {}
            assert left[1] in ({}, {"e": 1.0})

"""Properties of many items at once, merged with stored ones by the store or by Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.errors import PropertyRefused, StorageUnavailable, VectorRefused
from storage.items.vectors import encode
from storage.records import ItemEntry, PropertyValue, TypeChanges
from storage.redis.connections.client import RedisServers
from storage.redis.connections.nodes import Command
from storage.redis.items import item_writer
from storage.redis.scripts.items import PUT_ITEMS, READ_ITEM_PROPERTIES
from storage.redis.store import RedisStore
from tests.storage.oracles.properties import PATCHES, PROPERTIES
from tests.storage.oracles.random_events import fresh_user
from tests.storage.redis.overtaken import BetweenCalls, overtake
from tests.storage.redis.servers import RedisServer
from tests.storage.redis.stores import opened

Values: TypeAlias = dict[str, Mapping[str, PropertyValue | None]]
Patch: TypeAlias = tuple[str, Mapping[str, PropertyValue | None]]
REMOVED = st.sampled_from(sorted(PROPERTIES))
PATCH_OF = st.tuples(st.sampled_from(["tea", "cup", "pot"]), PATCHES)
STEPS = st.lists(st.lists(PATCH_OF, min_size=1, max_size=4) | REMOVED, max_size=6)


@pytest.fixture
def every_put_reads_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_writer, "FEW_PROPERTIES", 0)


@pytest.fixture(params=["read first", "read first, in steps", "in steps"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "read first" in request.param:
        monkeypatch.setattr(item_writer, "FEW_PROPERTIES", 0)
    if "in steps" in request.param:
        monkeypatch.setattr(item_writer, "MERGED_BYTES", 2)


async def properties(store: RedisStore, tenant: str = "main") -> Values:
    changes = await store.item_changes(tenant, 0, 1000)
    return {one.item_id: one.properties for one in changes.entries if isinstance(one, ItemEntry)}


def with_patches(values: Values, patches: Sequence[Patch]) -> Values:
    """The oracle: sequential patches."""
    for item_id, patch in patches:
        own = {**values.get(item_id, {}), **patch}
        values = {**values, item_id: {name: value for name, value in own.items() if value is not None}}
    return values


@pytest.mark.usefixtures("way")
@given(STEPS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equal_sequential_patches(server: RedisServer, steps: list[list[Patch] | str]) -> None:
    async def law() -> None:
        tenant, expected = fresh_user(), Values()
        async with opened(server.url) as store:
            for step in steps:
                if isinstance(step, str):
                    await store.properties.declare(tenant, {"item": {step: None}, "user": {}})
                    expected = {of: {k: v for k, v in own.items() if k != step} for of, own in expected.items()}
                else:
                    await store.put_items(tenant, [ItemEntry(of, properties=patch) for of, patch in step])
                    expected = with_patches(expected, step)
                assert await properties(store, tenant) == expected

    asyncio.run(law())


@pytest.mark.usefixtures("every_put_reads_first")
@pytest.mark.parametrize("removed", [False, True])
def test_keep_concurrent_changes_of_another_process(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, *, removed: bool
) -> None:
    async def law() -> None:
        async with opened(server.url) as store, opened(server.url) as other:
            await store.put_items("main", [ItemEntry("tea", properties={"price": 1.0, "brand": "Ada"})])
            between: list[str] = []

            async def work() -> None:
                between.append("now")
                if removed:
                    await other.properties.declare("main", {"item": {"brand": None}, "user": {}})
                else:
                    await other.put_items("main", [ItemEntry("tea", properties={"brand": "Bob", "size": "L"})])

            overtake(monkeypatch, PUT_ITEMS.sha, work)
            monkeypatch.setattr(item_writer, "FEW_PROPERTIES", 0)
            await store.put_items("main", [ItemEntry("tea", properties={"price": 2.0})])
            assert between == ["now"]
            expected = {"price": 2.0} if removed else {"price": 2.0, "brand": "Bob", "size": "L"}
            assert await properties(other) == {"tea": expected}

    asyncio.run(law())


@pytest.mark.usefixtures("every_put_reads_first")
def test_are_all_set_even_if_only_some_could_be_read(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def law() -> None:
        async with opened(server.url) as store:
            first: list[Patch] = [(f"item-{n}", {"brand": "x" * 100}) for n in range(20)]
            second: list[Patch] = [(item_id, {"price": 1.0}) for item_id, _ in first]
            monkeypatch.setattr(item_writer, "READ_BYTES", 1_000)
            for patches in (first, second):
                await store.put_items("main", [ItemEntry(of, properties=patch) for of, patch in patches])
            monkeypatch.undo()
            assert await properties(store) == with_patches({}, [*first, *second])

    asyncio.run(law())


def test_are_read_first_only_if_many(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def law() -> None:
        async with opened(server.url) as store:
            reads: list[str] = []

            async def note() -> None:
                reads.append("read")

            overtake(monkeypatch, READ_ITEM_PROPERTIES.sha, note)
            for few in (1, 0):
                monkeypatch.setattr(item_writer, "FEW_PROPERTIES", few)
                await store.put_items("main", [ItemEntry("tea", properties={"price": 1.0})])
                assert reads == ["read"] * (1 - few)

    asyncio.run(law())


def test_are_merged_in_steps_that_let_others_run(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def law() -> None:
        tenant = fresh_user()
        async with opened(server.url) as store, opened(server.url) as other:
            long: list[Patch] = [(f"item-{n}", {"text": "x" * 900, "size": "L"}) for n in range(12)]
            short: list[Patch] = [(item_id, {"price": 1.0}) for item_id, _ in long]
            await store.put_items(tenant, [ItemEntry(of, properties=patch) for of, patch in long])
            seen: list[int] = []

            async def look() -> None:
                seen.append(sum("price" in own for own in (await properties(other, tenant)).values()))

            monkeypatch.setattr(item_writer, "MERGED_BYTES", 2_000)
            with BetweenCalls(store, look):
                await store.put_items(tenant, [ItemEntry(of, properties=patch) for of, patch in short])
            assert sorted(set(seen)) == [0, 3, 6, 9]
            assert await properties(other, tenant) == with_patches({}, [*long, *short])

    asyncio.run(law())


def test_refuse_invalid_values_before_any_step(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def law() -> None:
        tenant = fresh_user()
        async with opened(server.url) as store:
            first: list[Patch] = [(f"item-{n}", {"size": "L"}) for n in range(3)]
            await store.put_items(tenant, [ItemEntry(of, properties=patch) for of, patch in first])
            monkeypatch.setattr(item_writer, "MERGED_BYTES", 2)
            wrong = [{"price": 1.0}, {"price": 1.0}, {"size": 1.0}]
            with pytest.raises(PropertyRefused):
                await store.put_items(tenant, [ItemEntry(f"item-{n}", properties=wrong[n]) for n in range(3)])
            assert await properties(store, tenant) == with_patches({}, first)

    asyncio.run(law())


@contextmanager
def work_after(step: int, work: Callable[[], Awaitable[object]], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Merge one item at a time, and run the action after this many steps."""
    send, calls = RedisServers.send, count()

    async def send_after(servers: RedisServers, commands: Sequence[Command], **options: Any) -> list[Any]:
        if any(PUT_ITEMS.sha in command.args[:2] for command in commands) and next(calls) == step:
            await work()
        return await send(servers, commands, **options)

    with monkeypatch.context() as patches:
        patches.setattr(item_writer, "MERGED_BYTES", 2)
        patches.setattr(RedisServers, "send", send_after)
        yield
    assert next(calls) > step


def test_repeat_if_others_change_them_between_steps(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def law() -> None:
        tenant = fresh_user()
        async with opened(server.url) as store, opened(server.url) as other:
            items = [ItemEntry(f"item-{n}", properties={"size": "L"}) for n in range(3)]
            await store.put_items(tenant, items)
            vectors = [*items, ItemEntry("tea", vector=encode([1.0, 2.0]))]
            size: TypeChanges = {"item": {"size": None}}
            again: TypeChanges = {"item": {"size": "number"}}

            async def redeclare() -> None:
                await other.properties.declare(tenant, size)
                await other.properties.declare(tenant, again)

            with work_after(1, redeclare, monkeypatch), pytest.raises(StorageUnavailable, match="send all of them"):
                await store.put_items(tenant, items)
            with pytest.raises(PropertyRefused):
                await store.put_items(tenant, items)
            await other.properties.declare(tenant, size)
            put = partial(other.put_items, tenant, [ItemEntry("cup", vector=encode([1.0, 2.0, 3.0]))])
            with work_after(1, put, monkeypatch), pytest.raises(StorageUnavailable, match="send all of them"):
                await store.put_items(tenant, vectors)
            with pytest.raises(VectorRefused):
                await store.put_items(tenant, vectors)

    asyncio.run(law())


def test_keep_removals_between_steps(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def law() -> None:
        tenant = fresh_user()
        async with opened(server.url) as store, opened(server.url) as other:
            items = [ItemEntry("item-0", properties={"size": "L"})]
            items += [ItemEntry(f"item-{n}", properties={"price": 1.0}) for n in (1, 2)]
            remove = partial(other.properties.declare, tenant, {"item": {"size": None}})
            with work_after(1, remove, monkeypatch):
                await store.put_items(tenant, items)
            assert (await store.properties.held(tenant)).types["item"] == {"price": "number"}
            assert await properties(store, tenant) == {"item-0": {}, "item-1": {"price": 1.0}, "item-2": {"price": 1.0}}

    asyncio.run(law())

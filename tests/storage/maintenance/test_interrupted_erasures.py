"""What is left in Redis of those who are erased, when an erasure or a merge is killed before any of its steps."""

from __future__ import annotations

import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from itertools import count
from typing import Any

import pytest

from storage.errors import StorageUnavailable
from storage.maintenance.tenants import erase_tenant
from storage.redis.connections.client import RedisServers
from storage.redis.connections.nodes import Command
from storage.redis.corrections import erasure
from storage.redis.layout.keys import Keyspace
from storage.redis.scripts.corrections import ERASE
from storage.redis.store import RedisStore
from tests.storage.oracles.random_events import click
from tests.storage.redis.overtaken import BetweenCalls, DyingAfter, OvertakenAt, servers_of
from tests.storage.redis.servers import RedisServer, new_server
from tests.storage.redis.stores import PREFIX, opened

MAX_STEPS = 200
MERGES = 120


@pytest.fixture
def server() -> Iterator[RedisServer]:
    server = new_server("redis-server", "--appendfsync", "no", "--rdbcompression", "no")
    yield server
    server.stop()


@asynccontextmanager
async def two_stores(server: RedisServer, partitions: int = 8) -> AsyncIterator[tuple[RedisStore, RedisStore]]:
    """The store of a process that is killed, and that of another one."""
    async with opened(server.url, partitions=partitions) as killed, opened(server.url, partitions=partitions) as other:
        yield killed, other


def traces(server: RedisServer, tenant: str) -> list[bytes]:
    """Whatever has one of the tenant's users, whose names begin with it, in its key, a field or its value."""
    found = [key + b" " + server.client.dump(key) for key in server.client.scan_iter()]
    return [one for one in found if f"{tenant}-".encode() in one]


def is_visible(server: RedisServer, tenant: str, name: str) -> bool:
    """Whether the user is still there, as a user or as another name of one."""
    return bool(server.client.keys(f"*:head:{tenant}/{tenant}-{name}"))


async def fill(store: RedisStore, tenant: str) -> None:
    """A user; two visitors who became the user, one of them with nothing but properties; one who became the first."""
    await store.append(tenant, [click("e", f"{tenant}-{name}") for name in ("user", "visitor", "earlier")])
    for name in ("user", "visitor", "earlier", "silent"):
        await store.properties.put_of_user(tenant, f"{tenant}-{name}", {"name": f"{tenant}-{name}"})
    for name, into in (("earlier", "visitor"), ("visitor", "user"), ("silent", "user")):
        await store.merge(tenant, f"{tenant}-{into}", f"{tenant}-{name}")


async def killed_at(step: int, store: RedisStore, work: Callable[[], Awaitable[object]]) -> bool:
    """Kill the work before that step; return whether it has so many."""
    with DyingAfter(store, step) as died, suppress(StorageUnavailable):
        await work()
    return bool(died)


@pytest.mark.parametrize("asked_for", ["user", "earlier"])
@pytest.mark.parametrize("goes_on", ["the same erasure", "another erasure", "erasure of the tenant"])
async def test_whoever_goes_on_after_a_killed_erasure_leaves_nothing(
    server: RedisServer, goes_on: str, asked_for: str
) -> None:
    async with two_stores(server, 1 if goes_on == "another erasure" else 8) as (killed, other):
        for step in range(MAX_STEPS):
            tenant = f"t{step}"
            await fill(other, tenant)
            has_died = await killed_at(step, killed, lambda: killed.erase(tenant, f"{tenant}-{asked_for}"))  # noqa: B023
            match goes_on:
                case "the same erasure":
                    await other.erase(tenant, f"{tenant}-{asked_for}")
                case "another erasure":
                    await other.erase(tenant, "nobody")
                case _:
                    await erase_tenant(other, tenant)
            if goes_on != "another erasure" or not is_visible(server, tenant, asked_for):
                assert traces(server, tenant) == [], step
            if not has_died:
                assert step > 10
                return
    raise AssertionError("there is no end to the steps")


@pytest.mark.parametrize("goes_on", ["the same erasure", "erasure of the tenant"])
async def test_a_merge_during_an_erasure_that_is_killed_then_leaves_nothing(server: RedisServer, goes_on: str) -> None:
    async with two_stores(server) as (killed, other):
        for step in range(MAX_STEPS):
            tenant = f"t{step}"
            user_id, newcomer = f"{tenant}-user", f"{tenant}-newcomer"
            await fill(other, tenant)
            await other.append(tenant, [click("e", newcomer)])
            with OvertakenAt(killed, step, lambda: other.merge(tenant, user_id, newcomer)) as overtaken:  # noqa: B023
                await killed_at(step + 1, killed, lambda: killed.erase(tenant, user_id))  # noqa: B023
            if not overtaken:
                assert step > 10
                return
            await overtaken.end()
            await (other.erase(tenant, user_id) if goes_on == "the same erasure" else erase_tenant(other, tenant))
            assert traces(server, tenant) == [], step
    raise AssertionError("there is no end to the steps")


@pytest.mark.parametrize("has_events", [True, False], ids=["", "the visitor has no events"])
async def test_nothing_is_left_of_a_killed_merge_by_erasing_its_tenant(server: RedisServer, has_events: bool) -> None:
    async with two_stores(server) as (killed, other):
        for step in range(MAX_STEPS):
            tenant = f"t{step}"
            user_id, visitor = f"{tenant}-user", f"{tenant}-visitor"
            await other.append(tenant, [click("e", visitor)] if has_events else [])
            has_died = await killed_at(step, killed, lambda: killed.merge(tenant, user_id, visitor))  # noqa: B023
            await erase_tenant(other, tenant)
            assert traces(server, tenant) == [], step
            if not has_died:
                assert step > 5
                return
    raise AssertionError("there is no end to the steps")


@pytest.mark.parametrize("erased", ["user", "visitor"])
async def test_a_merge_that_is_killed_after_an_erasure_leaves_no_alias(server: RedisServer, erased: str) -> None:
    """Unless there is a head, by which somebody goes on with the merge."""
    async with two_stores(server) as (killed, other):
        for step in range(MAX_STEPS):
            for later in range(1, 6):
                tenant = f"t{step}.{later}"
                user_id, visitor = f"{tenant}-user", f"{tenant}-visitor"
                await other.append(tenant, [click("e", user_id), click("e", visitor)])
                with OvertakenAt(killed, step, lambda: other.erase(tenant, f"{tenant}-{erased}")) as overtaken:  # noqa: B023
                    await killed_at(step + later, killed, lambda: killed.merge(tenant, user_id, visitor))  # noqa: B023
                if overtaken:
                    await overtaken.end()
                if not any(is_visible(server, tenant, name) for name in ("user", "visitor")):
                    assert traces(server, tenant) == [], (step, later)
            if not overtaken:
                assert step > 5
                return
    raise AssertionError("there is no end to the steps")


async def test_an_erasure_of_a_visitor_who_is_merged_meanwhile_erases_the_user_too(server: RedisServer) -> None:
    async with two_stores(server) as (slow, other):
        for step in range(MAX_STEPS):
            tenant = f"t{step}"
            user_id, visitor = f"{tenant}-user", f"{tenant}-visitor"
            await other.append(tenant, [click("e", user_id), click("e", visitor)])
            with OvertakenAt(slow, step, lambda: other.merge(tenant, user_id, visitor)) as overtaken:  # noqa: B023
                await slow.erase(tenant, visitor)
            if not overtaken:
                assert step > 5
                return
            await overtaken.end()
            left = [entry.record.user_id for entry in await other.events(tenant, user_id)]
            assert left in ([], [user_id])
            assert not left or not any(f"{visitor}/".encode() in one for one in traces(server, tenant))
            if not left and not is_visible(server, tenant, "visitor"):
                assert traces(server, tenant) == [], step
    raise AssertionError("there is no end to the steps")


async def test_a_long_chain_of_merges_is_erased_by_the_id_of_its_last_user(server: RedisServer) -> None:
    async with opened(server.url, partitions=8) as store:
        await store.append("t", [click("e", "t-0")])
        for number in range(MERGES):
            await store.merge("t", f"t-{number + 1}", f"t-{number}")
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(len(inspect.stack()) + MERGES)
        try:
            await store.erase("t", f"t-{MERGES}")
        finally:
            sys.setrecursionlimit(limit)
        assert traces(server, "t") == []


async def test_merges_during_an_erasure_do_not_repeat_what_it_has_done(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, send = Keyspace(PREFIX, 8), RedisServers.send

    async def reads_of_the_first_visitor(tenant: str, newcomers: int) -> int:
        user, visitor, reads = keys.user(tenant, f"{tenant}-user"), keys.user(tenant, f"{tenant}-visitor"), 0
        names = [f"{tenant}-{number}" for number in range(newcomers)]
        async with two_stores(server) as (slow, other):
            await other.append(tenant, [click("e", name) for name in [visitor.user_id, *names]])
            await other.merge(tenant, user.user_id, visitor.user_id)

            async def overtaken(servers: RedisServers, commands: Sequence[Command], **options: Any) -> list[Any]:
                nonlocal reads
                sent = [command.args for command in commands] if servers is servers_of(slow) else []
                reads += sent.count(("GET", visitor.head))
                if names and any(ERASE.sha in args and user.head in args for args in sent):
                    await other.merge(tenant, user.user_id, names.pop())
                return await send(servers, commands, **options)

            with monkeypatch.context() as patch:
                patch.setattr(RedisServers, "send", overtaken)
                await slow.erase(tenant, user.user_id)
            assert names == []
            assert traces(server, tenant) == []
            return reads

    assert await reads_of_the_first_visitor("t", 5) == await reads_of_the_first_visitor("u", 0) > 0


async def test_a_visitor_who_is_merged_again_before_the_user_is_hidden_is_found_after_a_kill(
    server: RedisServer,
) -> None:
    async with two_stores(server) as (killed, other):
        for later in range(MAX_STEPS):
            tenant = f"t{later}"
            user, send, merged = Keyspace(PREFIX, 8).user(tenant, f"{tenant}-user"), RedisServers.send, False
            await fill(other, tenant)

            async def merging(servers: RedisServers, commands: Sequence[Command], **options: Any) -> list[Any]:
                nonlocal merged
                is_next = servers is servers_of(killed) and any(ERASE.sha in command.args for command in commands)
                if not merged and is_next and any(user.head in command.args for command in commands):  # noqa: B023
                    merged = True
                    await other.append(tenant, [click("new", f"{tenant}-visitor")])  # noqa: B023
                    await other.merge(tenant, user.user_id, f"{tenant}-visitor")  # noqa: B023
                    died.enter_context(DyingAfter(killed, later))  # noqa: B023
                return await send(servers, commands, **options)  # noqa: B023

            with pytest.MonkeyPatch.context() as patch, ExitStack() as died, suppress(StorageUnavailable):
                patch.setattr(RedisServers, "send", merging)
                await killed.erase(tenant, user.user_id)
                assert merged
                assert later > 5
                return
            await other.erase(tenant, user.user_id)
            assert traces(server, tenant) == [], later
    raise AssertionError("there is no end to the steps")


async def test_an_erasure_gives_up_while_others_are_merged_into_the_user_without_end(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure, "RETRY_FOR_S", 0.1)
    newcomers = (f"t-{number}" for number in count())
    async with two_stores(server) as (slow, other):
        await fill(other, "t")
        merging = BetweenCalls(slow, lambda: other.merge("t", "t-user", next(newcomers)))
        with merging, pytest.raises(StorageUnavailable, match="concurrent writes"):
            await slow.erase("t", "t-user")
        await slow.erase("t", "t-user")
        assert traces(server, "t") == []

"""Calls on leased connections return what redis-py returns, despite connection failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from hashlib import sha1
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from storage.redis.connections import nodes as nodes_module
from storage.redis.connections.host_lookup import HostLookup
from storage.redis.connections.lean_calls import MAX_LEASED, PLAIN, LeanConnection, LeasedConnections
from storage.redis.connections.nodes import CONNECTION_ERRORS, Command, NodeClients, ReplicaAcks
from tests.storage.redis.servers import RedisServer
from tests.waiting import PATIENCE_S, until

KEYS = [f"key-{number}" for number in range(40)]
SCRIPT = "return {ARGV[1], {KEYS[1], 7}, redis.call('GET', KEYS[1])}"
SHA = sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()


@asynccontextmanager
async def clients(server: RedisServer, socket_timeout_s: float = PATIENCE_S) -> AsyncIterator[NodeClients]:
    nodes = NodeClients(PATIENCE_S, socket_timeout_s, ReplicaAcks())
    nodes.add(server.url)
    for number, key in enumerate(KEYS[::2]):
        await nodes.call(server.url, "SET", key, b"\x00value\r\n" * number)
    await nodes.call(server.url, "SCRIPT LOAD", SCRIPT)
    try:
        yield nodes
    finally:
        await nodes.close()


def run(law: Coroutine[Any, Any, None]) -> None:
    """Run on the event loop of the service."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(law)


async def turns() -> None:
    """Let a pending call make progress."""
    for _ in range(20):
        await asyncio.sleep(0)


def value_of(number: int) -> bytes | None:
    return None if number % 2 else b"\x00value\r\n" * (number // 2)


def test_each_call_gets_its_own_reply(any_server: RedisServer) -> None:
    async def law() -> None:
        async with clients(any_server) as nodes, Redis.from_url(any_server.url, protocol=2) as plain:
            calls: list[tuple[str | bytes | int, ...]] = [("MGET", *KEYS[n : n + 3]) for n in range(30)]
            calls += [("EVALSHA", SHA, 1, key, f"argument-{key}") for key in KEYS]
            assert {command for command, *_ in calls} == PLAIN
            found = await asyncio.gather(*(nodes.call(any_server.url, *call) for call in calls))
            assert found == [await plain.execute_command(*call) for call in calls]
            assert found[4] == [value_of(n) for n in (4, 5, 6)]

    run(law())


def test_no_command_whose_reply_the_client_rewrites_is_plain() -> None:
    assert PLAIN.isdisjoint(Redis(protocol=2).response_callbacks)


def test_an_error_reply_keeps_the_connection(any_server: RedisServer) -> None:
    async def law() -> None:
        async with clients(any_server) as nodes:
            await nodes.call(any_server.url, "MGET", *KEYS)
            before = nodes.connected(any_server.url)
            for _ in range(5):
                with pytest.raises(NoScriptError):
                    await nodes.call(any_server.url, "EVALSHA", "0" * 40, 0)
                with pytest.raises(ResponseError):
                    await nodes.call(any_server.url, "MGET")
            assert await nodes.call(any_server.url, "MGET", KEYS[4]) == [value_of(4)]
            assert nodes.connected(any_server.url) == before

    run(law())


def test_large_values_round_trip(any_server: RedisServer) -> None:
    async def law() -> None:
        async with clients(any_server) as nodes:
            large = bytes(range(256)) * (1 << 16)
            ((argument, *_),) = await asyncio.gather(nodes.call(any_server.url, "EVALSHA", SHA, 1, KEYS[2], large))
            assert argument == large

    run(law())


def test_a_large_write_to_a_server_that_hangs_ends_after_the_timeout(any_server: RedisServer) -> None:
    async def law() -> None:
        pool = BlockingConnectionPool.from_url(any_server.url, protocol=2, client_name="large")
        pool.connection_class = type("LeanConnection", (LeanConnection, Connection), {"lookup": HostLookup()})
        connection = await pool.get_connection()
        any_server.freeze()
        try:
            connection.socket_timeout = 0.1
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(RedisTimeoutError, match="writing"):
                    await connection.send_command("EVALSHA", SHA, 1, KEYS[2], bytes(50 << 20))
        finally:
            any_server.thaw()
        assert not connection.is_connected
        await until(lambda: all(one["name"] != "large" for one in any_server.client.client_list()))

    run(law())


def test_failed_connects_hold_no_connection(tmp_path: Path) -> None:
    async def law() -> None:
        leased = LeasedConnections(BlockingConnectionPool.from_url(f"unix://{tmp_path}/nobody"))
        for _ in range(MAX_LEASED + 1):
            assert leased.takes("MGET")
            with pytest.raises(RedisConnectionError):
                await leased.call("MGET", KEYS[4])

    run(law())


def test_a_connection_in_use_is_reconnected_after_its_reply(any_server: RedisServer) -> None:
    async def law() -> None:
        async with clients(any_server) as nodes:
            await nodes.call(any_server.url, "MGET", KEYS[6])
            connected = nodes.connected(any_server.url)
            any_server.freeze()
            in_use = asyncio.create_task(nodes.call(any_server.url, "MGET", KEYS[6]))
            await asyncio.sleep(0)
            await nodes.reconnect(any_server.url)
            any_server.thaw()
            assert await in_use == [value_of(6)]
            assert nodes.connected(any_server.url) == connected
            assert await nodes.call(any_server.url, "MGET", KEYS[6]) == [value_of(6)]
            assert nodes.connected(any_server.url) == connected + 1

    run(law())


def test_no_call_gets_a_closing_connection(any_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "RECONNECT_EVERY_S", 0.0)

    async def law() -> None:
        async with clients(any_server) as nodes:

            async def reads() -> None:
                for _ in range(100):
                    replies: list[Any] = [None, None]
                    await nodes.send({any_server.url: [0, 1]}, [Command.of("GET", "nothing")] * 2, replies)
                    assert replies == [None, None]

            reading = [asyncio.create_task(reads()) for _ in range(8)]
            while not all(task.done() for task in reading):
                await nodes.reconnect(any_server.url)
                await asyncio.sleep(0)
            await asyncio.gather(*reading)

    run(law())


def test_closed_connections_are_reopened(any_server: RedisServer) -> None:
    async def law() -> None:
        async with clients(any_server) as nodes:

            async def answers() -> bool:
                try:
                    return bool(await nodes.call(any_server.url, "MGET", KEYS[6]) == [value_of(6)])
                except CONNECTION_ERRORS:  # the connection's end was not there yet
                    return False

            for _ in range(3):
                await asyncio.gather(*(nodes.call(any_server.url, "MGET", *KEYS) for _ in range(4)))
                any_server.client.execute_command("CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "YES")
                await until(answers)

    run(law())


def test_a_cancelled_call_leaves_no_reply_for_others(any_server: RedisServer) -> None:
    async def law() -> None:
        async with clients(any_server) as nodes:
            for _ in range(4):
                any_server.freeze()
                cancelled = asyncio.ensure_future(nodes.call(any_server.url, "MGET", KEYS[8]))
                await turns()
                cancelled.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await cancelled
                any_server.thaw()
                assert await nodes.call(any_server.url, "MGET", KEYS[10]) == [value_of(10)]

    run(law())


@pytest.mark.parametrize("command", ["MGET", "GET"])
def test_a_call_cancelled_during_release_holds_no_connection(any_server: RedisServer, command: str) -> None:
    async def law() -> None:
        async with clients(any_server) as nodes:
            pool: Any = nodes._nodes[any_server.url].client.connection_pool  # noqa: SLF001
            await nodes.call(any_server.url, command, KEYS[8])
            any_server.freeze()
            cancelled = asyncio.ensure_future(nodes.call(any_server.url, command, KEYS[8]))
            await turns()
            async with pool._condition:  # noqa: SLF001 - as another call that returns or takes one
                for _ in range(2):
                    cancelled.cancel()
                    await turns()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            any_server.thaw()
            assert not pool._in_use_connections  # noqa: SLF001

    run(law())


def test_wrappers_of_the_client_see_every_call(any_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like OpenTelemetry, with a callable that is no function."""
    seen: list[str] = []
    plain: Any = Redis.execute_command

    class Wrapper:
        def __get__(self, client: Redis, _owner: type[Redis]) -> Any:
            async def traced(*args: Any, **options: Any) -> Any:
                seen.append(args[0])
                return await plain(client, *args, **options)

            return traced if client is not None else self

    monkeypatch.setattr(Redis, "execute_command", Wrapper())

    async def law() -> None:
        async with clients(any_server) as nodes:
            assert await nodes.call(any_server.url, "MGET", KEYS[4]) == [value_of(4)]
            assert seen[-1] == "MGET"

    run(law())


def test_other_commands_use_the_client(any_server: RedisServer) -> None:
    async def law() -> None:
        pool = BlockingConnectionPool.from_url(any_server.url)
        assert not LeasedConnections(pool).takes("HGETALL")
        assert LeasedConnections(pool).takes("MGET")
        await pool.disconnect()

    run(law())

"""Connecting to a server whose name has several addresses, of which some do not answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import uvloop

from storage.errors import StorageUnavailable
from storage.redis.connections.client import RedisServers
from storage.redis.connections.lean_calls import NEXT_ADDRESS_AFTER_S
from storage.redis.connections.nodes import ReplicaAcks
from tests.storage.redis.servers import RedisServer
from tests.waiting import PATIENCE_S, until

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
NAME = "redis.example"
NO_ACKS = ReplicaAcks()


@pytest.fixture
def refusing() -> Iterator[tuple[str, int]]:
    """An address whose host refuses connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """An address that does not answer: as on a host that is down, no attempt to connect ends."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        while True:
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0.2)
            try:
                waiting.connect(full.getsockname())
            except TimeoutError:
                break
        yield full.getsockname()


def run(
    law: Coroutine[Any, Any, None], new_loop: Callable[[], Any], *addresses: tuple[str, int], lookup_s: float = 0
) -> None:
    """Run on such an event loop, on which NAME has these addresses, found after some time."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", address) for address in addresses]

    with asyncio.Runner(loop_factory=new_loop) as runner, pytest.MonkeyPatch.context() as patch:
        loop = type(runner.get_loop())
        resolve = loop.getaddrinfo

        async def getaddrinfo(own_loop: Any, host: str, *args: Any, **options: Any) -> Any:
            if host != NAME:
                return await resolve(own_loop, host, *args, **options)
            await asyncio.sleep(lookup_s)
            return found

        patch.setattr(loop, "getaddrinfo", getaddrinfo)
        runner.run(law)


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("others", [["refusing"], ["silent"], ["silent", "refusing", "silent"]], ids=str)
def test_the_first_address_that_answers_is_used(
    any_server: RedisServer, request: pytest.FixtureRequest, others: list[str], new_loop: Callable[[], Any]
) -> None:
    async def law() -> None:
        servers = RedisServers(f"{url}@{NAME}", connect_timeout_s=PATIENCE_S, socket_timeout_s=PATIENCE_S, acks=NO_ACKS)
        await servers.connect()
        assert await servers.call("GET", "key") is None
        await servers.close()

    url = any_server.url.rpartition("@")[0]
    dead = [request.getfixturevalue(name) for name in others]
    run(law(), new_loop, *dead, ("127.0.0.1", any_server.port))


@pytest.mark.parametrize("new_loop", LOOPS)
def test_an_address_that_does_not_answer_costs_a_quarter_of_a_second(
    silent: tuple[str, int], any_server: RedisServer, new_loop: Callable[[], Any]
) -> None:
    async def law() -> None:
        servers = RedisServers(f"{url}@{NAME}", connect_timeout_s=PATIENCE_S, socket_timeout_s=PATIENCE_S, acks=NO_ACKS)
        begin_s = asyncio.get_running_loop().time()
        await servers.connect()
        assert asyncio.get_running_loop().time() - begin_s >= NEXT_ADDRESS_AFTER_S
        await servers.close()

    url = any_server.url.rpartition("@")[0]
    run(law(), new_loop, silent, ("127.0.0.1", any_server.port))


@pytest.mark.parametrize("new_loop", LOOPS)
def test_without_an_address_that_answers_the_connection_times_out_or_is_refused(
    silent: tuple[str, int], refusing: tuple[str, int], new_loop: Callable[[], Any]
) -> None:
    async def law(cause: str) -> None:
        servers = RedisServers(f"redis://{NAME}", connect_timeout_s=0.6, socket_timeout_s=PATIENCE_S, acks=NO_ACKS)
        with pytest.raises(StorageUnavailable) as failed:
            await servers.connect()
        assert failed.value.failure_cause == cause
        await servers.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(law("timeout"), new_loop, silent, refusing, silent)
    run(law("unreachable"), new_loop, refusing, refusing)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_lookup_may_take_longer_than_a_connection(any_server: RedisServer, new_loop: Callable[[], Any]) -> None:
    """As it does while the first of several name servers is down."""

    async def law() -> None:
        servers = RedisServers(f"{url}@{NAME}", connect_timeout_s=0.2, socket_timeout_s=PATIENCE_S, acks=NO_ACKS)
        with pytest.raises(StorageUnavailable, match="Timeout connecting"):
            await servers.connect()

        async def is_connected() -> bool:
            with suppress(StorageUnavailable):
                await servers.connect()
                return True
            return False

        await until(is_connected)
        await servers.close()

    url = any_server.url.rpartition("@")[0]
    run(law(), new_loop, ("127.0.0.1", any_server.port), lookup_s=0.9)

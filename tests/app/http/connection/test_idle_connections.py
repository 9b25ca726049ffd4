"""Idle connections: how long they stay, what they keep in memory, and how processes share new ones."""

from __future__ import annotations

import asyncio
import gc
import time
from types import SimpleNamespace
from typing import Any

import pytest

from app.http import protocol
from app.http.middleware.plain_cycle import PlainCycle
from app.http.middleware.plain_requests import PlainRequest
from tests.app.conftest import Client
from tests.app.http.middleware.server import Server, post, read_answer, request
from tests.waiting import PATIENCE_S, until

PATH = "/v1/users/{}/recommendations"


@pytest.fixture(scope="module")
def known(shared_client: Client) -> Client:
    shared_client.click("ada", "item-1", "item-2", "item-9")
    return shared_client


@pytest.mark.parametrize("path", [PATH.format("ada"), "/healthz"])
def test_a_long_idle_connection_is_closed(known: Client, path: str) -> None:
    async def ask_twice_and_wait() -> None:
        async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
            for _ in range(2):
                writer.write(request(path))
                await until(lambda: server.state.connections)
                connection: Any = next(iter(server.state.connections))
                connection.keep_alive.check()  # the timer, before the request or while it is answered
                assert (await read_answer(reader))[0] == 200
                connection.keep_alive.check()  # too early
            connection.keep_alive.timeout_s = 0
            connection.keep_alive.check()
            assert await reader.read() == b""

    server = Server(known)
    known.runner.run(ask_twice_and_wait())
    assert server.state.total_requests == 2


def test_an_idle_connection_closes_without_other_traffic(known: Client) -> None:
    async def ask_and_wait() -> None:
        async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
            writer.write(request(PATH.format("ada")))
            assert (await read_answer(reader))[0] == 200
            assert await reader.read() == b""

    server = Server(known)  # with the server's time-out of 5 s
    known.runner.run(ask_and_wait())


def test_a_body_that_comes_after_the_response_does_not_keep_a_connection_open(known: Client) -> None:
    async def answer_early() -> bytes:
        async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
            writer.write(request("/nothing-here", "Content-Length: 4"))
            assert (await read_answer(reader))[0] == 404
            connection: Any = next(iter(server.state.connections))
            connection.keep_alive.timeout_s = 0.001
            writer.write(b"late")
            return await reader.read()

    server = Server(known)
    assert known.runner.run(answer_early()) == b""


def test_an_answered_request_creates_no_reference_cycles(known: Client) -> None:
    async def ask() -> None:
        async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
            for _ in range(20):
                writer.write(request(PATH.format("ada")))
                await read_answer(reader)

    server = Server(known)
    known.runner.run(ask())
    gc.collect()
    gc.disable()
    try:
        known.runner.run(ask())
        kept = [type(one).__name__ for one in gc.get_objects() if isinstance(one, PlainCycle | PlainRequest)]
    finally:
        gc.enable()
    assert len(kept) <= 2  # of the last request


def test_processes_yield_to_each_other_before_accepting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the process that is awake would accept all connections of a client."""
    slept: list[float] = []
    monkeypatch.setattr(protocol, "LimitedHttpProtocol", lambda **_: None)
    monkeypatch.setattr(time, "sleep", slept.append)
    for workers in (1, 2):
        services = SimpleNamespace(tls=None, settings=SimpleNamespace(workers=workers))
        protocol.new_connection(app_state={"services": services})
        assert len(slept) == workers - 1
    assert 0 < slept[0] < 1e-3


def test_a_connection_with_a_pending_response_is_not_closed_to_make_room(
    known: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, owed = asyncio.Event(), asyncio.Event()
    append, room = known.service.store.append, known.services.idle_connections

    async def append_later(*arguments: Any, **options: Any) -> Any:
        begun.set()
        await owed.wait()
        return await append(*arguments, **options)

    async def law() -> None:
        async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
            writer.write(whole[:-1])
            await until(lambda: room.late)
            writer.write(whole[-1:])  # late, but here
            await begun.wait()
            assert not room.idle
            assert not room.late
            writer.write(whole[:-1])  # the next one waits for that response
            (connection,) = server.state.connections
            assert isinstance(connection, protocol.LimitedHttpProtocol)
            await until(lambda: connection.pipeline)
            assert not room.late
            owed.set()
            await read_answer(reader)
            await until(lambda: room.late)
            writer.write(whole[-1:])
            await read_answer(reader)
            assert room.idle
            assert not room.late

    monkeypatch.setattr(known.service.store, "append", append_later)
    server, whole = Server(known), post({"user_id": "ada", "item_id": "item-1"})
    known.runner.run(law())

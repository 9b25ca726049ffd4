"""Processes that listen on one socket take its connections in turns, and survive what keeps them from accepting."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from typing_extensions import override

from app.http.connection import shared_listener
from app.http.connection.shared_listener import SharedListener, new_loop
from tests.waiting import PATIENCE_S, until

CONNECTIONS = 12


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        yield runner


class Greeter(asyncio.Protocol):
    def __init__(self, name: str, taken: Counter[str]) -> None:
        self.name, self.taken = name, taken

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.taken[self.name] += 1
        transport.write(self.name.encode())
        transport.close()


async def serve(listener: socket.socket, name: str, taken: Counter[str]) -> SharedListener:
    loop = asyncio.get_running_loop()
    server: Any = await loop.create_server(partial(Greeter, name, taken), sock=listener, backlog=CONNECTIONS)
    assert isinstance(server, SharedListener)
    return server


def test_waiting_connections_are_shared(runner: asyncio.Runner) -> None:
    taken = Counter[str]()

    async def open_many() -> set[bytes]:
        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=CONNECTIONS))
            clients = [
                stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(CONNECTIONS)
            ]
            servers = [await serve(stack.enter_context(listener.dup()), name, taken) for name in ("one", "two")]
            await until(lambda: taken.total() == CONNECTIONS)
            for server in servers:
                server.close()
                await server.wait_closed()
            loop = asyncio.get_running_loop()
            for client in clients:
                client.setblocking(False)
            return {await loop.sock_recv(client, 9) for client in clients}

    assert runner.run(asyncio.wait_for(open_many(), PATIENCE_S)) == {b"one", b"two"}
    assert taken == {"one": CONNECTIONS / 2, "two": CONNECTIONS / 2}


@pytest.mark.parametrize("failure", [errno.EMFILE, errno.ECONNABORTED])
def test_it_accepts_again_after_a_failure(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: int
) -> None:
    monkeypatch.setattr(shared_listener, "RETRY_S", 0.001)
    taken = Counter[str]()

    class Failing(socket.socket):
        failures = 2

        @override
        def accept(self) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError(failure, "no")
            return super().accept()

    async def open_one() -> None:
        with Failing(socket.AF_INET) as listener:
            listener.bind(("127.0.0.1", 0))
            server = await serve(listener, "one", taken)
            _, writer = await asyncio.open_connection(*listener.getsockname())
            await until(lambda: taken.total() == 1)
            writer.close()
            server.close()

    runner.run(asyncio.wait_for(open_one(), PATIENCE_S))
    assert ("cannot accept a connection" in caplog.text) == (failure == errno.EMFILE)


def test_without_a_socket_it_listens_as_any_loop(runner: asyncio.Runner) -> None:
    async def listen() -> None:
        loop = asyncio.get_running_loop()
        async with await loop.create_server(asyncio.Protocol, "127.0.0.1", 0) as server:
            assert server.is_serving()

    runner.run(listen())

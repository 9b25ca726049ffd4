"""The circuit breaker: after a timeout calls fail fast until a probe succeeds; idle servers are not probed."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from itertools import pairwise

import pytest

import storage.redis.connections.circuit_breaker
from storage.redis.connections.circuit_breaker import CircuitBreaker
from storage.redis.connections.nodes import address

REQUEST: ContextVar[str | None] = ContextVar("REQUEST", default=None)


class Server:
    """A server for probes, which responds when released."""

    def __init__(self, *, fails: bool = False) -> None:
        self.probed_at_s: list[float] = []
        self.requests: list[str | None] = []  # of each probe
        self.answers = asyncio.Event()
        self.fails = fails
        self.circuit = CircuitBreaker("the server", self._probe)

    async def _probe(self) -> None:
        self.probed_at_s.append(asyncio.get_running_loop().time())
        self.requests.append(REQUEST.get())
        if self.fails:
            raise ConnectionError
        await self.answers.wait()

    @property
    def probes(self) -> int:
        return len(self.probed_at_s)

    def is_open(self) -> bool:
        return not self.circuit.allows_call()


async def test_calls_fail_fast_after_a_timeout_until_a_probe_succeeds() -> None:
    server = Server()
    assert not server.is_open()
    server.circuit.open()
    server.circuit.open()
    await asyncio.sleep(0)
    assert server.probes == 0  # nobody has asked
    for _ in range(5):
        assert server.is_open()
        await asyncio.sleep(0)
    assert server.probes == 1
    server.answers.set()
    while server.is_open():
        await asyncio.sleep(0)
    assert server.probes == 1
    server.circuit.require_closed()
    server.circuit.open()
    with pytest.raises(TimeoutError, match="the server has not responded since a timeout"):
        server.circuit.require_closed()
    await server.circuit.close()


async def test_a_failed_probe_is_repeated_with_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.redis.connections.circuit_breaker, "PROBE_EVERY_S", 0.05)
    server = Server(fails=True)
    server.circuit.open()
    while server.probes < 3:
        assert server.is_open()
        await asyncio.sleep(0.001)
    assert min(later_s - earlier_s for earlier_s, later_s in pairwise(server.probed_at_s)) > 0.04
    server.fails = False
    server.answers.set()
    while server.is_open():
        await asyncio.sleep(0.001)


async def test_a_probe_is_independent_of_the_request_that_triggers_it() -> None:
    """Otherwise its trace and logs would belong to one arbitrary request."""
    server = Server()
    server.circuit.open()
    REQUEST.set("the first")
    assert server.is_open()
    await asyncio.sleep(0)
    assert server.requests == [None]
    await server.circuit.close()


async def test_closing_ends_a_hung_probe() -> None:
    server = Server()
    server.circuit.open()
    assert server.is_open()
    await asyncio.sleep(0)
    await server.circuit.close()
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://lisarec:secret@redis:6380/0", "redis:6380"),
        ("rediss://:secret@redis", "redis:6379"),
        ("redis://lisarec:secret@[fd00::1]:6380", "[fd00::1]:6380"),
        ("unix://lisarec:secret@/run/redis.sock", "/run/redis.sock"),
    ],
)
def test_messages_name_a_server_without_its_password(url: str, shown: str) -> None:
    assert address(url) == shown

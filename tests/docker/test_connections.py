"""Many connections, bursts and idle ones, through HAProxy and two replicas."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from benchmarks.harness.topology import Topology, topology
from tests.waiting import PATIENCE_S

BURST = 990
MAX_PER_SOURCE = 1_000  # the default of LISAREC_MAX_CONNECTIONS_PER_SOURCE
OPEN_FILES = 4_096
REQUEST = b"GET /v1/users/ada/recommendations HTTP/1.1\r\nHost: service\r\n\r\n"


@pytest.fixture(scope="module")
def running(model_dir: Path) -> Iterator[Topology]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        pytest.skip(f"a process may open no more than {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, OPEN_FILES), hard))
    try:
        with topology(model_dir, 2, redis=False) as running:
            yield running
    except FileNotFoundError as exc:  # CI turns this into a failure
        pytest.skip(str(exc))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def address(running: Topology) -> tuple[str, int]:
    host, port = running.url.removeprefix("http://").split(":")
    return host, int(port)


def connect(running: Topology, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(address(running), timeout=PATIENCE_S, source_address=(source, 0))


def status(connection: socket.socket) -> int:
    """Status of the response; 0 if the connection ends without one."""
    try:
        head = connection.recv(65_536)
    except ConnectionError:
        return 0
    return int(head.split(b" ")[1]) if head else 0


def test_a_burst_of_connections_takes_no_replica_out_of_rotation(running: Topology) -> None:
    log = running.balancer_log()  # replicas were down before they were ready
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(running)) for _ in range(BURST)]
        begin_s = time.monotonic()
        for connection in connections:
            connection.sendall(REQUEST)
        statuses = Counter(map(status, connections))
        print(f"{statuses} within {time.monotonic() - begin_s:.2f} s; {running.resent()} sent again")
    assert statuses == {200: BURST}
    assert "DOWN" not in running.balancer_log()[len(log) :]


def test_idle_connections_of_one_source_do_not_block_others(running: Topology) -> None:
    log = running.balancer_log()
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(running, "127.0.0.2")) for _ in range(MAX_PER_SOURCE)]
        for connection in idle[::2]:  # the others send nothing, not even now
            connection.sendall(REQUEST)
        assert Counter(map(status, idle[::2])) == {200: MAX_PER_SOURCE // 2}
        begin_s = time.monotonic()
        answers = [httpx.get(f"{running.url}/v1/items/popular", timeout=PATIENCE_S).status_code for _ in range(50)]
        seconds = time.monotonic() - begin_s
        print(f"50 others were answered within {seconds:.2f} s")
        assert set(answers) == {200}
        with suppress(ConnectionError):  # refused while it connects, or right after
            assert status(stack.enter_context(connect(running, "127.0.0.2"))) == 0
    assert "DOWN" not in running.balancer_log()[len(log) :]


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
@pytest.mark.parametrize("is_declared", [True, False])
def test_a_client_that_reads_only_after_sending_gets_the_413(
    running: Topology, is_declared: bool, connection: str
) -> None:
    for _ in range(10):
        client = http.client.HTTPConnection(*address(running), timeout=PATIENCE_S)
        chunks = [b" " * 65_536] * 128
        body = b"".join(chunks) if is_declared else iter(chunks)
        client.request("POST", "/v1/events", body, {"Connection": connection})
        answer = client.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (413, "body_too_large")
        client.close()

"""Limits of connections: memory and time of each, the number of idle ones, and the delivery of refusals."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest

from app.http.auth.keys import add, make
from app.http.protocol import MAX_HEADERS, MAX_PIPELINED
from tests.app.service_process import Process
from tests.app.support import bearer
from tests.waiting import PATIENCE_S

MOST_SENT_BYTES = 200 << 20  # what an attacker tries to send
MOST_GROWTH_BYTES = 64 << 20
MAX_CONNECTIONS = 100
CHUNKED = b"POST /v1/events HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
OPEN_CHUNKED = b"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    text, key = make("main", ["events:write", "recs:read"])
    file = tmp_path_factory.mktemp("keys") / "keys"
    add(file, key)
    return text, file


@pytest.fixture(scope="module")
def server(model_dir: Path, key: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    directory = tmp_path_factory.mktemp("connections")
    process = Process(
        directory / "log",
        model_dir=model_dir,
        data_dir=directory,
        keys_file=key[1],
        max_open_connections=MAX_CONNECTIONS,
    )
    process.wait_until_ready()
    yield process
    process.kill()
    assert "Traceback" not in process.log()


class Attack(NamedTuple):
    """Bytes that a client sends first, bytes that it repeats, and the number of connections."""

    begin: bytes
    again: bytes
    connections: int = 1
    is_authorised: bool = False


def pipelined(request: bytes) -> bytes:
    return request * (65_536 // len(request))


ATTACKS = {
    "trailers": Attack(OPEN_CHUNKED + b"0\r\n", b"X-Y: zzzzzzzz\r\n" * 4_096),
    "a trailer without end": Attack(OPEN_CHUNKED + b"0\r\nX-Long: ", b"x" * 65_536),
    "a trailer's name without end": Attack(OPEN_CHUNKED + b"0\r\n", b"x" * 65_536),
    "trailers of a request at work": Attack(CHUNKED + b"0\r\n", b"X-Y: zzzzzzzz\r\n" * 4_096, is_authorised=True),
    "a chunk's extension": Attack(OPEN_CHUNKED + b"1;", b"x" * 65_536),
    "a body in small chunks": Attack(CHUNKED, b"1\r\n \r\n" * 10_000),
    "an authorised body in small chunks": Attack(CHUNKED, b"1\r\n \r\n" * 10_000, is_authorised=True),
    "a body that nobody reads": Attack(
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n", b"x" * 65_536
    ),
    "headers": Attack(b"GET /healthz HTTP/1.1\r\nHost: x\r\n", b"a:b\r\n" * 13_000),
    "empty lines": Attack(b"", b"\r\n" * 32_768),
    "pipelined requests": Attack(b"", pipelined(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"), 6),
    "pipelined requests of old": Attack(b"", pipelined(b"GET /healthz HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"), 6),
    "pipelined bodies": Attack(b"", pipelined(b"POST /v1/events HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx"), 6),
    "a pipelined body": Attack(
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 8
        + b"POST /v1/events HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n",
        b"x" * 65_536,
    ),
    "an upgrade": Attack(
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", b"x" * 65_536
    ),
}


def send_until_cut_off(address: tuple[str, int], attack: Attack, headers: bytes) -> bytes:
    """Send as fast as possible without reading; return the response if it still arrives."""
    begin = attack.begin.replace(b"\r\n", b"\r\n" + headers, 1) if headers else attack.begin
    with socket.create_connection(address, timeout=PATIENCE_S) as connection:
        give_up_at = time.monotonic() + PATIENCE_S
        sent = 0
        try:
            connection.sendall(begin)
            while sent < MOST_SENT_BYTES / attack.connections and time.monotonic() < give_up_at:
                connection.sendall(attack.again)
                sent += len(attack.again)
        except OSError:
            pass
        answer = b""
        try:
            connection.settimeout(1)
            while chunk := connection.recv(65_536):
                answer += chunk
        except OSError:
            pass
        return answer


class Peak(threading.Thread):
    """Records the peak memory of a process and the longest wait of another client."""

    def __init__(self, server: Process, key: str) -> None:
        super().__init__()
        self._process = psutil.Process(server.process.pid)
        self._client = httpx.Client(base_url=server.url, headers=bearer(key), timeout=PATIENCE_S)
        self._ends = threading.Event()
        self.before_bytes = self.most_bytes = self._process.memory_info().rss
        self.longest_s = 0.0
        self.statuses: set[int] = set()

    def run(self) -> None:
        while not self._ends.is_set():
            begin = time.monotonic()
            self.statuses.add(self._client.get("/v1/items/popular").status_code)
            self.longest_s = max(self.longest_s, time.monotonic() - begin)
            self.most_bytes = max(self.most_bytes, self._process.memory_info().rss)
            time.sleep(0.01)

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self.join()
        self._client.close()


@pytest.mark.parametrize("name", ATTACKS)
def test_a_connection_is_bounded_in_memory_and_time(server: Process, key: tuple[str, Path], name: str) -> None:
    attack = ATTACKS[name]
    headers = f"Authorization: Bearer {key[0]}\r\n".encode() if attack.is_authorised else b""
    httpx.get(f"{server.url}/v1/items/popular", headers=bearer(key[0]))  # what a first request allocates is there
    with Peak(server, key[0]) as peak, ThreadPoolExecutor() as attackers:
        attacks = [
            attackers.submit(send_until_cut_off, server.address, attack, headers) for _ in range(attack.connections)
        ]
        answers = [one.result() for one in attacks]
    growth = peak.most_bytes - peak.before_bytes
    print(f"{name}: {growth >> 20} MiB more, another client waited {peak.longest_s * 1e3:.0f} ms, {answers[0][-80:]!r}")
    assert growth < MOST_GROWTH_BYTES
    assert peak.statuses == {200}


@pytest.mark.parametrize("waiting", [MAX_PIPELINED, MAX_PIPELINED + 1])
def test_pipelined_requests_are_limited(server: Process, waiting: int) -> None:
    """While one request runs, all others are answered in order before the refusal."""
    targets = [f"/v1/model?n={n}" for n in range(1 + waiting)]
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        connection.sendall(b"".join(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for target in targets))
        answers = b""
        while answers.count(b"}}") <= waiting:
            chunk = connection.recv(65_536)
            assert chunk, answers
            answers += chunk
        found = re.findall(rb'HTTP/1.1 (\d+).*?"code":"(\w+)"', answers, re.DOTALL)
        statuses = [(int(status), code.decode()) for status, code in found]
        refused = [(400, "too_many_pipelined")] * (waiting - MAX_PIPELINED)
        assert statuses == [(401, "unauthenticated")] * (1 + MAX_PIPELINED) + refused
        if refused:
            assert connection.recv(1) == b""


@pytest.mark.parametrize("target", ["http://[", "http:///", "http://x:99999/"])
@pytest.mark.parametrize("before", [[], ["/healthz"], ["/v1/users/u/recommendations"]])
@pytest.mark.parametrize("at_once", [True, False])
def test_an_invalid_target_is_refused_after_pending_responses(
    server: Process, key: tuple[str, Path], target: str, before: list[str], at_once: bool
) -> None:
    *first, last = [
        f"GET {one} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key[0]}\r\n\r\n".encode() for one in (*before, target)
    ]
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        connection.sendall(b"".join([*first, last] if at_once else first))
        answers = b""
        if not at_once:
            answers += connection.recv(65_536) if first else b""
            connection.sendall(last)
        while chunk := connection.recv(65_536):
            answers += chunk
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200"] * len(before) + [b"400"]
    assert b'"not_http"' in answers


def test_the_number_of_headers_is_limited(server: Process) -> None:
    def status(headers: int) -> int:
        names = {f"x-{n}": "y" for n in range(headers)}
        with closing(http.client.HTTPConnection(*server.address, timeout=PATIENCE_S)) as connection:
            connection.request("GET", "/healthz", headers=names)  # beside Host and Accept-Encoding
            return connection.getresponse().status

    assert [status(MAX_HEADERS - 2), status(MAX_HEADERS - 1)] == [200, 431]


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
@pytest.mark.parametrize("is_declared", [True, False])
@pytest.mark.parametrize(("size", "with_key", "status"), [(30 * MEBIBYTE, True, 413), (MEBIBYTE, False, 401)])
def test_a_client_that_reads_only_after_sending_gets_the_refusal(
    server: Process, key: tuple[str, Path], size: int, with_key: bool, status: int, is_declared: bool, connection: str
) -> None:
    headers = {"Connection": connection, **(bearer(key[0]) if with_key else {})}
    for _ in range(10):
        client = http.client.HTTPConnection(*server.address, timeout=PATIENCE_S)
        chunks = [b" " * 65_536] * (size // 65_536)
        client.request("POST", "/v1/events", b"".join(chunks) if is_declared else iter(chunks), headers)
        answer = client.getresponse()
        assert (answer.status, set(json.loads(answer.read()))) == (status, {"error"})
        client.close()


@pytest.mark.parametrize("before", [0, 1, 2])
def test_idle_connections_do_not_lock_out_others(server: Process, key: tuple[str, Path], before: int) -> None:
    """Idle connections are closed for new ones; connections with late bodies only if no others are idle."""
    slow = b'{"user_id": "ada", "history": []}'
    head = f"POST /v1/recommendations HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key[0]}\r\n".encode()
    with ExitStack() as stack:

        def connect(begin: bytes) -> socket.socket:
            connection = stack.enter_context(socket.create_connection(server.address, timeout=PATIENCE_S))
            connection.sendall(begin)
            return connection

        answered = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * before
        at_work = connect(answered + head + b"Content-Length: %d\r\n\r\n" % len(slow))
        received = b""
        while received.count(b"}") < before:
            received += at_work.recv(65_536)
        assert received.count(b"HTTP/1.1 200") == before
        for _ in range(MAX_CONNECTIONS):
            for begin in (b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"):
                connect(begin)
        begin_s = time.monotonic()
        for _ in range(20):
            with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
                connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        print(f"20 others were answered within {time.monotonic() - begin_s:.3f} s")
        at_work.sendall(slow)
        assert at_work.recv(65_536).startswith(b"HTTP/1.1 422")


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_missing_bodies_do_not_lock_out_others(server: Process, key: tuple[str, Path], is_pipelined: bool) -> None:
    """Without idle connections, those with the latest bodies are closed; a body that arrives is answered."""
    body = b'{"user_id": "ada", "history": []}'
    head = f"POST /v1/recommendations HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key[0]}\r\n".encode()
    begun = head + b"Content-Length: %d\r\n\r\n" % len(body)
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS + 20):
            last = stack.enter_context(socket.create_connection(server.address, timeout=PATIENCE_S))
            last.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" + (begun if is_pipelined else b""))
            assert last.recv(65_536).startswith(b"HTTP/1.1 200")
            last.sendall(b"" if is_pipelined else begun)
        last.sendall(body)
        assert last.recv(65_536).startswith(b"HTTP/1.1 422")

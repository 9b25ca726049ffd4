"""Slow clients and overload: slow clients are disconnected, excess requests refused, and others served."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from app.http.auth.keys import add, make, remove
from benchmarks.harness.service_process import fetch
from tests.app.conftest import item_id
from tests.app.service_process import ROOT, Process, raw_exchange
from tests.app.support import assert_refused, bearer
from tests.waiting import PATIENCE_S, wait_until

TRICKLE_S = 0.1
MAX_REQUESTS = 3
MAX_CONNECTIONS = 60
MAX_HEAD_BYTES = 8_192
LARGE = json.dumps({"requests": [{"history": [item_id(1)], "k": 60}] * 100}).encode()  # its answer has some 400 kB


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    directory = tmp_path_factory.mktemp("limits")
    process = Process(
        directory / "log",
        model_dir=model_dir,
        data_dir=directory,
        head_timeout_s=1,
        body_timeout_s=1,
        answer_timeout_s=1,
        max_requests=MAX_REQUESTS,
        max_open_connections=MAX_CONNECTIONS,
        max_head_bytes=MAX_HEAD_BYTES,
    )
    process.wait_until_ready()
    yield process
    process.kill()
    assert "Traceback" not in process.log()


def connected(server: Process) -> socket.socket:
    return socket.create_connection(server.address, timeout=PATIENCE_S)


def trickle(connection: socket.socket, begin: bytes, again: bytes) -> bool:
    """Send the beginning, then a little at a time; return whether the server closes the connection."""
    give_up_at = time.monotonic() + PATIENCE_S
    try:
        connection.sendall(begin)
        connection.settimeout(TRICKLE_S)
        while time.monotonic() < give_up_at:
            connection.sendall(again)
            try:
                if connection.recv(65_536) == b"":
                    return True
            except TimeoutError:
                continue
    except ConnectionError:
        return True
    return False


SLOW = {
    "a byte, then nothing": (b"", b""),
    "a head byte by byte": (b"GET /healthz HTTP/1.1\r\nX-Long: ", b"x"),
    "a head line by line": (b"GET /healthz HTTP/1.1\r\n", b"X-Y: z\r\n"),
    "empty lines": (b"", b"\r\n"),
    "a second head, byte by byte": (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /healthz HTTP/1.1\r\nX-Long: ", b"x"),
    "a body byte by byte": (b"POST /v1/events HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n", b" "),
    "a body that nobody reads": (b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n", b" "),
    "a chunk at a time": (b"POST /v1/events HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
}


def test_slow_clients_are_cut_off_while_others_are_served(server: Process) -> None:
    served: list[int] = []
    done = threading.Event()

    def serve_others() -> None:
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            while not done.is_set():
                served.append(client.get("/v1/items/popular").status_code)
                time.sleep(TRICKLE_S)

    with ExitStack() as stack, ThreadPoolExecutor() as others, ThreadPoolExecutor(4 * len(SLOW)) as clients:
        serving = others.submit(serve_others)
        ends = {
            name: [clients.submit(trickle, stack.enter_context(connected(server)), *slow) for _ in range(3)]
            for name, slow in SLOW.items()
        }
        ended = {name: [end.result() for end in of_name] for name, of_name in ends.items()}
        done.set()
        serving.result()
    assert ended == {name: [True] * 3 for name in SLOW}
    assert set(served) == {200}


def test_a_client_that_does_not_read_the_response_is_cut_off(server: Process) -> None:
    request = b"POST /v1/recommendations HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(LARGE)
    with ExitStack() as stack:
        lazy = [stack.enter_context(connected(server)) for _ in range(2 * MAX_REQUESTS)]
        for connection in lazy:
            connection.sendall(request + LARGE)
        give_up_at = time.monotonic() + PATIENCE_S
        while lazy and time.monotonic() < give_up_at:
            for connection in list(lazy):
                try:
                    connection.sendall(request + LARGE)  # ask on, but never look at an answer
                except OSError:
                    lazy.remove(connection)
            assert httpx.get(f"{server.url}/healthz", timeout=PATIENCE_S).status_code == 200
            time.sleep(TRICKLE_S)
        assert lazy == []


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("of", ["address", "header", "headers"])
def test_a_head_has_a_limit(server: Process, of: str, at_once: bool) -> None:
    long = {
        "address": b"GET /" + b"x" * (2 * MAX_HEAD_BYTES) + b" HTTP/1.1\r\n",
        "header": b"GET / HTTP/1.1\r\nX-Long: " + b"x" * (2 * MAX_HEAD_BYTES) + b"\r\n",
        "headers": b"GET / HTTP/1.1\r\n" + b"X-Y: zzzzzz\r\n" * (MAX_HEAD_BYTES // 4),
    }[of]
    if at_once:
        answer = raw_exchange(server.address, long + b"\r\n")
    else:
        with connected(server) as connection:
            for start in range(0, len(long), 2_000):
                connection.sendall(long[start : start + 2_000])
                if select.select([connection], [], [], 0.02)[0]:
                    break
            answer = connection.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 431"), answer
    assert b'"head_too_large"' in answer


def test_one_connection_too_many_is_closed(server: Process) -> None:
    with ExitStack() as stack:
        many = [stack.enter_context(connected(server)) for _ in range(MAX_CONNECTIONS + 20)]
        for connection in many:
            connection.settimeout(PATIENCE_S)
        assert [trickle(connection, b"", b"") for connection in many[-5:]] == [True] * 5

    def is_served() -> bool:
        try:
            return fetch(f"{server.url}/healthz", PATIENCE_S).status_code == 200
        except httpx.TransportError:
            return False

    wait_until(is_served)  # the server has noticed that they are gone


def test_requests_beyond_the_limit_get_503_with_retry_after(server: Process) -> None:
    answers: list[httpx.Response] = []
    watched: list[int] = []

    def ask(_: int) -> None:
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            for n in range(20):
                if n % 5 == 0:
                    watched.append(client.get("/readyz").status_code)
                answers.append(client.post("/v1/recommendations", content=LARGE))

    with ThreadPoolExecutor(4 * MAX_REQUESTS) as clients:
        list(clients.map(ask, range(4 * MAX_REQUESTS)))
    by_status = {status: [one for one in answers if one.status_code == status] for status in (200, 503)}
    assert len(by_status[200]) + len(by_status[503]) == len(answers) == 80 * MAX_REQUESTS
    assert by_status[200]
    assert by_status[503]
    for refused in by_status[503]:
        assert_refused(refused, 503)
        assert refused.json()["error"]["code"] == "overloaded"
        assert refused.headers["retry-after"] == "1"
    assert set(watched) == {200}
    assert httpx.post(f"{server.url}/v1/recommendations", content=LARGE, timeout=PATIENCE_S).status_code == 200


def test_requests_of_disconnected_clients_are_not_processed(server: Process) -> None:
    request = b"POST /v1/recommendations HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(LARGE) + LARGE
    given_up = 'lisarec_request_seconds_count{method="POST",route="/v1/recommendations",status="400"}'
    give_up_at = time.monotonic() + PATIENCE_S
    while given_up not in fetch(f"{server.url}/metrics", PATIENCE_S).text:
        assert time.monotonic() < give_up_at
        with connected(server) as waits:
            waits.sendall(request)
            with connected(server) as goes:
                goes.sendall(request)
            assert waits.recv(65_536).startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_a_worker_does_not_import_torch_before_it_answers() -> None:
    quick = "import sys, app.http.protocol; sys.exit(bool({'torch', 'polars', 'fastapi'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", quick], cwd=ROOT, check=False).returncode == 0


@pytest.mark.slow
def test_keys_rotate_in_a_running_process_and_are_never_logged(
    model_dir: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    file = tmp_path / "keys"
    old, old_key = make("main", ["recs:read"])
    new, new_key = make("main", ["recs:read"])
    add(file, old_key)
    process = Process(
        tmp_path / "log", model_dir=model_dir, data_dir=tmp_path, keys_file=file, log_level="debug", workers=1
    )
    request.addfinalizer(process.kill)
    process.wait_until_ready()
    with httpx.Client(base_url=process.url, timeout=PATIENCE_S) as client:

        def status(key: str) -> int:
            return client.get("/v1/model", headers=bearer(key)).status_code

        assert (status(old), status(new)) == (200, 401)
        add(file, new_key)
        wait_until(lambda: status(new) == 200)
        assert status(old) == 200
        remove(file, old_key.id)
        wait_until(lambda: status(old) == 401)
        assert status(new) == 200
        file.write_text(f"{new}\n")  # somebody pastes a key into the file
        wait_until(lambda: status(new) != 200 or "ignoring the changed keys file" in process.log())
        assert status(new) == 200
        client.get(f"/v1/{new}?key={new}", headers=bearer(new))
        client.post("/v1/events", content=new, headers=bearer(new))
        client.request(f"GET-{new}"[:20], "/", headers={"x-key": new})
    raw_exchange(process.address, f"GET /{new}\r\n{new}\r\n\r\n".encode())
    process.terminate()
    assert process.exit_code() == 0
    output = process.log()
    assert "ignoring the changed keys file" in output
    assert old[-20:] not in output
    assert new[-20:] not in output

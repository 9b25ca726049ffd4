"""HTTPS of the service itself: the limits of plain connections also apply to TLS and its handshakes."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
import pytest

from app.http.connection.lingering_transport import LingeringTransport
from app.http.connection.tls import TlsProtocol, server_context
from app.http.protocol import MAX_PIPELINED
from app.main import serve
from app.settings import Settings
from benchmarks.harness.service_process import free_port
from tests.app.service_process import Process
from tests.storage.redis.servers import make_certificate
from tests.waiting import PATIENCE_S, wait_until

MAX_CONNECTIONS = 20
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
HELLO_BEGUN = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
EVENT = b'{"event_id": "slow", "user_id": "slow", "item_id": "item-1"}'


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("certificate"))[0]


@pytest.fixture(scope="module")
def server(model_dir: Path, certificate: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    directory = tmp_path_factory.mktemp("server")
    settings = {"data_dir": directory, "max_open_connections": MAX_CONNECTIONS, **tls(certificate)}
    process = Process(directory / "log", model_dir=model_dir, **settings)
    process.wait_until_ready()
    yield process
    process.kill()
    assert "Traceback" not in process.log()


def tls(certificate: Path) -> dict[str, object]:
    return {"tls_certificate": certificate, "tls_key": certificate.with_name("key.pem")}


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


def connect(server: Process, certificate: Path, receive_bytes: int = 0) -> ssl.SSLSocket:
    context, plain = trusting(certificate), socket.socket()
    plain.settimeout(PATIENCE_S)
    if receive_bytes:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    plain.connect(server.address)
    return context.wrap_socket(plain, server_hostname="127.0.0.1")


def received(connection: socket.socket) -> bytes:
    """Bytes until the server closes or resets the connection."""
    answer = b""
    with suppress(ConnectionResetError):
        while chunk := connection.recv(65_536):
            answer += chunk
    return answer


def test_requests_are_served_over_tls_only(server: Process, certificate: Path) -> None:
    assert server.url.startswith("https://")
    with httpx.Client(base_url=server.url, verify=trusting(certificate)) as client:
        assert client.post("/v1/events", json={"user_id": "ada", "item_id": "item-1"}).status_code == 200
        assert client.get("/v1/users/ada/recommendations").json()["items"]
        assert client.get("/v1/users/ada").json()["event_count"] == 1
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http"))
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(server.url)
    assert server_context(*tls(certificate).values()).minimum_version is ssl.TLSVersion.TLSv1_2  # type: ignore[arg-type]


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_client_that_reads_only_after_sending_gets_the_413(
    server: Process, certificate: Path, is_declared: bool
) -> None:
    chunks = [b" " * 65_536] * 480
    for _ in range(5):
        client = http.client.HTTPSConnection(*server.address, timeout=PATIENCE_S, context=trusting(certificate))
        client.request("POST", "/v1/events", b"".join(chunks) if is_declared else iter(chunks))
        answer = client.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (413, "body_too_large")
        client.close()


def test_responses_come_in_order_and_the_refusal_last(server: Process, certificate: Path) -> None:
    requests = b"GET /v1/model HTTP/1.1\r\nHost: x\r\n\r\n" * (2 + MAX_PIPELINED)
    with connect(server, certificate) as connection:
        connection.sendall(requests)
        answers = b""
        while b'"too_many_pipelined"' not in answers:
            chunk = connection.recv(65_536)
            assert chunk, answers
            answers += chunk
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200"] * (1 + MAX_PIPELINED) + [b"400"]


def test_a_slow_reader_gets_everything_before_the_connection_closes(server: Process, certificate: Path) -> None:
    request = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
    with connect(server, certificate, receive_bytes=4_096) as connection:
        connection.sendall(request * (MAX_PIPELINED - 1) + request.replace(b"Host", b"Connection: close\r\nHost"))
        answers = received(connection)
    lengths = [int(length) for length in re.findall(rb"\ncontent-length: (\d+)", answers)]
    heads = [head + b"\r\n\r\n" for head in re.findall(rb"HTTP/1\.1 200.*?(?=\r\n\r\n)", answers, re.DOTALL)]
    assert len(lengths) == len(heads) == MAX_PIPELINED
    assert len(answers) == sum(lengths) + sum(map(len, heads))


def test_an_endless_head_is_refused(server: Process, certificate: Path) -> None:
    with connect(server, certificate) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nX-Long: " + b"x" * 100_000)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("begin", [b"", HELLO_BEGUN])
def test_connections_without_a_handshake_do_not_lock_out_others(
    server: Process, certificate: Path, begin: bytes
) -> None:
    """They are closed for new ones, like connections without a request; active ones are kept."""
    with ExitStack() as stack:
        at_work = stack.enter_context(connect(server, certificate))
        at_work.sendall(b"POST /v1/events HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(EVENT))
        for _ in range(5 * MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(server.address, timeout=PATIENCE_S)).sendall(begin)
        for _ in range(5):
            with connect(server, certificate) as connection:
                connection.sendall(HEALTH)
                assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        wait_until(lambda: open_connections(server) <= MAX_CONNECTIONS)
        at_work.sendall(EVENT)
        assert at_work.recv(65_536).startswith(b"HTTP/1.1 200")


def open_connections(server: Process) -> int:
    connections = psutil.Process(server.process.pid).net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED for one in connections)


@pytest.mark.parametrize("begin", [b"", HELLO_BEGUN])
def test_a_handshake_has_the_timeout_of_a_head(launch: Callable[..., Process], certificate: Path, begin: bytes) -> None:
    process, begin_s = launch(head_timeout_s=0.5, **tls(certificate)), time.monotonic()
    with socket.create_connection(process.address, timeout=PATIENCE_S) as connection:
        connection.sendall(begin)
        assert received(connection) == b""
    assert time.monotonic() - begin_s < 50  # asyncio's own limit is 60 s


def test_handshake_and_head_share_one_timeout(launch: Callable[..., Process], certificate: Path) -> None:
    process = launch(head_timeout_s=4.0, **tls(certificate))
    with connect(process, certificate) as connection:
        connection.sendall(b"GET")
        assert received(connection) == b""


class Slow(asyncio.Protocol):
    """A protocol that answers with constant bytes and records when it is paused."""

    scheme = "http"

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.told: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = LingeringTransport(cast("asyncio.Transport", transport), lambda: False, 30.0)

    def data_received(self, data: bytes) -> None:
        self.transport.write(self.answer)

    def pause_writing(self) -> None:
        self.told.append("pause")

    def resume_writing(self) -> None:
        self.told.append("resume")


def test_an_unread_response_pauses_the_protocol(certificate: Path) -> None:
    """This starts the timeout for reading the response."""

    async def answered() -> None:
        http, context = Slow(secrets.token_bytes(8 << 20)), server_context(*tls(certificate).values())  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: TlsProtocol(cast("Any", http), context, 10.0, 30.0), "127.0.0.1")
        host, port = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(host, port, ssl=trusting(certificate), limit=1024)
        writer.write(b"x")
        async with asyncio.timeout(PATIENCE_S):
            while not http.told:
                await asyncio.sleep(0.01)
            assert set(http.told) == {"pause"}  # once more whenever the client's buffers have taken something
            assert await reader.readexactly(len(http.answer)) == http.answer
            while http.told[-1] != "resume":
                await asyncio.sleep(0.01)
        writer.close()
        server.close()

    asyncio.run(answered())


@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_answers_accepted_requests_and_waits_for_no_others(
    launch: Callable[..., Process], certificate: Path, workers: int
) -> None:
    limits = {"drain_s": 0, "shutdown_timeout_s": 600, "body_timeout_s": PATIENCE_S, "head_timeout_s": PATIENCE_S}
    process = launch(workers=workers, port=free_port(), **limits, **tls(certificate))
    with ExitStack() as stack:
        idle = stack.enter_context(connect(process, certificate))
        idle.sendall(HEALTH)
        assert idle.recv(65_536).startswith(b"HTTP/1.1 200")
        stack.enter_context(socket.create_connection(process.address))
        slow = stack.enter_context(connect(process, certificate))
        slow.sendall(
            b"POST /v1/events HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(EVENT)
        )
        assert slow.recv(65_536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        process.terminate()
        while idle.recv(65_536):
            pass
        slow.sendall(EVENT)
        assert slow.recv(65_536).startswith(b"HTTP/1.1 200")
        answered_s = time.monotonic()
        assert process.exit_code() == 0, process.log()
        assert time.monotonic() - answered_s < 25  # asyncio would close a connection with TLS within 30 s
    assert "Traceback" not in process.log()


@pytest.mark.parametrize(("given", "missing"), [("certificate", "key"), ("key", "certificate")])
def test_certificate_and_key_require_each_other(tmp_path: Path, given: str, missing: str) -> None:
    settings: dict[str, Any] = {f"tls_{given}": tmp_path / "file"}
    with pytest.raises(ValueError, match=f"--tls-{given} needs --tls-{missing}; pass both or none"):
        Settings(**settings)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("missing", "cannot read '.*cert.pem' .No such file"),
        ("of another", "the key belongs to another certificate"),
        ("garbage", "they must be PEM files"),
        ("encrypted", "the key must have no passphrase"),
    ],
)
def test_an_unusable_certificate_is_named_at_startup(
    model_dir: Path, certificate: Path, tmp_path: Path, problem: str, message: str
) -> None:
    own, key = tmp_path / "cert.pem", certificate.with_name("key.pem")
    shutil.copy(certificate, own)
    match problem:
        case "missing":
            own.unlink()
        case "of another":
            make_certificate(tmp_path)
        case "garbage":
            own.write_text("of no use")
        case "encrypted":
            key = tmp_path / "encrypted.pem"
            encrypt = [
                "openssl",
                "pkey",
                "-in",
                str(certificate.with_name("key.pem")),
                "-aes256",
                "-passout",
                "pass:secret",
            ]
            subprocess.run([*encrypt, "-out", str(key)], check=True, timeout=PATIENCE_S)
    settings: dict[str, Any] = {"tls_certificate": own, "tls_key": key}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(ValueError, match=message):
            serve(Settings(model_dir=model_dir, data_dir=tmp_path, port=0, **settings))
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)

"""Request heads by RFC 9112: the fast path and the app refuse what a server must refuse."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.app.conftest import Client
from tests.app.http.middleware.server import Answer, Server, post, read_answer, request
from tests.waiting import PATIENCE_S

LIST = "/v1/users/ada/recommendations"
EVENT = {"event_id": "head", "user_id": "ada", "item_id": "item-1"}
TARGETS = {"fast path": LIST, "app": "/v1/model"}
REFUSED = {
    "no host": "GET {} HTTP/1.1\r\n\r\n",
    "two hosts": "GET {} HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "the same host twice": "GET {} HTTP/1.1\r\nHost: a\r\nX: y\r\nHOST: a\r\n\r\n",
    "two hosts in HTTP/1.0": "GET {} HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n",
    "a list of hosts": "GET {} HTTP/1.1\r\nHost: a, b\r\n\r\n",
    "a path in the host": "GET {} HTTP/1.1\r\nHost: a/b\r\n\r\n",
    "a user in the host": "GET {} HTTP/1.1\r\nHost: b@a\r\n\r\n",
    "a host that is not ASCII": "GET {} HTTP/1.1\r\nHost: \xe4\r\n\r\n",
    "an upgrade without host": "GET {} HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    "HTTP/2 in the form of HTTP/1": "GET {} HTTP/2.0\r\nHost: a\r\n\r\n",
    "HTTP/0.9 with headers": "GET {} HTTP/0.9\r\nHost: a\r\n\r\n",
    "an encoded body": "POST {} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a blank in the host": "GET {} HTTP/1.1\r\nHost: a b\r\n\r\n",
    "two encodings": "POST {} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n\r\n",
}
HOSTS = [
    "a",
    "A.example:8000",
    "a_b",
    "127.0.0.1:80",
    "[::1]:8000",
    "[fe80::1%25eth0]",
    "",
    "x:",
    "xn--bcher-kva.example",
    "blanks.example \t ",
    " ",
]


@pytest.fixture(scope="module")
def known(shared_client: Client) -> Client:
    return shared_client


async def last_response(server: Server, sent: bytes) -> tuple[bytes, bytes]:
    """Return head and body of the last response before the service closes the connection."""
    async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
        writer.write(sent)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return head, body


@pytest.mark.parametrize("head", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_invalid_heads_are_refused(known: Client, head: str, target: str) -> None:
    server = Server(known)
    answer, body = known.runner.run(last_response(server, head.format(target).encode("latin-1")))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "not_http"
    assert server.for_app == []


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_valid_host_is_accepted(known: Client, host: str, target: str) -> None:
    sent = request(target).replace(b"Host: x", f"Host: {host}".encode())
    ((status, _, _),) = known.runner.run(Server(known).exchange(sent))
    assert status == 200


@pytest.mark.parametrize("encoding", ["chunked", "Chunked", "chunked  "])
def test_every_spelling_of_chunked_is_accepted(known: Client, encoding: str) -> None:
    body = json.dumps({"user_id": "ada"}).encode()
    head = f"POST /v1/recommendations HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: {encoding}\r\n\r\n"
    ((status, _, _),) = known.runner.run(
        Server(known).exchange(b"%b%x\r\n%b\r\n0\r\n\r\n" % (head.encode(), len(body), body))
    )
    assert status == 200


def test_http_1_0_needs_no_host_and_gets_no_interim_response(known: Client) -> None:
    async def first(sent: bytes) -> Answer:
        async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
            writer.write(sent)
            return await read_answer(reader)

    server = Server(known)
    asks_first = post(EVENT, "Expect: 100-continue").replace(b"Host: x\r\n", b"")
    assert known.runner.run(first(asks_first.replace(b"HTTP/1.1", b"HTTP/1.0")))[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"HEAD /healthz HTTP/1.1\r\n\r\n",
        b"HEAD /healthz HTTP/1.1\r\nHost : x\r\n\r\n",
        b"HEAD /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n",
        b"HEAD /" + b"x" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_a_refused_head_method_gets_no_body(known: Client, sent: bytes) -> None:
    head, body = known.runner.run(last_response(Server(known), sent))
    assert head.startswith(b"HTTP/1.1 4")
    assert b"\r\ncontent-length: " in head
    assert body == b""


def test_a_refusal_without_a_method_has_a_body(known: Client) -> None:
    async def after_a_head() -> bytes:
        async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
            writer.write(b"HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"\x16\x03\x01\r\n")
            return await reader.read()

    server = Server(known)
    assert known.runner.run(after_a_head()).endswith(b"}")


def test_refusals_have_a_date(known: Client) -> None:
    server = Server(known)
    server.state.default_headers = [(b"date", b"today")]
    head, _ = known.runner.run(last_response(server, b"GET / HTTP/1.1\r\n\r\n"))
    assert b"\r\ndate: today\r\n" in head

"""Upgrade requests, as HTTP/2 clients send them without TLS, are answered over HTTP/1.1."""

from __future__ import annotations

import json

import pytest

from tests.app.conftest import Client
from tests.app.http.middleware.server import Server, post, request

UPGRADES = {
    "HTTP/2": ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAB"],
    "a websocket": ["Connection: keep-alive, Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"],
    "two at once": ["Connection: x,, upgrade", "Upgrade: h2c", "Connection:\tUPGRADE ", "Upgrade: websocket"],
    "by a proxy": ["Proxy-Connection: upgrade", "Upgrade: h2c"],
}
NEXT = request("/healthz", "X-Request-ID: next")


def event(event_id: str) -> dict[str, str]:
    return {"event_id": event_id, "user_id": "upgrader", "item_id": "item-1"}


@pytest.fixture(scope="module")
def known(shared_client: Client) -> Client:
    return shared_client


@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES)
@pytest.mark.parametrize("size", [1, 9, 10_000])
def test_the_body_is_read(known: Client, upgrade: list[str], size: int) -> None:
    sent = post(event(f"{upgrade} {size}"), *upgrade) + NEXT
    parts = [sent[n : n + size] for n in range(0, len(sent), size)]
    (status, _, body), after = known.runner.run(Server(known).exchange(*parts, answers=2))
    assert (status, json.loads(body)["accepted"]) == (200, 1)
    assert (after[0], after[1]["x-request-id"]) == (200, "next")


@pytest.mark.parametrize("lines", [0, 60_000])
def test_the_body_is_never_parsed_as_a_request(known: Client, lines: int) -> None:
    """A proxy would assign the response to another client's request."""
    server = Server(known)
    head, body = post(b"\r\n" * lines + request("/readyz"), *UPGRADES["HTTP/2"]).split(b"\r\n\r\n", 1)
    answers = known.runner.run(server.exchange(head + b"\r\n\r\n", body, NEXT, answers=2))
    assert [status for status, _, _ in answers] == [400, 200]
    assert answers[1][1]["x-request-id"] == "next"
    assert server.for_app == ["/v1/events", "/healthz"]


def test_a_chunked_body_is_read(known: Client) -> None:
    content = json.dumps(event("in chunks")).encode()
    head = request("/v1/events", "Transfer-Encoding: chunked", *UPGRADES["HTTP/2"]).replace(b"GET", b"POST")
    sent = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
    (status, _, body), _ = known.runner.run(Server(known).exchange(sent + NEXT, answers=2))
    assert (status, json.loads(body)["accepted"]) == (200, 1)


@pytest.mark.parametrize("last", [{"version": "1.0"}, {}])
def test_the_last_request_of_a_connection_is_answered(known: Client, last: dict[str, str]) -> None:
    sent = request("/healthz", "Connection: upgrade, close", "Upgrade: h2c", **last)
    ((status, headers, _),) = known.runner.run(Server(known).exchange(sent))
    assert (status, headers["connection"]) == (200, "close")


def test_upgrade_requests_share_the_limit_of_pipelined_requests(known: Client) -> None:
    sent = request("/healthz", *UPGRADES["HTTP/2"]) * 20
    answers = known.runner.run(Server(known).exchange(sent, answers=18))
    assert [status for status, _, _ in answers] == [200] * 17 + [400]
    assert b"too_many_pipelined" in answers[-1][2]


@pytest.mark.parametrize("target", [b"service:1", b"a://service/healthz"])
def test_connect_is_refused(known: Client, target: bytes) -> None:
    sent = b"CONNECT " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n" + NEXT
    ((status, headers, _),) = known.runner.run(Server(known).exchange(sent))
    assert (status, headers["connection"]) == (400, "close")

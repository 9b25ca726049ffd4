"""Operator-only paths, in every spelling, over plain sockets: through HAProxy and directly."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from urllib.parse import quote

import pytest

from app.http.middleware.request_path import AMBIGUOUS
from benchmarks.harness.topology import HAPROXY_CONFIG, Topology, topology
from tests.waiting import PATIENCE_S

ODD_IDS = ["a/b", "../../admin/experiment", "a/recommendations?k=1", "100%", "%2F", "Größe 42", "商品", "{p1}*[?]"]
# 404 too where nobody has such events; a 405 would be another path
WITH_SLASHES = {
    "/v1/items/x%2fpopular": 404,
    "/v1/items%2fpopular": 404,
    "/v1%2Fitems/popular": 404,
    "/v1/users%2Fada/recommendations": 404,
    "/v1/users/ada%2Frecommendations": 404,
    "/v1/users/ada%2F..%2Frecommendations": 404,
    "/v1/users/ada%2Frecommendations/recommendations": 200,
    "/v1/users/%2e%2e%2Fadmin/recommendations": 200,
    "/v1/users/..%2f..%2fmetrics/recommendations": 200,
    "/v1/users/ada%1frecommendations/recommendations": 422,
    "/v1/users/ada%c2%85/recommendations": 422,
    "/v1/users/ada%ff/recommendations": 422,
    "/v1/users/%2e%2e/recommendations": 422,
}
OPERATORS = ["/metrics", "/v1/admin/experiment"]
CONTROLS = [f"%{byte:02{case}}" for byte, case in product((*range(0x20), 0x7F), "xX")]
ENDINGS = [*CONTROLS, "", "/", "?", "?x=1", "#", "#x", ";", ";x=1", "%23", "%3f", "%20", "%250a", "%c2%85", "%e2%80%a8"]
ENDINGS += ["%2f", "%2F..", "%ff", "\\", "%5c", "+", "\x85", "\xa0", ".", "%2e", "*", "%", "%0", "%0g"]
BEGINNINGS = ["", "/", "/.", "/x/..", "/%2e", "/%2f", "http://service", "HTTP://service:80", "http://a@service", "//x"]
BEGINNINGS += ["%0a", "/%0d", "/%00", "*"]


def spellings(path: str) -> list[str]:
    """Variants of the path: prefixes, suffixes, and each character encoded or in the other case."""
    inner = [f"{path[:n]}{control}{path[n:]}" for n in (1, 4) for control in CONTROLS]
    encoded = [f"{path[:n]}%{ord(path[n]):02x}{path[n + 1 :]}" for n in range(len(path))]
    return [
        *(f"{path}{ending}" for ending in ENDINGS),
        *(f"{beginning}{path}" for beginning in BEGINNINGS),
        *inner,
        *encoded,
        *(f"{one}%0a" for one in encoded),
        path.upper(),
        path.replace("/", "//"),
    ]


@pytest.fixture(scope="module")
def running(model_dir: Path) -> Iterator[Topology]:
    try:
        with topology(model_dir, 1, redis=False) as running:
            yield running
    except FileNotFoundError as exc:  # CI turns this into a failure
        pytest.skip(str(exc))


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def ask(where: tuple[str, int], target: str, version: str = "1.1") -> tuple[int, bytes]:
    """Status and body of the response."""
    request = f"GET {target} HTTP/{version}\r\nHost: service\r\nConnection: close\r\n\r\n".encode("latin-1")
    with socket.create_connection(where, timeout=PATIENCE_S) as connection:
        connection.sendall(request)
        head, _, body = b"".join(iter(lambda: connection.recv(65_536), b"")).partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body


@pytest.mark.parametrize("path", OPERATORS)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_no_spelling_reaches_operator_paths(running: Topology, path: str, version: str) -> None:
    replica = (str(running.replicas[0].address), running.replica_port)
    assert ask(replica, path)[0] == 200  # it is there
    passed = {
        spelling: answer[0]
        for spelling in spellings(path)
        if (answer := ask(address(running.url), spelling, version))[0] not in range(400, 500)
    }
    assert passed == {}


@pytest.mark.parametrize("path", [*OPERATORS, "/healthz", "/v1/items/popular", "/v1/users/ada/recommendations"])
def test_the_service_itself_refuses_control_characters(running: Topology, path: str) -> None:
    replica = (str(running.replicas[0].address), running.replica_port)
    for control in CONTROLS:
        for where in (replica, address(running.url)):
            status, body = ask(where, f"{path}{control}")
            assert (status, json.loads(body)["error"]["code"]) == (422, "invalid_request"), control


def test_public_paths_are_passed_on(running: Topology) -> None:
    plain = [
        "/healthz",
        "/v1/model",
        "/v1/items/popular?k=1",
        "http://service/v1/model",
        "/v1/users/a%40b/recommendations",
    ]
    plain += [f"/v1/users/{quote(user_id, safe='')}/recommendations" for user_id in ODD_IDS]
    assert [ask(address(running.url), path)[0] for path in plain] == [200] * len(plain)


@pytest.mark.parametrize("where", ["balancer", "replica"])
def test_an_encoded_slash_belongs_to_an_id(running: Topology, where: str) -> None:
    by_where = {"balancer": address(running.url), "replica": (str(running.replicas[0].address), running.replica_port)}
    found = {path: ask(by_where[where], path)[0] for path in WITH_SLASHES}
    assert found == WITH_SLASHES


def test_load_balancer_and_service_use_the_same_expression() -> None:
    (of_balancer,) = re.findall(r'path -m reg -i "([^"]+)"', HAPROXY_CONFIG.read_text())
    assert of_balancer.encode() == AMBIGUOUS.pattern

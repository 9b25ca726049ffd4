"""The cost of requests without a key: the service reads nothing else of them."""

from __future__ import annotations

import time
import zlib
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from starlette.types import Message

from app.http.auth.keys import add, make
from app.schemas.cursor import MAX_ITEMS, cursor_after
from tests.app.conftest import Client

LARGE = 31_000  # bytes, in a head of at most 32 KiB
MOST_S = 0.001  # of CPU more than the plainest request without a key
TIMES = 20

FULL_CURSOR = cursor_after(f"item-{n}" for n in range(MAX_ITEMS))
BOMB = urlsafe_b64encode(b"\x01" + zlib.compress(b"a\n" * 600_000)).decode()


class HttpRequest(NamedTuple):
    method: str
    path: str
    query: str = ""
    header: str = "x-nothing"
    value: str = ""


PLAIN = HttpRequest("GET", "/v1/users/ada/recommendations")
HOSTILE = {
    "a full cursor": PLAIN._replace(query=f"cursor={FULL_CURSOR[:LARGE]}"),
    "a cursor that unpacks to much": PLAIN._replace(query=f"cursor={BOMB}"),
    "ids to exclude": PLAIN._replace(query="&".join(["exclude=a"] * (LARGE // 10))),
    "categories": PLAIN._replace(query="&".join(["categories=a"] * (LARGE // 13))),
    "a parameter again and again": HttpRequest("GET", "/v1/items", "&".join(["a"] * (LARGE // 2))),
    "parameters of an open route": HttpRequest("GET", "/healthz", "&".join(["a"] * (LARGE // 2))),
    "an encoded path": HttpRequest("GET", "/v1/users/" + "%41" * 1_000 + "/recommendations"),
    "a long path": HttpRequest("GET", "/v1/users/" + "a" * LARGE),
    "a deep path": HttpRequest("GET", "/v1" + "/users" * (LARGE // 6)),
    "no such method": HttpRequest("PATCH", "/v1/users/ada"),
    "a long key": PLAIN._replace(header="authorization", value="Bearer lisarec_" + "a" * LARGE),
    "a key of underlines": PLAIN._replace(header="authorization", value="Bearer " + "_" * LARGE),
    "many headers of a page": HttpRequest("OPTIONS", "/v1/events", "", "access-control-request-headers", "a," * 15_000),
    "an origin": HttpRequest("POST", "/v1/events", "", "origin", "https://" + "a." * 15_000),
    "the description of the service": HttpRequest("GET", "/openapi.json"),
    "a type": HttpRequest("POST", "/v1/events", "", "content-type", ";" * LARGE),
}


@pytest.fixture(scope="module")
def guarded(start: Callable[..., Client], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory = tmp_path_factory.mktemp("guarded")
    add(directory / "keys", make("main", ["recs:read"])[1])
    client = start(directory, keys_file=directory / "keys")
    yield client
    client.close()


def cpu_s(client: Client, http_request: HttpRequest) -> tuple[float, int]:
    """Minimum CPU time of some requests without the client's share, and the status."""

    async def ask() -> tuple[float, int]:
        statuses: list[int] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            if "status" in message:
                statuses.append(message["status"])

        headers = [(b"host", b"x"), (http_request.header.encode(), http_request.value.encode())]
        if http_request.method == "OPTIONS":
            headers += [(b"origin", b"https://shop.example"), (b"access-control-request-method", b"POST")]
        scope = {
            "type": "http",
            "method": http_request.method,
            "path": http_request.path.replace("%41", "A"),
            "raw_path": http_request.path.encode(),
            "query_string": http_request.query.encode(),
            "headers": headers,
        }
        begin = time.thread_time()
        await client.transport.app(scope, receive, send)
        return time.thread_time() - begin, statuses[0]

    spent = [client.runner.run(ask()) for _ in range(TIMES)]
    return min(seconds for seconds, _ in spent), spent[0][1]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_request_without_a_key_costs_about_as_much_as_the_plainest_one(guarded: Client, name: str) -> None:
    plainest, status = cpu_s(guarded, PLAIN)
    assert status == 401
    seconds, status = cpu_s(guarded, HOSTILE[name])
    print(f"{name}: {seconds * 1e3:.2f} ms, the plainest {plainest * 1e3:.2f} ms, {status}")
    assert seconds <= plainest + MOST_S

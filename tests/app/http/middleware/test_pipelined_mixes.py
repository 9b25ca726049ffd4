"""Pipelined requests, split at any byte: fast path and app together answer like the app alone."""

from __future__ import annotations

import asyncio
import random
import re

import pytest

from tests.app.conftest import Client
from tests.app.http.middleware.server import Server
from tests.waiting import PATIENCE_S

LIST = b"/v1/users/ada/recommendations"
JSON = b'{"user_id":"ada","k":4}'
CALLS = [
    *(
        b"GET %%b%b%b HTTP/1.1\r\nHost: x\r\n\r\n" % (LIST, query)
        for query in (b"", b"?k=3", b"?k=0", b"?explain=true")
    ),
    *(b"%b %%b/v1/model HTTP/1.1\r\nHost: x\r\n\r\n" % method for method in (b"GET", b"HEAD", b"DELETE")),
    b"POST %%b/v1/recommendations HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(JSON), JSON),
    b"POST %%b/v1/recommendations HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"1;a=b\r\n{\r\n%x\r\n%b\r\n0\r\nX-Trailer: y\r\n\r\n" % (len(JSON) - 1, JSON[1:]),
    b"POST %b/v1/events HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n{",
    b"GET %%b%b HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nab" % LIST,
]
LAST = b"GET %%b%b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % LIST
MAY_DIFFER = re.compile(rb'"recommendation_id":"[^"]*"|(?:x-request-id|server-timing): [^\r]*\r\n')


@pytest.mark.parametrize("seed", range(12))
def test_responses_and_their_order_equal_those_of_the_app(shared_client: Client, seed: int) -> None:
    async def exchange(server: Server, sent: bytes) -> bytes:
        cuts = sorted(chance.randrange(len(sent)) for _ in range(chance.choice((0, 2, 20))))
        async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
            for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
                writer.write(sent[begin:end])
                await asyncio.sleep(0)
            return MAY_DIFFER.sub(b"", await reader.read())

    shared_client.click("ada", "item-1", "item-2")
    chance = random.Random(seed)
    calls = [CALLS[0], *chance.choices(CALLS, k=chance.randint(1, 14)), LAST]
    mixed, of_app = Server(shared_client), Server(shared_client)
    answers = shared_client.runner.run(exchange(mixed, b"".join(call % b"" for call in calls)))
    assert answers == shared_client.runner.run(exchange(of_app, b"".join(call % b"http://x" for call in calls)))
    assert len(of_app.for_app) == len(calls) == answers.count(b"HTTP/1.1 ")
    assert len(mixed.for_app) < len(calls)

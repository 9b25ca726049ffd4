"""The HTTP protocol of a service over a client's app, and raw requests to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from app.http.auth.keys import add, make
from app.http.middleware.load_shedding import RequestsInProgress
from app.http.middleware.plain_requests import PlainRequests
from app.http.middleware.request_metrics import RequestRecorder
from app.http.protocol import LimitedHttpProtocol
from tests.app.conftest import Client
from tests.waiting import PATIENCE_S

Answer = tuple[int, dict[str, str], bytes]


class Bounds(NamedTuple):
    """Limits of a server: concurrent requests, and the duration of slow ones."""

    in_progress: RequestsInProgress
    slow_s: float = PATIENCE_S


class Server:
    """The protocol of a service's connections over the app of a client.

    for_app  the paths of the requests that the app got
    """

    def __init__(self, client: Client, bounds: Bounds | None = None) -> None:
        in_progress, slow_s = bounds or Bounds(RequestsInProgress(100))
        self.for_app: list[str] = []
        self.state = ServerState()
        self.services = client.services

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            self.for_app.append(scope["path"])
            await client.transport.app(scope, receive, send)

        config = Config(app, lifespan="off", ws="none", access_log=False, log_config=None, proxy_headers=False)
        config.load()
        recorder = RequestRecorder(self.services.metrics.requests, slow_s)
        state = {"services": self.services, "plain_requests": PlainRequests(self.services, in_progress, recorder)}
        self._protocol = partial(LimitedHttpProtocol, config, self.state, state)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection; yields its reader and writer."""
        server = await asyncio.get_running_loop().create_server(self._protocol, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            yield reader, writer
            writer.close()
            await writer.wait_closed()

    async def exchange(self, *parts: bytes, answers: int = 1) -> list[Answer]:
        """Send parts of requests one after another; return that many responses."""
        async with asyncio.timeout(PATIENCE_S), self.connected() as (reader, writer):
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.001)
            return [await read_answer(reader) for _ in range(answers)]


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    pairs = [line.split(": ", 1) for line in lines[1:-2]]
    headers = dict(pairs)
    assert len(headers) == len(pairs)
    return int(lines[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


def request(path: str, *headers: str, version: str = "1.1") -> bytes:
    return "\r\n".join((f"GET {path} HTTP/{version}", "Host: x", *headers, "\r\n")).encode()


def post(body: bytes | object, *headers: str, path: str = "/v1/events") -> bytes:
    """Return a request that posts a body, or its JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = request(path, f"Content-Length: {len(content)}", *headers).replace(b"GET", b"POST")
    return head + content


def start_with_keys(
    start: Callable[..., Client], directory: Path, kinds: Mapping[str, Mapping[str, Any]]
) -> tuple[Client, dict[str, str]]:
    """Start a service with keys of each kind; return it with their texts."""
    texts = {}
    for name, kind in kinds.items():
        texts[name], key = make("main", **kind)
        add(directory / "keys", key)
    return start(directory, keys_file=directory / "keys"), texts

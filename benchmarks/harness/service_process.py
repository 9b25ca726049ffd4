"""A service in its own process on a free port, with a temporary store that is empty at the start, or in this one."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
from starlette.types import ASGIApp, Message

if TYPE_CHECKING:  # these import torch, which the processes that only send requests do not need
    from app.serving.lifespan import Service
    from app.settings import Settings

START_TIMEOUT_S = 600.0  # for a machine that runs thirty other processes
END_TIMEOUT_S = ANSWER_TIMEOUT_S = 200.0  # for the same one
LISTENING_PORTS = 10_000, 20_000

_holders: deque[int] = deque(maxlen=512)  # file descriptors, which close when the process ends


def free_port(ports: tuple[int, int] | None = None) -> int:
    """Return a TCP port that no process listens on, and that the system does not assign to connections.

    ports  the first port, and the one after the last; None: LISTENING_PORTS

    No other call, in this process or another one, returns the same port: servers that share ports, as HAProxy does,
    would take each other's connections. A UDP socket on the same port marks it as taken, until the process ends or
    takes 512 more.
    """
    while True:
        port = random.randrange(*(ports or LISTENING_PORTS))
        holder = socket.socket(type=socket.SOCK_DGRAM)
        with socket.socket() as probe, suppress(OSError):
            holder.bind(("127.0.0.1", port))
            probe.bind(("127.0.0.1", port))
            if len(_holders) == _holders.maxlen:
                os.close(_holders.popleft())
            _holders.append(holder.detach())
            return port
        holder.close()


def inherited_environment() -> dict[str, str]:
    """Return the environment of this process without settings of the service."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LISAREC_")}


def fetch(url: str, timeout_s: float = ANSWER_TIMEOUT_S) -> httpx.Response:
    """Return the response to a GET over plain HTTP; raise httpx.TransportError if there is none.

    The client does not load the TLS root certificates, which would take 25 ms of CPU time for each request.
    """
    return httpx.get(url, timeout=timeout_s, verify=False)


def is_ready(url: str, path: str = "/readyz", timeout_s: float = 5.0) -> bool:
    """Return whether the path returns 200."""
    try:
        return fetch(f"{url}{path}", timeout_s).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


@contextmanager
def running_service(model: Path, *options: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Serve a model directory, on an empty SQLite store unless options name one; yield the URL once it is ready."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    with TemporaryDirectory() as store:
        command = [sys.executable, "-m", "app", "serve", "--model", str(model), "--port", str(port), *options]
        store_options = [] if {"--redis-url", "--data-dir"} & set(options) else ["--data-dir", store]
        with running_process([*command, *store_options], url, env=environment):
            yield url


@contextmanager
def running_process(command: Sequence[str], url: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server, and yield its process once it is ready at the URL.

    options  of subprocess.Popen
    """
    process: subprocess.Popen[bytes] = subprocess.Popen(command, stdout=subprocess.DEVNULL, **options)
    try:
        wait_until_ready(url, process)
        yield process
    finally:
        process.terminate()
        process.wait(timeout=END_TIMEOUT_S)


def wait_until_ready(url: str, process: subprocess.Popen[bytes], path: str = "/readyz") -> None:
    """Wait until the path returns 200; raise RuntimeError if the process ends or takes too long."""
    wait_for(lambda: is_ready(url, path), process)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait for the condition; raise RuntimeError if the process ends or takes too long."""
    give_up_at_s = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode} before it was ready")
        if time.monotonic() > give_up_at_s:
            raise RuntimeError(f"{process.args!r} was not ready within {START_TIMEOUT_S:g} s")
        time.sleep(0.1)


class AppResponse(NamedTuple):
    """A response of an application in this process: what it took, and how much processor time of all threads."""

    status: int
    body: bytes
    seconds: float
    cpu_s: float


async def call_app(
    app: ASGIApp, state: Mapping[str, Any] | None, method: str, path: str, body: bytes = b"", query: str = ""
) -> AppResponse:
    """Send a request to an application in this process, as a server would.

    state  what the application's lifespan yielded
    """
    status, sent = 0, bytearray()

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        sent.extend(message.get("body", b""))

    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode()}
    headers = [(b"host", b"localhost")]
    if body:
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    await app({**scope, "headers": headers, "state": dict(state or {})}, receive, send)
    return AppResponse(status, bytes(sent), time.perf_counter() - begin_s, time.process_time() - begin_cpu_s)


@dataclass(frozen=True)
class InProcessService:
    """A service in this process, which is called without a network.

    state   what the application's lifespan yielded
    tenant  the only tenant
    """

    app: ASGIApp
    state: Mapping[str, Any]
    tenant: Service

    async def call(self, method: str, path: str, body: bytes = b"", query: str = "") -> AppResponse:
        """Send a request as a server would."""
        return await call_app(self.app, self.state, method, path, body, query)

    async def add_histories(self, users: int, events: int, **fields: str) -> None:
        """Log events of user-0, user-1 and so on, each on consecutive items of the catalogue.

        fields  of every event besides its user and item
        """
        items = self.tenant.catalogue.item_ids
        for user in range(users):
            own = [items[(user * events + n) % len(items)] for n in range(events)]
            posted = [{**fields, "user_id": f"user-{user}", "item_id": item} for item in own]
            await self.tenant.ingest.append(posted)


@asynccontextmanager
async def in_process_service(settings: Settings) -> AsyncIterator[InProcessService]:
    """Start a service with one tenant in this process; yield it while its lifespan runs."""
    from app.main import create_app

    app = create_app(settings)
    async with app.router.lifespan_context(app) as state:
        assert state is not None
        (tenant,) = state["services"].by_tenant.values()
        yield InProcessService(app, state, tenant)

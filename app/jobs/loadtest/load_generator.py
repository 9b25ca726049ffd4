"""An open-loop load generator: it sends each request when it is due, however slow the responses are.

The latency of a request counts from the time at which it was due, so a service that stalls also pays for the requests
that should have been sent meanwhile. The generator is one thread with plain sockets, because on one machine it takes
CPU time from the service.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Address = tuple[str, int]

TICK_S = 0.0005  # between polls of the clock and the sockets; part of the latencies
RESPONSE_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
RECEIVE_BYTES = 1 << 18
NO_RESPONSE = 0  # instead of a status
HEAD_END = b"\r\n\r\n"


class ScheduledRequest(NamedTuple):
    """A request, and when to send it, in seconds from the start."""

    at_s: float
    kind: str
    request: bytes


@dataclass(slots=True)
class Responses:
    """The responses to the requests of one kind.

    latencies_ms  of the responses with status 200
    statuses      the number of responses by status; NO_RESPONSE for requests without one
    unannounced   the number of refusals with 429 or 503 without Retry-After
    """

    latencies_ms: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    unannounced: int = 0

    def count(self, status: int, latency_ms: float, head: bytes) -> None:
        """Count one response."""
        self.statuses[status] += 1
        if status == 200:
            self.latencies_ms.append(latency_ms)
        elif status in (429, 503) and b"\r\nretry-after:" not in head.lower():
            self.unannounced += 1


class LoadGenerator:
    """Sends requests over a fixed number of kept-alive connections, spread over the addresses.

    A request that finds no free connection waits for one; the wait is part of its latency.
    """

    def __init__(self, addresses: Sequence[Address], connections: int) -> None:
        self._epoll = select.epoll()
        self._free = deque(_Connection(addresses[number % len(addresses)]) for number in range(connections))
        self._open: dict[int, _Connection] = {}  # by file descriptor
        self._in_progress = 0
        self._outcomes: dict[str, Responses] = {}

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._open.values()):
            self._close(connection)
        self._epoll.close()

    def run(self, requests: Iterable[ScheduledRequest]) -> dict[str, Responses]:
        """Send all requests in the order of their times, and return the responses by kind."""
        self._outcomes = {}
        upcoming = iter(requests)
        next_request = next(upcoming, None)
        waiting: deque[ScheduledRequest] = deque()
        begin_s = checked_s = time.perf_counter()
        while next_request is not None or waiting or self._in_progress:
            now_s = time.perf_counter()
            while next_request is not None and begin_s + next_request.at_s <= now_s:
                waiting.append(next_request)
                next_request = next(upcoming, None)
            while waiting and self._free:
                self._send(waiting.popleft(), begin_s)
            time.sleep(TICK_S)
            for descriptor, _ in self._epoll.poll(0):
                self._receive(self._open[descriptor])
            if now_s > checked_s:
                self._fail_due_before(now_s - RESPONSE_TIMEOUT_S)
                checked_s = now_s + 1.0
        return self._outcomes

    def _send(self, due: ScheduledRequest, begin_s: float) -> None:
        connection = self._free.popleft()
        connection.kind, connection.due_s, connection.is_busy = due.kind, begin_s + due.at_s, True
        self._in_progress += 1
        try:
            if connection.socket is None:
                self._open[connection.connect()] = connection
                self._epoll.register(connection.connected, select.EPOLLIN)
            connection.connected.sendall(due.request)
        except OSError:
            self._fail(connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            received = connection.connected.recv(RECEIVE_BYTES)
        except OSError:
            received = b""
        if not received:
            self._fail(connection)
            return
        answer = connection.received = connection.received + received
        head_end = answer.find(HEAD_END)
        if head_end < 0 or len(answer) < head_end + len(HEAD_END) + _content_length(answer[:head_end]):
            return
        head = answer[:head_end]
        if b"\r\nconnection: close" in head:
            self._close(connection)
        self._complete(connection, int(head[9:12]), head)

    def _fail(self, connection: _Connection) -> None:
        self._close(connection)
        if connection.is_busy:
            self._complete(connection, NO_RESPONSE)

    def _complete(self, connection: _Connection, status: int, head: bytes = b"") -> None:
        latency_ms = (time.perf_counter() - connection.due_s) * 1e3
        connection.received, connection.is_busy = b"", False
        self._in_progress -= 1
        self._outcomes.setdefault(connection.kind, Responses()).count(status, latency_ms, head)
        self._free.append(connection)

    def _close(self, connection: _Connection) -> None:
        if connection.socket is not None:
            del self._open[connection.socket.fileno()]
            connection.socket.close()
            connection.socket = None

    def _fail_due_before(self, time_s: float) -> None:
        for connection in list(self._open.values()):
            if connection.is_busy and connection.due_s < time_s:
                self._fail(connection)


class _Connection:
    """A connection, with one request at a time."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self.socket: socket.socket | None = None
        self.kind = ""
        self.due_s = 0.0
        self.is_busy = False
        self.received = b""

    def connect(self) -> int:
        """Connect, and return the file descriptor."""
        self.socket = socket.create_connection(self._address, timeout=CONNECT_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        return self.socket.fileno()

    @property
    def connected(self) -> socket.socket:
        assert self.socket is not None
        return self.socket


def _content_length(head: bytes) -> int:
    return int(head.lower().partition(b"\r\ncontent-length:")[2].split(b"\r", 1)[0] or 0)


def get(path: str) -> bytes:
    """Return a GET request."""
    return f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode()


def post(path: str, body: object) -> bytes:
    """Return a POST request with a JSON body."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    return f"{head}\r\n\r\n".encode() + content

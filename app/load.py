"""An open-loop load generator: requests go out when they are due, whatever the answers do.

The latency of a request counts from the time at which it was due, so that a service that stalls is charged with all
that should have been sent meanwhile. It is one thread with plain sockets, since what it costs is taken from the
service where both run on one machine.
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

TICK_S = 0.0005  # between looks at the clock and the sockets; it is part of the latencies
ANSWER_WITHIN_S = 10.0
CONNECT_WITHIN_S = 5.0
RECEIVED_AT_ONCE = 1 << 18
NO_ANSWER = 0  # in the place of a status
HEAD_END = b"\r\n\r\n"


class Due(NamedTuple):
    """A request, and when it is to be sent: seconds from the start."""

    at_s: float
    kind: str
    request: bytes


@dataclass(slots=True)
class Outcome:
    """What became of the requests of one kind.

    latencies_ms  of the answers with status 200
    statuses      how many answers had which, NO_ANSWER for those that did not come
    unannounced   refusals with 429 or 503 that did not say when to come back
    """

    latencies_ms: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    unannounced: int = 0

    def count(self, status: int, latency_ms: float, head: bytes) -> None:
        self.statuses[status] += 1
        if status == 200:
            self.latencies_ms.append(latency_ms)
        elif status in (429, 503) and b"\r\nretry-after:" not in head.lower():
            self.unannounced += 1


class Load:
    """Sends over a fixed number of connections, kept alive, to all addresses in turn.

    A request that finds no connection free waits for one, and its latency goes on counting.
    """

    def __init__(self, addresses: Sequence[Address], connections: int) -> None:
        self._epoll = select.epoll()
        self._free = deque(_Connection(addresses[number % len(addresses)]) for number in range(connections))
        self._open: dict[int, _Connection] = {}  # by file descriptor
        self._at_work = 0
        self._outcomes: dict[str, Outcome] = {}

    def close(self) -> None:
        for connection in list(self._open.values()):
            self._close(connection)
        self._epoll.close()

    def run(self, requests: Iterable[Due]) -> dict[str, Outcome]:
        """Send all of them, in the order of their times, and wait for the answers; what became of them, by kind."""
        self._outcomes = {}
        coming = iter(requests)
        following = next(coming, None)
        waiting: deque[Due] = deque()
        begin_s = look_s = time.perf_counter()
        while following is not None or waiting or self._at_work:
            now_s = time.perf_counter()
            while following is not None and begin_s + following.at_s <= now_s:
                waiting.append(following)
                following = next(coming, None)
            while waiting and self._free:
                self._send(waiting.popleft(), begin_s)
            time.sleep(TICK_S)
            for descriptor, _ in self._epoll.poll(0):
                self._receive(self._open[descriptor])
            if now_s > look_s:
                self._give_up_those_due_before(now_s - ANSWER_WITHIN_S)
                look_s = now_s + 1.0
        return self._outcomes

    def _send(self, due: Due, begin_s: float) -> None:
        connection = self._free.popleft()
        connection.kind, connection.due_s, connection.is_at_work = due.kind, begin_s + due.at_s, True
        self._at_work += 1
        try:
            if connection.socket is None:
                self._open[connection.connect()] = connection
                self._epoll.register(connection.connected, select.EPOLLIN)
            connection.connected.sendall(due.request)
        except OSError:
            self._fail(connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            received = connection.connected.recv(RECEIVED_AT_ONCE)
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
        self._end(connection, int(head[9:12]), head)

    def _fail(self, connection: _Connection) -> None:
        self._close(connection)
        if connection.is_at_work:
            self._end(connection, NO_ANSWER)

    def _end(self, connection: _Connection, status: int, head: bytes = b"") -> None:
        latency_ms = (time.perf_counter() - connection.due_s) * 1e3
        connection.received, connection.is_at_work = b"", False
        self._at_work -= 1
        self._outcomes.setdefault(connection.kind, Outcome()).count(status, latency_ms, head)
        self._free.append(connection)

    def _close(self, connection: _Connection) -> None:
        if connection.socket is not None:
            del self._open[connection.socket.fileno()]
            connection.socket.close()
            connection.socket = None

    def _give_up_those_due_before(self, time_s: float) -> None:
        for connection in list(self._open.values()):
            if connection.is_at_work and connection.due_s < time_s:
                self._fail(connection)


class _Connection:
    """One place to send from, with one request at a time."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self.socket: socket.socket | None = None
        self.kind = ""
        self.due_s = 0.0
        self.is_at_work = False
        self.received = b""

    def connect(self) -> int:
        """The file descriptor."""
        self.socket = socket.create_connection(self._address, timeout=CONNECT_WITHIN_S)
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
    """A request."""
    return f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode()


def post(path: str, body: object) -> bytes:
    """A request with a JSON body."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    return f"{head}\r\n\r\n".encode() + content

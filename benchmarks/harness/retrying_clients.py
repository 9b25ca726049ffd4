"""Clients that send events until they receive 2xx, whatever happens to their connections."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from benchmarks.harness.faults.tcp_proxy import Address
from benchmarks.harness.ledger import EventJson, Ledger

SENDERS = 24
BATCH_SIZES = (1,) * 5 + (10,) * 4 + (100,)
HOT_USERS = 8
HOT_RATE = 50.0  # events of each hot user per second
ANSWER_WITHIN_S = 10.0
PAUSE_S = 0.05  # before a retry
REST_S = 0.0  # between two requests of a sender

NO_ANSWER = "no answer"
TRANSPORT_ERRORS = (OSError, TimeoutError, asyncio.IncompleteReadError)


def counts(counter: Counter[str]) -> str:
    """Return the counts as a line of text, most frequent first."""
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common()) or "none"


class RetryingClients:
    """A closed loop of senders that post to one address.

    answers  number of requests by answer: an HTTP status with the error code of the body, or none
    """

    def __init__(self, address: Address, ledger: Ledger, seed: int, *, resent_share: float) -> None:
        self.ledger = ledger
        self.answers: Counter[str] = Counter()
        self.last_acknowledged_s = 0.0  # monotonic
        self._address = address
        self._seed = seed
        self._resent_share = resent_share
        self._begin_s = 0.0
        self._hot_made = 0

    async def run(self, is_enough: Callable[[], bool]) -> None:
        """Create and send events until `is_enough`; return when all of them are acknowledged."""
        self._begin_s = time.monotonic()
        async with asyncio.TaskGroup() as senders:
            for number in range(SENDERS):
                senders.create_task(self._send_until(is_enough, random.Random(self._seed * SENDERS + number)))

    @property
    def hot_rate(self) -> float:
        """Events per second of each hot user, until the last acknowledgement."""
        return self._hot_made / HOT_USERS / max(self.last_acknowledged_s - self._begin_s, 1e-9)

    async def _send_until(self, is_enough: Callable[[], bool], rng: random.Random) -> None:
        connection = HttpConnection(self._address)
        while not is_enough():
            numbers = [self.ledger.new(self._user_id(), time.time()) for _ in range(rng.choice(BATCH_SIZES))]
            bodies = [self.ledger.body(number) for number in numbers]
            for _ in bodies[:]:
                if rng.random() < self._resent_share and (resent := self.ledger.resent()):
                    numbers.append(resent[0])
                    bodies.append(resent[1])
            while not await self._is_taken(connection, bodies):
                await asyncio.sleep(PAUSE_S * rng.uniform(0.5, 1.5))
            self.ledger.acknowledge(numbers)
            self.last_acknowledged_s = time.monotonic()
            await asyncio.sleep(REST_S)
        connection.close()

    def _user_id(self) -> str | None:
        """Return a hot user as long as they lack events for their rate; otherwise None."""
        due = (time.monotonic() - self._begin_s) * HOT_RATE * HOT_USERS
        if self._hot_made >= due:
            return None
        self._hot_made += 1
        return f"hot-{self._hot_made % HOT_USERS}"

    async def _is_taken(self, connection: HttpConnection, bodies: list[EventJson]) -> bool:
        try:
            status, answer = await connection.request("POST", "/v1/events", bodies)
        except TRANSPORT_ERRORS:
            self.answers[NO_ANSWER] += 1
            return False
        if status == 200:
            self.answers["200"] += 1
            if answer["accepted"] + answer["duplicates"] != len(bodies):
                raise RuntimeError(f"{len(bodies)} events were answered by {answer}")
            return True
        self.answers[f"{status} {answer['error']['code']}"] += 1
        return False


class HttpConnection:
    """An HTTP connection, which opens at the first request and again after each failure."""

    def __init__(self, address: Address, answer_within_s: float = ANSWER_WITHIN_S) -> None:
        self._address = address
        self._answer_within_s = answer_within_s
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def request(self, method: str, path: str, body: object = None) -> tuple[int, dict]:  # type: ignore[type-arg]
        """Return status and JSON of the response; raise one of TRANSPORT_ERRORS if there is none in time."""
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        head += "Content-Type: application/json\r\n\r\n" if content else "\r\n"
        try:
            async with asyncio.timeout(self._answer_within_s):
                return await self._exchange(head.encode() + content)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort the connection; the next request opens a new one."""
        if self._writer is not None:
            with suppress(OSError, RuntimeError):
                self._writer.transport.abort()
        self._reader = self._writer = None

    async def _exchange(self, request: bytes) -> tuple[int, dict]:  # type: ignore[type-arg]
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address)
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        lower = head.lower()
        length = int(lower.partition(b"content-length:")[2].split(b"\r", 1)[0])
        content = await self._reader.readexactly(length)
        if b"connection: close" in lower:
            self.close()
        return int(head.split(b" ", 2)[1]), json.loads(content)

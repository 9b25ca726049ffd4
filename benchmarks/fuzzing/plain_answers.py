"""Check that responses to requests for recommendations without the app equal those of the app, byte for byte.

Users with histories of every length, with merged ones and unknown ones among them, ask over several connections at
once, so that batches of all sizes form, and click in between. Each request is sent twice: as it comes, and over a
connection that passes everything to the app, which then builds a query for each. Random bytes and the time in the ids
of lists are the same for both, and the headers `Date` and `Server-Timing` may differ. Exit status 1 if anything else
does, or if the app got a request that is plain.

    python -m benchmarks.fuzzing.plain_answers --model models/ml-1m --requests 100000
    python -m benchmarks.fuzzing.plain_answers --model models/ml-1m --requests 100000 --redis
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Annotated, Any
from unittest.mock import patch

import typer
from rich.console import Console
from starlette.types import Receive, Scope, Send
from typing_extensions import override
from uvicorn import Config
from uvicorn.server import ServerState

from app.events import recommendation_ids
from app.http.protocol import LimitedHttpProtocol
from app.recommendation.ranking import plain_ranking, query_builder
from app.schemas.recommendations import RecommendationRequest
from app.serving import lifespan
from app.serving.lifespan import Service
from app.settings import Settings
from benchmarks.harness.service_process import in_process_service
from benchmarks.harness.topology import redis_server

LENGTHS = (0, 1, 2, 3, 4, 10, 30)  # of histories: up to three events, trends are blended in
USERS = 200
TRENDS = 1_500  # events that make trends
CONNECTIONS = 32
CLICKS = 0.1  # per round
PLAIN = ("", "", "?k=5", "?k=30")  # joins its batch at once
QUERIES = (*PLAIN * 3, "?exclude_seen=none", "?k=7&explain=true", "?diversity=0.5", "?current_item=nothing", "?k=300")
BODIES = (
    '{{"user_id":"{}"}}',
    '{{"user_id":"{}","k":3,"explain":true}}',
    '{{"requests":[{{"user_id":"{}"}},{{"user_id":"nobody","k":2}}]}}',
)
POSTS = 0.1  # of the requests
HEADERS = ("", "Accept: */*\r\nConnection: keep-alive\r\n", "User-Agent: x\r\nAccept-Encoding: gzip, br\r\n")
FAULT = re.compile(rb"HTTP/1.1 5")  # of both ways, which would be equal
MAY_DIFFER = re.compile(rb"(?:date|server-timing): [^\r]*\r\n")

console = Console()


class Memory(asyncio.Transport):
    """A transport that stores the responses of a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: asyncio.Queue[bytes] = asyncio.Queue()

    @override
    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.answers.put_nowait(data)

    @override
    def is_closing(self) -> bool:
        return False

    @override
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    @override
    def close(self) -> None: ...


class Way:
    """Connections to the service, and the number of their requests that reached the app."""

    def __init__(self, app: Any, state: dict[str, Any]) -> None:
        self.for_app = 0

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            self.for_app += 1
            await app(scope, receive, send)

        config = Config(counted, lifespan="off", ws="none", access_log=False, log_config=None, proxy_headers=False)
        config.load()
        self._connect = partial(LimitedHttpProtocol, config, ServerState(), state)

    async def answers(self, requests: Sequence[bytes]) -> list[bytes]:
        """Send each request over its own connection, concurrently; return responses without parts that may differ."""
        connections = [(self._connect(), Memory()) for _ in requests]
        for (protocol, transport), request in zip(connections, requests, strict=True):
            protocol.connection_made(transport)
            protocol.data_received(request)
        answers = [MAY_DIFFER.sub(b"", await transport.answers.get()) for _, transport in connections]
        for protocol, _ in connections:
            protocol.connection_lost(None)
        return answers


def request(user_id: str, number: int) -> bytes:
    """Return a random request, mostly a plain one."""
    common = f"HTTP/1.1\r\nHost: x\r\nX-Request-ID: r-{number}\r\n{random.choice(HEADERS)}"
    if random.random() < POSTS:
        body = random.choice(BODIES).format(user_id)
        return f"POST /v1/recommendations {common}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    return f"GET /v1/users/{user_id}/recommendations{random.choice(QUERIES)} {common}\r\n".encode()


async def click(service: Service, user_id: str, count: int) -> None:
    """Log clicks of the user on random items."""
    ids = service.catalogue.item_ids
    items = [ids[random.randrange(len(ids))] for _ in range(count)]
    await service.ingest.append([{"user_id": user_id, "item_id": item_id} for item_id in items])


async def add_users(service: Service) -> list[str]:
    """Log histories of users; return their ids and some unknown ones."""
    users = [f"user-{number}" for number in range(USERS)]
    for number, user_id in enumerate(users):
        if count := LENGTHS[number % len(LENGTHS)]:
            await click(service, user_id, count)
    for number in range(TRENDS // 100):
        await click(service, f"crowd-{number}", 100)
    for number in range(5, USERS, 70):
        await service.users.merge(users[number], users[number + 1])
    await service.signals.sync()
    return [*users, "a:b", "~", "..."]


def never(_request: RecommendationRequest) -> bool:
    """Return False, so that no request is plain and each gets a full query."""
    return False


async def differences(settings: Settings, requests: int) -> tuple[int, int]:
    """Return the number of different or failed responses, and of requests that reached the app."""
    different, sent = 0, 0
    async with in_process_service(settings) as service:
        users = await add_users(service.tenant)
        plain = Way(service.app, dict(service.state))
        nothing = SimpleNamespace(begin=lambda *_: None, takes_body=lambda *_: False)
        usual = Way(service.app, {**service.state, "plain_requests": nothing})
        while sent < requests:
            count = min(random.randint(1, CONNECTIONS), requests - sent)
            batch = [request(random.choice(users), sent + n) for n in range(count)]
            found = await plain.answers(batch)
            with patch.object(plain_ranking, "is_plain", never), patch.object(query_builder, "is_plain", never):
                expected = await usual.answers(batch)
            different += sum(
                one != other or FAULT.match(one) is not None for one, other in zip(found, expected, strict=True)
            )
            sent += count
            if random.random() < CLICKS:
                await click(service.tenant, random.choice(users), 1)
        assert usual.for_app == requests
        return different, plain.for_app


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    requests: Annotated[int, typer.Option(min=1)] = 100_000,
    redis: Annotated[bool, typer.Option("--redis", help="Start a Redis, instead of using SQLite.")] = False,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Print the number of different responses."""
    random.seed(seed)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory()))
        url = stack.enter_context(redis_server(directory)) if redis else None
        chance = SimpleNamespace(getrandbits=lambda _bits: 0)
        stack.enter_context(patch.object(recommendation_ids, "random", chance))
        stack.enter_context(patch.object(recommendation_ids, "time", SimpleNamespace(time_ns=lambda: 0)))
        stack.enter_context(patch.object(lifespan, "SYNC_EVERY_S", 1e9))  # or trends change between two answers
        settings = Settings(model_dir=model, data_dir=directory, redis_url=url)
        different, for_app = asyncio.run(differences(settings, requests))
    console.print(f"{requests:,} requests: {different:,} answers differ, {for_app:,} were left to the app")
    if different or for_app:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

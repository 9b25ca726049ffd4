"""Request bodies that arrive after their head, in parts, late or never."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.http.middleware import plain_cycle
from app.http.middleware.load_shedding import RequestsInProgress
from tests.app.conftest import Client
from tests.app.http.middleware.server import Answer, Bounds, Server, post, read_answer
from tests.waiting import PATIENCE_S, until

PATH = "/v1/events"


def event(event_id: str, user_id: str = "bob") -> dict[str, Any]:
    return {"event_id": event_id, "user_id": user_id, "item_id": "item-1"}


@pytest.fixture(scope="module")
def known(shared_client: Client) -> Client:
    return shared_client


async def waiting_cycle(server: Server) -> object:
    """The request whose head has arrived and whose body is incomplete."""
    await until(lambda: any(connection.cycle for connection in server.state.connections))  # type: ignore[union-attr]
    (connection,) = server.state.connections
    return connection.cycle  # type: ignore[union-attr]


def test_a_body_may_arrive_after_its_head(known: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_cycle, "BODY_WITHIN_S", PATIENCE_S)
    server, sent = Server(known), post(event("in parts"))
    parts = [sent[n : n + 9] for n in range(0, len(sent), 9)]
    ((status, _, body),) = known.runner.run(server.exchange(*parts))
    assert (status, json.loads(body)["accepted"], server.for_app) == (200, 1, [])


@pytest.mark.parametrize("before", [0, 5])
def test_the_app_waits_for_a_late_body(known: Client, before: int) -> None:
    async def send_late() -> Answer:
        async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
            head, body = sent.split(b"\r\n\r\n")
            writer.write(head + b"\r\n\r\n" + body[:before])
            await until(lambda: server.for_app)
            writer.write(body[before:])
            return await read_answer(reader)

    server, sent = Server(known), post(event(f"late {before}"))
    status, _, body = known.runner.run(send_late())
    assert (status, json.loads(body)["accepted"], server.for_app) == (200, 1, [PATH])


def test_a_disconnect_before_the_body_is_complete_leaves_nothing(
    known: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def disconnect() -> None:
        async with asyncio.timeout(PATIENCE_S):
            async with server.connected() as (_, writer):
                writer.write(post(event("gone"))[:-5])
                waiting = weakref.ref(await waiting_cycle(server))
            await until(lambda: not server.state.connections)
            await until(lambda: gc.collect() >= 0 and waiting() is None)  # a timer would keep it

    monkeypatch.setattr(plain_cycle, "BODY_WITHIN_S", 10 * PATIENCE_S)
    server = Server(known)
    known.runner.run(disconnect())
    assert (server.for_app, server.state.tasks) == ([], set())
    assert known.services.metrics.requests.in_progress == 0
    assert "gone" not in [one["event_id"] for one in known.get("/v1/users/bob/events").json()["events"]]


def test_the_app_refuses_a_request_whose_slot_is_taken_before_its_body_arrives(
    known: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fill() -> None:
        async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
            writer.write(sent[:-5])
            await waiting_cycle(server)
            in_progress.begin(None)
            writer.write(sent[-5:])
            await read_answer(reader)

    monkeypatch.setattr(plain_cycle, "BODY_WITHIN_S", PATIENCE_S)
    in_progress, sent = RequestsInProgress(1), post(event("no room"))
    server = Server(known, Bounds(in_progress))
    known.runner.run(fill())
    assert server.for_app == [PATH]


def test_the_connection_closes_if_the_server_shuts_down_before_the_body(known: Client) -> None:
    async def shut_down() -> Answer:
        async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
            writer.write(sent[:-5])
            await waiting_cycle(server)
            for connection in list(server.state.connections):
                connection.shutdown()
            await until(lambda: server.for_app)
            writer.write(sent[-5:])
            answer = await read_answer(reader)
            assert await reader.read() == b""
            return answer

    server, sent = Server(known), post(event("shut down"))
    status, headers, _ = known.runner.run(shut_down())
    assert (status, headers["connection"]) == (200, "close")


def test_an_idle_connection_keeps_no_body(known: Client) -> None:
    async def kept() -> int:
        async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
            writer.write(post([event(f"{n}", "long") for n in range(100)]))
            await read_answer(reader)
            (connection,) = server.state.connections
            return len(connection.cycle.body)  # type: ignore[union-attr]

    server = Server(known)
    assert (known.runner.run(kept()), server.for_app) == (0, [])


def test_invalid_chunks_after_a_head_are_refused(known: Client) -> None:
    server = Server(known)
    sent = post(event("then noise")) + b"noise\r\n\r\n"
    (first, second) = known.runner.run(server.exchange(sent, answers=2))
    assert (first[0], second[0]) == (200, 400)


def test_the_app_answers_if_the_process_starts_draining(start: Callable[..., Client], tmp_path: Path) -> None:
    async def drain() -> Answer:
        async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
            writer.write(sent[:-5])
            await waiting_cycle(server)
            client.services.draining = True
            writer.write(sent[-5:])
            return await read_answer(reader)

    client, sent = start(tmp_path), post(event("drained"))
    server = Server(client)
    status, headers, _ = client.runner.run(drain())
    assert (status, headers["connection"], server.for_app) == (200, "close", [PATH])
    client.close()

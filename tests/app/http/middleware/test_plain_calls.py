"""Plain calls with a body bypass the app with identical responses; all other calls reach the app."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.http.middleware.load_shedding import RequestsInProgress
from tests.app.conftest import Client
from tests.app.http.middleware.server import Answer, Bounds, Server, post, read_answer, request, start_with_keys
from tests.waiting import PATIENCE_S

PATH = "/v1/events"
EVENT = {"event_id": "one", "user_id": "bob", "item_id": "item-1"}


def event(event_id: str, user_id: str = "bob") -> dict[str, Any]:
    return EVENT | {"event_id": event_id, "user_id": user_id}


def shown(answer: Answer) -> Any:
    """The parts of a response that must be equal."""
    status, headers, body = answer
    return status, {name: headers[name] for name in headers if name not in ("x-request-id", "server-timing")}, body


def lists(answer: Answer) -> Any:
    """The same of a response with lists, each with an id."""
    status, headers, body = shown(answer)
    without_id = json.loads(
        body, object_pairs_hook=lambda pairs: [one for one in pairs if one[0] != "recommendation_id"]
    )
    return status, headers, without_id


@pytest.fixture(scope="module")
def known(shared_client: Client) -> Client:
    return shared_client


def logged(client: Client, user_id: str) -> list[str]:
    """Ids of a user's logged events in log order."""
    return [one["event_id"] for one in client.get(f"/v1/users/{user_id}/events").json()["events"]]


@pytest.mark.parametrize("count", [1, 3, 100])
def test_events_bypass_the_app(known: Client, count: int) -> None:
    server, user_id = Server(known), f"user of {count}"
    events = [event(f"{n}", user_id) for n in range(count)]
    sent = post(events[0] if count == 1 else events, "Content-Type: application/json; charset=utf-8")
    for counted in ({"accepted": count, "duplicates": 0}, {"accepted": 0, "duplicates": count}):
        ((status, _, body),) = known.runner.run(server.exchange(sent))
        assert (status, json.loads(body)) == (200, {**counted, "unknown_items": 0, "unknown_types": 0, "refused": 0})
    assert server.for_app == []
    assert logged(known, user_id) == [f"{n}" for n in range(count)]


BODIES: dict[str, bytes | object] = {
    "no body": b"",
    "no JSON": b"{",
    "no UTF-8": b"\xff",
    "a field twice": b'{"user_id": "a", "user_id": "b", "item_id": "c"}',
    "no events": [],
    "no event": 7,
    "a wrong field": EVENT | {"user": "x"},
    "a wrong type": [EVENT, EVENT | {"value": "much"}],
    "a late event": EVENT | {"event_id": "late", "timestamp": 1},
    "an unknown item": EVENT | {"event_id": "unknown", "item_id": "nothing"},
    "an unknown type": EVENT | {"event_id": "type", "type": "wave"},
    "an impression": {"event_id": "shown", "user_id": "bob", "type": "impression", "items": ["item-1", "item-2"]},
    "an order": EVENT | {"event_id": "order", "type": "purchase", "value": 2.5, "order_id": "1"},
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_responses_equal_those_of_the_app(known: Client, body: bytes | object) -> None:
    server = Server(known)
    known.runner.run(server.exchange(post(body)))  # the first one, of which the others are duplicates
    (plain,) = known.runner.run(server.exchange(post(body, "X-Request-ID: own-id_1")))
    assert server.for_app == []
    (of_app,) = known.runner.run(server.exchange(post(body, path=f"{PATH}?")))
    assert server.for_app == [PATH]
    assert shown(plain) == shown(of_app)
    assert plain[1]["x-request-id"] == "own-id_1"


OTHER_CALLS: dict[str, tuple[str, object]] = {
    "a list": ("recommendations", {"user_id": "bob", "k": 3}),
    "a session": ("recommendations", {"history": [{"item_id": "item-1"}], "explain": True}),
    "a batch": ("recommendations", {"requests": [{"user_id": "bob"}, {"user_id": "nobody", "k": 2}]}),
    "no user": ("recommendations", {"k": 3}),
    "a list without JSON": ("recommendations", b"{"),
    "a wrong list": ("recommendations", {"user_id": "bob", "k": 0}),
    "a portable list": ("portable/recommendations", {"k": 3}),
    "portable events": ("portable/events", {"events": [{"event_id": "one", "item_id": "item-1"}]}),
}


@pytest.mark.parametrize(("path", "body"), OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_variations_are_answered_like_the_app(known: Client, path: str, body: object) -> None:
    server, path = Server(known), f"/v1/{path}"
    (plain,) = known.runner.run(server.exchange(post(body, path=path)))
    assert server.for_app == []
    (of_app,) = known.runner.run(server.exchange(post(body, path=f"{path}?")))
    assert server.for_app == [path]
    assert lists(plain) == lists(of_app)


OF_THE_APP = {
    "another path": post(EVENT, path="/v1/event"),
    "a query": post(EVENT, path=f"{PATH}?x=1"),
    "another method": post(EVENT).replace(b"POST", b"PUT"),
    "another type": post(EVENT, "Content-Type: text/plain"),
    "a compressed body": post(EVENT, "Content-Encoding: gzip"),
    "two types": post(EVENT, "Content-Type: application/json", "Content-Type: text/plain"),
    "a body without a length": request(PATH).replace(b"GET", b"POST"),
    "a body in chunks": request(PATH, "Transfer-Encoding: chunked").replace(b"GET", b"POST") + b"2\r\n[]\r\n0\r\n\r\n",
    "a long body": post(json.dumps(EVENT).encode() + b" " * 32_768),
    "a page": post(EVENT, "Sec-Fetch-Site: same-origin"),
    "a page of another origin": post(EVENT, "Origin: https://elsewhere.example"),
    "the last request": post(EVENT, "Connection: close"),
    "old HTTP": post(EVENT).replace(b"HTTP/1.1", b"HTTP/1.0"),
}


@pytest.mark.parametrize("sent", OF_THE_APP.values(), ids=OF_THE_APP)
def test_other_calls_reach_the_app(known: Client, sent: bytes) -> None:
    server = Server(known)
    known.runner.run(server.exchange(sent))
    assert len(server.for_app) == 1


def test_expect_100_continue_is_answered(known: Client) -> None:
    async def ask_first() -> tuple[bytes, Answer]:
        async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
            head, body = post(event("asked first"), "Expect: 100-continue").split(b"\r\n\r\n")
            writer.write(head + b"\r\n\r\n")
            told = await reader.readuntil(b"\r\n\r\n")
            writer.write(body)
            return told, await read_answer(reader)

    server = Server(known)
    told, (status, _, _) = known.runner.run(ask_first())
    assert (told.split()[1], status, server.for_app) == (b"100", 200, [PATH])


def test_pipelined_requests_are_answered_in_order(known: Client) -> None:
    ids = [f"id-{n}" for n in range(8)]
    sent = b"".join(
        post(event(name), f"X-Request-ID: {name}") if n % 2 else request("/healthz", f"X-Request-ID: {name}")
        for n, name in enumerate(ids)
    )
    answers = known.runner.run(Server(known).exchange(sent, answers=8))
    assert [headers["x-request-id"] for _, headers, _ in answers] == ids
    assert {status for status, _, _ in answers} == {200}


def test_metrics_count_them_together_with_the_app(client: Client) -> None:
    server = Server(client)
    for path in (PATH, f"{PATH}?"):
        client.runner.run(server.exchange(post(EVENT, path=path)))
    assert server.for_app == [PATH]
    assert (
        'lisarec_request_seconds_count{method="POST",route="/v1/events",status="200"} 2.0'
        in client.get("/metrics").text
    )
    assert client.services.metrics.requests.in_progress == 0


def test_the_app_refuses_requests_beyond_the_limit(known: Client) -> None:
    in_progress = RequestsInProgress(1)
    server = Server(known, Bounds(in_progress))
    in_progress.begin(None)
    known.runner.run(server.exchange(post(EVENT)))
    assert server.for_app == [PATH]
    in_progress.end(None)
    known.runner.run(server.exchange(post(EVENT)))
    assert len(server.for_app) == 1
    assert in_progress.has_room(None)


KINDS: dict[str, tuple[dict[str, Any], bool, int]] = {
    "a key": ({"scopes": ["events:write", "portable"]}, True, 200),
    "lists": ({"scopes": ["recs:read"]}, False, 403),
    "a key with a rate": ({"scopes": ["events:write"], "requests_per_minute": 100}, True, 200),
    "a key with a low rate": ({"scopes": ["events:write"], "requests_per_minute": 1}, True, 200),
    "a page's key": ({"scopes": ["events:write"], "origins": ["https://shop.example"]}, False, 403),
}


@pytest.fixture(scope="module")
def guarded(
    start: Callable[..., Client], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Client, dict[str, str]]]:
    """A service with a key of each kind."""
    kinds = {name: kind[0] for name, kind in KINDS.items()}
    client, texts = start_with_keys(start, tmp_path_factory.mktemp("guarded"), kinds)
    yield client, texts
    client.close()


class TestKeys:
    @pytest.mark.parametrize("kind", KINDS)
    def test_requests_with_server_keys_bypass_the_app(self, guarded: tuple[Client, dict[str, str]], kind: str) -> None:
        server, authorised = Server(guarded[0]), f"Authorization: Bearer {guarded[1][kind]}"
        ((status, _, _),) = guarded[0].runner.run(server.exchange(post(event(kind), authorised)))
        assert (status, not server.for_app) == (KINDS[kind][2], KINDS[kind][1])

    @pytest.mark.parametrize("path", [PATH, "/v1/portable/events", "/v1/recommendations"])
    def test_responses_equal_those_of_the_app(self, guarded: tuple[Client, dict[str, str]], path: str) -> None:
        client, texts = guarded
        body = {"events": [{"item_id": "item-1"}]} if path == "/v1/portable/events" else event("with a key")
        scope = "lists" if path == "/v1/recommendations" else "a key"
        authorised = f"Authorization: Bearer {texts[scope]}"
        client.runner.run(Server(client).exchange(post(body, authorised, path=path)))  # then it is a duplicate
        server = Server(client)
        (plain,) = client.runner.run(server.exchange(post(body, authorised, path=path)))
        assert server.for_app == []
        (of_app,) = client.runner.run(server.exchange(post(body, authorised, path=f"{path}?")))
        assert shown(plain) == shown(of_app)
        assert list(plain[1]) == list(of_app[1])
        assert plain[1].get("vary") == (None if path == "/v1/recommendations" else "Origin")

    def test_events_count_against_the_rate(self, guarded: tuple[Client, dict[str, str]]) -> None:
        server, authorised = Server(guarded[0]), f"Authorization: Bearer {guarded[1]['a key with a rate']}"
        statuses = [
            guarded[0].runner.run(server.exchange(post([event(f"{n} {turn}") for n in range(60)], authorised)))[0][0]
            for turn in range(2)
        ]
        assert (statuses, server.for_app) == ([200, 429], [])

    @pytest.mark.parametrize("headers", [(), ("Authorization: Bearer lisarec_0_0",)])
    def test_the_app_refuses_invalid_keys_at_once(
        self, guarded: tuple[Client, dict[str, str]], headers: Sequence[str]
    ) -> None:
        server, (head, _) = Server(guarded[0]), post(EVENT, *headers).split(b"\r\n\r\n")
        ((status, _, _),) = guarded[0].runner.run(server.exchange(head + b"\r\n\r\n"))
        assert (status, server.for_app) == (401, [PATH])


class TestFailures:
    def test_the_app_answers_requests_that_cannot_start(self, known: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("app.http.middleware.plain_requests.uncounted_caller", None)
        server = Server(known)
        ((status, _, _),) = known.runner.run(server.exchange(post(EVENT)))
        assert (status, server.for_app) == (200, [PATH])

    def test_a_bug_returns_500_and_is_logged(
        self, known: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def fail(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(known.service.ingest, "append", fail)
        ((status, _, body),) = known.runner.run(Server(known).exchange(post(EVENT)))
        assert (status, json.loads(body)["error"]["code"]) == (500, "internal_error")
        assert "ZeroDivisionError" in caplog.text
        assert "POST /v1/events answered 500" in caplog.text

    def test_shutdown_cancels_requests_that_take_too_long(self, known: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        begun = asyncio.Event()

        async def never(*_: object) -> None:
            begun.set()
            await asyncio.Event().wait()

        async def cancelled() -> Answer:
            async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
                writer.write(post(EVENT))
                await begun.wait()
                (task,) = server.state.tasks
                task.cancel()
                return await read_answer(reader)

        monkeypatch.setattr(known.service.ingest, "append", never)
        server = Server(known)
        status, _, body = known.runner.run(cancelled())
        assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
        assert not server.state.tasks

    def test_an_unavailable_store_is_reported_like_the_app(self, start: Callable[..., Client], tmp_path: Path) -> None:
        client = start(tmp_path)
        client.close_store()
        server = Server(client)
        ((status, _, body),) = client.runner.run(server.exchange(post(EVENT)))
        assert (status, json.loads(body)["error"]["code"], server.for_app) == (503, "storage_unavailable", [])
        client.close()

"""Plain requests for recommendations bypass the app with identical responses; all others reach the app."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.http.auth import quota_counters
from app.http.middleware import plain_requests
from app.http.middleware.load_shedding import RequestsInProgress, Source
from app.observability import tracing
from app.recommendation.batching import Waiter
from app.schemas.recommendations import Recommendations
from tests.app.conftest import Client
from tests.app.http.middleware.server import Answer, Bounds, Server, read_answer, request, start_with_keys
from tests.waiting import PATIENCE_S, until

PATH = "/v1/users/{}/recommendations"
OWN_HEADERS = {"x-request-id", "server-timing"}


def shown(answer: Answer) -> Any:
    """The parts of a response that must be equal."""
    status, headers, body = answer

    def without_id(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [pair for pair in pairs if pair[0] != "recommendation_id"]

    content = json.loads(body, object_pairs_hook=without_id)
    return status, list(headers), {name: headers[name] for name in headers.keys() - OWN_HEADERS}, content


@pytest.fixture(scope="module")
def known(shared_client: Client) -> Client:
    shared_client.click("ada", "item-1", "item-2", "item-9")
    return shared_client


@pytest.mark.parametrize("user_id", ["ada", "nobody", "a:b", "...", "a" * 128, "A-Z_0~9"])
@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("X-Request-ID: own-id_1",),
        ("X-Request-ID: not safe",),
        ("X-Request-ID: first", "X-Request-ID: second"),
        ("Accept: */*", "User-Agent: test", "Connection: keep-alive", "Accept-Encoding: gzip"),
    ],
)
def test_responses_equal_those_of_the_app(known: Client, user_id: str, headers: Sequence[str]) -> None:
    server, path, run = Server(known), PATH.format(user_id), known.runner.run
    (plain,) = run(server.exchange(request(path, *headers)))
    assert server.for_app == []
    (of_app,) = run(server.exchange(request(f"{path}?", *headers)))
    assert server.for_app == [path]
    assert plain[0] == 200
    assert shown(plain) == shown(of_app)
    if headers and headers[0].split()[1] in ("own-id_1", "first"):
        assert plain[1]["x-request-id"] == of_app[1]["x-request-id"] == headers[0].split()[1]
    else:
        assert plain[1]["x-request-id"] != of_app[1]["x-request-id"]
    assert plain[1]["server-timing"].startswith("store;dur=")


@pytest.mark.parametrize("k", ["1", "10", "020", "249"])
def test_a_list_length_bypasses_the_app(known: Client, k: str) -> None:
    server = Server(known)
    (plain,) = known.runner.run(server.exchange(request(f"{PATH.format('ada')}?k={k}")))
    assert server.for_app == []
    (of_app,) = known.runner.run(server.exchange(request(f"http://x{PATH.format('ada')}?k={k}")))
    assert len(json.loads(plain[2])["items"]) == min(int(k), 57)
    assert shown(plain) == shown(of_app)


QUERIES = [
    "k=250",
    "exclude_seen=none",
    "k=3&exclude_seen=none",
    "diversity=0.5",
    "explain=true",
    "categories=drama&max_per=categories:2",
    "categories=nothing",
    "exclude=item-1&exclude=item-2&current_item=item-3",
    "basket=item-1&basket=item-9",
    "filter=price%20%3C%203",
    "filter=a%20%3C",
    "objective=nothing",
    "scenario=nothing",
    "exclude_events=wave",
    "params=%7B%22x%22%3A1%7D",
]


@pytest.mark.parametrize("query", QUERIES)
def test_other_options_are_answered_like_the_app(known: Client, query: str) -> None:
    server = Server(known)
    (plain,) = known.runner.run(server.exchange(request(f"{PATH.format('ada')}?{query}")))
    assert server.for_app == []
    (of_app,) = known.runner.run(server.exchange(request(f"http://x{PATH.format('ada')}?{query}")))
    assert len(server.for_app) == 1
    assert shown(plain) == shown(of_app)


OF_THE_APP = {
    "another path": request("/v1/users/ada/recommendation"),
    "a longer path": request(f"{PATH.format('ada')}/"),
    "a long id": request(PATH.format("a" * 129)),
    "no id": request(PATH.format(".")),
    "a step": request(PATH.format("..")),
    "an encoded id": request(PATH.format("a%2Fb")),
    "a cursor": request(f"{PATH.format('ada')}?cursor=x"),
    "a cursor after others": request(f"{PATH.format('ada')}?k=3&cursor=x"),
    "an encoded field": request(f"{PATH.format('ada')}?k=3&c%75rsor=x"),
    "a long query": request(f"{PATH.format('ada')}?{'&'.join(['exclude=x'] * 52)}"),
    "an unknown field": request(f"{PATH.format('ada')}?seen=none"),
    "a field twice": request(f"{PATH.format('ada')}?k=3&k=3"),
    "a wrong field": request(f"{PATH.format('ada')}?k=0"),
    "an address with its host": request(f"http://x{PATH.format('ada')}"),
    "another method": request(PATH.format("ada")).replace(b"GET", b"PUT"),
    "a body": request(PATH.format("ada"), "Content-Length: 2") + b"{}",
    "a body in chunks": request(PATH.format("ada"), "Transfer-Encoding: chunked") + b"0\r\n\r\n",
    "a page of another origin": request(PATH.format("ada"), "Origin: https://elsewhere.example"),
    "a page": request(PATH.format("ada"), "Sec-Fetch-Site: same-origin"),
    "a page of another name": request(PATH.format("ada"), "Accept-Language: en"),
    "an upgrade": request(PATH.format("ada"), "Connection: upgrade", "Upgrade: websocket"),
    "the last request": request(PATH.format("ada"), "Connection: close"),
    "old HTTP": request(PATH.format("ada"), version="1.0"),
    "one that asks first": request(PATH.format("ada"), "Expect: 100-continue"),
}


@pytest.mark.parametrize("sent", OF_THE_APP.values(), ids=OF_THE_APP)
def test_other_requests_reach_the_app(known: Client, sent: bytes) -> None:
    server = Server(known)
    known.runner.run(server.exchange(sent))
    assert len(server.for_app) == 1


def test_a_head_may_arrive_in_parts(known: Client) -> None:
    server = Server(known)
    sent = b"\r\n" + request(PATH.format("ada"), "X-Request-ID: in-parts")
    ((status, headers, _),) = known.runner.run(server.exchange(*(sent[n : n + 7] for n in range(0, len(sent), 7))))
    assert (status, headers["x-request-id"], server.for_app) == (200, "in-parts", [])


def test_a_connection_serves_consecutive_requests(known: Client) -> None:
    async def ask_again_and_again() -> list[int]:
        async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
            statuses = []
            for n in range(6):
                writer.write(request(PATH.format("ada") if n % 3 else "/healthz"))
                statuses.append((await read_answer(reader))[0])
            return statuses

    server = Server(known)
    assert known.runner.run(ask_again_and_again()) == [200] * 6
    assert server.for_app == ["/healthz"] * 2
    assert server.state.total_requests == 6


def test_pipelined_requests_are_answered_in_order(known: Client) -> None:
    ids = [f"id-{n}" for n in range(8)]
    paths = [PATH.format("ada"), "/healthz"] * 4
    sent = b"".join(request(path, f"X-Request-ID: {name}") for path, name in zip(paths, ids, strict=True))
    server = Server(known)
    answers = known.runner.run(server.exchange(sent, answers=8))
    assert [headers["x-request-id"] for _, headers, _ in answers] == ids
    assert {status for status, _, _ in answers} == {200}


def test_metrics_count_them_together_with_the_app(client: Client) -> None:
    server = Server(client)
    for path in (PATH.format("ada"), f"{PATH.format('ada')}?"):
        client.runner.run(server.exchange(request(path)))
    exposition = client.get("/metrics").text
    labels = 'method="GET",route="/v1/users/{user_id}/recommendations",status="200"'
    assert f"lisarec_request_seconds_count{{{labels}}} 2.0" in exposition
    assert client.services.metrics.requests.in_progress == 0


KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "a key": ({"scopes": ["recs:read"]}, True),
    "a key with a rate": ({"scopes": ["recs:read"], "requests_per_minute": 100}, True),
    "a key with a high rate": ({"scopes": ["recs:read"], "requests_per_minute": 60_000}, True),
    "a key with a low rate": ({"scopes": ["recs:read"], "requests_per_minute": 2}, True),
    "another scope": ({"scopes": ["events:write"]}, False),
    "a page's key": ({"scopes": ["events:write"], "origins": ["https://shop.example"]}, False),
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
        ((status, _, _),) = guarded[0].runner.run(server.exchange(request(PATH.format("ada"), authorised)))
        assert status == (403 if kind in ("another scope", "a page's key") else 200)
        assert bool(server.for_app) != KINDS[kind][1]

    def test_a_key_above_its_rate_gets_the_429_of_the_app(
        self, guarded: tuple[Client, dict[str, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now_s = time.monotonic()  # the seconds to wait would differ where a second ends between both answers
        monkeypatch.setattr(quota_counters, "time", SimpleNamespace(monotonic=lambda: now_s))
        server, authorised = Server(guarded[0]), f"Authorization: Bearer {guarded[1]['a key with a low rate']}"
        queries = "", "?k=3", "?k=2"
        asked = [request(f"{PATH.format('ada')}{query}", authorised) for query in queries]
        asked.append(request(f"http://x{PATH.format('ada')}", authorised))
        # one after the other: what is sent before an answer came may be the app's
        *_, (plain,), (of_app,) = [guarded[0].runner.run(server.exchange(one)) for one in asked]
        assert (plain[0], shown(plain), len(server.for_app)) == (429, shown(of_app), 1)

    @pytest.mark.parametrize("headers", [(), ("Authorization: Bearer lisarec_0_0",)])
    def test_the_app_refuses_requests_without_a_valid_key(
        self, guarded: tuple[Client, dict[str, str]], headers: Sequence[str]
    ) -> None:
        server = Server(guarded[0])
        ((status, _, _),) = guarded[0].runner.run(server.exchange(request(PATH.format("ada"), *headers)))
        assert (status, len(server.for_app)) == (401, 1)

    def test_keys_share_the_slots(self, guarded: tuple[Client, dict[str, str]]) -> None:
        client, texts = guarded
        in_progress = RequestsInProgress(2)
        for key_id in ("1", "2"):
            in_progress.begin(Source("main", key_id))
        server, authorised = Server(client, Bounds(in_progress)), f"Authorization: Bearer {texts['a key']}"
        client.runner.run(server.exchange(request(PATH.format("ada"), authorised)))
        assert server.for_app == []  # it has less than its share
        assert in_progress.has_room(Source("main", "3"))


def test_the_app_refuses_requests_beyond_the_limit(known: Client) -> None:
    in_progress = RequestsInProgress(1)
    server = Server(known, Bounds(in_progress))
    in_progress.begin(None)
    known.runner.run(server.exchange(request(PATH.format("ada"))))
    assert server.for_app == [PATH.format("ada")]
    in_progress.end(None)
    known.runner.run(server.exchange(request(PATH.format("ada"))))
    assert len(server.for_app) == 1


class TestFailures:
    def test_the_app_answers_requests_that_cannot_start(self, known: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(plain_requests, "uncounted_caller")
        server = Server(known)
        ((status, _, _),) = known.runner.run(server.exchange(request(PATH.format("ada"))))
        assert (status, server.for_app) == (200, [PATH.format("ada")])

    def failing(self, client: Client, monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
        def fail(_request: object, _cost: float, waiter: Waiter[Recommendations], *_: object) -> None:
            asyncio.get_running_loop().call_soon(waiter.set_exception, failure)

        monkeypatch.setattr(client.service.switcher.recommender, "recommend_plain", fail)

    def test_a_bug_returns_500_and_is_logged(
        self, known: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.failing(known, monkeypatch, ZeroDivisionError())
        ((status, headers, body),) = known.runner.run(Server(known).exchange(request(PATH.format("ada"))))
        assert (status, json.loads(body)["error"]["code"]) == (500, "internal_error")
        assert headers["content-type"] == "application/json"
        assert "ZeroDivisionError" in caplog.text
        assert "/v1/users/{user_id}/recommendations answered 500" in caplog.text

    def test_a_response_that_cannot_be_sent_closes_the_connection(
        self, known: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def ask() -> bytes:
            async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
                writer.write(request(PATH.format("ada")))
                return await reader.read()

        monkeypatch.setattr(plain_requests, "trace_headers", lambda _: 1 / 0)
        in_progress = RequestsInProgress(1)
        server = Server(known, Bounds(in_progress))
        assert known.runner.run(ask()) == b""
        assert "ZeroDivisionError" in caplog.text
        assert not server.state.tasks
        assert in_progress.has_room(None)
        assert known.services.metrics.requests.in_progress == 0
        monkeypatch.undo()
        ((status, _, _),) = known.runner.run(server.exchange(request(PATH.format("ada"))))
        assert (status, server.for_app) == (200, [])

    def test_shutdown_cancels_requests_that_take_too_long(self, known: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        begun = asyncio.Event()

        def never(*_: object) -> None:
            begun.set()

        async def cancelled() -> Answer:
            async with asyncio.timeout(PATIENCE_S), server.connected() as (reader, writer):
                writer.write(request(PATH.format("ada")))
                await begun.wait()
                for connection in list(server.state.connections):
                    connection.shutdown()
                (task,) = server.state.tasks
                task.cancel()
                answer = await read_answer(reader)
                assert await reader.read() == b""
                return answer

        monkeypatch.setattr(known.service.switcher.recommender, "recommend_plain", never)
        server = Server(known)
        status, headers, body = known.runner.run(cancelled())
        assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
        assert headers["connection"] == "close"
        assert not server.state.tasks

    def test_disconnected_clients_are_not_answered(self, known: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        begun, may_end, waiting = asyncio.Event(), asyncio.Event(), list[asyncio.Task[None]]()
        recommend = known.service.switcher.recommender.recommend_plain

        def wait(*arguments: Any) -> None:
            async def later() -> None:
                await may_end.wait()
                recommend(*arguments)

            begun.set()
            waiting.append(asyncio.create_task(later()))

        async def gone() -> None:
            async with asyncio.timeout(PATIENCE_S):
                async with server.connected() as (_, writer):
                    writer.write(request(PATH.format("ada")))
                    await begun.wait()
                await until(lambda: not server.state.connections)
                may_end.set()
                await until(lambda: not server.state.tasks)

        monkeypatch.setattr(known.service.switcher.recommender, "recommend_plain", wait)
        server = Server(known)
        known.runner.run(gone())
        assert known.services.metrics.requests.in_progress == 0

    def test_an_unavailable_store_is_reported_like_the_app(self, start: Callable[..., Client], tmp_path: Path) -> None:
        client = start(tmp_path)
        client.close_store()
        server = Server(client)
        ((status, _, body),) = client.runner.run(server.exchange(request(PATH.format("ada"))))
        assert (status, json.loads(body)["source"], server.for_app) == (200, "popular", [])
        client.close()


def test_slow_requests_are_logged_with_their_ids(known: Client, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[bytes | None] = []

    class Ids(logging.Handler):
        def emit(self, _record: logging.LogRecord) -> None:
            trace = tracing.current.get()
            seen.append(None if trace is None else trace.id)

    logger = logging.getLogger("app.http.middleware.request_metrics")
    handler = Ids()
    logger.addHandler(handler)
    server = Server(known, Bounds(RequestsInProgress(9), slow_s=0.0))
    known.runner.run(server.exchange(request(PATH.format("ada"), "X-Request-ID: slow-1")))
    logger.removeHandler(handler)
    assert seen == [b"slow-1"]
    assert "GET /v1/users/{user_id}/recommendations answered 200 after" in caplog.text


def test_a_draining_process_closes_the_connection(start: Callable[..., Client], tmp_path: Path) -> None:
    client = start(tmp_path)
    server = Server(client)
    client.services.draining = True
    ((_, headers, _),) = client.runner.run(server.exchange(request(PATH.format("ada"))))
    assert headers["connection"] == "close"
    assert len(server.for_app) == 1
    client.close()

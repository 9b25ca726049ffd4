"""Log lines stay single lines whatever they contain, and carry the id of the request."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from app.http.auth.keys import add, make
from app.http.middleware import request_metrics
from app.http.middleware.load_shedding import RequestsInProgress
from app.http.middleware.request_metrics import RequestRecorder, RequestTimer
from app.observability import tracing
from app.observability.log_format import MAX_LINES_PER_SECOND, OWN_LOGGERS, UNSAFE_CHARACTERS, JsonLines, TextLines
from app.observability.metrics import Metrics
from app.observability.tracing import Trace
from tests.app.conftest import Client
from tests.app.http.middleware.server import Bounds, Server, request
from tests.storage.redis.servers import RedisServer

ROOT = Path(__file__).parents[3]
NASTY = st.text() | st.sampled_from(
    ["a\nINFO forged", "a\r\n\x1b[2J", "\u2028x\u0085y", "\ud800", '"}\n{"level":"info']
)


def record_of(message: str, fault: str | None = None) -> logging.LogRecord:
    exc_info = None
    if fault is not None:
        try:
            raise ValueError(fault)
        except ValueError:
            exc_info = sys.exc_info()
    return logging.LogRecord("app.somewhere", logging.WARNING, __file__, 1, "it was %s", (message,), exc_info)


@settings(max_examples=50)
@given(NASTY, NASTY | st.none())
def test_a_json_record_is_one_complete_line(message: str, fault: str | None) -> None:
    line = JsonLines().format(record_of(message, fault))
    assert line.isascii()
    assert len(line.splitlines()) == 1
    printed = json.loads(line)
    assert (printed["message"], printed["level"]) == (f"it was {message}", "warning")
    if fault is not None:
        assert printed["exception"].endswith(f"ValueError: {fault}" if fault else "ValueError")


@settings(max_examples=50)
@given(NASTY, NASTY | st.none())
def test_continuation_lines_do_not_look_like_records(message: str, fault: str | None) -> None:
    first, *others = TextLines().format(record_of(message, fault)).split("\n")
    assert " WARNING " in first
    assert all(line.startswith("    ") for line in others)
    assert (fault is None) == (not others)
    for line in (first, *others):
        assert not UNSAFE_CHARACTERS.search(line)
        assert len(line.splitlines()) == 1


def test_a_line_contains_the_request_id() -> None:
    token = tracing.current.set(Trace(b"abc-1"))
    try:
        assert json.loads(JsonLines().format(record_of("x")))["request_id"] == "abc-1"
        assert " [abc-1] app.somewhere: " in TextLines().format(record_of("x"))
    finally:
        tracing.current.reset(token)
    assert "request_id" not in json.loads(JsonLines().format(record_of("x")))


@pytest.fixture
def log() -> Iterator[StringIO]:
    """Log output of a service from level info on."""
    written = StringIO()
    output = logging.StreamHandler(written)
    output.setFormatter(JsonLines())
    own = [logging.getLogger(name) for name in OWN_LOGGERS]
    for logger in own:
        logger.addHandler(output)
        logger.setLevel(logging.INFO)
    yield written
    for logger in own:
        logger.removeHandler(output)
        logger.setLevel(logging.NOTSET)


def test_slow_and_failed_requests_are_logged_without_user_ids(
    start: Callable[..., Client],
    tmp_path: Path,
    redis_server: RedisServer,
    log: StringIO,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_metrics, "MAX_LINES_PER_SECOND", 100)  # every request of this test has its line
    client = start(tmp_path, redis_url=redis_server.url, slow_request_s=1e-9)

    def call_everything(request_id: str) -> None:
        headers = {"X-Request-ID": request_id}
        event = {"user_id": "whisper-1", "item_id": "item-1", "event_id": "hush-1"}
        client.post("/v1/events", json=event, headers=headers)
        client.get("/v1/users/whisper-1/recommendations?exclude_seen=all", headers=headers)
        client.get("/v1/users/whisper-1", headers=headers)
        client.get("/v1/users/whisper-1/events", headers=headers)
        client.post("/v1/users/whisper-1/merge", json={"from": "whisper-2"}, headers=headers)
        client.get("/whisper-1/no/such/route", headers=headers)

    call_everything("calm")
    redis_server.kill()
    call_everything("storm")
    redis_server.start()
    client.request("DELETE", "/v1/users/whisper-1/events/hush-1")
    client.request("DELETE", "/v1/users/whisper-1")
    client.close()
    printed = log.getvalue()
    assert "whisper" not in printed
    assert "hush" not in printed
    lines = [json.loads(line) for line in printed.splitlines()]
    by_request = {
        wanted: [line["message"] for line in lines if line.get("request_id") == wanted] for wanted in ("calm", "storm")
    }
    assert any(
        printed.startswith("GET /v1/users/{user_id}/recommendations answered 200") for printed in by_request["calm"]
    )
    assert any(printed.startswith("POST /v1/events answered 503 after ") for printed in by_request["storm"])
    assert any(line["message"].startswith("the store fails (unreachable): ") for line in lines)


def test_slow_requests_are_logged_with_key_id_and_tenant(
    start: Callable[..., Client], tmp_path: Path, log: StringIO
) -> None:
    """With and without the framework, and never with the key itself."""
    text, key = make("main", ["recs:read"])
    add(tmp_path / "keys", key)
    client = start(tmp_path, keys_file=tmp_path / "keys", slow_request_s=1e-9)
    server = Server(client, Bounds(RequestsInProgress(9), slow_s=0.0))
    for path in ("/v1/users/ada/recommendations", "/v1/model", "/healthz"):
        client.runner.run(server.exchange(request(path, f"Authorization: Bearer {text}")))
    client.close()
    lines = [line for line in log.getvalue().splitlines() if " answered 200 after " in line]
    assert [f" to key {key.id} of tenant main" in line for line in lines] == [True, True, True]
    assert server.for_app == ["/v1/model", "/healthz"]
    assert text not in log.getvalue()


@pytest.mark.slow
def test_messages_for_every_request_are_rate_limited() -> None:
    program = """if True:
        import logging, sys
        from app.observability import log_format
        log_format.configure("info", "json")
        logger = logging.getLogger("app.somewhere")
        for number in range(500):
            logger.warning("the store cannot be read: %d", number)
        logger.warning("something else")
    """
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stderr
    messages = [json.loads(line)["message"] for line in printed.splitlines()]
    assert messages[:2] == ["the store cannot be read: 0", "the store cannot be read: 1"]
    assert MAX_LINES_PER_SECOND < len(messages) <= 3 * MAX_LINES_PER_SECOND  # a second may end meanwhile
    assert messages[-1] == "something else"


@pytest.mark.parametrize("lines", [3, 500])
def test_messages_of_overload_are_rate_limited(lines: int, caplog: pytest.LogCaptureFixture) -> None:
    async def refuse(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(_: Message) -> None: ...

    async def request_again_and_again() -> None:
        timer = RequestTimer(refuse, RequestRecorder(Metrics().requests, 1.0))
        for _ in range(lines):
            await timer({"type": "http", "method": "GET", "headers": []}, receive, send)

    asyncio.run(request_again_and_again())
    assert len(caplog.records) <= min(lines, 3 * MAX_LINES_PER_SECOND)  # a second may end meanwhile
    assert len(caplog.records) >= min(lines, MAX_LINES_PER_SECOND)

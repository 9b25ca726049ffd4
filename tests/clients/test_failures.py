"""Failures of calls of the Python client: messages and timing; closing, and forked processes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any

import pytest

from clients.lisarec_client import Client, LisarecError, calls, fallback, outbox
from tests.clients.conftest import ROOT, Connect, Exchange, Proxy, Service
from tests.waiting import PATIENCE_S

UNKNOWN_HOST = "no-such-host.invalid"
START = """
import asyncio, multiprocessing, sys
from lisarec_client import AsyncClient, Client
url, key, user_id = sys.argv[1:]
def run_in_child(shop):
    child = multiprocessing.get_context("fork").Process(target=shop)
    child.start()
    child.join()
    assert child.exitcode == 0
"""
BLOCKING = """
client = Client(url, key, timeout_s=60.0)
def shop(event_id):
    assert client.recommendations(user_id).source != "fallback"
    client.event(user_id, "item-1", event_id=event_id)
def shop_in_child():
    shop("of-the-child")
    assert client.flush(60.0)
    assert client.user(user_id)["event_count"] == 2
    assert client.close()
shop("before")
assert client.flush(60.0)
shop("of-the-parent")
run_in_child(shop_in_child)
client.call("GET", "/v1/stats")
assert client.close()
"""
IN_ASYNCIO = """
client = AsyncClient(url, key, timeout_s=60.0)
async def shop(event_id):
    assert (await client.recommendations(user_id)).source != "fallback"
    client.event(user_id, "item-1", event_id=event_id)
async def shop_in_child():
    await shop("of-the-child")
    assert await client.flush(60.0)
    assert (await client.user(user_id))["event_count"] == 2
    assert await client.close()
with asyncio.Runner() as runner:
    runner.run(shop("before"))
    assert runner.run(client.flush(60.0))
    runner.run(shop("of-the-parent"))
    run_in_child(lambda: asyncio.run(shop_in_child()))
    runner.run(client.call("GET", "/v1/stats"))
    assert runner.run(client.close())
"""


class NoService(BaseHTTPRequestHandler):
    """Another HTTP server, which is not lisarec."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<h1>Not found</h1>")

    def log_message(self, *_: object) -> None: ...


def test_an_error_names_the_invalid_part_of_the_request(connect: Connect) -> None:
    events = [{"event_id": str(n), "user_id": "ann", "item_id": "no\nid" if n % 2 else "item-1"} for n in range(10)]
    with pytest.raises(LisarecError) as refused:
        connect().call("POST", "/v1/events", events)
    assert [(detail["index"], detail["field"]) for detail in refused.value.details] == [
        (place, "item_id") for place in range(1, 10, 2)
    ]
    reason = refused.value.details[0]["reason"]
    said = [f"[{place}] item_id {reason}" for place in (1, 3, 5)]
    assert "; ".join(["", *said, "and 2 more"]) in str(refused.value)


@pytest.fixture
def retry_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a call that is tried again take much longer than one that fails at once on a busy machine."""
    monkeypatch.setattr(calls, "RETRY_FOR_S", PATIENCE_S)


@pytest.mark.usefixtures("retry_for_long")
def test_calls_fail_fast_without_a_service(
    connect: Connect, serve_http: Callable[[type[BaseHTTPRequestHandler]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_only_numbers(host: str | bytes | None, *asked: Any, **options: Any) -> Any:
        if host == UNKNOWN_HOST:  # what a name server on the network would say, and when, is its own business
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return find(host, *asked, **options)

    find = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", find_only_numbers)
    elsewhere = serve_http(NoService)
    for url, code, said in (
        (elsewhere, "not_lisarec", elsewhere),
        (f"http://{UNKNOWN_HOST}", "unreachable", "cannot be reached"),
    ):
        client, begin_s = connect(url), time.monotonic()
        for call in (client.check, lambda client=client: client.user("ann")):
            with pytest.raises(LisarecError, match=said) as failed:
                call()
            assert failed.value.code == code
        assert time.monotonic() - begin_s < PATIENCE_S / 2


@pytest.mark.usefixtures("retry_for_long")
def test_address_and_key_are_checked_once_at_startup(service: Service, connect: Connect) -> None:
    connect().check()
    connect(key=service.add_key("events:write")).check()
    with pytest.raises(LisarecError, match="401 unauthenticated"):
        connect(key="lisarec_no-key").check()
    begin_s = time.monotonic()
    with pytest.raises(LisarecError) as unreachable:
        connect("http://127.0.0.1:9").check()
    assert (unreachable.value.code, unreachable.value.status) == ("unreachable", 0)
    assert time.monotonic() - begin_s < PATIENCE_S / 2


@pytest.mark.parametrize(("status", "code"), [(422, "too_many_new_users_at_once"), (413, "body_too_large")])
def test_a_refused_event_does_not_block_the_others(
    service: Service, proxy: Proxy, connect: Connect, ann: str, status: int, code: str
) -> None:
    def refuse_strangers(exchange: Exchange) -> None:
        if any(event["user_id"] == "stranger" for event in json.loads(exchange.body)):
            exchange.refuse(status, code, None)
        else:
            exchange.forward()

    proxy.play = refuse_strangers
    client = connect(proxy.url)
    first = client.event(ann, "item-1")
    client.event("stranger", "item-2")
    last = client.event(ann, "item-3")
    assert not client.flush(PATIENCE_S)
    assert client.outbox.refused == 1
    assert service.logged_ids(ann) == [first, last]


def test_a_refused_event_does_not_prevent_corrections(
    service: Service, proxy: Proxy, connect: Connect, ann: str
) -> None:
    client = connect(proxy.url)
    first = client.event(ann, "item-1")
    assert client.flush(PATIENCE_S)

    def refuse_first(exchange: Exchange) -> None:
        proxy.play = Exchange.forward
        exchange.refuse(422, "too_many_new_users_at_once", None)

    proxy.play = refuse_first
    client.event("stranger", "item-2")
    assert client.undo(ann, first)
    assert not client.flush(PATIENCE_S)  # an undo does not hide it
    assert client.outbox.refused == 1
    client.event("stranger", "no order", timestamp_s=4e9)
    assert client.erase(ann)
    assert service.log(ann) == []


def test_a_clock_ahead_loses_no_event(
    service: Service,
    connect: Connect,
    ann: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def ahead_s() -> float:
        return time.time() + 3_600

    monkeypatch.setattr(outbox, "time", SimpleNamespace(time=ahead_s))
    client, begin_s = connect(), time.time()
    for _ in range(2):
        ids = [
            client.event(ann, "item-1"),
            client.event(ann, "item-2", timestamp_s=1_000.5),
            client.impression(ann, ["item-3"]),
            client.event(ann, "item-4", timestamp_s=ahead_s()),  # by the same clock
            *client.order(ann, "order", ["item-5", "item-6"]),
        ]
        assert client.flush(PATIENCE_S)
        logged = service.log(ann)[-len(ids) :]
        assert [event["event_id"] for event in logged] == ids
        now, own, *others = [event["timestamp"] for event in logged]
        assert own == 1_000.5
        assert begin_s - 1 <= min(now, *others) <= max(now, *others) <= time.time() + 1
    assert [one.getMessage().startswith("this clock is") for one in caplog.records] == [True], (
        "a warning for the client"
    )
    client.event(ann, "item-7", timestamp_s=4e9)  # by no clock
    last = client.event(ann, "item-8")
    assert not client.flush(PATIENCE_S)
    assert client.outbox.refused == 1
    assert service.logged_ids(ann)[-2:] == [ids[-1], last]


def test_events_of_a_clock_behind_count_as_new(
    service: Service, connect: Connect, ann: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "time", SimpleNamespace(time=lambda: time.time() - 3_600))
    client, begin_s = connect(), time.time()
    client.event("who has no clock", "item-1")
    assert client.flush(PATIENCE_S)
    client.event(ann, "item-1")
    client.event(ann, "item-2", timestamp_s=1_000.5)
    assert client.flush(PATIENCE_S)
    now_s, own_s = [event["timestamp"] for event in service.log(ann)]
    assert begin_s - 1 <= now_s <= time.time() + 1
    assert own_s == 1_000.5


def test_closing_a_client_ends_calls_of_other_threads(proxy: Proxy) -> None:
    asked, checked = threading.Barrier(5), threading.Event()

    def never_answer(_exchange: Exchange) -> None:
        asked.wait(PATIENCE_S)
        checked.wait(PATIENCE_S)

    proxy.play = never_answer
    client, sources = Client(proxy.url, timeout_s=PATIENCE_S), []
    pages = [
        threading.Thread(target=lambda: sources.append(client.recommendations("ann").source), daemon=True)
        for _ in range(4)
    ]
    for page in pages:
        page.start()
    asked.wait(PATIENCE_S)
    client.close()
    for page in pages:
        page.join(PATIENCE_S)
    checked.set()
    assert sources == ["fallback"] * 4
    assert client.recommendations("ann", fallback=["item-1"]).item_ids == ["item-1"]  # as AsyncClient does


def test_a_lasting_failure_is_logged_once_a_minute(
    proxy: Proxy, connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(proxy.url)

    def reasons(*codes: str) -> list[str]:
        caplog.clear()
        for code in codes:
            proxy.play = partial(Exchange.refuse, status=500, code=code, retry_after=None)
            assert client.recommendations("ann", fallback=["item-1"]).source == "fallback"
        return [message.split()[4].rstrip(":") for message in caplog.messages]

    assert reasons("one", "one", "other", "one", "other") == ["one", "other"]
    assert reasons("other", "one") == []
    monkeypatch.setattr(fallback, "QUIET_FOR_S", 0)
    assert reasons("third", "third") == ["third", "third"]


@pytest.mark.parametrize("program", [BLOCKING, IN_ASYNCIO], ids=["Client", "AsyncClient"])
def test_a_forked_client_works_without_sending_events_of_its_parent(
    service: Service, proxy: Proxy, ann: str, program: str
) -> None:
    def wait_for_the_child(exchange: Exchange) -> None:
        if b"of-the-parent" in exchange.body and "/v1/stats" not in proxy.requests:
            exchange.refuse(503, "storage_unavailable")
        else:
            exchange.forward()

    proxy.play = wait_for_the_child
    done = subprocess.run(
        [sys.executable, "-c", START + program, proxy.url, service.key, ann],
        cwd=ROOT / "clients",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert service.logged_ids(ann) == ["before", "of-the-child", "of-the-parent"]

"""Replay of a data set: order within each user, deduplication, and a clear end if the service refuses."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.cli.main import main
from app.jobs.datasets.writer import write_interactions
from app.jobs.import_items import send
from app.jobs.replay import EventJson, ReplayCounts, ReplayError, histories, replay, wait_for_service
from benchmarks.harness.service_process import free_port
from model.data.interactions import Interactions
from model.data.readers import read_interactions

Answer = tuple[int | None, Any]  # the status and the body; without a status the connection is closed


@dataclass
class Service:
    """A fake service that records requests and times; it returns ``answers`` first (None: the usual one)."""

    url: str = ""
    answers: list[Answer | None] = field(default_factory=list)
    is_full: Callable[[], bool] = lambda: False  # whether a quota is used up; then the answer is `full`
    full: dict[str, str] = field(default_factory=lambda: {"code": "too_many_requests", "message": "rate limit"})
    requests: list[list[EventJson]] = field(default_factory=list)
    acknowledged: dict[str, EventJson] = field(default_factory=dict)
    overlaps: set[str] = field(default_factory=set)
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    users_in_flight: Counter[str] = field(default_factory=Counter)
    requests_in_flight: int = 0

    def begin(self, events: list[EventJson]) -> Answer | None:
        with self.lock:
            self.requests.append(events)
            self.requests_in_flight += 1
            self.most_at_once = max(self.most_at_once, self.requests_in_flight)
            users = {str(event["user_id"]) for event in events}
            self.overlaps |= {user_id for user_id in users if self.users_in_flight[user_id]}
            self.users_in_flight.update(users)
            if self.is_full():
                return 429, {"error": self.full}
            return self.answers.pop(0) if self.answers else None

    def end(self, events: list[EventJson]) -> None:
        with self.lock:
            self.requests_in_flight -= 1
            self.users_in_flight.subtract({str(event["user_id"]) for event in events})

    def acknowledge(self, events: list[EventJson]) -> dict[str, int]:
        with self.lock:
            fresh = [event for event in events if event["event_id"] not in self.acknowledged]
            self.acknowledged.update({str(event["event_id"]): event for event in fresh})
            return {"accepted": len(fresh), "duplicates": len(events) - len(fresh), "unknown_items": 0}


@pytest.fixture
def service(serve_http: Callable[[type[BaseHTTPRequestHandler]], str]) -> Service:
    at = Service()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self.send_response(204)
            self.end_headers()

        def do_POST(self) -> None:
            events = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = at.begin(events)
            time.sleep(random.random() / 500)
            status, body = (200, at.acknowledge(events)) if answer is None else answer
            at.end(events)
            if status is None:
                self.close_connection = True
                return
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            if at.is_full():
                self.send_header("retry-after", "58")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    at.url = serve_http(Handler)
    return at


@pytest.fixture(scope="module")
def interactions(tmp_path_factory: pytest.TempPathFactory) -> Interactions:
    """60 users with 1 to 40 events each."""
    directory = tmp_path_factory.mktemp("data")
    lengths = random.Random(1)
    write_interactions(
        directory,
        (
            (f"u{user}", f"i{position % 7}", 1_700_000_000 + position / 4)
            for user in range(60)
            for position in range(lengths.randint(1, 40))
        ),
    )
    return read_interactions(directory)


def by_user(events: list[EventJson]) -> dict[str, list[EventJson]]:
    found: dict[str, list[EventJson]] = defaultdict(list)
    for event in events:
        found[str(event["user_id"])].append(event)
    return dict(found)


def run(service: Service, interactions: Interactions, hold_out: int = 0, **options: Any) -> ReplayCounts:
    return asyncio.run(replay(histories(interactions, hold_out), service.url, **options))


class TestHistories:
    def test_equal_the_data(self, interactions: Interactions) -> None:
        first = next(histories(interactions))
        assert [event["timestamp"] for event in first[:3]] == [1_700_000_000, 1_700_000_000.25, 1_700_000_000.5]
        assert first[1] | {"event_id": ""} == {
            "event_id": "",
            "user_id": "u0",
            "item_id": "i1",
            "type": "click",
            "timestamp": 1_700_000_000.25,
        }

    def test_have_distinct_and_deterministic_ids(self, interactions: Interactions) -> None:
        ids = [[event["event_id"] for history in histories(interactions) for event in history] for _ in range(2)]
        assert ids[0] == ids[1]
        assert len(set(ids[0])) == len(interactions)

    @pytest.mark.parametrize(("header", "cells"), [("", ""), ("\tvalue\torder_id", "\t4.5\to-1")])
    def test_keep_their_ids_when_the_table_grows(self, tmp_path: Path, header: str, cells: str) -> None:
        columns = "user_id\titem_id\ttimestamp\ttype"
        old = [f"u\ta\t{time}\t{type_}" for time in (10, 10, 11) for type_ in ("cart", "view")]
        new = ["u\ta\t10\tview", "a\tu\t10\tview", "u\tb\t9\tview"]

        def ids(name: str, lines: list[str], header: str) -> list[str]:
            (tmp_path / name).mkdir()
            (tmp_path / name / "interactions.tsv").write_text("\n".join([columns + header, *lines, ""]))
            return [str(event["event_id"]) for each in histories(read_interactions(tmp_path / name)) for event in each]

        before, after = ids("old", old, ""), ids("new", [f"{one}{cells}" for one in old + new], header)
        assert len({*before}) == len(before) == len(old)
        assert len({*after}) == len(after) == len(old + new)
        assert {*before} < {*after}

    def test_hold_out_the_last_events_of_each_user(self, interactions: Interactions) -> None:
        whole = {str(history[0]["user_id"]): history for history in histories(interactions)}
        kept = {str(history[0]["user_id"]): history for history in histories(interactions, hold_out=2)}
        assert kept == {user_id: history[:-2] for user_id, history in whole.items() if len(history) > 2}


@pytest.mark.parametrize(("batch_size", "concurrency"), [(1, 3), (7, 4), (50, 1), (50, 4), (1000, 4)])
@pytest.mark.slow
def test_events_of_a_user_are_sent_in_order_and_sequentially(
    service: Service, interactions: Interactions, batch_size: int, concurrency: int
) -> None:
    sent: list[int] = []
    counts = run(service, interactions, batch_size=batch_size, concurrency=concurrency, on_sent=sent.append)
    arrived = [event for request in service.requests for event in request]
    assert by_user(arrived) == {str(history[0]["user_id"]): history for history in histories(interactions)}
    assert service.overlaps == set()
    assert max(map(len, service.requests)) <= batch_size
    assert service.most_at_once <= concurrency
    assert counts.accepted == len(interactions) == sum(sent)
    assert counts.requests == len(service.requests)


def test_a_second_replay_adds_no_events(service: Service, interactions: Interactions) -> None:
    run(service, interactions)
    again = run(service, interactions)
    assert (again.accepted, again.duplicates) == (0, len(interactions))


def test_a_replay_continues_after_the_held_out_events(service: Service, interactions: Interactions) -> None:
    before = run(service, interactions, hold_out=1)
    after = run(service, interactions)
    assert (before.accepted, after.accepted) == (len(interactions) - 60, 60)


@pytest.mark.parametrize(
    "problem", [(503, {"error": {"message": "busy"}}), (502, b"<html>"), (429, b""), (None, None)], ids=str
)
def test_the_same_events_are_retried_after_transient_errors(
    service: Service, interactions: Interactions, problem: Answer
) -> None:
    service.answers = [problem, None, problem, problem]
    counts = run(service, interactions, batch_size=100, concurrency=1)
    assert service.requests[0] == service.requests[1]
    assert service.requests[2] == service.requests[3] == service.requests[4]
    assert (counts.accepted, counts.duplicates, counts.retries) == (len(interactions), 0, 3)


class Clock:
    """A clock that moves only while the replay pauses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr("app.jobs.replay.time", SimpleNamespace(monotonic=lambda: self.now_s))
        # that of the replay alone: other threads of this process may sleep, too
        monkeypatch.setattr("app.jobs.replay.asyncio", SimpleNamespace(**(vars(asyncio) | {"sleep": self.sleep})))

    async def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s


@pytest.mark.parametrize(
    ("code", "full_for_s", "hint"),
    [("too_many_requests", 65, "--rate"), ("too_many_new_users", 3500, "LISAREC_NEW_USERS_PER_HOUR")],
)
def test_an_exhausted_quota_is_waited_for_by_retry_after(
    service: Service,
    interactions: Interactions,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: str,
    full_for_s: float,
    hint: str,
) -> None:
    clock = Clock(monkeypatch)
    service.is_full = lambda: clock.now_s < full_for_s
    service.full = {"code": code, "message": "the quota is used up"}
    counts = run(service, interactions, concurrency=1)
    assert counts.accepted == len(interactions)
    assert counts.retries == -(-full_for_s // 58)
    (line,) = caplog.messages
    assert "answers 429: the quota is used up" in line
    assert hint in line


class TestGivesUp:
    def test_at_once_if_events_are_refused(self, service: Service, interactions: Interactions) -> None:
        service.answers = [(422, {"error": {"code": "invalid_events", "message": "timestamp lies ahead"}})]
        with pytest.raises(ReplayError, match="answers 422: timestamp lies ahead"):
            run(service, interactions, concurrency=1)
        assert len(service.requests) == 1

    @pytest.mark.parametrize(("field", "says"), [("type", "type is not a name"), (None, "is not a name")])
    def test_naming_the_refused_event(
        self, service: Service, interactions: Interactions, field: str | None, says: str
    ) -> None:
        details = [{"index": 1, "field": field, "reason": "is not a name"}]
        service.answers = [(422, {"error": {"message": "some events are invalid", "details": details}})]
        with pytest.raises(ReplayError) as refused:
            run(service, interactions, concurrency=1)
        whose = "event of user 'u0', item 'i1' at 1700000000.25"
        assert str(refused.value).endswith(f"some events are invalid; the first problem: {whose}: {says}")

    def test_suggesting_a_smaller_batch(self, service: Service, interactions: Interactions) -> None:
        service.answers = [(422, {"error": {"code": "too_costly", "message": "this call costs 500 requests"}})]
        with pytest.raises(ReplayError, match="this call costs 500 requests; send fewer events at once, with --batch"):
            run(service, interactions, concurrency=1)

    def test_with_all_senders(self, service: Service, interactions: Interactions) -> None:
        service.answers = [(422, {})]
        with pytest.raises(ReplayError, match="answers 422"):
            run(service, interactions, batch_size=1, concurrency=4)
        assert len(service.requests) < 20

    def test_if_the_service_stays_busy(self, service: Service, interactions: Interactions) -> None:
        service.answers = [(503, {"error": {"message": "too much waits"}})] * 100
        with pytest.raises(
            ReplayError, match=r"503: too much waits; gave up after 0\.3 s\. Run the same command again"
        ):
            run(service, interactions, concurrency=1, retry_for_s=0.3)

    def test_if_the_service_disappears(self, service: Service, interactions: Interactions) -> None:
        service.answers = [None, *[(None, None)] * 100]
        with pytest.raises(ReplayError, match=r"cannot be reached .*; gave up after 0\.3 s"):
            run(service, interactions, batch_size=10, concurrency=1, retry_for_s=0.3)

    @pytest.mark.parametrize("answer", [b"<html>welcome</html>", {"ok": True}, [1]], ids=str)
    def test_if_another_server_answers(self, service: Service, interactions: Interactions, answer: object) -> None:
        for post in (lambda: run(service, interactions), lambda: send([{"user_id": "ada"}], service.url)):
            service.answers = [(200, answer)] * 9
            with pytest.raises(ReplayError, match="is not lisarec; check the URL"):
                post()

    @pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "", "http://", "http://a:b", "/v1"])
    def test_before_the_start_if_the_address_is_invalid(self, interactions: Interactions, url: str) -> None:
        with pytest.raises(ReplayError, match="such as http://127"):
            run(Service(url=url), interactions)


def test_types_values_and_orders_of_the_table_are_posted(tmp_path: Path) -> None:
    rows = "u\ta\t10\tpurchase\t4.5\to-17\nu\tb\t11\tclick\t\t\n"
    (tmp_path / "interactions.tsv").write_text("user_id\titem_id\ttimestamp\ttype\tvalue\torder_id\n" + rows)
    ((first, second),) = histories(read_interactions(tmp_path))
    assert (first["type"], first["value"], first["order_id"]) == ("purchase", 4.5, "o-17")
    assert second["type"] == "click"
    assert not {"value", "order_id"} & {*second}


@pytest.fixture
def returns(tmp_path: Path) -> Path:
    """A data directory with a purchase and two returns."""
    lines = ["v\ta\t1766601000\tpurchase\t4.5", "u\ta\t1766601001\tpurchase\t-2.5", "u\tb\t1766601002\treturn\t-1"]
    (tmp_path / "interactions.tsv").write_text("\n".join(["user_id\titem_id\ttimestamp\ttype\tvalue", *lines, ""]))
    return tmp_path


class TestReturns:
    def test_are_refused_before_anything_is_sent(
        self, service: Service, returns: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as exit_:
            main(["replay", "--data", str(returns), "--url", service.url])
        said = capsys.readouterr().err
        assert (exit_.value.code, service.requests) == (1, [])
        assert "the service rejects negative values, and 2 of 3 events have one, such as that of user 'u'" in said
        assert "item 'a' at 2025-12-24 18:30:01 UTC, -2.5; remove these lines, or skip them" in said

    def test_may_be_skipped_as_bad_lines(
        self, service: Service, returns: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as exit_:
            main(["replay", "--data", str(returns), "--url", service.url, "--skip-bad-lines"])
        assert exit_.value.code in (0, None)
        assert [event["value"] for event in service.acknowledged.values()] == [4.5]
        assert "2 events with a negative value are skipped" in capsys.readouterr().out

    def test_count_as_held_out_events(self, service: Service, tmp_path: Path) -> None:
        (tmp_path / "interactions.csv").write_text("user_id,item_id,timestamp,value\nu,a,1,1\nu,b,2,2\nu,b,3,-2\n")
        with pytest.raises(SystemExit) as exit_:
            main(["replay", "--data", str(tmp_path), "--url", service.url, "--hold-out", "1"])
        assert exit_.value.code in (0, None)
        assert [event["value"] for event in service.acknowledged.values()] == [1, 2]


@pytest.mark.parametrize(("options", "code", "sent"), [((), "1", []), (("--skip-bad-lines",), "0|None", [1, 2])])
def test_future_times_are_refused_before_sending_or_skipped(
    service: Service, tmp_path: Path, options: tuple[str, ...], code: str, sent: list[int]
) -> None:
    (tmp_path / "interactions.csv").write_text("user_id,item_id,timestamp\nu,a,1\nv,b,4102444800\nv,b,2\n")
    with pytest.raises(SystemExit, match=code):
        main(["replay", "--data", str(tmp_path), "--url", service.url, *options])
    assert sorted(event["timestamp"] for event in service.acknowledged.values()) == sent


class TestWaiting:
    def test_lasts_until_the_service_has_started(self) -> None:
        said: list[str] = []
        port = free_port()
        servers: list[HTTPServer] = []

        def say(text: str) -> None:  # it is waited for: now it comes
            said.append(text)
            servers.append(HTTPServer(("127.0.0.1", port), Ready))
            threading.Thread(target=servers[0].serve_forever, daemon=True).start()

        url = f"http://127.0.0.1:{port}"
        wait_for_service(url, say)
        assert said == [f"waiting for {url}: no answer yet"]
        wait_for_service(url, say)
        assert len(said) == 1
        servers[0].shutdown()
        servers[0].server_close()

    def test_ends_if_no_service_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("app.jobs.replay.START_FOR_S", 0.2)
        with pytest.raises(ReplayError, match=r"cannot be reached .*; start the service with 'lisarec serve'"):
            wait_for_service("http://127.0.0.1:9", lambda _: None)


class Ready(BaseHTTPRequestHandler):
    """A server that answers every request."""

    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass

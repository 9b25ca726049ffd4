"""The Python client against the real service, through a proxy that injects network failures."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.lisarec_client import Client, LisarecError, responses, visitor_in
from tests.app.service_process import Process, logged_ids
from tests.clients.conftest import ROOT, Connect, Exchange, Proxy, Service
from tests.waiting import PATIENCE_S, wait_until

UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
ITEMS = [f"item-{row}" for row in range(1, 6)]


class RandomFailures:
    """Injects every kind of failure into some requests, in random order, and then stops."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.left = [name for name in dir(self) if name.startswith("do_")] * 2
        self._random.shuffle(self.left)

    def __call__(self, exchange: Exchange) -> None:
        getattr(self, self.left.pop() if self.left else "do_nothing_bad")(exchange)

    def do_nothing_bad(self, exchange: Exchange) -> None:
        exchange.forward()

    def do_hang_up_before(self, exchange: Exchange) -> None: ...

    def do_hang_up_after(self, exchange: Exchange) -> None:
        exchange.ask_service()

    def do_hang_up_within(self, exchange: Exchange) -> None:
        exchange.ask_service()
        exchange.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\n{")

    def do_apply_some(self, exchange: Exchange) -> None:
        """The service applies the events of one user in a request together or not at all."""
        events = json.loads(exchange.body)
        users = {event["user_id"] for event in events if self._random.random() < 0.5}
        some = [event for event in events if event["user_id"] in users]
        if some:
            exchange.ask_service(json.dumps(some).encode())
        exchange.refuse(503, "partly_applied")

    def do_apply_and_say_unavailable(self, exchange: Exchange) -> None:
        exchange.ask_service()
        exchange.refuse(503, "storage_unavailable", None)

    def do_say_too_many(self, exchange: Exchange) -> None:
        exchange.refuse(429, "too_many_requests")

    def do_say_too_large(self, exchange: Exchange) -> None:
        """A single event that is refused would be dropped."""
        if len(json.loads(exchange.body)) == 1:
            return exchange.forward()
        return exchange.refuse(*self._random.choice([(413, "body_too_large"), (422, "too_many_new_users_at_once")]))

    def do_answer_something_else(self, exchange: Exchange) -> None:
        exchange.answer(200, b"<h1>Welcome to the hotel's network</h1>")

    def do_answer_for_fewer(self, exchange: Exchange) -> None:
        exchange.answer(200, b'{"accepted": 0, "duplicates": 0, "unknown_items": 0}')

    def do_take_long(self, exchange: Exchange) -> None:
        time.sleep(0.05)
        exchange.forward()


class TestEvents:
    @pytest.mark.parametrize("seed", range(2))
    def test_are_logged_once_and_in_order_after_flush(
        self, service: Service, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, seed: int
    ) -> None:
        monkeypatch.setattr(responses, "MAX_PAUSE_S", 0.02)
        failures = RandomFailures(seed)
        proxy.play = failures
        client = Client(proxy.url, service.key)
        sent: dict[str, list[str | None]] = {f"flush-{seed}-{n}": [] for n in range(4)}

        def shop(user_id: str) -> None:
            while failures.left or len(sent[user_id]) < 20:
                sent[user_id].append(client.event(user_id, random.choice(ITEMS)))
                time.sleep(0.02)

        shops = [threading.Thread(target=shop, args=(user_id,)) for user_id in sent]
        for thread in shops:
            thread.start()
        for thread in shops:
            thread.join()
        assert client.flush(PATIENCE_S)
        assert {user_id: service.logged_ids(user_id) for user_id in sent} == sent
        assert client.close()

    def test_queued_during_a_restart_of_the_service_are_logged_once(
        self, model_dir: Path, tmp_path: Path, launch: Callable[..., Process]
    ) -> None:
        client = Client((process := launch()).url)
        ids = [client.event("ann", "item-1")]
        assert client.flush(PATIENCE_S)
        is_over = threading.Event()

        def shop() -> None:
            while not is_over.wait(0.02):
                ids.append(client.event("ann", ITEMS[len(ids) % len(ITEMS)]))

        (shopper := threading.Thread(target=shop)).start()
        wait_until(lambda: len(ids) > 5)
        process.kill()
        queued_before = len(ids)
        wait_until(lambda: len(ids) > queued_before + 1)
        assert not client.flush(0.2)
        process = launch(port=process.address[1])
        is_over.set()
        shopper.join()
        assert client.flush(PATIENCE_S)
        assert client.close()
        process.kill()
        assert logged_ids(model_dir, tmp_path / "state", "ann") == ids

    def test_are_dropped_without_waiting_if_the_queue_is_full(
        self, service: Service, proxy: Proxy, connect: Connect, ann: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        has_room = threading.Event()

        def wait_and_forward(exchange: Exchange) -> None:
            has_room.wait()
            exchange.forward()

        proxy.play = wait_and_forward
        client = connect(proxy.url, queue_size=3)
        ids = [client.event(ann, item_id) for item_id in ITEMS]  # would hang here, if it waited
        assert ids[3:] == [None, None]
        assert client.outbox.dropped == 2
        assert [record.getMessage() for record in caplog.records if "dropping" in record.getMessage()] != []
        has_room.set()
        assert client.flush(PATIENCE_S)
        ids[3:] = [client.event(ann, "item-9")]
        assert client.flush(PATIENCE_S)
        assert service.logged_ids(ann) == ids

    def test_that_are_invalid_do_not_block_the_others(self, service: Service, connect: Connect, ann: str) -> None:
        client = connect()
        ids = [client.event(ann, item_id) for item_id in ITEMS]
        client.event(ann, "item-1", timestamp_s=time.time() + 3_600)  # somebody's clock
        ids += [client.event(ann, item_id) for item_id in ITEMS]
        assert not client.flush(PATIENCE_S)
        assert client.outbox.refused == 1
        assert client.flush(PATIENCE_S)
        assert service.logged_ids(ann) == ids

    def test_that_are_invalid_are_refused_by_the_client(self, connect: Connect) -> None:
        client = connect()
        for wrong in (
            ("a\x85b", "item-1"),
            ("ann", ""),
            ("ann", "e\ud800"),
            ("..", "item-1"),
            ("ann", "i" * 129),
        ):
            with pytest.raises(ValueError, match="128 characters"):
                client.event(*wrong)
        with pytest.raises(ValueError, match=r"user_id must be a text \(str\), not int"):
            client.event(7, "item-1")
        for value in (float("nan"), float("inf"), True, "7"):
            with pytest.raises(ValueError, match="finite number"):
                client.event("ann", "item-1", value=value)
        with pytest.raises(ValueError, match="0 or greater"):
            client.event("ann", "item-1", value=-0.01)

    def test_have_all_given_fields(self, service: Service, connect: Connect, ann: str) -> None:
        client = connect()
        before_s = time.time()
        ids = [
            client.event(ann, "item-2", type="purchase", value=9.5, recommendation_id="r-1", timestamp_s=1_000.5),
            client.event(ann, "item-3"),
            client.event(ann, "item-4", event_id="own-id"),
        ]
        assert client.flush(PATIENCE_S)
        full, plain, own = service.log(ann)
        assert all(UUID7.fullmatch(str(event_id)) for event_id in ids[:2])
        assert own["event_id"] == ids[2] == "own-id"
        assert full == {
            "event_id": ids[0],
            "user_id": ann,
            "item_id": "item-2",
            "type": "purchase",
            "value": 9.5,
            "recommendation_id": "r-1",
            "timestamp": 1_000.5,
        }
        assert before_s - 1 <= plain["timestamp"] <= time.time() + 1
        assert plain["type"] == "click"

    def test_wait_for_retry_after(self, service: Service, proxy: Proxy, connect: Connect, ann: str) -> None:
        asked_s: list[float] = []

        def be_busy_once(exchange: Exchange) -> None:
            asked_s.append(time.monotonic())
            if len(asked_s) == 1:
                exchange.refuse(429, "too_many_requests", "1")
            else:
                exchange.forward()

        proxy.play = be_busy_once
        client = connect(proxy.url)
        ids = [client.event(ann, "item-1")]
        assert client.flush(PATIENCE_S)
        assert asked_s[1] - asked_s[0] >= 1.0
        assert service.logged_ids(ann) == ids

    def test_are_flushed_at_exit(self, service: Service) -> None:
        program = (
            "from lisarec_client import Client\n"
            f"client = Client({service.url!r}, {service.key!r})\n"
            "for n in range(500): client.event('forgetful', f'item-{n % 60}')\n"
        )
        subprocess.run([sys.executable, "-c", program], cwd=ROOT / "clients", check=True, timeout=PATIENCE_S)
        assert len(service.log("forgetful")) == 500


class TestRecommendations:
    def test_equal_those_of_the_service(self, service: Service, connect: Connect) -> None:
        client = connect()
        for item_id in ITEMS:
            client.event("reader", item_id)
        assert client.flush(PATIENCE_S)
        answer = client.recommendations("reader", k=4, exclude_seen="all", exclude=["item-9"], fallback=["item-1"])
        direct = service.ask(
            "GET", "/v1/users/reader/recommendations", params={"k": 4, "exclude_seen": "all", "exclude": "item-9"}
        ).json()
        assert (answer.items, answer.source) == (direct["items"], "personalised")
        assert answer.item_ids == [item["item_id"] for item in direct["items"]]
        assert answer.recommendation_id
        assert client.recommendations(None, history=ITEMS, k=2).source == "personalised"
        assert client.recommendations("stranger").source == "popular"

    def test_use_a_scenario(self, service: Service, connect: Connect) -> None:
        described = {"k": 12, "filter": "item.title != params.not", "params": {"not": {"type": "text"}}}
        assert service.ask("PUT", "/v1/admin/scenarios/client", json=described).status_code == 200
        client, model = connect(), service.ask("GET", "/v1/model").json()
        answer = client.recommendations("ann", scenario="client", params={"not": ""})
        assert (len(answer.items), answer.scenario, answer.generation) == (12, "client", model["generation"])
        assert len(client.recommendations("ann", 3, scenario="client", params={"not": ""}).items) == 3
        assert client.recommendations("ann", scenario="client").source == "fallback"  # it lacks a parameter

    def test_come_in_pages(self, service: Service, connect: Connect) -> None:
        client, shown = connect(), list[str]()
        cursor: str | None = ""
        while cursor is not None:
            page = client.recommendations("pager", k=7, cursor=cursor)
            assert page.source == "popular"
            shown, cursor = shown + page.item_ids, page.cursor
        assert shown == client.recommendations("pager", k=1000).item_ids
        row = client.recommendations("pager", because=ITEMS[0], fallback=ITEMS)
        assert row.because is not None
        assert row.because["item_id"] == ITEMS[0]

    @pytest.mark.parametrize("fault", ["drip", "silence", "refusal", "nonsense", "no keys"])
    def test_are_the_fallback_if_the_service_fails(self, proxy: Proxy, connect: Connect, fault: str) -> None:
        """A total timeout is needed for responses that trickle in."""
        is_over = threading.Event()
        answer = b'{"items": [], "source": "personalised", "recommendation_id": "r"}'

        def fail(exchange: Exchange) -> None:
            if fault == "drip":
                exchange.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer))
                for place in range(len(answer)):
                    exchange.wfile.write(answer[place : place + 1])
                    if is_over.wait(0.02):
                        return
            elif fault == "silence":
                is_over.wait()
            elif fault == "refusal":
                exchange.refuse(503, "overloaded", None)
            elif fault == "nonsense":
                exchange.answer(200, b"[]")
            else:
                exchange.refuse(401, "unauthenticated", None)

        proxy.play = fail
        client = connect(proxy.url, timeout_s=0.2)
        found = client.recommendations("ann", k=2, fallback=iter(ITEMS))
        is_over.set()
        assert (found.source, found.item_ids, found.recommendation_id) == ("fallback", ITEMS[:2], None)
        assert client.recommendations("ann").items == []

    def test_are_the_fallback_without_a_service(self, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
        answer = connect("http://127.0.0.1:9").recommendations("ann", fallback=ITEMS)
        assert (answer.source, answer.item_ids) == ("fallback", ITEMS)
        assert "fallback" in caplog.text

    def test_are_not_requested_during_retry_after(self, proxy: Proxy, connect: Connect) -> None:
        proxy.play = lambda exchange: exchange.refuse(503, "overloaded", "60")
        client = connect(proxy.url)
        assert [client.recommendations("ann").source for _ in range(3)] == ["fallback"] * 3
        assert len(proxy.requests) == 1

    def test_are_requested_again_if_the_connection_was_closed(self, proxy: Proxy, connect: Connect, ann: str) -> None:
        plays = iter([lambda _exchange: None, Exchange.forward])
        proxy.play = lambda exchange: next(plays)(exchange)
        assert connect(proxy.url).recommendations(ann).source == "popular"


class TestUsers:
    def test_can_be_read_undone_merged_and_erased(self, service: Service, connect: Connect, ann: str) -> None:
        client, visitor = connect(), f"visitor-of-{ann}"
        assert client.user(ann) is None
        kept = client.event(ann, "item-1")
        regretted = client.event(ann, "item-2")
        assert client.undo(ann, regretted)  # though it may still wait to be sent
        assert not client.undo(ann, regretted)
        with pytest.raises(LisarecError) as unknown:
            client.undo(ann, "never-sent")
        assert (unknown.value.status, unknown.value.code) == (404, "event_not_found")
        client.event(visitor, "item-3")
        client.event(visitor, "item-4")
        assert client.flush(PATIENCE_S)
        assert client.merge(ann, visitor)
        assert not client.merge(ann, visitor)
        with pytest.raises(LisarecError) as refused:
            client.merge("somebody-else", visitor)
        assert refused.value.code == "merge_refused"
        user = client.user(ann)
        assert (user["event_count"], user["last_item_id"]) == (3, "item-4")
        assert client.user(visitor)["event_count"] == 3
        assert kept in service.logged_ids(ann)
        client.event(ann, "item-5")
        assert client.erase(ann)
        assert client.user(ann) is None  # nothing came after it

    def test_have_properties(self, service: Service, connect: Connect, ann: str) -> None:
        client, visitor = connect(), f"visitor-of-{ann}"
        assert client.properties(ann) == {}
        assert client.put_properties(ann, {"member": True, "region": "south"}) == {"member": True, "region": "south"}
        assert client.put_properties(ann, {"region": None}) == {"member": True}
        client.put_properties(visitor, {"member": False, "region": "north"})
        assert client.merge(ann, visitor)
        assert client.properties(visitor) == {"member": True, "region": "north"}
        with pytest.raises(LisarecError) as refused:
            client.put_properties(ann, {"member": "yes"})
        assert (refused.value.status, refused.value.code) == (422, "invalid_request")
        assert client.erase(ann)
        assert client.properties(ann) == {}

    def test_retry_until_the_service_recovers(self, proxy: Proxy, connect: Connect) -> None:
        plays = iter(
            [
                lambda exchange: exchange.refuse(503, "storage_unavailable", "0"),
                lambda _exchange: None,
                lambda exchange: exchange.refuse(429, "too_many_requests", "0"),
                Exchange.forward,
            ]
        )
        proxy.play = lambda exchange: next(plays)(exchange)
        assert connect(proxy.url).user("nobody-at-all") is None
        assert len(proxy.requests) == 4

    def test_report_errors(self, service: Service) -> None:
        with Client(service.url, "no-key") as client, pytest.raises(LisarecError, match="401 unauthenticated"):
            client.user("ann")
        with Client(service.url) as client, pytest.raises(ValueError, match="user_id"):
            client.erase("..")


def test_visitor_ids_come_only_from_the_browser_script() -> None:
    visitor = "visitor-01932c07-5e00-7d4b-a1c3-2f8e6b9d0a11"
    assert visitor_in(visitor) == visitor
    for other in (None, "", "ann", "visitor-", visitor + "\n", visitor.upper(), f"{visitor}/x", visitor[8:]):
        assert visitor_in(other) is None


def test_a_closed_client_refuses_calls(service: Service) -> None:
    client = Client(service.url, service.key)
    client.recommendations("ann")
    assert client.close()
    assert client.close()
    assert client.event("ann", "item-1") is None
    with pytest.raises(RuntimeError, match="closed"):
        client.user("ann")


def test_the_client_depends_only_on_httpx() -> None:
    program = "import sys, lisarec_client; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT / "clients", check=True, capture_output=True, text=True
    )
    assert not {"app", "model", "storage", "torch", "numpy", "pydantic"} & set(done.stdout.split())

"""Passwords in URLs of services and of Redis are used, and never printed."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from app.jobs.replay import ReplayError, ServiceAddress
from app.settings import StoreSettings, without_password
from benchmarks.kafka.brokers import MockBrokers, mock_brokers
from tests.app.jobs.kafka.topics import ConsumerProcess, produce
from tests.app.support import run_command
from tests.waiting import wait_until

PASSWORD = "qqw/xxz"
ENCODED = "qqw%2Fxxz"

Place = Callable[[int, object], str]


@pytest.fixture
def place(serve_http: Callable[[type[BaseHTTPRequestHandler]], str]) -> Place:
    """Serve one response to every request with the password; return the URL with it."""

    def serve(status: int, body: object) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                wanted = base64.b64encode(f"shop:{PASSWORD}".encode()).decode()
                is_known = self.headers["authorization"] == f"Basic {wanted}"
                content = json.dumps(body if is_known else {}).encode()
                self.send_response(status if is_known else 401)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        return serve_http(Handler).replace("://", f"://shop:{ENCODED}@")

    return serve


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    (tmp_path / "interactions.csv").write_text("user_id,item_id,timestamp\nu,a,1\n")
    (tmp_path / "items.csv").write_text("item_id,title\na,A\n")
    return tmp_path


def require_none_of(password: str, printed: str) -> None:
    assert all(part not in printed for part in password.replace("%2F", "/").split("/")), printed


@pytest.mark.parametrize("command", [["items", "import", "items.csv"], ["replay", "--data", "."]], ids=" ".join)
@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ((200, {"accepted": 1, "duplicates": 0, "unknown_items": 0, "items": {}}), 0),
        ((422, {"error": {"code": "invalid_items", "message": "invalid", "details": []}}), 1),
    ],
    ids=str,
)
def test_commands_use_the_password_without_printing_it(
    command: list[str],
    answer: tuple[int, object],
    code: int,
    place: Place,
    tables: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tables)
    assert run_command(*command, "--url", place(*answer)) == code
    printed = "".join(capsys.readouterr())
    assert "401" not in printed
    require_none_of(ENCODED, printed)


@pytest.mark.parametrize(
    "command", [["items", "import", "items.csv"], ["replay", "--data", "."], ["bench"], ["mcp"]], ids=" ".join
)
@pytest.mark.parametrize(
    "url",
    [
        "http://shop:qqw%2Fxxz@127.0.0.1:9",
        "http://shop:qqw/xxz@127.0.0.1:9",
        "http://shop:9/qqw-xxz@127.0.0.1:9",
        "http://shop:9?qqw-xxz@127.0.0.1:9",
        "http://shop:qqw@xxz@127.0.0.1:9",
        "ftp://shop:qqw-xxz@127.0.0.1:9",
        "shop:qqw-xxz@127.0.0.1:9",
        "//shop:qqw-xxz@127.0.0.1:9",
    ],
)
def test_errors_do_not_print_the_password(
    command: list[str], url: str, tables: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tables)
    monkeypatch.setattr("app.jobs.replay.START_FOR_S", 0.2)
    assert run_command(*command, "--url", url) in (1, 2)
    printed = "".join(capsys.readouterr())
    assert printed
    require_none_of("qqw/xxz", printed)


def test_a_load_test_without_the_password_does_not_start(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """It would measure 401 responses."""
    url = place(200, {"items": [{"item_id": "a"}]})
    for address in (url, url.replace("http://", "https://"), "https://127.0.0.1:9"):
        assert run_command("bench", "--url", address) == 1
        printed = "".join(capsys.readouterr())
        assert "neither TLS nor a password" in printed
        require_none_of(ENCODED, printed)


def test_another_server_at_the_url_is_reported_without_the_password(
    place: Place, tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("replay", "--data", tables, "--url", place(200, [])) == 1
    printed = "".join(capsys.readouterr())
    assert "/v1/events is not lisarec" in printed
    require_none_of(ENCODED, printed)


def test_a_consumer_does_not_log_the_password(place: Place, tmp_path: Path) -> None:
    with mock_brokers() as brokers:
        consumer = consuming(brokers, place(503, {"error": {"code": "overloaded", "message": "busy"}}), tmp_path)
        wait_until(lambda: "retrying: http://127.0.0.1:" in consumer.log(), consumer.log)
        consumer.end()
        assert "answers 503: busy" in consumer.log()
        require_none_of(ENCODED, consumer.log())


def consuming(brokers: MockBrokers, url: str, directory: Path) -> ConsumerProcess:
    """A consumer of a topic with one event."""
    for topic in ("events", "events-dead"):
        brokers.create_topic(topic, 1)
    produce(brokers.addresses, "events", [("u", {"item_id": "a"})])
    return ConsumerProcess(directory, brokers.addresses, "events", url)


def test_broker_addresses_have_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["consume"], ["publish", "--positions", "p"]):
        assert run_command(*command, "--topic", "t", "--brokers", "SASL_SSL://shop:qqw-xxz@kafka:9093") == 2
        printed = "".join(capsys.readouterr())
        assert "--properties" in printed
        require_none_of("qqw/xxz", printed)


def test_the_password_is_split_from_the_address() -> None:
    assert ServiceAddress.of("http://shop:s%2Fs@h:1/recs") == ServiceAddress("http://h:1/recs", ("shop", "s/s"))
    assert ServiceAddress.of("http://token@h") == ServiceAddress("http://h", ("token", ""))
    assert ServiceAddress.of("http://h:1/") == ServiceAddress("http://h:1/", None)
    with pytest.raises(ReplayError, match="encode special characters"):
        ServiceAddress.of("http://shop:1/s@h")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://shop:qqw%2Fxxz@db,db2:1/0", "redis://shop:PASSWORD@db,db2:1/0"),
        ("redis://db/0?password=qqw%2Fxxz&db=1", "redis://db/0?password=PASSWORD&db=1"),
        (
            "unix://shop:qqwxxz@/run/redis.sock?password=qqwxxz",
            "unix://shop:PASSWORD@/run/redis.sock?password=PASSWORD",
        ),
        ("redis://db/0?password_file=/run/pw", "redis://db/0?password_file=/run/pw"),
    ],
)
def test_a_store_is_named_without_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown
    assert StoreSettings(redis_url=url).store_name == f"Redis at {shown}"

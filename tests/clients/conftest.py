"""A service with keys over the tiny model, and a proxy in front of it that injects failures."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from app.http.auth import watched_file
from app.http.auth.keys import SCOPES, Scope, add, make
from app.http.auth.seal_keys import rotate
from app.settings import Settings
from clients.lisarec_client import AsyncClient, Client
from tests.app.conftest import model_dir
from tests.app.service_process import launch, serve_in_thread
from tests.waiting import PATIENCE_S

__all__ = ["launch", "model_dir"]  # fixtures

ROOT = Path(__file__).parents[2]
HOW_TO = ROOT / "docs" / "how-to"

PASSED_ON = frozenset({"authorization", "content-type", "origin"})
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class Service:
    """The app on a free port, and user logs as it returns them."""

    def __init__(self, directory: Path) -> None:
        self.url = ""
        self.keys_file = directory / "keys"
        self.key = self.add_key(*SCOPES)

    def add_key(self, *scopes: Scope, **rest: Any) -> str:
        text, key = make("main", scopes, **rest)
        add(self.keys_file, key)
        return text

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        return httpx.request(method, self.url + path, headers={"authorization": f"Bearer {self.key}"}, **options)

    def log(self, user_id: str) -> list[dict[str, Any]]:
        """The user's log, oldest first; empty for a user without events."""
        events: list[dict[str, Any]] = []
        after: int | None = 0
        while after is not None:
            page = self.ask("GET", f"/v1/users/{user_id}/events", params={"after": after, "limit": 1_000}).json()
            if page.get("error", {}).get("code") == "user_not_found":
                break
            events += page["events"]
            after = page["next"]
        return events

    def logged_ids(self, user_id: str) -> list[str]:
        return [entry["event_id"] for entry in self.log(user_id) if "event_id" in entry]


@pytest.fixture(scope="session")
def service(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for all tests; each has users of its own."""
    directory = tmp_path_factory.mktemp("service")
    service = Service(directory)
    rotate(directory / "seal")
    settings = Settings(
        model_dir=model_dir, data_dir=directory, keys_file=service.keys_file, seal_keys_file=directory / "seal"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watched_file, "POLL_EVERY_S", 0)  # so that keys of tests work at once
        with serve_in_thread(settings) as url:
            service.url = url
            yield service


class Proxy:
    """A proxy in front of the service; `play` decides what happens to each request."""

    def __init__(self, service_url: str) -> None:
        self.service_url = service_url
        self.url = ""
        self.play: Callable[[Exchange], None] = Exchange.forward
        self.requests: list[str] = []


class Exchange(BaseHTTPRequestHandler):
    """A request to the proxy."""

    proxy: Proxy

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.proxy.requests.append(self.path)
        self.proxy.play(self)

    do_GET = do_DELETE = do_OPTIONS = do_POST  # noqa: N815

    def ask_service(self, body: bytes | None = None) -> httpx.Response:
        headers = {name: value for name, value in self.headers.items() if name.lower() in PASSED_ON}
        headers |= {name: value for name, value in self.headers.items() if name.lower().startswith("access-control-")}
        url, content = self.proxy.service_url + self.path, self.body if body is None else body
        return httpx.request(self.command, url, content=content, headers=headers)

    def forward(self) -> None:
        answer = self.ask_service()
        headers = {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}
        self.answer(answer.status_code, answer.content, headers)

    def answer(self, status: int, body: bytes = b"{}", headers: Mapping[str, str] = NO_HEADERS) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, code: str, retry_after: str | None = "0") -> None:
        error = {"error": {"code": code, "message": "as the test wants it", "details": []}}
        headers = {} if retry_after is None else {"Retry-After": retry_after}
        if origin := self.headers["origin"]:
            headers |= {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": "Retry-After"}
        self.answer(status, json.dumps(error).encode(), headers)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def proxy(service: Service, serve_http: Callable[[type[BaseHTTPRequestHandler]], str]) -> Proxy:
    proxy = Proxy(service.url)
    proxy.url = serve_http(type("OwnExchange", (Exchange,), {"proxy": proxy}))
    return proxy


@pytest.fixture
def ann() -> str:
    """A user id that no other test uses."""
    return f"ann-{time.monotonic_ns()}"


class InLoop:
    """Blocking calls of an AsyncClient, so that a test covers both clients."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._runner.get_loop()
        self._client = AsyncClient(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if not inspect.iscoroutinefunction(method):
            return method
        return lambda *arguments, **options: self._runner.run(method(*arguments, **options))

    def close(self) -> bool:
        all_sent = self._runner.run(self._client.close())
        self._runner.close()
        return all_sent


Connect = Callable[..., Any]


@pytest.fixture(params=[Client, InLoop], ids=["Client", "AsyncClient"])
def connect(request: pytest.FixtureRequest, service: Service) -> Iterator[Connect]:
    """Create a client of either kind with long timeouts and all scopes; it is closed afterwards."""
    made: list[Any] = []

    def connect_client(
        url: str = service.url, *, key: str | None = service.key, timeout_s: float = PATIENCE_S, **options: Any
    ) -> Any:
        made.append(request.param(url, key, timeout_s=timeout_s, **options))
        return made[-1]

    yield connect_client
    for client in made:
        client.close()


@pytest.fixture(scope="session")
def integration_script() -> Callable[[str], str]:
    """The first script in a language on its page of docs/how-to/integrate."""
    pages = {"python": "python.md", "html": "browser.md", "js": "backend.md", "sh": "backend.md"}
    scripts = {}
    for language, page in pages.items():
        text = (HOW_TO / "integrate" / page).read_text()
        script = re.search(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        assert script is not None
        scripts[language] = script[1]
    assert all(len(script.splitlines()) <= 25 for script in scripts.values())
    return scripts.__getitem__

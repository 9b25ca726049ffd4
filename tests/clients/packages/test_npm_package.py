"""The installed npm package: in Node.js and in a browser against the service, and its types."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
from playwright.sync_api import Browser

from tests.clients.conftest import ROOT, Exchange, Proxy, Service
from tests.clients.packages.conftest import SOURCES, run
from tests.waiting import wait_until

HERE = Path(__file__).parent
BROKEN = (
    lambda exchange: exchange.refuse(503, "overloaded", None),  # the list
    lambda exchange: exchange.answer(200, b"<h1>Welcome to the hotel's network</h1>"),
    lambda _exchange: None,
    lambda exchange: exchange.refuse(503, "storage_unavailable", "0"),
)


def test_node_gets_lists_and_loses_no_event(npm_project: Path, service: Service, proxy: Proxy, ann: str) -> None:
    plays = iter(BROKEN)
    proxy.play = lambda exchange: next(plays, Exchange.forward)(exchange)
    shutil.copy(HERE / "shop.mjs", npm_project)
    run("node", "shop.mjs", service.url, service.key, proxy.url, ann, cwd=npm_project)
    assert next(plays, None) is None
    log = service.log(ann)
    clicked = [event["item_id"] for event in log if event["type"] == "click"]
    assert clicked == [f"item-{n}" for n in (1, 2, 3, 5, *range(10, 20))]
    (shown,) = [event for event in log if event["type"] == "impression"]
    (bought,) = [event for event in log if event["type"] == "purchase"]
    assert bought["item_id"] == shown["items"][0]
    assert bought["recommendation_id"] == shown["recommendation_id"]
    assert (bought["value"], bought["order_id"], bought["timestamp"]) == (9.5, "order-1", 1e9)


def test_a_page_sends_events(
    npm_project: Path,
    service: Service,
    ann: str,
    browser: Browser,
    serve_http: Callable[[type[BaseHTTPRequestHandler]], str],
) -> None:
    installed = npm_project / "node_modules" / "lisarec-client" / "dist"

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            script = installed / name
            self.send_response(200)
            self.send_header("Content-Type", "text/javascript" if name else "text/html")
            self.end_headers()
            self.wfile.write(script.read_bytes() if name and script.exists() else b"<!doctype html>")

        def log_message(self, *_: object) -> None: ...

    url = serve_http(Pages).replace("127.0.0.1", "localhost")
    key = service.add_key("events:write", origins=[url])
    page = browser.new_page()
    page.goto(f"{url}/")
    source = page.evaluate(
        """async ([url, key, user]) => {
            const { LisarecClient } = await import("/index.js")
            const shop = new LisarecClient(url, { key, timeoutMs: 60_000 })
            shop.event(user, "item-1")
            await shop.flush(60_000)
            return (await shop.recommendations(user, { fallback: ["item-1"] })).source
        }""",
        [service.url, key, ann],
    )
    assert source == "fallback"  # this key reads nothing
    wait_until(lambda: [event["item_id"] for event in service.log(ann)] == ["item-1"])
    page.close()


def test_types_match_openapi(npm_sources: Path, npm_project: Path, service: Service) -> None:
    """openapi-typescript handles every operation without a warning, and the package's types agree with it."""
    document = httpx.get(f"{service.url}/openapi.json").json()
    description = npm_project / "openapi.json"
    description.write_text(json.dumps(document))
    tools = npm_sources / "node_modules" / ".bin"
    said = run(
        *(str(tools / "openapi-typescript"), str(description), "--default-non-nullable", "false"),
        *("--output", str(npm_project / "openapi.d.ts")),
        cwd=npm_sources,
    )
    assert "warn" not in said.lower()
    types = (npm_project / "openapi.d.ts").read_text()
    operations = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert all(f'operations["{name}"]' in types for name in operations)
    compile_strictly(npm_sources, npm_project, "schemas.ts")


def test_the_example_compiles_in_strict_typescript(npm_sources: Path, npm_project: Path) -> None:
    options = ("--exactOptionalPropertyTypes", "--noUncheckedIndexedAccess")
    compile_strictly(npm_sources, npm_project, "shop.ts", *options)


def compile_strictly(npm_sources: Path, npm_project: Path, name: str, *options: str) -> None:
    shutil.copy(HERE / name, npm_project)
    always = ("--strict", "--noEmit", "--module", "nodenext", "--target", "es2022", "--lib", "es2022,dom")
    run(str(npm_sources / "node_modules" / ".bin" / "tsc"), *always, *options, name, cwd=npm_project)


def test_only_the_build_is_published(npm_project: Path) -> None:
    installed = npm_project / "node_modules" / "lisarec-client"
    assert {path.name for path in installed.iterdir()} == {"LICENSE", "README.md", "dist", "package.json"}
    described = json.loads((installed / "package.json").read_text())
    assert "dependencies" not in described
    assert (installed / described["exports"]["."]["types"]).exists()
    assert (SOURCES / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()

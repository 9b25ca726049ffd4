"""The page of docs/tutorials/shop-page.md and its backend, as they stand there, in a real browser."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser

from tests.clients.conftest import ROOT, Service
from tests.waiting import wait_until

PORT = "3000"  # of the tutorial


@pytest.fixture
def shop_url(service: Service, tmp_path: Path) -> Iterator[str]:
    """The running backend of the tutorial, with keys of its own, on a free port."""
    text = (ROOT / "docs" / "tutorials" / "shop-page.md").read_text()
    scripts = dict(re.findall(r"^```(html|python)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    url = f"http://localhost:{port}"
    (tmp_path / "page.html").write_text(scripts["html"])
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "clients"),
        "LISAREC_URL": service.url,
        "PAGE_KEY": service.add_key("events:write", origins=[url]),
        "BACKEND_KEY": service.add_key("recs:read"),
    }
    backend = subprocess.Popen(
        [sys.executable, "-c", scripts["python"].replace(PORT, port)],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        with httpx.Client(transport=httpx.HTTPTransport(retries=20), timeout=60) as client:
            assert client.get(f"http://127.0.0.1:{port}/").status_code == 200
        yield url
    finally:
        backend.kill()
        backend.wait()


def test_what_a_visitor_looks_at_is_logged_and_recommended_by(
    service: Service, shop_url: str, browser: Browser
) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{shop_url}/?item=item-3")
    visitor = wait_until(lambda: context.cookies())[0]["value"]
    assert [event["type"] for event in wait_until(lambda: service.log(visitor))] == ["view"]

    def is_personal() -> bool:
        page.reload(wait_until="networkidle")  # where 250 ms were too short, the list is the fallback
        return re.search("from=.", page.get_attribute("#list a", "href") or "") is not None

    wait_until(is_personal)
    page.click("#list a")
    page.click("#cart")
    (cart,) = wait_until(lambda: [event for event in service.log(visitor) if event["type"] == "cart"])
    assert cart["recommendation_id"]
    assert cart["item_id"] == page.inner_text("#item")
    context.close()

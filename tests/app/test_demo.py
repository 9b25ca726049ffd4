"""The demo as a newcomer meets it: started by one command, tried with the two lines it prints."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from app.demo import demo, invitation
from app.main import PortTaken
from app.shop import generate
from model.data import read_items

READY_WITHIN_S = 180


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def running_demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """The process, its port, and the file that takes what it prints."""
    directory, port = tmp_path_factory.mktemp("demo"), free_port()
    printed = directory / "printed"
    root = Path(__file__).parent.parent.parent
    with printed.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "app", "demo", "--port", str(port)],
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(root)},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until_ready(process, port, printed)
        yield process, port, printed
    finally:
        process.kill()
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], port: int, printed: Path) -> None:
    give_up_s = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < give_up_s and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/readyz").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail(f"the demo did not become ready; it said: {printed.read_text()}")


def curl(line: str) -> dict[str, object]:
    """Do what ``curl`` would do with the line."""
    words = shlex.split(line)
    url = next(word for word in words if word.startswith("http"))
    if "-d" not in words:
        return httpx.get(url).raise_for_status().json()
    kind = words[words.index("-H") + 1].split(": ")
    body = words[words.index("-d") + 1]
    return httpx.post(url, content=body, headers=dict([kind])).raise_for_status().json()


def test_the_printed_lines_show_a_recommender_that_learns(
    running_demo: tuple[subprocess.Popen[bytes], int, Path],
) -> None:
    process, port, printed = running_demo
    click, question = [line for line in printed.read_text().splitlines() if line.strip().startswith("curl ")]
    assert f"127.0.0.1:{port}" in click
    before = curl(question)
    assert curl(click) == {"accepted": 1, "duplicates": 0, "unknown_items": 0}
    after = curl(question)
    assert (before["source"], after["source"]) == ("popular", "personalised")
    assert before["items"] != after["items"]
    assert len(after["items"]) == 5
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0


def test_a_taken_port_is_named_before_anything_is_made(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} .* cannot be used .*; choose another one: .*--port 8001"):
            demo(None, port, Console(quiet=True), tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


def test_the_invitation_is_about_an_item_of_the_data(tmp_path: Path) -> None:
    generate(tmp_path, shoppers=50)
    click = next(line for line in invitation(tmp_path, 8000).splitlines() if "/events" in line)
    item_id = json.loads(shlex.split(click)[-1])["item_id"]
    title = read_items(tmp_path).titles[item_id]
    assert repr(title) in invitation(tmp_path, 8000)

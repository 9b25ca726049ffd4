"""The demo: one command starts it, and the lines that it prints work."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from playwright.sync_api import Browser, expect
from rich.console import Console

from app.http.connection.listeners import PortTaken
from app.jobs.datasets.synthetic_shop import GOODS, generate
from app.jobs.demo import compiling_meanwhile, demo, instructions
from app.settings import Settings
from benchmarks.harness.service_process import free_port, is_ready
from benchmarks.service import screenshots
from model.data.interactions import DataError, Interactions
from model.data.readers import read_interactions, read_items
from tests.app.support import run_command
from tests.waiting import PATIENCE_S, wait_until


@contextmanager
def started(directory: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """Process (leader of its group), port, and output file of a demo."""
    port, printed = free_port(), directory / "printed"
    root = Path(__file__).parents[3]
    with printed.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "app", "demo", "--port", str(port), *options],
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(root)},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process, port, printed
    finally:
        process.kill()
        process.wait()


@contextmanager
def running(directory: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """Process, port and output of a demo, once its service is ready."""
    with started(directory, *options) as (process, port, printed):
        wait_until_ready(process, port, printed)
        yield process, port, printed


@pytest.fixture(scope="module")
def running_demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    with running(tmp_path_factory.mktemp("demo")) as demo:
        yield demo


def wait_until_ready(process: subprocess.Popen[bytes], port: int, printed: Path) -> None:
    wait_until(lambda: is_ready(f"http://127.0.0.1:{port}") or process.poll() is not None, printed.read_text)
    assert process.poll() is None, printed.read_text()


def curl(line: str) -> Any:
    """Send the request of a ``curl`` command line."""
    words = shlex.split(line)
    url = next(word for word in words if word.startswith("http"))
    if "-d" not in words:
        return httpx.get(url).raise_for_status().json()
    kind = words[words.index("-H") + 1].split(": ")
    body = words[words.index("-d") + 1]
    return httpx.post(url, content=body, headers=dict([kind])).raise_for_status().json()


def test_three_clicks_change_the_list(running_demo: tuple[subprocess.Popen[bytes], int, Path]) -> None:
    """After three items of a product line in order, the next one ranks first and the line dominates the list."""
    with httpx.Client(base_url=f"http://127.0.0.1:{running_demo[1]}/v1", timeout=PATIENCE_S) as client:

        def recommended(user_id: str) -> list[dict[str, Any]]:
            items = client.get(f"/users/{user_id}/recommendations").raise_for_status().json()["items"]
            return [client.get(f"/items/{item['item_id']}").json() for item in items]

        popular = recommended("nobody")
        before, after, first = [], [], []
        for finishes, ranges in GOODS.values():
            for name, goods in ranges.items():
                user_id = name.replace(" ", "-")
                for good in goods[:3]:
                    item, *_ = client.get("/items", params={"query": f"{good}, {finishes[0]}"}).json()["items"]
                    client.post("/events", json={"user_id": user_id, "item_id": item["item_id"]}).raise_for_status()
                steered = recommended(user_id)
                before.append(sum(name in item["categories"] for item in popular))
                after.append(sum(name in item["categories"] for item in steered))
                first.append(steered[0]["title"].startswith(goods[3]))
    assert np.mean(before) < 1
    assert min(after) >= 4
    assert np.mean(after) > 6.5
    assert np.mean(first) > 0.8


def test_the_page_shows_users_of_the_data_and_the_effect_of_clicks(
    running_demo: tuple[subprocess.Popen[bytes], int, Path], browser: Browser, tmp_path: Path
) -> None:
    """With the clicks of the documentation's screenshots."""
    _, port, printed = running_demo
    (user_id,) = re.findall("open a user of the data set, such as '(.*)'", printed.read_text())
    interactions = read_interactions(printed.parent / "var/demo/shop")
    bought = [interactions.item_ids[item] for item in interactions.item[: interactions.starts[1]]]
    address = f"http://127.0.0.1:{port}/playground/"
    screenshots.save_screenshot(browser, address, tmp_path / "picture.png", screenshots.SCREENSHOTS["light"])
    assert (tmp_path / "picture.png").read_bytes()[16:24] == b"\0\0\5\0\0\0\4\xd8"  # 1280 by 1240
    page = browser.new_page()
    page.goto(address)
    shown = page.locator("#recommendations .item b")
    cycling = tuple(GOODS["Outdoor"][1]["Cycling"])
    shares = []
    for item_id in (None, *screenshots.CLICKS):
        if item_id is not None:
            screenshots.click(page, item_id)
        expect(shown).to_have_count(10)
        shares.append(sum(title.startswith(cycling) for title in shown.all_inner_texts()) / 10)
    assert shares[0] <= 0.1
    assert shares[-1] >= 0.6
    page.fill("#user", user_id)
    page.keyboard.press("Enter")
    expect(page.locator("#state-size")).to_have_text(f"{len(bought)} events")
    expect(page.locator("#history li").first).to_have_attribute("data-item-id", bought[-1])
    page.close()


def test_the_printed_commands_work(
    running_demo: tuple[subprocess.Popen[bytes], int, Path],
) -> None:
    process, port, printed = running_demo
    click, question = [line for line in printed.read_text().splitlines() if line.strip().startswith("curl ")]
    assert f"127.0.0.1:{port}" in click
    before = curl(question)
    assert curl(click) == {"accepted": 1, "duplicates": 0, "unknown_items": 0, "unknown_types": 0, "refused": 0}
    after = curl(question)
    assert (before["source"], after["source"]) == ("popular", "personalised")
    assert before["items"] != after["items"]
    assert len(after["items"]) == 5
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0


COMPILED = """
import gc, json, sys
from pathlib import Path
from numba.core.registry import CPUDispatcher
from app.jobs.demo import compile_engine, compile_service
from app.settings import Settings
what, state, model = sys.argv[1:]
settings = Settings(data_dir=Path(state), model_dir=Path(model) if what == "demo" else None)
{"engine": compile_engine, "service": compile_service, "demo": compile_service}[what](settings)
loops = [(one, one.py_func) for one in gc.get_objects() if isinstance(one, CPUDispatcher)]
print(json.dumps([f"{of.__module__}.{of.__qualname__}{kinds}" for one, of in loops for kinds in one.signatures]))
"""


def test_kernels_are_compiled_during_training(
    running_demo: tuple[subprocess.Popen[bytes], int, Path], tmp_path: Path
) -> None:
    model = running_demo[2].parent / "var/demo/models/demo"

    def compiled(what: str) -> set[str]:
        command = [sys.executable, "-c", COMPILED, what, str(tmp_path / what), str(model)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
        return set(json.loads(done.stdout))

    engine, service, demo = map(compiled, ("engine", "service", "demo"))
    assert {name.partition("(")[0] for name in engine} >= {
        "model.inference.scan_kernel.top_k",
        "model.inference.step_kernel.step",
    }
    assert engine <= service
    assert len(demo - service) < len(demo) / 8


@pytest.mark.parametrize(("end", "signum"), [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)])
def test_sigterm_during_training_ends_all_processes_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[int, int], None], signum: int
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with started(tmp_path) as (process, _, printed):
        wait_until(lambda: "Training on" in printed.read_text() or process.poll() is not None, printed.read_text)
        compiling = [one for one in psutil.Process(process.pid).children() if "spawn_main" in " ".join(one.cmdline())]
        end(process.pid, signum)
        assert process.wait(PATIENCE_S) == 128 + signum
        assert "Traceback" not in printed.read_text()
        assert len(compiling) == 2
        assert not any(one.is_running() for one in compiling)
        assert [*temporary.glob("tmp*")] == []


def test_errors_during_compilation_are_left_to_the_service(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = Settings(data_dir=tmp_path, seal_keys_file=tmp_path / "none")
    with compiling_meanwhile(settings, Console(quiet=True)):
        pass
    assert capfd.readouterr().err == ""


def test_a_port_in_use_is_reported_before_training(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} .*; choose another port: .*--port 8001"):
            demo(None, port, Console(quiet=True), tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("rows", ["", "ann\ta\tyesterday\tclick", "ann\ta\t10\tadmired"], ids=str)
def test_untrainable_tables_keep_the_earlier_demo(tmp_path: Path, rows: str) -> None:
    (tmp_path / "interactions.tsv").write_text(f"user_id\titem_id\ttimestamp\ttype\n{rows}\n")
    earlier = [tmp_path / "demo" / name / "file" for name in ("models", "state")]
    for file in earlier:
        file.parent.mkdir(parents=True)
        file.touch()
    with pytest.raises(DataError):
        demo(tmp_path, free_port(), Console(quiet=True), tmp_path / "demo")
    assert all(file.exists() for file in earlier)


def test_it_reads_the_table_of_a_shop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[Interactions] = []
    monkeypatch.setattr("app.jobs.demo.demo", lambda data, *_: found.append(read_interactions(data)))
    (tmp_path / "orders.csv").write_text("Customer;SKU;Ordered at;Total\nann;a;24.12.2025 18:30;4,50\n")
    columns = "Customer=user_id,SKU=item_id,Ordered at=timestamp,Total=value"
    options = ["--columns", columns, "--timezone", "Europe/Berlin", "--decimal", ","]
    assert run_command("demo", "--data", tmp_path / "orders.csv", *options) == 0
    assert (found[0].user_ids, found[0].item_ids, found[0].value.tolist()) == (["ann"], ["a"], [4.5])
    assert run_command("demo", *options) == 2
    assert "--data" in capsys.readouterr().err


def test_the_printed_example_uses_an_item_of_the_data(tmp_path: Path) -> None:
    generate(tmp_path, shoppers=50)
    titles = read_items(tmp_path).titles
    text = instructions(read_interactions(tmp_path), titles, 8000)
    click = next(line for line in text.splitlines() if "/events" in line)
    assert repr(titles[json.loads(shlex.split(click)[-1])["item_id"]]) in text


def test_it_works_on_other_data(shared_data: Path, tmp_path: Path) -> None:
    data = shared_data / "tiny"
    titles = read_items(data).titles
    with running(tmp_path, "--data", str(data)) as (_, port, printed):
        click, question = [line for line in printed.read_text().splitlines() if line.strip().startswith("curl ")]
        curl(click)
        answer = curl(question)
        assert answer["source"] == "personalised"
        assert all(item["item_id"] in titles for item in answer["items"])
        assert f"http://127.0.0.1:{port}/playground" in printed.read_text()
        assert "<title>lisarec playground" in httpx.get(f"http://127.0.0.1:{port}/playground/").text

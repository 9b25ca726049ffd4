"""The whole loop in real processes: serve, collect, archive, train on the archive, and serve again."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import polars as pl
import pytest

from app.cli.main import main
from app.jobs.archive import FOLLOW_JUMPS_AFTER_S, ArchiverMetrics, ArchiverPlan, run_archiver
from app.serving.store_factory import opened_store
from app.settings import Settings, StoreSettings
from benchmarks.harness.service_process import free_port, is_ready
from model.data.arrays import MappedArrays
from model.data.interactions import DataError, Interactions
from model.data.orders import order_numbers
from model.data.readers import read_interactions
from storage.archive.manifest import archived_through_s
from storage.archive.reader import ArchiveReader
from storage.archive.training_events import TrainingEvents
from storage.archive.writer import ArchiveWriter
from storage.errors import StorageError, StorageUnavailable
from storage.folders.place import as_folder
from storage.redis.store import RedisStore
from storage.sqlite.store import SQLiteStore
from storage.state.generation import Generation
from tests.app.conftest import Client
from tests.app.http.connection.ipv6 import LOOPBACK
from tests.model.data.same_interactions import require_same
from tests.storage.oracles.random_events import click, make_generation
from tests.storage.redis.servers import RedisServer
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[3]
DAY_S = 86_400


@pytest.fixture(scope="module")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "first"
    run("train", "--data", data, "--out", out, "--epochs", 1)
    return out


def run(*arguments: object) -> str:
    """Run a command in its own process, which must succeed; return its output."""
    command = [sys.executable, "-m", "app", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("LISAREC_")}


@contextmanager
def serving(directory: Path, *arguments: object) -> Iterator[str]:
    """Run a service; yields its URL once it is ready."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "app", "serve", "--port", str(port), *map(str, arguments)]
    with (
        (directory / "serve.log").open("a") as log,
        subprocess.Popen(command, cwd=ROOT, stderr=log, env=environment()) as process,
    ):
        try:
            wait_until(lambda: is_ready(url) or process.poll() is not None)
            assert process.poll() is None, (directory / "serve.log").read_text()
            yield url
        finally:
            process.send_signal(signal.SIGKILL)


def histories(interactions: Interactions) -> dict[str, list[tuple[str, str, int]]]:
    """Item, type and time of each user's events in order."""
    users: dict[str, list[tuple[str, str, int]]] = {user_id: [] for user_id in interactions.user_ids}
    for user, item, type_, time_us in zip(
        interactions.user, interactions.item, interactions.type, interactions.timestamp_us, strict=True
    ):
        event = interactions.item_ids[item], interactions.type_names[type_], int(time_us)
        users[interactions.user_ids[user]].append(event)
    return users


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_served_log_is_archived_trained_on_and_served_again(
    data: Path, model: Path, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    archive_dir, second = tmp_path / "archive", tmp_path / "second"
    if kind == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        place = ("--redis-url", server.url)
    else:
        place = ("--data-dir", str(tmp_path / "state"))
    keep = ("--keep-tail", 0) if kind == "redis" else ()
    with serving(tmp_path, "--model", model, *place, "--archive-dir", archive_dir) as url:
        run("replay", "--data", data, "--url", url)
        time.sleep(0.01)  # the newest events are older than 0 s
        printed = run("archive", *place, "--archive-dir", archive_dir, "--once", *keep)
        events = len(read_interactions(data))
        assert f"{events:,} events archived" in printed
        assert "0 events archived" in run("archive", *place, "--archive-dir", archive_dir, "--once", *keep)
        assert f"{events:,} duplicates" in run("replay", "--data", data, "--url", url)

    assert histories(read_interactions(archive_dir)) == histories(read_interactions(data))
    archived = read_interactions(archive_dir)
    assert read_interactions(archive_dir / "tenant=main").sha256 == archived.sha256
    stages: list[str] = []
    require_same(archived, read_interactions(archive_dir, MappedArrays(tmp_path / "work", 500), stages.append))
    assert stages[1].startswith("reading data, 0%")
    assert any(stage.startswith("reading data, ") and stage.endswith(" to go") for stage in stages)
    (archive_dir / "items.tsv.gz").write_bytes((data / "items.tsv.gz").read_bytes())
    run("train", "--data", archive_dir, "--out", second, "--epochs", 1)
    assert "120 users" in run("evaluate", "--model", second, "--data", archive_dir)
    rebuilt = run("rebuild", "--model", second, *place, "--archive-dir", archive_dir)
    assert f"{events:,} events of" in rebuilt
    with serving(tmp_path, "--model", second, *place, "--archive-dir", archive_dir) as url:
        user_id = max(histories(read_interactions(data)).items(), key=lambda user: len(user[1]))[0]
        assert httpx.get(f"{url}/v1/users/{user_id}/recommendations").json()["source"] == "personalised"
        count = len(histories(read_interactions(data))[user_id])
        assert httpx.get(f"{url}/v1/users/{user_id}").json()["event_count"] == count  # folded again, from the archive


def test_an_event_that_needs_the_lost_archive_gets_503(
    data: Path, model: Path, tmp_path: Path, redis_server: RedisServer
) -> None:
    archive_dir = tmp_path / "archive"
    place = ("--model", model, "--redis-url", redis_server.url, "--archive-dir", archive_dir)

    def post(url: str, event_id: str, user_id: str = "ada") -> httpx.Response:
        return httpx.post(
            f"{url}/v1/events", json={"event_id": event_id, "user_id": user_id, "item_id": "school-bag-red"}
        )

    with serving(tmp_path, *place) as url:
        for number in range(30):
            assert post(url, f"e{number}").json()["accepted"] == 1
        time.sleep(0.01)
        run("archive", "--redis-url", redis_server.url, "--archive-dir", archive_dir, "--once", "--keep-tail", 0)
        archive_dir.rename(tmp_path / "elsewhere")
        for event_id in ("e0", "never-seen"):
            refused = post(url, event_id)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_unavailable")
            assert refused.headers["retry-after"]
        assert httpx.get(f"{url}/v1/users/ada/recommendations").json()["source"] == "personalised"
        assert post(url, "e0", "somebody-new").json()["accepted"] == 1
        without_id = httpx.post(f"{url}/v1/events", json={"user_id": "ada", "item_id": "school-bag-red"})
        assert without_id.json()["accepted"] == 1
        (tmp_path / "elsewhere").rename(archive_dir)
        assert [post(url, event_id).json()["duplicates"] for event_id in ("e0", "never-seen")] == [1, 0]


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_training_reads_posted_orders(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue("redis_server").url if kind == "redis" else None
    settings = Settings(
        data_dir=tmp_path / "state", archive_dir=tmp_path / "archive", models_dir=tmp_path / "models", redis_url=url
    )
    bought = [
        ("ann", "tea", "o1"),
        ("guest", "cup", "o1"),
        ("ann", "pot", "o2"),
        ("ann", "lid", None),
        ("ann", "bag", "o1"),
        ("bob", "jar", "o1"),
    ]
    events = [
        {"event_id": f"e{n}", "user_id": user_id, "item_id": item_id, "type": "purchase", "timestamp": DAY_S * n}
        | ({} if order_id is None else {"order_id": order_id})
        for n, (user_id, item_id, order_id) in enumerate(bought, start=20_000)
    ]
    client = Client(settings)
    assert client.post("/v1/events", json=events).json()["accepted"] == len(bought)
    assert client.post("/v1/users/ann/merge", json={"from": "guest"}).status_code == 200
    assert client.request("DELETE", "/v1/users/ann/events/e20004").status_code == 200
    run_archiver(settings, ArchiverPlan(None, 0, None), lambda _: None, ArchiverMetrics())
    client.close()
    archived = read_interactions(tmp_path / "archive")
    for piece in (2, 1_000):
        require_same(archived, read_interactions(tmp_path / "archive", MappedArrays(tmp_path / "work", piece)))
    numbers = order_numbers(archived)
    orders = [{archived.item_ids[row] for row in archived.item[numbers == one]} for one in set(numbers.tolist())]
    assert sorted(map(sorted, orders)) == [["cup", "tea"], ["jar"], ["lid"], ["pot"]]
    newest = pl.concat(TrainingEvents(tmp_path / "archive", settings.tenant).newest(1_000))
    kept = {item_id: order_id for _, item_id, order_id in bought if item_id != "bag"}
    assert dict(newest.select("item_id", "order_id").iter_rows()) == kept


def test_untrainable_archives_are_refused_with_a_reason(tmp_path: Path) -> None:
    with ArchiveWriter.open(tmp_path):
        pass
    with pytest.raises(DataError, match="no events yet; run 'lisarec archive'"):
        read_interactions(tmp_path)
    (tmp_path / "archive.json").write_text("{}")
    with pytest.raises(DataError, match="not a list of archived files"):
        read_interactions(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--redis-url", "redis://127.0.0.1:1"], "pass --archive-dir"),
        (["--redis-url", "r", "--data-dir", "d", "--archive-dir", "a"], "one of --redis-url and --data-dir"),
        (["--data-dir", "no-such", "--archive-dir", "a"], "'no-such/lisarec.sqlite3' does not exist"),
        (["--redis-url", "redis://127.0.0.1:1", "--archive-dir", "a"], "Redis failed"),
        (["--redis-url", "http://127.0.0.1:1", "--archive-dir", "a"], "redis://"),
    ],
)
def test_invalid_archive_commands_are_refused_with_a_reason(
    arguments: list[str],
    printed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("LISAREC_")]:
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit) as exit_:
        main(["archive", "--once", *arguments])
    assert exit_.value.code
    assert printed in capsys.readouterr().err.replace("\n", " ").replace("│ ", "")


@pytest.mark.usefixtures("interpreter_starts")
def test_the_archiver_waits_for_an_unavailable_redis(tmp_path: Path, redis_server: RedisServer) -> None:
    archive_dir = tmp_path / "archive"
    command = [sys.executable, "-m", "app", "archive", "--redis-url", redis_server.url]
    metrics = f"{LOOPBACK}:{free_port()}"
    options = ["--archive-dir", str(archive_dir), "--every", "0.1", "--metrics", metrics]
    with subprocess.Popen(
        [*command, *options], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:

        def read_until_printed(words: str) -> None:
            assert process.stdout is not None
            printed = [process.stdout.readline()]
            while words not in printed[-1]:
                assert printed[-1], printed  # else it has ended
                printed.append(process.stdout.readline())

        try:
            read_until_printed("retrying: no service has used the key prefix 'lisarec' yet")
            assert failures_at(metrics) > 0
            asyncio.run(append(redis_server, "e1"))
            read_until_printed("1 events archived")
            failed = failures_at(metrics)
            redis_server.kill()
            read_until_printed("retrying: Redis failed")
            assert failures_at(metrics) > failed
            redis_server.start()
            asyncio.run(append(redis_server, "e2"))
            read_until_printed("1 events archived")
        finally:
            process.kill()
    found = ArchiveReader(archive_dir).read(lambda snapshot: snapshot.entries("main", "u"))
    assert [entry.record.entry_id for entry in found] == ["e1", "e2"]


def test_memory_metrics_of_redis_continue_while_the_archive_is_unwritable(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """Redis fills up then, and the alert must precede refused events."""
    asyncio.run(append(redis_server, "e1"))
    (tmp_path / "archive").write_text("a file, where a directory belongs")
    settings = StoreSettings(redis_url=redis_server.url, archive_dir=tmp_path / "archive")
    metrics = ArchiverMetrics()
    with pytest.raises(StorageUnavailable, match="cannot write to the archive"):
        run_archiver(settings, ArchiverPlan(None, 0, None), lambda _: None, metrics)
    server = {"server": f"127.0.0.1:{redis_server.port}"}
    used = metrics.registry.get_sample_value("lisarec_redis_used_bytes", server)
    assert used is not None
    assert used > 0


@pytest.mark.parametrize("command", [["archive"], ["retrain", "--every", "1h"]], ids=" ".join)
@pytest.mark.parametrize("form", ["json", "text"])
def test_failures_of_jobs_are_warnings(command: list[str], form: str, tmp_path: Path) -> None:
    away = ["--redis-url", f"redis://127.0.0.1:{free_port()}", "--archive-dir", str(tmp_path / "archive")]
    log = {"LISAREC_LOG_FORMAT": form, "LISAREC_LOG_LEVEL": "warning"}
    with subprocess.Popen(
        [sys.executable, "-m", "app", *command, *away],
        cwd=tmp_path,
        env=environment() | log | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        process.kill()
    assert first.startswith("{") == (form == "json")
    assert re.search('"level": "warning"|WARNING', first)
    assert "retrying: Redis failed" in first


def failures_at(address: str) -> float:
    lines = httpx.get(f"http://{address}/metrics").text.splitlines()
    (failures,) = (line for line in lines if line.startswith("lisarec_archive_failures_total "))
    return float(failures.split()[1])


async def append(server: RedisServer, event_id: str) -> None:
    store = await RedisStore.open(server.url, [make_generation()])
    await store.append("main", [click(event_id)])
    await store.close()


def test_a_clock_less_than_an_hour_ahead_drops_no_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a wrong clock would drop archived events that Redis no longer has. The archive is not behind then."""

    class Stopped(BaseException):
        """Ends the archiver from the test."""

    now_ns, wrong_by_s, up_s = time.time_ns, 0, 0
    monkeypatch.setattr("time.time_ns", lambda: now_ns() + (wrong_by_s + up_s) * 10**9)
    monkeypatch.setattr("time.clock_gettime_ns", lambda _: now_ns() + up_s * 10**9)
    monkeypatch.setattr("time.time", lambda: time.time_ns() / 1e9)
    turns: list[str] = []

    def report(turn: str) -> None:
        nonlocal wrong_by_s, up_s
        turns.append(turn)
        through_s = archived_through_s(as_folder(tmp_path / "archive"))
        assert through_s is not None
        assert abs(time.time() - through_s) < PATIENCE_S
        wrong_by_s = 365 * 86_400
        if len(turns) > 2:
            up_s = int(FOLLOW_JUMPS_AFTER_S)
        if len(turns) > 3:
            raise Stopped

    async def fill() -> None:
        store = await SQLiteStore.open(tmp_path, [make_generation()])
        await store.append("main", [click(f"e{n}") for n in range(5)])
        await store.close()

    asyncio.run(fill())
    settings = StoreSettings(data_dir=tmp_path, archive_dir=tmp_path / "archive")
    with pytest.raises(Stopped):
        run_archiver(settings, ArchiverPlan(0.0, 0.0, 30), report, ArchiverMetrics())
    assert ["deleted" in turn for turn in turns] == [False, False, False, True]


def test_a_store_older_than_its_archive_is_refused(model: Path, tmp_path: Path) -> None:
    """By every command that folds events; others, and a restore, may open it."""
    data_dir, archive_dir = tmp_path / "state", tmp_path / "archive"
    settings = StoreSettings(data_dir=data_dir, archive_dir=archive_dir)
    generation = make_generation()

    async def fill() -> None:
        async with opened_store(settings, generation, is_new=True) as store:
            await store.append("main", [click(f"e{n}") for n in range(5)])

    async def open_once(*generations: Generation, is_new: bool = False) -> None:
        async with opened_store(settings, *generations, is_new=is_new):
            pass

    asyncio.run(fill())
    run("archive", "--data-dir", data_dir, "--archive-dir", archive_dir, "--once")
    asyncio.run(open_once(generation))
    data_dir.rename(tmp_path / "away")
    asyncio.run(open_once(generation, is_new=True))
    with pytest.raises(StorageError, match="the store lacks"):
        asyncio.run(open_once(generation))
    command = [sys.executable, "-m", "app", "serve", "--model", str(model), "--data-dir", str(data_dir)]
    command += ["--archive-dir", str(archive_dir), "--port", str(free_port())]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment())
    assert refused.returncode
    assert "the store lacks" in refused.stderr
    run("repair", "--data-dir", data_dir, "--archive-dir", archive_dir, "--accept-loss")
    asyncio.run(open_once(generation))

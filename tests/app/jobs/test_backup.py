"""The backup command: which stores it refuses, and what a refused backup leaves."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from app.cli.main import main
from app.serving import empty_model
from benchmarks.harness.service_process import free_port
from model.artifact import model_directory
from storage.archive.writer import ArchiveWriter
from storage.archiver.archiver import archive_log
from storage.archiver.redis_source import RedisSource
from storage.archiver.sqlite_source import SQLiteSource
from storage.errors import StorageUnavailable
from storage.records import ItemEntry
from storage.redis.store import RedisStore
from storage.sqlite.store import SQLiteStore
from tests.app.conftest import write_model
from tests.app.support import run_command
from tests.storage.oracles.random_events import click, make_generation
from tests.storage.redis.servers import RedisServer

ROOT = Path(__file__).parents[3]


async def fill(server: RedisServer) -> None:
    store = await RedisStore.open(server.url, [make_generation()])
    await store.append("main", [click("e1")])
    await store.close()


def refused_backup(capsys: pytest.CaptureFixture[str], out: Path, *options: object) -> str:
    """Output of a backup that fails and leaves no file."""
    out.parent.mkdir()
    with pytest.raises(SystemExit, match="1"):
        main(["backup", "--out", str(out), *map(str, options)])
    assert list(out.parent.iterdir()) == []
    printed = capsys.readouterr()
    assert not printed.out.startswith(("0 entries", "\n"))
    return printed.err


def run_apart(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in its own process, because pytest captures what a command logs."""
    return subprocess.run([sys.executable, "-m", "app", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_a_redis_with_lost_events_is_refused(
    redis_server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(fill(redis_server))
    with RedisSource.open(redis_server.url) as log, ArchiveWriter.open(tmp_path / "archive") as writer:
        archive_log(log, writer, datetime.now(UTC), keep_tail_s=0, keep_days=None)
        redis_server.restart_with(None)
        with pytest.raises(StorageUnavailable, match=r"no data under .*, but the archive has: .*repair --accept-loss"):
            archive_log(log, writer, datetime.now(UTC), keep_tail_s=0, keep_days=None)

    async def start_a_service() -> None:
        await (await RedisStore.open(redis_server.url, [make_generation()])).close()

    asyncio.run(start_a_service())
    out, options = tmp_path / "backups" / "log.jsonl.gz", ["--archive-dir", tmp_path / "archive"]
    assert "has lost acknowledged events" in refused_backup(capsys, out, "--redis-url", redis_server.url, *options)
    command = ["repair", "--redis-url", redis_server.url, "--archive-dir", str(tmp_path / "archive")]
    failed = run_apart(*command)
    assert failed.returncode == 1
    assert re.fullmatch("lisarec: Redis at .* has lost acknowledged events.*\n", failed.stderr)


def test_a_file_that_lacks_archived_events_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_dir, archive_dir = tmp_path / "state", tmp_path / "archive"

    async def open_store(*event_ids: str) -> None:
        store = await SQLiteStore.open(data_dir, [make_generation()])
        await store.append("main", [click(event_id) for event_id in event_ids])
        await store.close()

    asyncio.run(open_store("e1"))
    with SQLiteSource.open(data_dir) as log, ArchiveWriter.open(archive_dir) as writer:
        archive_log(log, writer, datetime.now(UTC), keep_tail_s=0, keep_days=None)
    data_dir.rename(tmp_path / "away")
    asyncio.run(open_store())
    out, options = tmp_path / "backups" / "log.jsonl.gz", ["--archive-dir", archive_dir]
    assert "the store lacks" in refused_backup(capsys, out, "--data-dir", data_dir, *options)


def test_an_unused_key_prefix_is_refused_and_left_unchanged(
    redis_server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(fill(redis_server))
    keys = sorted(redis_server.client.keys())
    monkeypatch.setenv("LISAREC_REDIS_PREFIX", "lisarek")
    out = tmp_path / "backups" / "log.jsonl.gz"
    printed = refused_backup(capsys, out, "--redis-url", redis_server.url)
    assert "no service has used the key prefix 'lisarek'" in printed
    assert sorted(redis_server.client.keys()) == keys


def test_an_emptied_redis_is_backed_up_after_accepting_the_loss(
    redis_server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, out = ["--redis-url", redis_server.url], tmp_path / "backups" / "log.jsonl.gz"
    assert "Recover from lost data" in refused_backup(capsys, out, *options)
    for command in (["repair", "--accept-loss"], ["backup", "--out", str(out)]):
        with pytest.raises(SystemExit, match="0"):
            main([*command, *options])
        assert ("activate the model again" in capsys.readouterr().out) == (command[0] == "repair")


def test_data_outside_the_log_is_restored_after_an_accepted_loss(
    redis_server: RedisServer, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(fill(redis_server))
    file = tmp_path / "log.jsonl.gz"
    monkeypatch.setenv("LISAREC_REDIS_URL", redis_server.url)
    monkeypatch.setenv("LISAREC_ARCHIVE_DIR", str(tmp_path / "archive"))

    def run(*arguments: object) -> None:
        with pytest.raises(SystemExit, match="0"):
            main([*map(str, arguments)])

    async def use(put: bool) -> tuple[list[str], int]:
        store = await RedisStore.open(redis_server.url, [make_generation()], archive_dir=tmp_path / "archive")
        if put:
            await store.put_items("main", [ItemEntry("tea", title="Green tea")])
        items = [entry.item_id for entry in (await store.item_changes("main", 0, 10)).entries]
        entries = len(await store.events("main", "u"))
        await store.close()
        return items, entries

    before = asyncio.run(use(put=True))
    run("archive", "--once")
    run("backup", "--out", file)
    redis_server.restart_with(None)
    run("repair", "--accept-loss")
    assert asyncio.run(use(put=False)) == ([], 1)
    run("restore", file, "--resume", "--model", model_dir)
    assert asyncio.run(use(put=False)) == before


def test_an_unavailable_redis_is_reported_once(tmp_path: Path) -> None:
    address = f"redis://127.0.0.1:{free_port()}"
    failed = run_apart("backup", "--redis-url", address, "--out", str(tmp_path / "f"))
    assert failed.returncode == 1
    assert failed.stderr.startswith("lisarec: Redis failed")
    assert failed.stderr.count("\n") == 1
    assert failed.stdout == ""


def test_a_backup_that_cannot_be_audited_leaves_no_file(
    redis_server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(fill(redis_server))
    redis_server.client.config_set("maxmemory", 1)
    out = tmp_path / "backups" / "log.jsonl.gz"
    assert "maxmemory" in refused_backup(capsys, out, "--redis-url", redis_server.url)


def test_accepting_a_loss_under_a_wrong_name_creates_no_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        main(["repair", "--accept-loss", "--data-dir", str(tmp_path / "typo")])
    assert "has no users" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


def test_each_tenant_is_restored_with_its_own_model_or_none(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fill_both() -> None:
        store = await SQLiteStore.open(tmp_path / "state", [make_generation()])
        for tenant in ("main", "books"):
            await store.append(tenant, [click("e1")])
        await store.close()

    asyncio.run(fill_both())
    file = str(tmp_path / "log.jsonl.gz")
    assert run_command("backup", "--out", file, "--data-dir", str(tmp_path / "state")) == 0
    own, other = (str(write_model(tmp_path / tenant / "first", seed)) for seed, tenant in enumerate(("main", "books")))
    command = ["restore", file, "--model", own, "--data-dir"]
    assert run_command(*command, tmp_path / "one", "--tenant", f"main={other}") == 2
    assert run_command(*command, tmp_path / "one") == 0
    assert "LISAREC_TENANT=books lisarec rebuild" in caplog.text
    caplog.clear()
    capsys.readouterr()
    assert run_command(*command, tmp_path / "all", "--tenant", f"books={other}") == 0
    assert f"--tenant books={other} --keys FILE" in " ".join(capsys.readouterr().out.split())
    assert "rebuild" not in caplog.text

    async def states(data_dir: str, tenant: str, tag: str) -> int:
        store = await SQLiteStore.open(tmp_path / data_dir, [], tenant=tenant)
        saved = [state async for some in store.generations.states(bytes.fromhex(tag)) for state in some]
        await store.close()
        return len(saved)

    of_main, of_books = (model_directory.load(Path(model)).tag for model in (own, other))
    for expected in (("all", "main", of_main), ("all", "books", of_books), ("one", "books", empty_model.TAG.hex())):
        assert asyncio.run(states(*expected)) == 1
    for data_dir in ("one", "all"):
        assert asyncio.run(states(data_dir, "books", of_main)) == 0
    monkeypatch.setenv("LISAREC_TENANT", "books")
    for data_dir, name in (("one", "none"), ("all", "first")):
        capsys.readouterr()
        assert run_command("drop", name, "--data-dir", tmp_path / data_dir) == 0
        assert "1 states of" in capsys.readouterr().out

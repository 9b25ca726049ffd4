"""The upgrade guide from 0.1, run on stores and a backup of an earlier version."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import sqlite3
from pathlib import Path

import pytest

from app.cli.main import main
from app.settings import Settings
from tests.app.conftest import Client, item_id, redis_server, write_model
from tests.storage.redis.servers import RedisServer
from tests.waiting import wait_until

__all__ = ["redis_server"]

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "how-to" / "deploy" / "upgrade-0.2.md").read_text()
BACKUP_OF_AN_EARLIER_VERSION = ROOT / "tests" / "storage" / "earlier_backups" / "version-2-log.jsonl"


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the model and backup of the guide's commands."""
    monkeypatch.chdir(tmp_path)
    write_model(Path("models/shop"))
    Path("log.jsonl.gz").write_bytes(gzip.compress(BACKUP_OF_AN_EARLIER_VERSION.read_bytes()))


def command(begin: str, place: str) -> list[str]:
    """Arguments of the guide's first command with this beginning for this kind of store."""
    (line, *_) = re.findall(rf"^ *(lisarec {begin}.*--{place} .*)$", GUIDE, re.MULTILINE)
    return shlex.split(line)[1:]


def run(arguments: list[str], status: int = 0) -> None:
    with pytest.raises(SystemExit, match=str(status)):
        main(arguments)


def assert_carried_over(client: Client) -> None:
    """Assert that all data of a user in the backup exist, and are not counted twice."""
    found = [one for one in client.get("/v1/users/u/events").json()["events"] if "item_id" in one]
    resent = client.post("/v1/events", json=[{"user_id": "u", "item_id": item_id(1), "event_id": "e0"}]).json()
    lines = [json.loads(line) for line in BACKUP_OF_AN_EARLIER_VERSION.read_text().splitlines()]
    entries = [line[1] for line in lines if isinstance(line, list) and line[0] == "main" and line[2] == "u"]
    assert [one["event_id"] for one in found] == [name.rpartition("/")[2] for name in entries if name[0] != "!"]
    assert resent["duplicates"] == 1


def test_a_database_of_an_earlier_version_is_migrated(capsys: pytest.CaptureFixture[str]) -> None:
    Path("state").mkdir()
    old = sqlite3.connect("state/lisarec.sqlite3")
    old.execute("PRAGMA journal_mode = WAL")
    old.execute("PRAGMA user_version = 9")
    old.close()
    before = Path("state/lisarec.sqlite3").read_bytes()

    run(["backup", "--data-dir", "state", "--out", "again.gz"], status=1)
    (message,) = re.findall(r"^lisarec: .*schema 9.*$", GUIDE, re.MULTILINE)
    assert capsys.readouterr().err.strip().splitlines()[-1] == message
    assert Path("state/lisarec.sqlite3").read_bytes() == before

    serve = command("serve", "data-dir")
    run(command("restore", "data-dir"))
    options = dict(zip(serve[1::2], serve[2::2], strict=True))
    client = Client(Settings(model_dir=Path(options["--model"]), data_dir=Path(options["--data-dir"])))
    assert_carried_over(client)
    client.close()


def test_a_redis_of_an_earlier_version_is_migrated(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    redis = redis_server.client

    def on_redis(begin: str) -> list[str]:
        return [re.sub("^redis://.*", redis_server.url, word) for word in command(begin, "redis-url")]

    redis.hset("lisarec:meta", mapping={"layout": 4, "partitions": 64})
    redis.set("lisarec:{p17}:seq", 1)
    before = {key: redis.dump(key) for key in redis.keys("*")}
    run(["backup", "--redis-url", redis_server.url, "--out", "again.gz"], status=1)
    assert "'lisarec:meta' was written by an earlier lisarec (layout 4" in capsys.readouterr().err

    (prefix,) = re.findall(r"export LISAREC_REDIS_PREFIX=(\w+)", GUIDE)
    monkeypatch.setenv("LISAREC_REDIS_PREFIX", prefix)
    run(on_redis("restore"))
    assert before == {key: redis.dump(key) for key in redis.keys("lisarec:*")}
    serve = on_redis("serve")
    options = dict(zip(serve[1::2], serve[2::2], strict=True))
    client = Client(
        Settings(
            models_dir=Path(options["--models-dir"]),
            redis_url=options["--redis-url"],
            archive_dir=Path(options["--archive-dir"]),
        )
    )
    run(on_redis("activate"))
    wait_until(lambda: client.get("/v1/users/u/recommendations").json()["generation"] == "shop")
    assert_carried_over(client)
    (old_keys,) = re.findall(r"redis-cli --scan --pattern '(.*?)'", GUIDE)
    assert {*redis.keys(old_keys)} == {*before}
    client.close()

"""The guide from 0.1: its commands, on a store and a back-up that an earlier version has written."""

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
from tests.app.conftest import Client, item_id, write_model

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "how-to" / "deploy" / "upgrade-0.2.md").read_text()
BACKUP_OF_AN_EARLIER_VERSION = ROOT / "tests" / "storage" / "earlier_backups" / "version-2-log.jsonl"


def command(begin: str) -> list[str]:
    """The arguments of the guide's first command that begins so, beside the program's name."""
    (line, *_) = re.findall(rf"^ *(lisarec {begin}.*--data-dir .*)$", GUIDE, re.MULTILINE)
    return shlex.split(line)[1:]


def test_a_store_of_an_earlier_version_is_carried_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(Path("models/shop"))
    Path("state").mkdir()
    old = sqlite3.connect("state/lisarec.sqlite3")
    old.execute("PRAGMA journal_mode = WAL")
    old.execute("PRAGMA user_version = 9")
    old.close()
    before = Path("state/lisarec.sqlite3").read_bytes()
    Path("log.jsonl.gz").write_bytes(gzip.compress(BACKUP_OF_AN_EARLIER_VERSION.read_bytes()))

    serve, restore = command("serve"), command("restore")
    old_store = ["backup", "--data-dir", "state", "--out", "again.gz"]
    with pytest.raises(SystemExit, match="1"):
        main(old_store)
    (message,) = re.findall(r"^lisarec: .*schema 9.*$", GUIDE, re.MULTILINE)
    assert capsys.readouterr().err.strip().splitlines()[-1] == message
    assert Path("state/lisarec.sqlite3").read_bytes() == before

    with pytest.raises(SystemExit, match="0"):
        main(restore)
    options = dict(zip(serve[1::2], serve[2::2], strict=True))
    client = Client(Settings(model_dir=Path(options["--model"]), data_dir=Path(options["--data-dir"])))
    found = [one for one in client.get("/v1/users/u/events").json()["events"] if "item_id" in one]
    resent = client.post("/v1/events", json=[{"user_id": "u", "item_id": item_id(1), "event_id": "e0"}]).json()
    client.close()
    lines = [json.loads(line) for line in BACKUP_OF_AN_EARLIER_VERSION.read_text().splitlines()]
    entries = [line[1] for line in lines if isinstance(line, list) and line[0] == "main" and line[2] == "u"]
    assert [one["event_id"] for one in found] == [name.rpartition("/")[2] for name in entries if name[0] != "!"]
    assert resent["duplicates"] == 1
